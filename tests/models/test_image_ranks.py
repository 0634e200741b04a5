"""Verdicts on images in validation and test, of modules that score whole images."""

import logging
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.models import ClassificationModule
from lit_data.models.image_ranks import ImageRanks
from tests.models.runs import make_trainer


class _Says(torch.nn.Module):
    """Logits that are given in the first pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]


def _load(scores: list[float], labels: list[int], classes: int = 2) -> Any:
    samples = []
    for score, label in zip(scores, labels, strict=True):
        probabilities = torch.full((classes,), score / (classes - 1))
        probabilities[0] = 1 - score
        samples.append({"image": probabilities.log().view(-1, 1, 1), "label": torch.tensor(label)})
    return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


def _run(model: ClassificationModule, folder: Path, stage: str, loader: Any) -> dict[str, float]:
    trainer = make_trainer(folder)
    score = trainer.validate if stage == "val" else trainer.test
    (found,) = score(model, loader, verbose=False)
    return {name.removeprefix(f"{stage}/"): value for name, value in found.items()}


def test_validation_chooses_the_threshold_by_which_test_is_judged(tmp_path: Path) -> None:
    model = ClassificationModule(_Says(), classes=["good", "scratch"])
    found = _run(model, tmp_path, "val", _load([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1]))
    assert found["image_auroc"] == 1
    assert (found["misses"], found["false_alarms"]) == (0, 0)
    assert 0.2 < float(model.image_threshold) < 0.3
    found = _run(model, tmp_path, "test", _load([0.1, 0.3, 0.2, 0.6], [0, 0, 1, 1]))
    assert (found["misses"], found["false_alarms"]) == (0.5, 0.5)
    assert found["image_auroc"] == 0.75
    assert model.confusion["test"].verdicts == [[1, 1], [1, 1]]
    assert model.confusion["test"].classes == ("good", "scratch")


def test_two_good_classes_count_as_one(tmp_path: Path) -> None:
    model = ClassificationModule(_Says(), classes=["good", "ok", "dent"])
    assert model.good == ("good", "ok")
    found = _run(model, tmp_path, "val", _load([0.2, 0.4, 0.8], [0, 1, 2], 3))
    assert found["image_auroc"] == 1
    assert 0.2 < float(model.image_threshold) < 0.4  # of half of what is not the first class


def test_images_of_one_kind_have_no_auroc_and_choose_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ClassificationModule(_Says(), classes=["good", "scratch"])
    with caplog.at_level(logging.INFO):
        found = _run(model, tmp_path, "val", _load([0.3, 0.4], [1, 1]))
        _run(model, tmp_path, "val", _load([0.3, 0.4], [1, 1]))
    assert isnan(found["image_auroc"])
    assert isnan(found["misses"])
    assert float(model.image_threshold) == -1
    assert model.confusion["val"].verdicts is None
    said = [line for line in caplog.messages if "no image AUROC" in line]
    assert said == ["val has no image AUROC: all images show a defect"]
    model.image_threshold.fill_(0.35)
    found = _run(model, tmp_path, "test", _load([0.3, 0.4], [1, 1]))
    assert found["misses"] == 0.5
    assert isnan(found["false_alarms"])


@pytest.mark.parametrize("classes", [["a", "b"], ["good", "ok"]])
def test_classes_of_one_quality_get_no_verdicts(classes: list[str], tmp_path: Path) -> None:
    model = ClassificationModule(_Says(), classes=classes)
    found = _run(model, tmp_path, "val", _load([0.1, 0.9], [0, 1]))
    assert not {"image_auroc", "misses"} & found.keys()


def test_checkpoints_from_before_there_was_a_threshold_load() -> None:
    model = ClassificationModule(_Says(), classes=["good", "scratch"])
    states = model.state_dict()
    del states["image_threshold"]
    model.load_state_dict(states)
    assert float(model.image_threshold) == -1
    model.image_threshold.fill_(0.25)
    checkpoint: dict[str, Any] = {"state_dict": {}}
    model.on_save_checkpoint(checkpoint)
    assert float(checkpoint["state_dict"]["image_threshold"]) == 0.25


def test_scores_of_nan_choose_no_threshold() -> None:
    ranks = ImageRanks()
    ranks.update(torch.tensor([torch.nan, torch.nan]), torch.tensor([False, True]))
    assert isnan(float(ranks.compute()["image_f1_max_threshold"]))
