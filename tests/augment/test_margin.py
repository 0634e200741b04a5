from typing import Any

import numpy as np
import pytest
import torch

from lit_data.augment import Geometry, Layers, Photometry, Pipeline
from lit_data.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "patch", "margin"),
    [
        ({}, (64, 32), (0, 0)),
        ({"flip_left_right": True, "flip_top_bottom": True}, (64, 32), (0, 0)),
        ({"turn": True}, (64, 64), (0, 0)),
        ({"shift_px": 4}, (64, 32), (4, 4)),
        ({"shift_px": 2.5, "subpixel": True}, (64, 32), (3, 3)),
        ({"scale": (0.5, 2.0)}, (65, 33), (32, 16)),
        ({"scale": (1.0, 2.0)}, (65, 33), (0, 0)),
        ({"rotate_deg": 45}, (101, 101), (21, 21)),  # 50 * (sqrt(2) - 1) = 20.7
        ({"rotate_deg": 180}, (101, 101), (21, 21)),
        ({"rotate_deg": 180}, (81, 61), (10, 20)),  # the diagonal: 50
        (
            {"turn": True, "shift_px": 4},
            (64, 58),
            (4, 7),
        ),  # large enough to be turned: 4 more than half of 64
        ({"turn": True, "shift_px": 1}, (64, 58), (1, 1)),  # not large enough
    ],
)
def test_margins(options: dict[str, Any], patch: tuple[int, int], margin: tuple[int, int]) -> None:
    geometry = Geometry(**options)
    assert geometry.margin_px(patch) == margin
    assert Pipeline([geometry, Photometry(gain=0.1)]).margin_px(patch) == margin


@pytest.mark.parametrize("patch", [(16, 16), (12, 25), (20, 18)])
@pytest.mark.parametrize(
    "options",
    [
        {"rotate_deg": 10, "scale": (0.8, 1.2)},
        {"turn": True, "rotate_deg": 30, "shift_px": 2},
        {"shear_deg": 15, "rotate_deg": 5},
        {"perspective": 0.2, "shift_px": 1.5, "subpixel": True},
        {"perspective": 0.1, "rotate_deg": 20, "shear_deg": 10, "scale": (0.9, 1.1), "turn": True},
    ],
)
def test_nothing_outside_is_seen_with_the_margin(
    options: dict[str, Any], patch: tuple[int, int]
) -> None:
    geometry = Geometry(**options, crop_px=patch, padding="zeros")
    down, across = geometry.margin_px(patch)
    images = torch.ones(400, 1, patch[0] + 2 * down, patch[1] + 2 * across)
    moved = geometry(Layers(images), geometry.draw(0, 0, np.arange(400), 1)).images
    assert moved.min() > 1 - 1e-3
    tight = torch.ones(400, 1, *patch)
    assert geometry(Layers(tight), geometry.draw(0, 0, np.arange(400), 1)).images.min() < 0.9


def test_a_perspective_that_reaches_the_horizon_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"perspective=0\.3 with shift_px=16 reaches the horizon of a patch of 8 x 8",
    ):
        Geometry(perspective=0.3, shift_px=16).margin_px((8, 8))
