"""Scores of whole images whose windows go through the net."""

from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch import Tensor

from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.detection.box_figures import find_true
from lit_data.wings.detection.model.module import DetectionModule
from lit_data.wings.detection.model.net import DetectorNet


class Oracle(DetectionModule):
    """Finds the boxes of each window, as it cuts them, and notes what is scored."""

    def __init__(self) -> None:
        super().__init__(DetectorNet(3))
        self.scored = []
        self.seen = None

    def score(self, batch: Batch, stage: str) -> None:
        self.seen = batch
        super().score(batch, stage)

    def read_objects(self, predictions: Any, images: Tensor, score_threshold: float) -> Any:
        answers = []
        for row in range(len(images)):
            corners, classes, _ = find_true(self.seen, row)
            # A box that its window cuts is as sure as others.
            answers.append(
                {"boxes": corners, "classes": classes, "scores": torch.full(classes.shape, 0.9)}
            )
        return answers

    def _update(self, stage: str, *objects: Any) -> None:
        predicted, true, _ = objects
        self.scored.append((len(predicted["classes"]), len(true["classes"])))
        super()._update(stage, *objects)


def _validate(folder: Path, **trainer_options: Any) -> tuple[Oracle, DetectionDataModule, Any]:
    data = DetectionDataModule(
        cache_dir=folder,
        samples={"count": 6, "size_px": [150, 200]},
        splits={"train": 0.5, "val": 0.5},
        patch_px=96,
        min_visible=0.1,
        loader=LoaderOptions(batch_size=4, worker_kind="inline"),
    )
    model = Oracle()
    trainer = Trainer(**QUIET, default_root_dir=folder, **trainer_options)
    (scores,) = trainer.validate(model, datamodule=data, verbose=False)
    return model, data, scores


def test_an_image_is_scored_as_a_whole(tmp_path: Path) -> None:
    model, data, scores = _validate(tmp_path)
    assert data.windows is not None
    counts = [len(data.files.labels.of(image)) for image in data.files.splits["val"]]
    assert model.scored == [*zip(counts, counts, strict=True)]  # cut boxes have yielded
    assert scores["val/map50"] == pytest.approx(1)
    shown = data.windows.labels.boxes
    assert len(shown) > len(data.files.labels.boxes)


def test_an_image_without_all_of_its_windows_is_not_scored(tmp_path: Path) -> None:
    model, _, scores = _validate(tmp_path, limit_val_batches=1)
    assert model.scored == []
    assert isnan(scores["val/map50"])
