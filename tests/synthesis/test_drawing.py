from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_data.synthesis import DefectSpec, SpotShape, sample_plan
from lit_data.synthesis.canvas import ValueRange
from lit_data.synthesis.renderer import draw, draw_spots
from tests.synthesis.placing import BATCHES

SPEC = DefectSpec(
    probability=0.8,
    count=(2, 5),
    amplitude=(0.05, 0.9),
    families={
        "spot": {
            "shapes": (
                SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
                SpotShape(height_px=14, width_px=9, sigma_y_px=4.0, sigma_x_px=2.5),
            )
        }
    },
)


@pytest.mark.parametrize("subpixel", [True, False])
@pytest.mark.parametrize(
    ("number", "dtype", "values"),
    [
        (0, np.uint8, ValueRange(0, 255, whole=True)),
        (1, np.uint16, ValueRange(10_000, 50_000, whole=True)),
        (2, np.int16, ValueRange(-900.5, 1000, whole=True)),
        (3, np.uint8, ValueRange(20.5, 200.25, whole=True)),
    ],
)
def test_spots_are_drawn_as_the_renderer_draws_them(
    number: int, dtype: type, values: ValueRange, subpixel: bool
) -> None:
    (batch, shape), limits, rng = BATCHES[number], np.iinfo(dtype), np.random.default_rng(0)
    images = rng.integers(limits.min, limits.max, (batch, *shape), dtype, endpoint=True)
    plan = sample_plan(replace(SPEC, subpixel=subpixel), 5, 1, np.arange(batch), shape)
    pixels, masks = images.copy(), np.zeros((batch, 1, *shape[1:]), np.uint8)
    draw_spots(pixels, masks, plan, values)
    expected, marks = torch.from_numpy(images.copy()), torch.zeros(masks.shape, dtype=torch.uint8)
    draw(expected, marks, plan, values)
    np.testing.assert_array_equal(pixels, expected.numpy())
    np.testing.assert_array_equal(masks, marks.numpy())
