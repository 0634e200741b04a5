"""Pits and bumps, seen by the light that falls on them from one side."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Family, Floats, Parameters, Range, spread, square_window

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Windows

_LEAST_SLOPE: Final = 1 / 256
"""Less of it cannot be seen in 8 bits."""
_REACH_SIGMAS: Final = 3.85
"""Where the slope has fallen to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief(Family):
    """A Gaussian bump (positive) or pit (negative): bright on the side that faces the light, dark on the other.

    The brightness of a flat Lambertian surface changes with its slope towards the light; the slope of a Gaussian is
    steepest one sigma from its top, where the change is `amplitude`.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        sigma_px: Standard deviation along the longer axis.
        elongation: Longer axis over shorter one.
        light_deg: Where the light comes from, from the x axis towards the y axis; none draws it for each defect.
    """

    sigma_px: Range = (1.5, 4.0)
    elongation: Range = (1.0, 2.0)
    light_deg: float | None = None

    name: ClassVar[str] = "relief"
    parameters: ClassVar[tuple[str, ...]] = ("sigma_px", "sigma_across_px", "angle", "light")

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        sigma = spread(draws[:, 0], self.sigma_px)
        light = draws[:, 3] * 360 if self.light_deg is None else np.full_like(sigma, self.light_deg)
        return {
            "sigma_px": sigma,
            "sigma_across_px": sigma / spread(draws[:, 1], self.elongation),
            "angle": draws[:, 2] * np.float32(np.pi),
            "light": np.deg2rad(light).astype(np.float32),
        }

    @override
    def window_px(self, parameters: dict[str, Floats], shape_px: tuple[int, int]) -> NDArray[np.int64]:
        return square_window(parameters["sigma_px"] * _REACH_SIGMAS)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        p = parameters
        along, across = (way / p[name] for way, name in zip(windows.turned(p["angle"]), self.parameters, strict=False))
        turn = p["light"] - p["angle"]
        towards = along * turn.cos() + across * turn.sin()
        slope = towards * (0.5 - (along.square() + across.square()) / 2).exp_()
        return slope.where(slope.abs() > _LEAST_SLOPE, slope.new_zeros(()))
