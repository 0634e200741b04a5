"""What a model answers is a ground for verdicts only where it is a probability."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_data.core.errors import ConfigError
from lit_data.datamodules import LabelledImageDataModule
from lit_data.predict import PredictOptions
from lit_data.predict.answers import check_probabilities, refusing_nan
from lit_data.predict.labels import LabelWriter
from lit_data.wings.detection.predictions import read_boxes
from tests.predict.running import make_run

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.2, NAN], "returned NaN"),
        ([0.2, 7.0], "goes from 0.2 to 7"),
        ([-1.0, 0.5], "goes from -1 to 0.5"),
        ([float("inf"), 0.5], "goes from 0.5 to inf"),
    ],
)
def test_what_is_no_probability_is_refused(values: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_probabilities(torch.tensor(values))
    check_probabilities(torch.tensor([0, 0.5, 1.0005]))
    check_probabilities(torch.zeros(0))


def _bank() -> Any:
    return SimpleNamespace(skipped=(), name=str, __len__=lambda: 0)


def test_labels_of_nan_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / "set" / name / "0.png"), np.zeros((32, 32), np.uint8))
    data = LabelledImageDataModule(tmp_path / "set", cache="none", size_px=32)
    data.setup("predict")
    writer = LabelWriter(data, make_run(tmp_path), PredictOptions())
    assert writer.read(torch.tensor([[0.2, 0.8]]), None) is not None
    with pytest.raises(ConfigError, match="returned NaN"):
        writer.read(torch.tensor([[NAN, 0.8]]), None)


@pytest.mark.parametrize(
    ("scores", "corners", "message"),
    [
        ([NAN], [[0.0, 0, 5, 5]], "returned NaN"),
        ([3.0], [[0.0, 0, 5, 5]], "goes from 3 to 3"),
        ([0.9], [[0.0, NAN, 5, 5]], "corners are not finite"),
    ],
)
def test_boxes_of_nan_are_refused(
    scores: list[float], corners: list[list[float]], message: str
) -> None:
    found = {"boxes": Tensor(corners), "scores": Tensor(scores), "classes": torch.zeros(1)}
    with pytest.raises(ConfigError, match=message):
        read_boxes([found], 1)


class _Net(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images / images  # NaN for black images


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Net()

    def score(self, images: Tensor) -> Tensor:
        return self.net(images) > 0.5


def test_scores_of_a_net_that_answers_nan_are_refused() -> None:
    model = _Module()
    with refusing_nan(model):
        model.score(torch.ones(2))
    with pytest.raises(ConfigError, match="the net returns NaN, so its scores are meaningless"):
        _score(model)
    model.score(torch.zeros(2))  # nobody looks any more


def _score(model: _Module) -> None:
    with refusing_nan(model):
        model.score(torch.zeros(2))
        model.score(torch.ones(2))
