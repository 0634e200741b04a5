"""Outlines of regions as coverage of the pixels of a window, and the smooth fields in them."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.images.readers import read_image
from lit_data.rng import Stream, uniform
from lit_data.synthesis.families.base import Parameters, load_on

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Windows


TILE_PX: Final = 64
LEAST_AREA_PX: Final = 9
"""Smaller pieces of a mask say nothing of a shape."""
BORDER: Final = 0.9
"""Fraction of a tile that the longer side of a shape takes."""


@lru_cache(maxsize=8)
def load_shapes(folder: str) -> NDArray[np.float32]:
    """Load every connected piece of every mask below a folder, each scaled to a tile.

    Args:
        folder: PNG, TIFF, BMP or .npy masks, any depth; whatever is not 0 is defect.

    Returns:
        [S, TILE_PX, TILE_PX] float32 coverage in 0..1, in the order of the paths.

    Raises:
        DataError: The folder is missing, or no mask in it has a piece of `LEAST_AREA_PX`.
    """
    if not Path(folder).is_dir():
        raise DataError(
            f"shapes_from={folder} is not a folder: give one that holds masks of defects"
        )
    shapes: list[NDArray[np.float32]] = []
    for path in find_images(Path(folder)).paths:
        shapes += _cut_tiles(read_image(path)[0] != 0)
    if not shapes:
        raise DataError(
            f"shapes_from={folder}: no mask has a piece of {LEAST_AREA_PX} px: are they all 0?"
        )
    return np.stack(shapes)


def _cut_tiles(mask: NDArray[np.bool_]) -> list[NDArray[np.float32]]:
    import cv2

    _, labels, boxes, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    tiles = []
    for number, (left, top, width, height, area) in enumerate(boxes.tolist()):
        if number == 0 or area < LEAST_AREA_PX:  # 0 is the ground
            continue
        piece = labels[top : top + height, left : left + width] == number
        tiles.append(_fit(piece.astype(np.float32)))
    return tiles


def _fit(piece: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale a piece into the middle of a tile, so that its longer side takes `BORDER` of it."""
    import cv2

    scale = BORDER * TILE_PX / max(piece.shape)
    # An empty edge, into which the outline is interpolated.
    padded = np.pad(piece, 1)
    height, width = padded.shape
    # Middle to middle; the place of a pixel is that of its own middle.
    down = (TILE_PX - 1) / 2 - scale * (height - 1) / 2
    across = (TILE_PX - 1) / 2 - scale * (width - 1) / 2
    matrix = np.array([[scale, 0, across], [0, scale, down]], np.float64)
    tile = cv2.warpAffine(padded, matrix, (TILE_PX, TILE_PX), flags=cv2.INTER_LINEAR)
    return np.asarray(tile, np.float32)


WOBBLE = 0.25
"""Distance that the edge of a blob strays, in fractions of its radius."""


def band(distance_px: "Tensor", half_width_px: "Tensor") -> "Tensor":
    """Return the coverage of a band around a line: 1 inside, 0 outside, an edge of one pixel."""
    return (half_width_px + 0.5 - distance_px.abs()).clamp_(0, 1)


