"""Small round defects: Gaussian spots from tables, bumps and pits, and nicks in an edge."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from typing_extensions import override

from lit_data.core.checks import call_checked
from lit_data.core.devices import constant
from lit_data.core.errors import ConfigError
from lit_data.core.types import Doubles, Floats, Ints, Size
from lit_data.synthesis.families.base import (
    Drawn,
    Family,
    Parameters,
    Range,
    band,
    find_extreme,
    load_on,
    spread,
    square_window,
)
from lit_data.synthesis.windows import SEARCH_PX

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Pixels, Windows


SUBPIXELS = 8
"""Steps per pixel of the grid of centers, so that every possible kernel is computed once."""

_COMPASS_Y = (0, -1, -0.7, 0, 0.7, 1, 0.7, 0, -0.7)
_COMPASS_X = (0, 0, 0.7, 1, 0.7, 0, -0.7, -1, -0.7)
"""The center of the disc and eight places around it."""

_LEAST_SLOPE = 1 / 256
"""Smallest slope that is visible in 8 bits."""
_REACH_SIGMAS = 3.85
"""Distance at which the slope has fallen to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotShape:
    """A Gaussian spot clipped to a window, which is the extent that the mask marks.

    Args:
        height_px: Window height.
        width_px: Window width.
        sigma_y_px: Vertical standard deviation.
        sigma_x_px: Horizontal standard deviation.
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
    """Return the number of rows (or columns) before the pixel nearest to the center."""
    return (size_px - 1) // 2


@lru_cache(maxsize=16)
def spot_kernels(shapes: tuple[SpotShape, ...]) -> Floats:
    """Return kernels of each shape at each sub-pixel center, padded to the largest window.

    A kernel is ``exp(-(dy^2 / (2 sigma_y^2) + dx^2 / (2 sigma_x^2)))`` with (dy, dx) measured from
    the center, so its height at the center is 1. The center is ``offset / SUBPIXELS - 1/2`` px
    from the nearest pixel, which is at `window_start` of the largest window for all shapes.

    Args:
        shapes: Shapes of the spots.

    Returns:
        Kernels [S, SUBPIXELS, SUBPIXELS, Kh, Kw] float32, by shape, vertical and horizontal offset.
    """
    height = max(shape.height_px for shape in shapes)
    width = max(shape.width_px for shape in shapes)
    # A Gaussian is the product of one along each axis.
    vertical = np.stack([_profile(height, shape.height_px, shape.sigma_y_px) for shape in shapes])
    horizontal = np.stack([_profile(width, shape.width_px, shape.sigma_x_px) for shape in shapes])
    return (vertical[:, :, None, :, None] * horizontal[:, None, :, None, :]).astype(np.float32)


def _profile(window_px: int, size_px: int, sigma_px: float) -> Doubles:
    """Return one axis of a kernel at each offset, [SUBPIXELS, window_px].

    It is centered in the largest window.
    """
    offset = np.arange(SUBPIXELS)[:, None] / SUBPIXELS - 0.5
    pixel = np.arange(window_px) - window_start(window_px)
    first = -window_start(size_px)
    inside = (pixel >= first) & (pixel < first + size_px)
    return np.exp(-((pixel - offset) ** 2) / (2 * sigma_px**2)) * inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot(Family):
    """A Gaussian spot clipped to a small window, which is the extent that the mask marks.

    Args:
        weight: See `Family`.
        amplitude: Height of the peak, see `Family`.
        contrast: See `Family`.
        shapes: The shapes to choose from; mappings with the fields of `SpotShape` are accepted.
    """

    shapes: tuple[SpotShape | Mapping[str, float], ...] = (
        SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
        SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    )

    name: ClassVar[str] = "spot"
    parameters: ClassVar[tuple[str, ...]] = ("shape",)
    draws: ClassVar[int] = 0
    turns_inwards: ClassVar[bool] = True
    marks_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Accept mappings, as a configuration gives them."""
        shapes = []
        for shape in self.shapes:
            if isinstance(shape, Mapping):
                shape = call_checked(SpotShape, (), shape, "spot.shapes")
            shapes.append(shape)
        if not shapes:
            raise ConfigError("spot.shapes is empty: give at least one shape, or remove the family")
        object.__setattr__(self, "shapes", tuple(shapes))
        Family.__post_init__(self)

    @property
    def spots(self) -> tuple[SpotShape, ...]:
        """The shapes."""
        return self.shapes  # type: ignore[return-value]  # from its birth on

    @property
    @override
    def variants(self) -> tuple[float, ...]:
        return tuple(shape.weight for shape in self.spots)

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        return {"shape": variant.astype(np.float32)}

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        height = max(shape.height_px for shape in self.spots)
        width = max(shape.width_px for shape in self.spots)
        return np.array((height, width))

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        offset_y = ((windows.centre_y - windows.nearest_y + 0.5) * SUBPIXELS).long()
        offset_x = ((windows.centre_x - windows.nearest_x + 0.5) * SUBPIXELS).long()
        shape = parameters["shape"].long().view(-1)
        return load_on(windows.device, spot_kernels, self.spots)[shape, offset_y, offset_x]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nick(Family):
    """A disc at the strongest edge nearby, filled with the gray of its dark (or bright) side.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        radius_px: Radius of the disc.
        opacity: Fraction of the edge that is removed.
    """

    radius_px: Range = (1.5, 4.0)
    opacity: Range = (0.6, 1.0)

    name: ClassVar[str] = "nick"
    parameters: ClassVar[tuple[str, ...]] = ("radius_px", "opacity")
    replaces: ClassVar[bool] = True

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        return square_window(parameters["radius_px"] + SEARCH_PX)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        edge_y, edge_x = windows.edge
        y = windows.y - edge_y[:, None, None]
        x = windows.x - edge_x[:, None, None]
        return band((y.square() + x.square()).sqrt_(), parameters["radius_px"])

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        windows = pixels.windows
        edge_y, edge_x = windows.edge
        radius = parameters["radius_px"].view(-1, 1) + 1
        compass_y = radius * constant(_COMPASS_Y, radius.device)
        compass_x = radius * constant(_COMPASS_X, radius.device)
        # Places around the disc, half of them on each side of the edge.
        y = (windows.nearest_y + edge_y)[:, None] + compass_y
        x = (windows.nearest_x + edge_x)[:, None] + compass_x
        around = windows.canvas.read_channels(windows.row, y.round_().long(), x.round_().long())
        level = find_extreme(around, windows.strength)
        return pixels.turn_into(level[pixels.defect], pixels.of_each(parameters["opacity"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief(Family):
    """A Gaussian bump (positive) or pit (negative).

    It is bright on the side that faces the light and dark on the other. The brightness of a flat
    Lambertian surface changes with its slope toward the light; the slope of a Gaussian is
    steepest one sigma from its top, where the change is `amplitude`.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        sigma_px: Standard deviation along the longer axis.
        elongation: Ratio of the longer axis to the shorter one.
        light_deg: Direction of the light, from the x axis toward the y axis; None draws it for
            each defect.
    """

    sigma_px: Range = (1.5, 4.0)
    elongation: Range = (1.0, 2.0)
    light_deg: float | None = None

    name: ClassVar[str] = "relief"
    parameters: ClassVar[tuple[str, ...]] = ("sigma_px", "sigma_across_px", "angle", "light")

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        sigma = spread(draws[:, 0], self.sigma_px)
        if self.light_deg is None:
            light_deg = draws[:, 3] * 360
        else:
            light_deg = np.full_like(sigma, self.light_deg)
        return {
            "sigma_px": sigma,
            "sigma_across_px": sigma / spread(draws[:, 1], self.elongation),
            "angle": draws[:, 2] * np.float32(np.pi),
            "light": np.deg2rad(light_deg).astype(np.float32),
        }

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        return square_window(parameters["sigma_px"] * _REACH_SIGMAS)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        p = parameters
        along, across = windows.turned(p["angle"])
        along = along / p["sigma_px"]
        across = across / p["sigma_across_px"]
        # The light in the axes of the bump, which is brightened by its slope toward the light.
        turn = p["light"] - p["angle"]
        towards = along * turn.cos() + across * turn.sin()
        slope = towards * (0.5 - (along.square() + across.square()) / 2).exp_()
        return slope.where(slope.abs() > _LEAST_SLOPE, slope.new_zeros(()))
