"""Scales and ticks of a chart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.commands.reports.numbers import choose_scale, format_number

WIDTH: Final = 400.0
HEIGHT: Final = 214.0
LEFT: Final = 44.0
RIGHT: Final = WIDTH - 12.0
TOP: Final = 16.0
BOTTOM: Final = HEIGHT - 20.0

_LOG_RANGE: Final = 300.0
_MOST: Final = 1e60  # a loss that runs away is shown up to here: ranges of larger numbers overflow
_FROM_ZERO: Final = ("B", "%", "s", "us", "ms", "samples/s", "/s")


@dataclass(frozen=True)
class Axis:
    """A range of numbers and where it lies in the chart.

    Attributes:
        low: The number at `begin`.
        high: The number at `end`; above `low`.
        begin: A place in the chart's own units.
        end: The other place.
        is_log: Whether equal ways are equal factors.
        divisor: What the numbers are divided by to be read.
        unit: What they then are.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    divisor: float = 1.0
    unit: str = ""

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where numbers lie; NaN for those without a place."""
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(np.abs(values) < _MOST, values, np.nan)
            if self.is_log:
                share = np.log(values / self.low) / math.log(self.high / self.low)
            else:
                share = (values - self.low) / (self.high - self.low)
        return np.asarray(self.begin + share * (self.end - self.begin))

    def find_ticks(self, most: int) -> list[tuple[float, str]]:
        """Round numbers of the range with their texts."""
        numbers = _find_powers(self.low, self.high) if self.is_log else _find_rounds(self.low, self.high, most, self)
        return [(number, _format_tick(number / self.divisor)) for number in numbers]


def make_value_axis(values: NDArray[np.float64], unit: str) -> Axis:
    """The upright axis for numbers of a unit, which may be NaN."""
    finite = values[np.abs(values) < _MOST]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    divisor, name = choose_scale(unit, max(abs(low), abs(high)))
    if not unit and low > 0 and high / low > _LOG_RANGE:
        return Axis(low / 1.2, high * 1.2, BOTTOM, TOP, is_log=True)
    if unit in _FROM_ZERO and low >= 0:
        low = 0.0
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(low - margin if low else low, high + margin, BOTTOM, TOP, divisor=divisor, unit=name)


def make_step_axis(steps: Sequence[NDArray[np.int64]]) -> Axis:
    """The lower axis over all steps."""
    low, high = min(int(found.min()) for found in steps), max(int(found.max()) for found in steps)
    return Axis(low, max(high, low + 1), LEFT, RIGHT)


def _find_rounds(low: float, high: float, most: int, axis: Axis) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, in the unit that is read."""
    low, high = low / axis.divisor, high / axis.divisor
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step * axis.divisor for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _find_powers(low: float, high: float) -> list[float]:
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    step = max(1, math.ceil(len(powers) / 5))
    return [10.0**power for power in powers[::step]]


def _format_tick(number: float) -> str:
    if number and (abs(number) >= 1e5 or abs(number) < 1e-3):
        return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return format_number(round(number, 10))
