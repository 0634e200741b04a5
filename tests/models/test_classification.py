"""`ClassificationModule`: its loss, its scores, and what it refuses."""

from math import isnan
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lit_data.core.errors import ConfigError
from lit_data.models import ClassificationModule, ConvClassifier
from tests.models.runs import make_trainer


def _samples(count: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 16, 16, generator=generator) / 4
    return [
        {"image": image + 0.3 * (n % 3), "label": torch.tensor(n % 3)}
        for n, image in enumerate(images)
    ]


def test_it_learns_and_logs_what_it_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = ["a", "b", "c"]
    model = ClassificationModule(ConvClassifier(names, width=8, depth=2), classes=names)
    loader = DataLoader(_samples(), batch_size=6)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, max_epochs=12)
    trainer.fit(model, loader, loader)
    scores = {f"val/{name}" for name in ("accuracy", "f1", "recall", "f1_a", "f1_b", "f1_c")}
    assert set(trainer.callback_metrics) == {"train/loss", "val/loss"} | scores
    assert trainer.callback_metrics["val/accuracy"] > 0.9
    predicted = trainer.predict(model, loader)
    assert_close(predicted[0].sum(1), torch.ones(6))


class _Says(torch.nn.Module):
    """Logits that are given in the first pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]


def test_scores_are_those_of_the_counts(tmp_path: Path) -> None:
    labels, said = [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]
    samples = [
        {"image": F.one_hot(torch.tensor(s), 3).float().view(3, 1, 1), "label": torch.tensor(label)}
        for label, s in zip(labels, said, strict=True)
    ]
    model = ClassificationModule(_Says(), classes=["a", "b", "c"])
    found = make_trainer(tmp_path).test(model, DataLoader(samples, batch_size=4), verbose=False)[0]  # type: ignore[arg-type]
    assert found["test/accuracy"] == pytest.approx(4 / 6)
    assert found["test/f1_a"] == pytest.approx(6 / 8)
    assert found["test/f1_b"] == pytest.approx(2 / 4)
    assert found["test/f1"] == pytest.approx((6 / 8 + 2 / 4) / 2)
    assert found["test/recall"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert isnan(found["test/f1_c"])
    assert model.confusion["test"].classes == ("a", "b", "c")
    assert model.confusion["test"].counts == [[3, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_a_batch_is_the_mean_of_its_micro_batches_with_weights_too() -> None:
    torch.manual_seed(0)
    model = ClassificationModule(
        _Says(), classes=["a", "b", "c"], class_weights=[1, 5, 2], label_smoothing=0.1
    )
    batch = {"image": torch.randn(6, 3, 1, 1), "label": torch.tensor([0, 1, 2, 2, 1, 0])}
    parts = [
        model.find_loss({key: value[part] for key, value in batch.items()})
        for part in (slice(2), slice(2, 6))
    ]
    assert_close(model.find_loss(batch), parts[0] * 2 / 6 + parts[1] * 4 / 6)


@pytest.mark.parametrize("weights", [[1, 5], [1, 5, 2, 1], [1, 5, -2], [1, 5, float("nan")]])
def test_class_weights_are_one_for_each_class(weights: list[float]) -> None:
    match = r"class_weights=\[1, 5.*\]: give one number of at least 0 for each of a, b, c$"
    with pytest.raises(ConfigError, match=match):
        ClassificationModule(_Says(), classes=["a", "b", "c"], class_weights=weights)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(_samples(), batch_size=6)  # type: ignore[arg-type]
    for classes, match in (
        (["a", "b"], r"the net gives \[6, 3\] for 2 classes \(a, b\): set model.net.classes"),
        (None, "classes none and the model none: set data.classes"),
    ):
        model = ClassificationModule(_Says(), classes=classes)
        with pytest.raises(ConfigError, match=match):
            make_trainer(tmp_path).test(model, loader, verbose=False)
    with pytest.raises(ConfigError, match="classes=0 is not usable"):
        ConvClassifier(0)
