"""Smooth random fields that are the same everywhere: defects look at them at places of their own."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.rng import Stream, uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_data.synthesis.windows import Windows

FIELD_PX: Final = 512
CELL_PX: Final = 32
"""Width of the largest bumps of the field, in its own pixels."""
_OCTAVES: Final = 3


@lru_cache(maxsize=1)
def smooth_field() -> NDArray[np.float32]:
    """Gradient noise with three octaves (Perlin, "An image synthesizer", SIGGRAPH 1985), which repeats at its edges.

    Returns:
        [FIELD_PX, FIELD_PX] float32 with mean 0 and variance 1.
    """
    octaves = [_perlin(FIELD_PX, CELL_PX >> octave, octave) / 2**octave for octave in range(_OCTAVES)]
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

    def slope(rows: NDArray[np.int64], columns: NDArray[np.int64], dy: float, dx: float) -> NDArray[np.float64]:
        gradient = gradients[:, rows[:, None], columns[None, :]]
        return np.asarray(gradient[0] * (inside[:, None] - dy) + gradient[1] * (inside[None, :] - dx))

    above = slope(first, first, 0, 0) + blend[None, :] * (slope(first, second, 0, 1) - slope(first, first, 0, 0))
    below = slope(second, first, 1, 0) + blend[None, :] * (slope(second, second, 1, 1) - slope(second, first, 1, 0))
    return np.asarray(above + blend[:, None] * (below - above))


@lru_cache(maxsize=4)
def _on(device: "torch.device") -> "Tensor":
    import torch

    with torch.inference_mode(mode=False):
        return torch.from_numpy(smooth_field()).to(device)
