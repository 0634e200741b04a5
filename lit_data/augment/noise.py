"""Gaussian noise that is a pure function of a sample, at the price of a copy.

Drawing a number for each pixel from a counter costs more than everything else together, so each image takes a window
at a random place of one fixed field of noise; 2**20 places and two signs make a repetition unlikely to matter.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lit_data.rng import Stream, uniform

FIELD_PX: Final = 1024
NOISE_DRAWS: Final = 3
"""Draws that one window takes: row, column, sign."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@lru_cache(maxsize=4)
def noise_field(device: torch.device) -> Tensor:
    """The field: [FIELD_PX, FIELD_PX] float32, normal with variance 1 (Box and Muller, 1958), the same everywhere."""
    draws = uniform(0, Stream.NOISE, np.arange(FIELD_PX), 0, FIELD_PX).astype(np.float64)
    radius, angle = np.sqrt(-2 * np.log(1 - draws[:, ::2])), 2 * np.pi * draws[:, 1::2]
    field = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return torch.from_numpy(field.astype(np.float32)).to(device, non_blocking=True)


def noise_windows(draws: Tensor, height_px: int, width_px: int) -> Tensor:
    """Windows of the field, wrapped at its edges.

    Args:
        draws: [..., NOISE_DRAWS] float32 in [0, 1).
        height_px: Rows of a window.
        width_px: Columns of a window.

    Returns:
        [..., height_px, width_px] float32 normal noise with variance 1, on the device of the draws.
    """
    start = (draws[..., :2] * FIELD_PX).long()
    rows = (start[..., 0, None] + torch.arange(height_px, device=draws.device)) % FIELD_PX
    columns = (start[..., 1, None] + torch.arange(width_px, device=draws.device)) % FIELD_PX
    sign = torch.where(draws[..., 2] < 0.5, -1.0, 1.0)
    field: Tensor = noise_field(draws.device)
    window = field[rows[..., :, None], columns[..., None, :]]
    return window * sign[..., None, None]
