"""Hounsfield units: windows for display, and conversion from stored numbers."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array, Floats

EXACT_FLOAT = 2**24
"""Largest number up to which all whole numbers are exact in float32."""


@dataclass(frozen=True, slots=True)
class Window:
    """The range of Hounsfield units that a picture maps to its gray levels.

    Args:
        centre_hu: Center of the range.
        width_hu: Distance from the lower to the upper edge.

    Raises:
        ConfigError: A number is not finite, or the width is not above 0.
    """

    centre_hu: float
    width_hu: float

    def __post_init__(self) -> None:
        is_finite = math.isfinite(self.centre_hu) and math.isfinite(self.width_hu)
        if not is_finite or self.width_hu <= 0:
            raise ConfigError(
                f"window of center {self.centre_hu} and width {self.width_hu}: "
                "the width must be above 0"
            )

    @property
    def low_hu(self) -> float:
        """Lower edge of the window, which is scaled to 0."""
        return self.centre_hu - self.width_hu / 2

    def scale(self, values: Array) -> Floats:
        """Scale Hounsfield units of any shape to float32 in 0..1, clipped outside the window."""
        scaled = (values.astype(np.float32) - np.float32(self.low_hu)) / np.float32(self.width_hu)
        return np.clip(scaled, 0, 1, out=scaled)


WINDOWS = MappingProxyType(
    {
        "lung": Window(-600, 1500),
        "bone": Window(400, 1800),
        "soft_tissue": Window(50, 400),
        "brain": Window(40, 80),
        "mediastinum": Window(50, 350),
    }
)
"""Common windows by name. The figures are those of https://radiopaedia.org/articles/windowing-ct:
lung W1500 L-600, bone W1800 L400, abdominal soft tissue W400 L50, brain W80 L40, mediastinum W350
L50."""


def read_window(value: object) -> Window:
    """Make a window from a value of a configuration.

    Args:
        value: A name of ``WINDOWS``, a pair (center, width), or a window.

    Raises:
        ConfigError: The value is none of these.
    """
    if isinstance(value, Window):
        return value
    if isinstance(value, str) and value in WINDOWS:
        return WINDOWS[value]
    try:
        centre_hu, width_hu = map(float, value)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        names = ", ".join(WINDOWS)
        raise ConfigError(
            f"window={value!r} is not allowed; give one of {names}, or [center, width]"
        ) from error
    return Window(centre_hu, width_hu)


@dataclass(frozen=True, slots=True)
class StoredScale:
    """Conversion of stored numbers to Hounsfield units: ``stored * slope + intercept``.

    Args:
        stored: Dtype of the stored numbers: booleans, integers or floats.
        slope: Factor.
        intercept: Offset, added after multiplying.
        bits: Number of bits of an integer in use; None for all.

    Attributes:
        dtype: Dtype of the Hounsfield units: bool and uint8 for unscaled masks and pictures of that
            dtype, int16 if every stored number becomes a whole number in its range, otherwise
            float32.

    Raises:
        DataError: The dtype cannot hold Hounsfield units.
    """

    stored: "np.dtype[Any]"
    slope: float = 1.0
    intercept: float = 0.0
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.stored.kind not in "biuf" or self.stored.itemsize > 8:
            raise DataError(
                f"dtype {self.stored}; booleans, integers and floats of up to 64 bits are read"
            )
        if not (math.isfinite(self.slope) and math.isfinite(self.intercept)) or self.slope == 0:
            raise DataError(
                f"slope {self.slope} and intercept {self.intercept} give no Hounsfield units"
            )

    @property
    def is_identity(self) -> bool:
        """True if the stored numbers are the Hounsfield units."""
        return (self.slope, self.intercept) == (1, 0)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Dtype of the Hounsfield units, see the class."""
        if self.is_identity and self.stored in (np.bool_, np.uint8):
            return self.stored
        is_whole = self.slope == round(self.slope) and self.intercept == round(self.intercept)
        if self.stored.kind == "f" or not is_whole:
            return np.dtype(np.float32)
        # A negative slope swaps the ends.
        ends_hu = [end * self.slope + self.intercept for end in self._range()]
        limits = np.iinfo(np.int16)
        fits_int16 = limits.min <= min(ends_hu) and max(ends_hu) <= limits.max
        return np.dtype(np.int16 if fits_int16 else np.float32)

    def apply(self, stored: Array) -> Array:
        """Convert stored numbers to Hounsfield units of ``dtype``, in native byte order.

        Raises:
            DataError: A number is outside the range that its header states, or too large for
                float32.
        """
        if self.is_identity and self.dtype == self.stored.newbyteorder("="):
            return stored.astype(self.dtype, copy=False)
        if self.dtype.kind == "f":
            return self._apply_float(stored)
        # In int32, so that a number beyond what the header allows is noticed below.
        values = stored.astype(np.int32) * int(self.slope) + int(self.intercept)
        result = values.astype(np.int16)
        if not np.array_equal(values, result):
            raise DataError(
                f"Hounsfield units {values.min()} to {values.max()}, more than its header allows"
            )
        return result

    def _apply_float(self, stored: Array) -> Array:
        if self.stored.kind in "iu" and stored.size:
            low, high = int(stored.min()), int(stored.max())
            # float32 would silently round them.
            if max(-low, high) > EXACT_FLOAT:
                raise DataError(f"values {low} to {high}; these are not Hounsfield units")
        # The check for NaN and infinite voxels that follows gives the place.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.is_identity:
                return stored.astype(np.float32, copy=False)
            return (stored.astype(np.float64) * self.slope + self.intercept).astype(np.float32)

    def _range(self) -> tuple[int, int]:
        """Return the smallest and the largest number that may be stored."""
        if self.stored.kind == "b":
            return 0, 1
        bits = min(self.bits or 64, 8 * self.stored.itemsize)
        if self.stored.kind == "u":
            return 0, 2**bits - 1
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
