from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.errors import DataError
from lit_data.synthesis.outlines import BORDER, TILE_PX, load_shapes

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
    with pytest.raises(DataError, match=r"no mask has a piece of 9 px"):
        load_shapes(_write(tmp_path / "empty", a=np.zeros((9, 9), np.uint8)))


@pytest.mark.data
def test_shapes_of_real_masks(shared_data: Path) -> None:
    shapes = load_shapes(str(shared_data / "inspection" / "meiwei-masks"))
    assert len(shapes) > 50
    covered = (shapes > 0.5).mean((1, 2))
    assert covered.min() > 0.01
    assert covered.max() <= BORDER**2 + 0.02
