"""Base of the families of defects: frequency, strength, drawn parameters, changes of pixels."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError
from lit_data.core.types import Floats, Ints, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_data.synthesis.windows import Pixels, Windows

DRAWS = 8
"""Number of random numbers for the shape of a defect, and largest number of a family's parameters."""

_SIZES = ("size_px", "length_px", "width_px", "radius_px", "sigma_px", "beat_px")
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SIZES, (0.1, math.inf)),
    "elongation": (1.0, math.inf),
    "opacity": (0.0, 1.0),
    "taper": (0.0, 1.0),
}
"""Limits of the ranges with these names; all others must not be negative."""

Range = tuple[float, float]
Drawn = dict[str, Floats]
"""Drawn parameters by name, [n] each, on the host."""
Parameters = dict[str, "Tensor"]
"""Drawn parameters on the device of the images, [n, 1, 1] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ABC):
    """One kind of defect.

    A family defines the parameters of a defect (`sample`, on the host, in NumPy), the size of its
    window (`window_px`), and the coverage and change of the pixels in that window (`cover` and
    `change`, on the device of the images).

    Args:
        weight: Frequency of this family, relative to the others.
        amplitude: Smallest and largest strength, in units of the 0..1 value range; None uses that
            of the specification.
        contrast: Smallest and largest strength in standard deviations of the noise around the
            defect; it replaces `amplitude`.

    Raises:
        ConfigError: A value is out of its range.
    """

    weight: float = 1.0
    amplitude: Range | None = None
    contrast: Range | None = None

    name: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]
    """Names of the columns that `sample` returns, at most `DRAWS`."""
    draws: ClassVar[int] = DRAWS
    """Number of random numbers that `sample` uses."""
    turns_inwards: ClassVar[bool] = False
    """True if the sign changes when the center would leave the value range."""
    marks_all: ClassVar[bool] = False
    """True if the mask holds every covered pixel, not only those that change visibly."""
    replaces: ClassVar[bool] = False
    """True if pixels are replaced by others with their noise, which a change must then exceed."""

    def __post_init__(self) -> None:
        """Accept lists, as a configuration gives them, and check every range and the weight."""
        if not isinstance(self.weight, Real) or not self.weight > 0:
            raise ConfigError(
                f"weight={self.weight!r} of {self.name} must be greater than 0: to skip the "
                "family, remove it"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            default = field.default
            # Strengths have no default that would show their type.
            is_strength = field.name in ("amplitude", "contrast") and value is not None
            is_range = isinstance(default, tuple) and isinstance(default[0], int | float)
            if is_strength or is_range:
                limits = _LIMITS.get(field.name, (0.0, math.inf))
                bounds = check_range(f"{self.name}.{field.name}", value, limits)
                object.__setattr__(self, field.name, bounds)

    @property
    def variants(self) -> tuple[float, ...]:
        """Weights of the fixed forms of this family."""
        return (1.0,)

    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        """Return the parameters of n defects, by default uniform over the ranges of their names.

        Args:
            draws: [n, DRAWS] in [0, 1).
            variant: [n] indices into `variants`.

        Returns:
            An array [n] for each of `parameters`.
        """
        drawn = {}
        for column, name in enumerate(self.parameters):
            drawn[name] = spread(draws[:, column], getattr(self, name))
        return drawn

    @abstractmethod
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        """Return the window sizes of the defects, [n, 2] (height, width), or [2] for all of them."""

    def place(
        self, y: Floats, x: Floats, parameters: Drawn, shape_px: Size
    ) -> tuple[Floats, Floats]:
        """Return the center of the window of each defect, by default that of the defect."""
        return y, x

    @abstractmethod
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        """Return the coverage of each pixel.

        Args:
            windows: Windows of n defects.
            parameters: Parameters of the defects.

        Returns:
            Coverage [n, h, w] float32 in 0..1, or in -1..1 for defects that brighten on one side
            and darken on the other.
        """

    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        """Return the numbers to add to covered pixels, by default strength times coverage.

        Args:
            pixels: K pixels.
            parameters: Parameters of the defects, see `Pixels.of_each`.

        Returns:
            Changes [K, C] float32 in units of the 0..1 value range, or [K, 1] for all channels.
        """
        return (pixels.strength * pixels.cover)[:, None]


def check_range(
    name: str,
    bounds: Any,  # noqa: ANN401 - a user's
    limits: Range = (0.0, math.inf),
) -> tuple[Any, Any]:
    """Return (smallest, largest) if they are in order, not negative, and within the limits.

    Raises:
        ConfigError: The bounds are not valid.
    """
    pair = tuple(bounds) if isinstance(bounds, Sequence) else (bounds,)
    is_pair = len(pair) == 2 and all(isinstance(bound, Real) for bound in pair)
    if not is_pair or not 0 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"{name}={list(pair)} is not a range: give [smallest, largest] with 0 <= smallest <= "
            "largest"
        )
    if pair[0] < limits[0] or pair[1] > limits[1]:
        raise ConfigError(f"{name}={list(pair)} must be between {limits[0]:g} and {limits[1]:g}")
    return pair[0], pair[1]


@lru_cache(maxsize=32)
def load_on(device: "torch.device", load: Callable[..., Floats], *arguments: Any) -> "Tensor":  # noqa: ANN401 - those of `load`
    """Return an array that families read from, which is copied to a device once.

    Args:
        device: Target device.
        load: Function that makes the array.
        arguments: Hashable arguments of `load`.
    """
    import torch

    with torch.inference_mode(mode=False):  # else it could not be used outside of it
        return torch.from_numpy(load(*arguments)).to(device)


def find_extreme(pixels: "Tensor", strength: "Tensor") -> "Tensor":
    """Return the brightest of J pixels for a positive strength, else the darkest, [n, C].

    Args:
        pixels: Pixels [n, J, C].
        strength: Signed strengths [n].
    """
    sign = strength.sign()[:, None]
    return (pixels * sign[..., None]).amax(1) * sign


def spread(draws: Floats, bounds: Range) -> Floats:
    """Scale uniform numbers in [0, 1) to the range between bounds."""
    low, high = bounds
    return np.float32(low) + draws * np.float32(high - low)


def square_window(half_px: NDArray[np.floating]) -> Ints:
    """Return sizes of square windows that reach `half_px` from their center, [n, 2], of few sizes."""
    # Odd, so that the exponent is that of the next power of 2.
    least_px = 2 * np.ceil(half_px + 0.5) + 1
    _, exponent = np.frexp(least_px)
    side = np.maximum(16, 1 << exponent.astype(np.int64))
    return np.repeat(side[:, None], 2, axis=1)


def band(distance_px: "Tensor", half_width_px: "Tensor") -> "Tensor":
    """Return the coverage of a band around a line: 1 inside, 0 outside, with an edge of one pixel."""
    return (half_width_px + 0.5 - distance_px.abs()).clamp_(0, 1)
