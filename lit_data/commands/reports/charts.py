"""Curves as SVG that stands in the page: it follows light and dark, and any width."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.commands.reports.curves import Series, split_off_last, thin
from lit_data.commands.reports.markup import Markup, choose_scale, element, find_unit, format_number, format_value, join

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
class ChartAxis:
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


def make_value_axis(values: NDArray[np.float64], unit: str) -> ChartAxis:
    """The upright axis for numbers of a unit, which may be NaN."""
    finite = values[np.abs(values) < _MOST]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    divisor, name = choose_scale(unit, max(abs(low), abs(high)))
    if not unit and low > 0 and high / low > _LOG_RANGE:
        return ChartAxis(low / 1.2, high * 1.2, BOTTOM, TOP, is_log=True)
    if unit in _FROM_ZERO and low >= 0:
        low = 0.0
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return ChartAxis(low - margin if low else low, high + margin, BOTTOM, TOP, divisor=divisor, unit=name)


def make_step_axis(steps: Sequence[NDArray[np.int64]]) -> ChartAxis:
    """The lower axis over all steps."""
    low, high = min(int(found.min()) for found in steps), max(int(found.max()) for found in steps)
    return ChartAxis(low, max(high, low + 1), LEFT, RIGHT)


def _find_rounds(low: float, high: float, most: int, axis: ChartAxis) -> list[float]:
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


def trace(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """A path through the points that are there; it begins anew after each gap."""
    pieces, pen = [], "M"
    for px, py in zip(x, y, strict=True):
        if math.isfinite(py):
            pieces.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L" if math.isfinite(py) else "M"
    return "".join(pieces)


def trace_band(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> str:
    """An outline around what lies between two lines; one for each piece without a gap."""
    there = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8)))
    pieces = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        upper = [f"{px:.1f} {py:.1f}" for px, py in zip(x[first:end], high[first:end], strict=True)]
        lower = [f"{px:.1f} {py:.1f}" for px, py in zip(x[first:end], low[first:end], strict=True)]
        pieces.append(f"M{'L'.join([*upper, *lower[::-1]])}Z")
    return "".join(pieces)


COLOURS = 8
"""Colours of lines, in page.css."""


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: Of the metric, which tells the unit.
        label: In the legend.
        series: At least one point.
        look: Number of the colour; from `COLOURS` on the line is dashed.
        is_dashed: Dashed whatever the number.
    """

    name: str
    label: str
    series: Series
    look: int
    is_dashed: bool = False

    @property
    def classes(self) -> str:
        """For the style sheet."""
        dash = min(self.look // COLOURS, 2)
        return f"c{self.look % COLOURS}" + (f" dash{dash or 1}" if dash or self.is_dashed else "")


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    epoch_ends: Mapping[int, int] | None = None,
    most_points: int = 240,
    legend: bool = True,
    stacked: bool = False,
) -> Markup:
    """A figure with title, curves and legend.

    Values that are no numbers leave gaps. A ring is the score of the best checkpoint, taken after training.

    Args:
        title: Of the figure.
        lines: At least one.
        epoch_ends: The last step of each epoch, to mark them.
        most_points: Of each line; neighbours become their mean, with a band from the lowest to the highest.
        legend: Whether to name the lines below, with their last values.
        stacked: Parts of a whole, one on the other; all have the same steps.
    """
    shown = _stack(lines, most_points) if stacked else lines
    x_axis = make_step_axis([line.series.steps for line in shown])
    y_axis = make_value_axis(np.concatenate([line.series.values for line in shown]), find_unit(lines[0].name))
    parts = [*_draw_grid(y_axis, x_axis), *_mark_epochs(x_axis, epoch_ends or {})]
    if stacked:
        parts += _draw_areas(shown, x_axis, y_axis)
    else:
        parts += [_draw_line(line, x_axis, y_axis, most_points) for line in shown]
    attributes: dict[str, str | float | None] = {
        **{"viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}", "role": "img", "aria-label": _describe(title, lines)},
        **{"data-x": f"{x_axis.low:g} {x_axis.high:g}", "data-unit": y_axis.unit},
        "data-y": " ".join(f"{number / y_axis.divisor:.6g}" for number in (y_axis.low, y_axis.high)),
        "data-log": "" if y_axis.is_log else None,
    }
    unit = ", ".join(filter(None, (y_axis.unit, "logarithmic" if y_axis.is_log else "")))
    caption = element(
        "figcaption", None, element("strong", None, title), element("span", {"class": "unit"}, unit) if unit else ""
    )
    named = _list_lines(lines, "legend areas" if stacked else "legend") if legend else Markup()
    return element("figure", {"class": "chart"}, caption, element("svg", attributes, *parts), named)


def draw_swatch(line: ChartLine) -> Markup:
    """A short piece of a line, for a legend."""
    piece = element("path", {"class": f"line {line.classes}", "d": "M1 6H21"})
    return element("svg", {"class": "swatch", "viewBox": "0 0 22 12", "aria-hidden": "true"}, piece)


