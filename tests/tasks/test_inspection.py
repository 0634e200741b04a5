"""Predictions of single images: verdicts, and the classes of defects where they are told apart."""

import csv
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import torch

from lit_data.datamodules import InspectionDataModule
from lit_data.tasks import find_task
from lit_data.tasks.options import PredictOptions, PredictRun
from lit_data.testing import QUIET


class _Levels(L.LightningModule):
    """Says class 1 where pixels are near 0.4, class 2 where they are near 0.8."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        levels = torch.tensor([0.0, 0.4, 0.8]).view(1, 3, 1, 1)
        shares = (-100 * (batch["image"][:, :1] - levels).abs()).softmax(1)
        return {"probability": 1 - shares[:, :1], "classes": shares[:, 1:]}


def _predict(tmp_path: Path, **options: Any) -> Path:
    (tmp_path / "set").mkdir(parents=True)
    for number in range(3):
        image = np.zeros((70, 90), np.uint8)
        if number:
            image[5:15, 5:15] = 102
        if number == 2:
            image[40:60, 30:50] = 204
        cv2.imwrite(str(tmp_path / "set" / f"{number}.png"), image)
    data = InspectionDataModule(str(tmp_path / "set"), classes=["dent", "spot"], cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup("predict")
    folder = tmp_path / "out"
    run = PredictRun(folder=folder, identity={}, make_trainer=lambda _: L.Trainer(**QUIET))
    find_task(data).predict(_Levels(), run, PredictOptions(tile_px=64, **options))
    return folder


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_defect_has_its_class_and_each_image_a_map_of_them(tmp_path: Path) -> None:
    for large_px in (50_000_000, 10):  # also through a temporary file
        folder = _predict(tmp_path / str(large_px), large_px=large_px)
        defects = _rows(folder / "defects.csv")
        assert sorted((row["image"], row["class"], row["area_px"]) for row in defects) == [
            ("1.png", "dent", "100"),
            ("2.png", "dent", "100"),
            ("2.png", "spot", "400"),
        ]
        classes = cv2.imread(str(folder / "classes" / "2.png.png"), cv2.IMREAD_UNCHANGED)
        assert classes.dtype == np.uint8
        assert (classes == 1).sum() == 100
        assert (classes[40:60, 30:50] == 2).all()
        assert [row["verdict"] for row in _rows(folder / "images.csv")] == ["good", "defect", "defect"]
