from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.mosaic import FILL, MosaicPlan, MosaicSpec, sample_mosaics
from lit_data.core.types import Array
from lit_data.wings.detection.dataset import draw_tiles


def _plan(**changed: Any) -> MosaicPlan:
    """One tile, image 0 of 4 x 6 px, from (1, 2) on, as it is."""
    given = {
        "row": np.array([0]),
        "image": np.array([0]),
        "scale": np.array([1.0]),
        "origin": np.array([[1.0, 2.0]]),
        "window": np.array([[1, 2, 5, 8]]),
        "bounds": np.array([[1.0, 2.0, 5.0, 8.0]]),
    }
    return MosaicPlan(**(given | changed))


def _image(height: int = 4, width: int = 6) -> Array:
    values = np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)
    values.flags.writeable = False  # as those of a store
    return values


def _draw(plan: MosaicPlan, images: list[Array], shape: tuple[int, ...]) -> Array:
    rows = np.full(shape, 7, np.uint8)
    draw_tiles(rows, plan, images)  # all that is asked of a bank is an image by number
    return rows


def test_at_its_own_scale_a_tile_or_a_part_of_it_is_copied_and_the_rest_is_grey() -> None:
    rows = _draw(_plan(), [_image()], (1, 3, 7, 9))
    assert_array_equal(rows[0, :, 1:5, 2:8], _image())
    rows[0, :, 1:5, 2:8] = FILL
    assert (rows == FILL).all()
    rows = _draw(_plan(window=np.array([[2, 3, 4, 7]])), [_image()], (1, 3, 7, 9))
    assert_array_equal(rows[0, :, 2:4, 3:7], _image()[:, 1:3, 1:5])
    assert (rows != FILL).sum() <= 3 * 2 * 4
    rows = _draw(_plan(window=np.array([[3, 3, 3, 6]])), [_image()], (1, 3, 7, 9))
    assert (rows == FILL).all()


def _ramps(height: int, width: int, step: int) -> Array:
    """Greys that tell their row (first channel) and column (second)."""
    row, column = np.mgrid[:height, :width] * step
    return np.stack((row, column, row)).astype(np.uint8)


def _find_shifts(plan: MosaicPlan, image: Array, step: int) -> list[Array]:
    """How far the rows and columns of the one tile lie from where the plan has them, in px of the output."""
    (low, high), scale, origin = plan.window.reshape(2, 2), plan.scale[0], plan.origin[0]
    drawn = _draw(plan, [image], (1, 3, *high))[0, :, low[0] :, low[1] :].astype(np.float64) / step
    shifts = []
    for axis, found in enumerate((drawn[0, :, 0], drawn[1, 0])):
        planned = (np.arange(low[axis], high[axis]) + 0.5) / scale - origin[axis] - 0.5
        shifts.append((found - planned.clip(0, image.shape[1 + axis] - 1)) * scale)
    return shifts


@pytest.mark.parametrize("scale", [0.4, 0.77, 0.999, 1.5, 3.0, 20.0])
@pytest.mark.parametrize("shift", [(0.0, 0.0), (-3.3, 2.6), (0.5, -1.25)])
def test_pixels_lie_within_half_a_pixel_of_their_place(
    scale: float, shift: tuple[float, float]
) -> None:
    low = np.ceil(np.maximum(0, np.array(shift) * scale) - 0.5).astype(int)
    high = np.minimum(60, np.ceil((np.array([40, 50]) + shift) * scale - 0.5).astype(int))
    plan = _plan(
        scale=np.array([scale]), origin=np.array([shift]), window=np.array([[*low, *high]])
    )
    for shifts in _find_shifts(plan, _ramps(40, 50, 5), 5):
        assert np.abs(shifts).max() <= 0.5 + 0.16 * scale + 0.01  # OpenCV's greys are right to 0.8


def test_every_row_gets_its_own_tiles_and_none_is_left_over() -> None:
    images = [np.full((3, 20 + n, 50 - n), n, np.uint8) for n in range(30)]
    sizes = np.array([image.shape[1:] for image in images])
    plan = sample_mosaics(
        MosaicSpec(),
        0,
        0,
        np.arange(30),
        images=np.arange(30),
        sizes_px=sizes,
        output_px=(32, 32),
        choices=np.arange(30),
    )
    rows = _draw(plan, images, (30, 3, 32, 32))
    for row in range(30):
        shown = set(plan.image[plan.row == row].tolist()) | {FILL}
        assert set(np.unique(rows[row]).tolist()) <= shown
    for row, image, (top, left, bottom, right) in zip(
        plan.row, plan.image, plan.window.tolist(), strict=True
    ):
        assert (rows[row, :, top:bottom, left:right] == image).all()
