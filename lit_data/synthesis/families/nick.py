"""Nicks: bites out of an edge."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.devices import constant
from lit_data.synthesis.families.base import (
    Family,
    Floats,
    Parameters,
    Range,
    spread,
    square_window,
)
from lit_data.synthesis.outlines import band
from lit_data.synthesis.windows import SEARCH_PX

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows

_COMPASS_Y: Final = (0, -1, -0.7, 0, 0.7, 1, 0.7, 0, -0.7)
_COMPASS_X: Final = (0, 0, 0.7, 1, 0.7, 0, -0.7, -1, -0.7)
"""The middle of the disc and eight places around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nick(Family):
    """A disc at the strongest edge nearby, filled with the grey of its dark (or bright) side.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        radius_px: Radius of the disc.
        opacity: Fraction of the edge that is gone.
    """

    radius_px: Range = (1.5, 4.0)
    opacity: Range = (0.6, 1.0)

    name: ClassVar[str] = "nick"
    parameters: ClassVar[tuple[str, ...]] = ("radius_px", "opacity")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        return {
            "radius_px": spread(draws[:, 0], self.radius_px),
            "opacity": spread(draws[:, 1], self.opacity),
        }

    @override
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
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
        y = (windows.nearest_y + edge_y)[:, None] + compass_y
        x = (windows.nearest_x + edge_x)[:, None] + compass_x
        around = windows.canvas.read_channels(windows.row, y.round_().long(), x.round_().long())
        # With the sign of the strength the largest value is the brightest, or the darkest.
        sign = windows.strength.sign()[:, None]
        level = (around * sign[..., None]).amax(1) * sign
        opacity = pixels.cover * pixels.of_each(parameters["opacity"]).view(-1)
        return (pixels.of_each(level) - pixels.before) * opacity[:, None]


_LEAST_SLOPE: Final = 1 / 256
"""Less of it cannot be seen in 8 bits."""
_REACH_SIGMAS: Final = 3.85
"""Distance at which the slope has fallen to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief(Family):
    """A Gaussian bump (positive) or pit (negative).

    It is bright on the side that faces the light and dark on the other. The brightness of a flat
    Lambertian surface changes with its slope towards the light; the slope of a Gaussian is
    steepest one sigma from its top, where the change is `amplitude`.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        sigma_px: Standard deviation along the longer axis.
        elongation: Longer axis over shorter one.
        light_deg: Direction of the light, from the x axis towards the y axis; none draws it for
            each defect.
    """

    sigma_px: Range = (1.5, 4.0)
    elongation: Range = (1.0, 2.0)
    light_deg: float | None = None

    name: ClassVar[str] = "relief"
    parameters: ClassVar[tuple[str, ...]] = ("sigma_px", "sigma_across_px", "angle", "light")

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
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
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
        return square_window(parameters["sigma_px"] * _REACH_SIGMAS)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        p = parameters
        along, across = windows.turned(p["angle"])
        along = along / p["sigma_px"]
        across = across / p["sigma_across_px"]
        turn = p["light"] - p["angle"]
        towards = along * turn.cos() + across * turn.sin()
        slope = towards * (0.5 - (along.square() + across.square()) / 2).exp_()
        return slope.where(slope.abs() > _LEAST_SLOPE, slope.new_zeros(()))
