"""Outlines of regions, how much of each pixel of a window a defect covers, and the smooth fields that shape them."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.images.readers import read_image
from lit_data.rng import Stream, uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_data.synthesis.families.base import Parameters
    from lit_data.synthesis.windows import Windows


TILE_PX: Final = 64
LEAST_AREA_PX: Final = 9
"""Smaller pieces of a mask say nothing of a shape."""
BORDER: Final = 0.9
"""Share of a tile that the longer side of a shape takes."""


@lru_cache(maxsize=8)
def load_shapes(folder: str) -> NDArray[np.float32]:
    """Every connected piece of every mask below a folder, each scaled to a tile; whatever is not 0
    is defect.

    Args:
        folder: PNG, TIFF, BMP or .npy masks, any depth.

    Returns:
        [S, TILE_PX, TILE_PX] float32 coverage in 0..1, in the order of the paths.

    Raises:
        DataError: The folder is missing, or no mask in it has a piece of `LEAST_AREA_PX`.
    """
    if not Path(folder).is_dir():
        raise DataError(
            f"shapes_from={folder} is not a folder: give one that holds masks of defects"
        )
    shapes = [
        tile
        for path in find_images(Path(folder)).paths
        for tile in _cut_tiles(read_image(path)[0] != 0)
    ]
    if not shapes:
        raise DataError(
            f"shapes_from={folder}: no mask has a piece of {LEAST_AREA_PX} px: are they all 0?"
        )
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
    return np.asarray(
        cv2.warpAffine(padded, matrix, (TILE_PX, TILE_PX), flags=cv2.INTER_LINEAR), np.float32
    )


WOBBLE = 0.25
"""How far the edge of a blob strays, in shares of its radius."""


def band(distance_px: "Tensor", half_width_px: "Tensor") -> "Tensor":
    """Coverage of a band around a line, with an edge of one pixel: 1 inside, 0 outside."""
    return (half_width_px + 0.5 - distance_px.abs()).clamp_(0, 1)


def stretch(windows: "Windows", p: "Parameters") -> "Tensor":
    """A rectangle along the stripes.

    Args:
        windows: The windows of n defects.
        p: ``length_px`` along the stripes, and ``width_px`` across them.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.along_stripes()
    return band(along, p["length_px"] / 2) * band(across, p["width_px"] / 2)


def blob(windows: "Windows", p: "Parameters", soft: float) -> "Tensor":
    """An ellipse with a wavy edge.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` and ``half_across_px`` (of the axes), ``angle``, ``seed_y`` and ``seed_x``.
        soft: Width of the edge in shares of the smaller half axis; 0 is an edge of one pixel.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.turned(p["angle"])
    radius = ((along / p["half_px"]).square() + (across / p["half_across_px"]).square()).sqrt_()
    waves = look_up(windows, p["seed_y"], p["seed_x"], CELL_PX / p["half_px"])
    edge_px = (p["half_across_px"] * soft).clamp(min=1.0)
    return (
        (1 + WOBBLE * waves.clamp_(-2, 2) - radius) * p["half_across_px"] / edge_px + 0.5
    ).clamp_(0, 1)


def real_shape(windows: "Windows", p: "Parameters", folder: str) -> "Tensor":
    """The outline of a real defect, turned and scaled.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` (of the longer side), ``angle``, and ``seed_y``, which chooses the shape.
        folder: Of masks, see `lit_data.synthesis.outlines.load_shapes`.

    Returns:
        [n, h, w] in 0..1.
    """
    shapes = shapes_on(folder, windows.device)
    along, across = windows.turned(p["angle"])
    column, row = ((way * BORDER / p["half_px"] + 1) * (TILE_PX / 2) for way in (along, across))
    inside = (column >= 0) & (column < TILE_PX) & (row >= 0) & (row < TILE_PX)
    chosen = (p["seed_y"] * len(shapes)).long()
    return (
        shapes[chosen, row.long().clamp_(0, TILE_PX - 1), column.long().clamp_(0, TILE_PX - 1)]
        * inside
    )


FIELD_PX: Final = 512
CELL_PX: Final = 32
"""Width of the largest bumps of the field, in its own pixels."""
_OCTAVES: Final = 3


@lru_cache(maxsize=1)
def smooth_field() -> NDArray[np.float32]:
    """Gradient noise with three octaves (Perlin, "An image synthesizer", SIGGRAPH 1985), which
    repeats at its edges.

    Returns:
        [FIELD_PX, FIELD_PX] float32 with mean 0 and variance 1.
    """
    octaves = [
        _perlin(FIELD_PX, CELL_PX >> octave, octave) / 2**octave for octave in range(_OCTAVES)
    ]
    field = np.sum(octaves, axis=0)
    standard: NDArray[np.float32] = ((field - field.mean()) / field.std()).astype(np.float32)
    return standard


def look_up(windows: "Windows", top: "Tensor", left: "Tensor", scale: "Tensor") -> "Tensor":
    """The field in windows, at a place and scale of each.

    Args:
        windows: The windows of n defects.
        top: [n, 1, 1] in [0, 1), a place in the field.
        left: [n, 1, 1] in [0, 1).
        scale: [n, 1, 1] pixels of the field for each pixel of the image.

    Returns:
        [n, h, w] float32 with mean 0 and variance 1 over the whole field.
    """
    rows = (top * FIELD_PX + (windows.y + FIELD_PX) * scale).long() % FIELD_PX
    columns = (left * FIELD_PX + (windows.x + FIELD_PX) * scale).long() % FIELD_PX
    return _on(windows.device)[rows, columns]


def _perlin(size_px: int, cell_px: int, octave: int) -> NDArray[np.float64]:
    cells = size_px // cell_px
    angle = 2 * np.pi * uniform(octave, Stream.NOISE, np.arange(cells), 1, cells).astype(np.float64)
    gradients = np.stack((np.sin(angle), np.cos(angle)))
    cell, inside = np.divmod((np.arange(size_px) + 0.5) / cell_px, 1)
    first, second = cell.astype(np.int64), (cell.astype(np.int64) + 1) % cells
    blend = inside**3 * (inside * (inside * 6 - 15) + 10)

    def slope(
        rows: NDArray[np.int64], columns: NDArray[np.int64], dy: float, dx: float
    ) -> NDArray[np.float64]:
        gradient = gradients[:, rows[:, None], columns[None, :]]
        return np.asarray(
            gradient[0] * (inside[:, None] - dy) + gradient[1] * (inside[None, :] - dx)
        )

    above = slope(first, first, 0, 0) + blend[None, :] * (
        slope(first, second, 0, 1) - slope(first, first, 0, 0)
    )
    below = slope(second, first, 1, 0) + blend[None, :] * (
        slope(second, second, 1, 1) - slope(second, first, 1, 0)
    )
    return np.asarray(above + blend[:, None] * (below - above))


@lru_cache(maxsize=4)
def _on(device: "torch.device") -> "Tensor":
    import torch

    with torch.inference_mode(mode=False):
        return torch.from_numpy(smooth_field()).to(device)
