"""Nets, images and predictions for the tests of prediction."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.core.types import Floats
from lit_data.predict import TiledPredictor

Found = list[tuple[int, Tensor]]

REACH_PX = 5
"""Of `make_net`: a pixel's value depends on so many pixels to each side."""


def make_net(channels: int = 1, out_channels: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


class HalvingNet(nn.Module):
    """Works at half resolution too: total stride 2, reach 4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Conv2d(1, 3, 3, padding=1)
        self.outer = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        low = nn.functional.interpolate(
            self.inner(nn.functional.max_pool2d(images, 2)), scale_factor=2
        )
        return self.outer(torch.cat((images, low), 1))


def make_images(*sizes: tuple[int, int], channels: int = 1) -> list[Floats]:
    rng = np.random.default_rng(0)
    return [rng.random((channels, *size)).astype(np.float32) for size in sizes]


def predict_whole(net: nn.Module, image: Floats) -> Tensor:
    with torch.inference_mode():
        return net(torch.from_numpy(image)[None])[0]


class Counting(nn.Module):
    """Notes the shapes of its batches and gives the images back."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = []
        self.modes = []

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.append(tuple(images.shape))
        self.modes.append(self.training)
        return images


def predict(
    net: nn.Module, images: Any, *, on_bad: Any = None, on_tiles: Any = None, **options: Any
) -> Found:
    """Predict images in tiles of 8 px without overlap, or as the options say."""
    predictor = TiledPredictor(net, **({"tile_px": 8, "overlap_px": 0} | options))
    return list(predictor.predict(images, on_bad=on_bad, on_tiles=on_tiles))


def assert_same(found: Found, expected: Iterable[tuple[int, Tensor]], atol: float = 1e-6) -> None:
    expected = list(expected)
    assert [number for number, _ in found] == [number for number, _ in expected]
    for (_, values), (_, wanted) in zip(found, expected, strict=True):
        torch.testing.assert_close(values, wanted, rtol=0, atol=atol)


def predict_all_whole(net: nn.Module, images: list[Floats]) -> Found:
    return list(enumerate(predict_whole(net, image) for image in images))
