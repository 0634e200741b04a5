"""Outlines of real defects, from a folder of masks."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.readers import read_image

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TILE_PX: Final = 64
LEAST_AREA_PX: Final = 9
"""Smaller pieces of a mask say nothing of a shape."""
BORDER: Final = 0.9
"""Share of a tile that the longer side of a shape takes."""


@lru_cache(maxsize=8)
def load_shapes(folder: str) -> NDArray[np.float32]:
    """Every connected piece of every mask below a folder, each scaled to a tile; whatever is not 0 is defect.

    Args:
        folder: PNG, TIFF, BMP or .npy masks, any depth.

    Returns:
        [S, TILE_PX, TILE_PX] float32 coverage in 0..1, in the order of the paths.

    Raises:
        DataError: The folder is missing, or no mask in it has a piece of `LEAST_AREA_PX`.
    """
    if not Path(folder).is_dir():
        raise DataError(f"shapes_from={folder} is not a folder: give one that holds masks of defects")
    shapes = [tile for path in find_images(Path(folder)).paths for tile in _cut_tiles(read_image(path)[0] != 0)]
    if not shapes:
        raise DataError(f"shapes_from={folder}: no mask has a piece of {LEAST_AREA_PX} px: are they all 0?")
    return np.stack(shapes)


@lru_cache(maxsize=8)
def shapes_on(folder: str, device: "torch.device") -> "Tensor":
    """`load_shapes` on a device."""
    import torch

    with torch.inference_mode(mode=False):
        return torch.from_numpy(load_shapes(folder)).to(device)


def _cut_tiles(mask: NDArray[np.bool_]) -> list[NDArray[np.float32]]:
    import cv2

    _, labels, boxes, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    tiles = []
    for number, (left, top, width, height, area) in enumerate(boxes.tolist()):
        if number and area >= LEAST_AREA_PX:
            piece = (labels[top : top + height, left : left + width] == number).astype(np.float32)
            tiles.append(_fit(piece))
    return tiles


def _fit(piece: NDArray[np.float32]) -> NDArray[np.float32]:
    """A piece in the middle of a tile, its longer side `BORDER` of it."""
    import cv2

    scale = BORDER * TILE_PX / max(piece.shape)
    padded = np.pad(piece, 1)
    # Middle to middle; a pixel's place is that of its own middle.
    down, across = ((TILE_PX - 1) / 2 - scale * (length - 1) / 2 for length in padded.shape)
    matrix = np.array([[scale, 0, across], [0, scale, down]], np.float64)
    return np.asarray(cv2.warpAffine(padded, matrix, (TILE_PX, TILE_PX), flags=cv2.INTER_LINEAR), np.float32)