def _stack(lines: Sequence[ChartLine], most_points: int) -> list[ChartLine]:
    total, found = np.zeros(1), []
    for line in lines:
        points, _, _ = thin(line.series, most_points)
        total = total + np.nan_to_num(points.values)
        found.append(replace(line, series=replace(points, values=total)))
    return found


def _draw_grid(y_axis: ChartAxis, x_axis: ChartAxis) -> list[Markup]:
    parts = []
    for number, text in y_axis.find_ticks(5):
        y = round(float(y_axis.place(np.array([number]))[0]), 1)
        parts.append(element("path", {"class": "grid", "d": f"M{LEFT:g} {y}H{RIGHT:g}"}))
        parts.append(element("text", {"class": "tick y", "x": LEFT - 6, "y": y + 4}, text))
    parts.append(element("path", {"class": "axis", "d": f"M{LEFT:g} {BOTTOM:g}H{RIGHT:g}"}))
    for number, text in x_axis.find_ticks(5):
        if number == int(number):
            x = round(float(x_axis.place(np.array([number]))[0]), 1)
            parts.append(element("text", {"class": "tick x", "x": x, "y": BOTTOM + 15}, text))
    parts.append(element("text", {"class": "tick end", "x": LEFT - 10, "y": BOTTOM + 15}, "step"))
    return parts


def _mark_epochs(x_axis: ChartAxis, epoch_ends: Mapping[int, int]) -> list[Markup]:
    """A mark where each epoch ends; of many, some."""
    ends = [(epoch, step) for epoch, step in epoch_ends.items() if x_axis.low < step <= x_axis.high]
    if len(ends) > 1 and ends[-1][1] - ends[-2][1] == 1:
        ends.pop()  # the scores after training
    every, parts = -(-len(ends) // 8) or 1, []
    for epoch, step in ends[every - 1 :: every]:
        x = round(float(x_axis.place(np.array([float(step)]))[0]), 1)
        text = f"epoch {epoch + 1}" if len(ends) < 6 else f"{epoch + 1}"
        parts.append(element("path", {"class": "epoch", "d": f"M{x} {TOP:g}V{BOTTOM:g}"}))
        parts.append(element("text", {"class": "tick end", "x": x, "y": TOP - 4}, text))
    return parts


def _draw_line(line: ChartLine, x_axis: ChartAxis, y_axis: ChartAxis, most_points: int) -> Markup:
    curve, final = split_off_last(line.series)
    points, low, high = thin(curve, most_points)
    x, y = x_axis.place(points.steps.astype(np.float64)), y_axis.place(points.values)
    parts = []
    if len(points.values) < len(curve.values):
        band = trace_band(x, y_axis.place(low), y_axis.place(high))
        parts.append(element("path", {"class": f"band {line.classes}", "d": band}))
    parts.append(element("path", {"class": f"line {line.classes}", "d": trace(x, y), "data-label": line.label}))
    if np.isfinite(y).sum() == 1:
        parts += _draw_dots(points, "dot", line, x_axis, y_axis)
    if final is not None:
        parts += _draw_dots(final, "ring", line, x_axis, y_axis)
    return join(parts)


def _draw_dots(points: Series, kind: str, line: ChartLine, x_axis: ChartAxis, y_axis: ChartAxis) -> Iterator[Markup]:
    xs, ys = x_axis.place(points.steps.astype(np.float64)), y_axis.place(points.values)
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            place = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.4"}
            yield element("circle", {"class": f"{kind} {line.classes}", **place})


def _draw_areas(lines: Sequence[ChartLine], x_axis: ChartAxis, y_axis: ChartAxis) -> Iterator[Markup]:
    """What lies between each line and the one before, which is below."""
    below = np.zeros(len(lines[0].series.values))
    for line in lines:
        x = x_axis.place(line.series.steps.astype(np.float64))
        outline = trace_band(x, y_axis.place(below), y_axis.place(line.series.values))
        yield element("path", {"class": f"area {line.classes}", "d": outline})
        below = line.series.values


def _list_lines(lines: Sequence[ChartLine], classes: str) -> Markup:
    entries = [
        element("li", None, draw_swatch(line), line.label, " ", element("b", None, _describe_end(line)))
        for line in lines
    ]
    return element("ul", {"class": classes}, *entries)


def _describe_end(line: ChartLine) -> str:
    series = line.series
    if not len(series.finite):
        return "no number"
    broken = "" if np.isfinite(series.values[-1]) else ", then not a number"
    return f"{format_value(line.name, series.last)}{broken}"


def _describe(title: str, lines: Sequence[ChartLine]) -> str:
    """The chart in words."""
    texts = []
    for line in lines[:COLOURS]:
        finite = line.series.finite
        if len(finite):
            first, last = (format_value(line.name, float(value)) for value in (finite[0], finite[-1]))
            texts.append(f"{line.label}: {last}" if len(finite) == 1 else f"{line.label}: from {first} to {last}")
    more = f"; and {len(lines) - COLOURS} more" if len(lines) > COLOURS else ""
    return f"{title} over the steps of training. {'; '.join(texts) or 'no numbers'}{more}"
