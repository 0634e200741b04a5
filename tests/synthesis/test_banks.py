from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.testing import assert_allclose

from lit_data.core.errors import DataError
from lit_data.synthesis.families.region import (
    BORDER,
    TEXTURE_PX,
    TILE_PX,
    load_shapes,
    load_textures,
    smooth_field,
)

LONGER_PX = BORDER * TILE_PX


def _write(folder: Path, **masks: np.ndarray) -> str:
    folder.mkdir(exist_ok=True)
    for name, mask in masks.items():
        cv2.imwrite(str(folder / f"{name}.png"), mask)
    return str(folder)


def test_each_piece_of_a_mask_is_a_shape(tmp_path: Path) -> None:
    first, second = np.zeros((2, 40, 60), np.uint8)
    first[2:12, 5:25] = 255
    first[20:30, 40:45] = 1
    first[35, 0:2] = 255  # too small
    second[0:30, 0:30] = np.tri(30, dtype=np.uint8) * 7
    shapes = load_shapes(_write(tmp_path / "masks", a=first, b=second))
    assert shapes.shape == (3, TILE_PX, TILE_PX)
    assert 0 <= shapes.min() <= shapes.max() <= 1
    for tile, height, width in zip(shapes, (0.5, 1, 1), (1, 0.5, 1), strict=True):
        rows, columns = (np.flatnonzero((tile > 0.5).any(axis)) for axis in (1, 0))
        for found, share in ((rows, height), (columns, width)):
            assert abs(len(found) - share * LONGER_PX) <= 2
            assert abs(found.mean() - (TILE_PX - 1) / 2) <= 1
    assert shapes[:2].sum((1, 2)) == pytest.approx(LONGER_PX**2 / 2, rel=0.05)
    assert shapes[2].sum() == pytest.approx(LONGER_PX**2 / 2, rel=0.1)
    assert shapes[2, TILE_PX // 2 + 10, TILE_PX // 2 - 10] == 1
    assert shapes[2, TILE_PX // 2 - 10, TILE_PX // 2 + 10] == 0


def test_folders_without_shapes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shapes_from=.*nowhere is not a folder"):
        load_shapes(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no mask has a connected area of 9 px"):
        load_shapes(_write(tmp_path / "empty", a=np.zeros((9, 9), np.uint8)))


@pytest.mark.parametrize("shape", [(300, 280), (256, 256), (40, 400), (1, 7)])
def test_textures_are_the_middles_of_images(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    (tile,) = load_textures(str(tmp_path))
    assert tile.shape == (TEXTURE_PX, TEXTURE_PX)
    assert abs(tile.mean()) < 1e-4
    assert tile.std() == pytest.approx(1, abs=1e-4)
    middle = image[tuple(slice(max(0, length - TEXTURE_PX) // 2, None) for length in shape)]
    pads = [(0, max(0, TEXTURE_PX - length)) for length in middle.shape]
    cut = np.pad(middle, pads, mode="reflect")[:TEXTURE_PX, :TEXTURE_PX].astype(np.float64)
    assert_allclose(tile, (cut - cut.mean()) / cut.std(), atol=1e-4)


def test_folders_without_textures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"textures_from=.*nowhere is not a folder"):
        load_textures(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no image matches"):
        load_textures(str(tmp_path))


# A field that changes changes every sample with a wavy outline.
PLACES = [
    [-0.0053, 0.0585, -0.1364, -0.1265],
    [-0.0016, 0.0671, 0.0541, -0.1138],
    [-0.1072, 0.1252, -0.1071, -0.0311],
    [-0.2119, 0.0219, -0.0593, 0.0521],
]


def test_the_field_stays_as_it_is() -> None:
    places = smooth_field()[::128, ::128]
    assert_allclose(places, PLACES, atol=1e-4)