def blob(windows: "Windows", p: Parameters, soft: float) -> "Tensor":
    """Return the coverage of an ellipse with a wavy edge.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` and ``half_across_px`` (of the axes), ``angle``, ``seed_y`` and ``seed_x``.
        soft: Width of the edge in fractions of the smaller half axis; 0 is an edge of one pixel.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.turned(p["angle"])
    radius = ((along / p["half_px"]).square() + (across / p["half_across_px"]).square()).sqrt_()
    waves = look_up(windows, p["seed_y"], p["seed_x"], CELL_PX / p["half_px"])
    edge_px = (p["half_across_px"] * soft).clamp(min=1.0)
    depth = 1 + WOBBLE * waves.clamp_(-2, 2) - radius  # in half axes, from the wavy edge inwards
    return (depth * p["half_across_px"] / edge_px + 0.5).clamp_(0, 1)


def real_shape(windows: "Windows", p: Parameters, folder: str) -> "Tensor":
    """Return the coverage of a real defect, turned and scaled.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` (of the longer side), ``angle``, and ``seed_y``, which chooses the shape.
        folder: Of masks, see `lit_data.synthesis.outlines.load_shapes`.

    Returns:
        [n, h, w] in 0..1.
    """
    shapes = load_on(windows.device, load_shapes, folder)
    along, across = windows.turned(p["angle"])
    # A tile spans one size of the shape, less its border.
    column = (along * BORDER / p["half_px"] + 1) * (TILE_PX / 2)
    row = (across * BORDER / p["half_px"] + 1) * (TILE_PX / 2)
    inside = (column >= 0) & (column < TILE_PX) & (row >= 0) & (row < TILE_PX)
    shape = (p["seed_y"] * len(shapes)).long()
    last = TILE_PX - 1
    return shapes[shape, row.long().clamp_(0, last), column.long().clamp_(0, last)] * inside


FIELD_PX: Final = 512
CELL_PX: Final = 32
"""Width of the largest bumps of the field, in its own pixels."""
_OCTAVES: Final = 3


@lru_cache(maxsize=1)
def smooth_field() -> NDArray[np.float32]:
    """Return gradient noise with three octaves, which repeats at its edges.

    After Perlin, "An image synthesizer", SIGGRAPH 1985.

    Returns:
        [FIELD_PX, FIELD_PX] float32 with mean 0 and variance 1.
    """
    octaves = []
    for octave in range(_OCTAVES):
        # Each octave has bumps of half the width and half the height of the one before.
        octaves.append(_perlin(FIELD_PX, CELL_PX >> octave, octave) / 2**octave)
    field = np.sum(octaves, axis=0)
    standard: NDArray[np.float32] = ((field - field.mean()) / field.std()).astype(np.float32)
    return standard


def look_up(windows: "Windows", top: "Tensor", left: "Tensor", scale: "Tensor") -> "Tensor":
    """Return the field in windows, at a place and scale of each.

    Args:
        windows: The windows of n defects.
        top: [n, 1, 1] in [0, 1), a place in the field.
        left: [n, 1, 1] in [0, 1).
        scale: [n, 1, 1] pixels of the field for each pixel of the image.

    Returns:
        [n, h, w] float32 with mean 0 and variance 1 over the whole field.
    """
    # FIELD_PX more, as pixels left of the centre would be negative.
    rows = (top * FIELD_PX + (windows.y + FIELD_PX) * scale).long() % FIELD_PX
    columns = (left * FIELD_PX + (windows.x + FIELD_PX) * scale).long() % FIELD_PX
    return load_on(windows.device, smooth_field)[rows, columns]


def _perlin(size_px: int, cell_px: int, octave: int) -> NDArray[np.float64]:
    """Return one octave: at each corner of a cell a random slope, blended in between."""
    cells = size_px // cell_px
    angle = 2 * np.pi * uniform(octave, Stream.NOISE, np.arange(cells), 1, cells).astype(np.float64)
    # Unit vectors, so that all bumps are about equally steep.
    gradients = np.stack((np.sin(angle), np.cos(angle)))
    cell, inside = np.divmod((np.arange(size_px) + 0.5) / cell_px, 1)
    first, second = cell.astype(np.int64), (cell.astype(np.int64) + 1) % cells
    # Smooth up to the second derivative, so that cells have no visible borders.
    blend = inside**3 * (inside * (inside * 6 - 15) + 10)

    def slope(
        rows: NDArray[np.int64], columns: NDArray[np.int64], dy: float, dx: float
    ) -> NDArray[np.float64]:
        down, across = gradients[:, rows[:, None], columns[None, :]]
        return np.asarray(down * (inside[:, None] - dy) + across * (inside[None, :] - dx))

    above_left, above_right = slope(first, first, 0, 0), slope(first, second, 0, 1)
    below_left, below_right = slope(second, first, 1, 0), slope(second, second, 1, 1)
    above = above_left + blend[None, :] * (above_right - above_left)
    below = below_left + blend[None, :] * (below_right - below_left)
    return np.asarray(above + blend[:, None] * (below - above))
