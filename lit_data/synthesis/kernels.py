"""Kernels of Gaussian spots at all sub-pixel centres, computed once."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError

SUBPIXELS: Final = 8
"""Centres lie on a grid of 1/8 px, so that every kernel that can occur is computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotShape:
    """A Gaussian spot cut to a window: the window is the extent that the mask marks.

    Args:
        height_px: Window height.
        width_px: Window width.
        sigma_y_px: Standard deviation along the rows' axis.
        sigma_x_px: Standard deviation along the columns' axis.
        weight: Frequency of this shape, relative to the others.
    """

    height_px: int
    width_px: int
    sigma_y_px: float
    sigma_x_px: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes that draw nothing."""
        for name in ("height_px", "width_px", "sigma_y_px", "sigma_x_px", "weight"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value!r} of a spot must be greater than 0")


def window_start(size_px: int) -> int:
    """Return the rows (or columns) from the pixel nearest to the centre back to the first one."""
    return (size_px - 1) // 2


@lru_cache(maxsize=16)
def spot_kernels(shapes: tuple[SpotShape, ...]) -> NDArray[np.float32]:
    """Return kernels of each shape at each sub-pixel centre, padded to the largest window.

    A kernel is ``exp(-(dy^2 / (2 sigma_y^2) + dx^2 / (2 sigma_x^2)))`` with (dy, dx) measured from
    the centre, so its height at the centre is 1. The centre lies ``offset / SUBPIXELS - 1/2`` px
    from the nearest pixel, which is at `window_start` of the largest window for all shapes.

    Args:
        shapes: The shapes.

    Returns:
        [S, SUBPIXELS, SUBPIXELS, Kh, Kw] float32, by shape, vertical offset and horizontal offset.
    """
    height = max(shape.height_px for shape in shapes)
    width = max(shape.width_px for shape in shapes)
    # A Gaussian is the product of one along each axis.
    vertical = np.stack([_profile(height, shape.height_px, shape.sigma_y_px) for shape in shapes])
    horizontal = np.stack([_profile(width, shape.width_px, shape.sigma_x_px) for shape in shapes])
    return (vertical[:, :, None, :, None] * horizontal[:, None, :, None, :]).astype(np.float32)


def _profile(window_px: int, size_px: int, sigma_px: float) -> NDArray[np.float64]:
    """Return one axis of a kernel at each offset, [SUBPIXELS, window_px].

    It lies in the middle of the largest window.
    """
    offset = np.arange(SUBPIXELS)[:, None] / SUBPIXELS - 0.5
    pixel = np.arange(window_px) - window_start(window_px)
    first = -window_start(size_px)
    inside = (pixel >= first) & (pixel < first + size_px)
    return np.exp(-((pixel - offset) ** 2) / (2 * sigma_px**2)) * inside
