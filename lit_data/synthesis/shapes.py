"""The kernels of all spots at all sub-pixel centres, computed once."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lit_data.synthesis.plan import SUBPIXELS, SpotShape


def window_start(size_px: int) -> int:
    """Rows (or columns) from the pixel nearest to the centre back to the first one of the window."""
    return (size_px - 1) // 2


@lru_cache(maxsize=16)
def window_starts(spots: tuple[SpotShape, ...]) -> NDArray[np.int64]:
    """`window_start` of each spot, vertical and horizontal: [S, 2]."""
    return np.array([[window_start(spot.height_px), window_start(spot.width_px)] for spot in spots])


@lru_cache(maxsize=16)
def spot_kernels(spots: tuple[SpotShape, ...]) -> NDArray[np.float32]:
    """Kernel of each spot at each sub-pixel centre, padded with zeros to the largest window.

    A kernel is ``exp(-(dy^2 / (2 sigma_y^2) + dx^2 / (2 sigma_x^2)))`` with (dy, dx) measured from the centre, so its
    height at the centre is 1. The centre lies ``offset / SUBPIXELS - 1/2`` px from the nearest pixel.

    Args:
        spots: The shapes.

    Returns:
        [S, SUBPIXELS, SUBPIXELS, Kh, Kw] float32, by spot, vertical offset and horizontal offset.
    """
    height = max(spot.height_px for spot in spots)
    width = max(spot.width_px for spot in spots)
    kernels = np.zeros((len(spots), SUBPIXELS, SUBPIXELS, height, width), dtype=np.float32)
    for kernel, spot in zip(kernels, spots, strict=True):
        vertical = _profile(spot.height_px, spot.sigma_y_px)
        horizontal = _profile(spot.width_px, spot.sigma_x_px)
        kernel[..., : spot.height_px, : spot.width_px] = vertical[:, None, :, None] * horizontal[None, :, None, :]
    return kernels


def _profile(size_px: int, sigma_px: float) -> NDArray[np.float64]:
    offset = np.arange(SUBPIXELS)[:, None] / SUBPIXELS - 0.5
    distance = np.arange(size_px) - window_start(size_px) - offset
    return np.exp(-(distance**2) / (2 * sigma_px**2))
