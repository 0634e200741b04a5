from typing import Any

import numpy as np
import pytest

from lit_data.datasets.tiles import FILL, draw_tiles
from lit_data.mosaic import MosaicPlan, MosaicSpec, sample_mosaics
from lit_data.types import Array


def _plan(**changed: Any) -> MosaicPlan:
    """One tile, image 0 of 4 x 6 px, from (1, 2) on, as it is."""
    given: dict[str, Any] = {
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
    draw_tiles(rows, plan, images)  # type: ignore[arg-type]  # all that is asked of a bank is an image by number
    return rows


def test_at_its_own_scale_a_tile_is_copied_and_the_rest_is_grey() -> None:
    rows = _draw(_plan(), [_image()], (1, 3, 7, 9))
    np.testing.assert_array_equal(rows[0, :, 1:5, 2:8], _image())
    rows[0, :, 1:5, 2:8] = FILL
    assert (rows == FILL).all()


def test_a_part_of_a_tile_is_copied() -> None:
    rows = _draw(_plan(window=np.array([[2, 3, 4, 7]])), [_image()], (1, 3, 7, 9))
    np.testing.assert_array_equal(rows[0, :, 2:4, 3:7], _image()[:, 1:3, 1:5])
    assert (rows != FILL).sum() <= 3 * 2 * 4


def test_empty_windows_draw_nothing() -> None:
    rows = _draw(_plan(window=np.array([[3, 3, 3, 6]])), [_image()], (1, 3, 7, 9))
    assert (rows == FILL).all()


@pytest.mark.parametrize("scale", [0.4, 0.77, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("shift", [(0.0, 0.0), (-3.3, 2.6)])
def test_pixels_are_interpolated_between_those_around_them(scale: float, shift: tuple[float, float]) -> None:
    spec = {"scale": np.array([scale]), "origin": np.array([shift])}
    image = _image(40, 50)
    low = np.ceil(np.maximum(0, np.array(shift) * scale) - 0.5).astype(int)
    high = np.minimum(30, np.ceil((np.array([40, 50]) + shift) * scale - 0.5).astype(int))
    rows = _draw(_plan(window=np.array([[*low, *high]]), **spec), [image], (1, 3, 30, 30))
    y = ((np.arange(low[0], high[0]) + 0.5) / scale - shift[0] - 0.5).clip(0, 39)
    x = ((np.arange(low[1], high[1]) + 0.5) / scale - shift[1] - 0.5).clip(0, 49)
    expected = _interpolate(_interpolate(image.astype(np.float64), y, 1), x, 2)
    difference = np.abs(rows[0, :, low[0] : high[0], low[1] : high[1]] - expected)
    assert difference.max() < 10  # OpenCV may round places to 1/32 px, and these are random greys
    assert difference.mean() < 1.5


def _interpolate(values: Array, places: Array, axis: int) -> Array:
    low = np.minimum(np.floor(places).astype(int), values.shape[axis] - 2)
    share = (places - low).reshape([-1 if other == axis else 1 for other in range(3)])
    return values.take(low, axis) * (1 - share) + values.take(low + 1, axis) * share


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
    for row, image, (top, left, bottom, right) in zip(plan.row, plan.image, plan.window.tolist(), strict=True):
        assert (rows[row, :, top:bottom, left:right] == image).all()
