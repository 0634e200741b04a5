"""Curves as pictures that Matplotlib draws as SVG; each follows light and dark and any width."""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from numpy.typing import NDArray

from lit_data.commands.reports.curves import Series, split_off_last, thin
from lit_data.commands.reports.units import choose_scale, find_unit, format_number, format_value

COLOURS: Final = (
    "#1f5fa8",
    "#d9730d",
    "#2a8a57",
    "#8250c4",
    "#c2255c",
    "#0b8a9a",
    "#8a6d1d",
    "#64748b",
)
"""Of lines in light; those of page.css."""
_DARK: Final = (
    "#6aa9ee",
    "#f2a65a",
    "#63c795",
    "#b794f0",
    "#f07ba4",
    "#4fc7d6",
    "#d3b65c",
    "#a0aec0",
)
_SOFT, _RULE, _CARD = "#5a6576", "#e1e5ea", "#fffffe"
_IN_DARK: Final = {
    **dict(zip(COLOURS, _DARK, strict=True)),
    _SOFT: "#9aa6b6",
    _RULE: "#2c3541",
    _CARD: "#1a2029",
}
_STYLE: Final = "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif}"
_WIDTH_PX, _HEIGHT_PX = 400.0, 214.0
_FRAME: Final = (44.0, 20.0, 344.0, 178.0)  # left, bottom, width, height
_PX: Final = 1 / 72  # of the figure: a point of SVG is a pixel of ours

_LOG_RANGE: Final = 300.0
_MOST: Final = 1e60  # a loss that runs away is shown up to here: ranges of larger numbers overflow
_LEAST: Final = 1e-60
_FROM_ZERO: Final = ("B", "%", "s", "us", "ms", "samples/s", "/s")
_MOST_EPOCHS: Final = 8
_DASHES: Final[tuple[Any, ...]] = ("solid", (0, (3, 2.2)), (0, (1, 2.5)))


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: Of the metric, which tells the unit.
        label: In the legend.
        series: At least one point.
        look: Number of the colour; from as many as there are on, the line is dashed.
        is_dashed: Dashed whatever the number.
    """

    name: str
    label: str
    series: Series
    look: int
    is_dashed: bool = False

    @property
    def colour(self) -> int:
        """Number of the colour."""
        return self.look % len(COLOURS)

    @property
    def dash(self) -> int:
        """0 for a whole line, 1 for a dashed one, 2 for dots."""
        return min(self.look // len(COLOURS), 2) or int(self.is_dashed)

    @property
    def end(self) -> str:
        """Its last value, and whether it is the last."""
        if not len(self.series.finite):
            return "no number"
        broken = "" if np.isfinite(self.series.values[-1]) else ", then not a number"
        return f"{format_value(self.name, self.series.last)}{broken}"


@dataclass(frozen=True)
class Chart:
    """A chart for the page.

    Attributes:
        title: Of the figure.
        unit: Of the numbers, and whether the axis is logarithmic.
        lines: For the legend.
        uri: The picture.
        description: The same in words.
        data: JSON of what the pointer reads: frame, ranges, and the points of each line.
        stacked: Whether lines are parts of a whole.
        legend: Whether lines are named below.
    """

    title: str
    unit: str
    lines: Sequence[ChartLine]
    uri: str
    description: str
    data: str
    stacked: bool
    legend: bool


@dataclass(frozen=True)
class AxisRange:
    """The upright axis, in the unit that is read."""

    low: float
    high: float
    divisor: float = 1.0
    unit: str = ""
    is_log: bool = False


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    epoch_ends: Mapping[int, int] | None = None,
    most_points: int = 240,
    legend: bool = True,
    stacked: bool = False,
) -> Chart:
    """Draw curves.

    Values that are no numbers leave gaps. A ring is the score of the best checkpoint, taken after
    training.

    Args:
        title: Of the figure.
        lines: At least one.
        epoch_ends: The last step of each epoch, to mark them.
        most_points: Of each line; neighbours become their mean, with a band from the lowest to the
            highest.
        legend: Whether to name the lines below, with their last values.
        stacked: Parts of a whole, one on the other; all have the same steps.
    """
    shown = {line.label: thin(split_off_last(line.series)[0], most_points) for line in lines}
    every = [line.series.values for line in lines]
    if stacked:
        every = [np.cumsum([np.nan_to_num(shown[line.label][0].values) for line in lines], axis=0)]
    found = _choose_range(
        np.concatenate([values.ravel() for values in every]), find_unit(lines[0].name)
    )
    steps = (
        min(int(line.series.steps[0]) for line in lines),
        max(int(line.series.steps[-1]) for line in lines),
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 11.3}):
        figure = Figure(figsize=(_WIDTH_PX * _PX, _HEIGHT_PX * _PX))
        axes = _open_axes(figure, found, steps)
        _mark_epochs(axes, epoch_ends or {}, steps)
        if stacked:
            _draw_areas(axes, lines, shown, found)
        else:
            for line in lines:
                _draw_line(axes, line, shown[line.label], found)
        uri = _write_svg(figure)
    return Chart(
        title=title,
        unit=", ".join(filter(None, (found.unit, "logarithmic" if found.is_log else ""))),
        lines=lines,
        uri=uri,
        description=_describe(title, lines),
        data=_write_data(lines, shown, found, steps),
        stacked=stacked,
        legend=legend,
    )


def _choose_range(values: NDArray[np.float64], unit: str) -> AxisRange:
    finite = values[np.abs(values) < _MOST]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    divisor, name = choose_scale(unit, max(abs(low), abs(high)))
    if not unit and low > _LEAST and high / low > _LOG_RANGE:
        return AxisRange(low / 1.2, high * 1.2, is_log=True)
    if unit in _FROM_ZERO and low >= 0:
        low = 0.0
    margin = max(0.06 * (high - low) or 0.5 * abs(high) or 1.0, 1e-9 * abs(high), _LEAST)
    return AxisRange(
        (low - margin if low else low) / divisor, (high + margin) / divisor, divisor, name
    )


def _open_axes(figure: Figure, found: AxisRange, steps: tuple[int, int]) -> Axes:
    left, bottom, width, height = _FRAME
    axes = figure.add_axes(
        (left / _WIDTH_PX, bottom / _HEIGHT_PX, width / _WIDTH_PX, height / _HEIGHT_PX)
    )
    axes.set_yscale("log" if found.is_log else "linear")
    axes.set_ylim(found.low, found.high)
    axes.set_xlim(steps[0], max(steps[1], steps[0] + 1))
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.minorticks_off()
    axes.tick_params(length=0, colors=_SOFT, pad=5)
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(
        LogLocator(numticks=5) if found.is_log else MaxNLocator(5, steps=[1, 2, 5, 10])
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda number, _: _format_tick(number)))
    axes.annotate("step", (-10, -5), xycoords="axes points", ha="right", va="top", color=_SOFT)
    return axes


def _format_tick(number: float) -> str:
    if number and (abs(number) >= 1e5 or abs(number) < 1e-3):
        return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return format_number(round(number, 10))


def _mark_epochs(axes: Axes, epoch_ends: Mapping[int, int], steps: tuple[int, int]) -> None:
    """A mark where each epoch ends; of many, some."""
    ends = [(epoch, step) for epoch, step in epoch_ends.items() if steps[0] < step <= steps[1]]
    if len(ends) > 1 and ends[-1][1] - ends[-2][1] == 1:
        ends.pop()  # the scores after training
    every = -(-len(ends) // _MOST_EPOCHS) or 1
    for epoch, step in ends[every - 1 :: every]:
        text = f"epoch {epoch + 1}" if len(ends) < 6 else f"{epoch + 1}"
        axes.axvline(step, color=_SOFT, linewidth=1, linestyle=(0, (2, 4)), alpha=0.5)
        axes.annotate(
            text,
            (step, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            color=_SOFT,
        )


def _draw_line(
    axes: Axes, line: ChartLine, points: tuple[Series, Any, Any], found: AxisRange
) -> None:
    (mean, low, high), colour = points, COLOURS[line.colour]
    final = split_off_last(line.series)[1]
    if len(mean.values) < len(line.series.values) - (final is not None):
        lower, upper = clip_line(low, found), clip_line(high, found)
        axes.fill_between(mean.steps, lower, upper, color=colour, alpha=0.16, linewidth=0)
    values = clip_line(mean.values, found)
    axes.plot(
        mean.steps, values, color=colour, linewidth=2.1, linestyle=_DASHES[line.dash], clip_on=False
    )
    if np.isfinite(values).sum() == 1:
        axes.plot(mean.steps, values, "o", color=colour, markersize=6, clip_on=False)
    if final is not None:
        ring = {"markerfacecolor": _CARD, "markeredgecolor": colour, "markeredgewidth": 2}
        levels = clip_line(final.values, found)
        axes.plot(final.steps, levels, "o", markersize=6.8, clip_on=False, **ring)  # type: ignore[arg-type]


def _draw_areas(
    axes: Axes, lines: Sequence[ChartLine], shown: Mapping[str, Any], found: AxisRange
) -> None:
    steps = shown[lines[0].label][0].steps
    parts = [np.nan_to_num(shown[line.label][0].values) / found.divisor for line in lines]
    axes.stackplot(
        steps, parts, colors=[COLOURS[line.colour] for line in lines], alpha=0.75, linewidth=0
    )


def clip_line(values: NDArray[np.float64], found: AxisRange) -> NDArray[np.float64]:
    """Values in the unit that is read; NaN for those without a place."""
    with np.errstate(invalid="ignore"):
        return np.where(
            (np.abs(values) < _MOST) & ((values > 0) | (not found.is_log)),
            values / found.divisor,
            np.nan,
        )


def _write_svg(figure: Figure) -> str:
    """The figure as a data URI, in colours that change with the page's."""
    text = io.StringIO()
    figure.savefig(
        text,
        format="svg",
        transparent=True,
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    )
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(
        r"font-family:[^;\"]*;? ?| id=\"[a-z][^\"]*\"(?=/?>)", "", re.sub(r"\s+", " ", svg)
    )
    svg = re.sub(r"(\d\.\d)\d{3,}(?!\d*<)", r"\1", svg)  # of coordinates: a label ends in <
    names = {light: f"var(--v{number})" for number, light in enumerate(_IN_DARK)}
    svg = re.sub("|".join(names), lambda match: names[match[0]], svg)
    light, dark = (
        ";".join(f"--v{n}:{c}" for n, c in enumerate(colours))
        for colours in (_IN_DARK, _IN_DARK.values())
    )
    style = (
        f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{_STYLE}</style>"
    )
    return f"data:image/svg+xml,{quote(svg.replace('>', f'>{style}', 1), safe=' =:/;,.()-')}"


def _write_data(
    lines: Sequence[ChartLine], shown: Mapping[str, Any], found: AxisRange, steps: tuple[int, int]
) -> str:
    left, _, width, _ = _FRAME
    read = []
    for line in lines:
        mean = shown[line.label][0]
        values = zip(mean.steps.tolist(), clip_line(mean.values, found).tolist(), strict=True)
        points = [
            (step, f"{format_number(value)} {found.unit}".strip())
            for step, value in values
            if math.isfinite(value)
        ]
        read.append({"label": line.label, "points": points})
    frame = [left / _WIDTH_PX, (left + width) / _WIDTH_PX]
    return json.dumps(
        {"frame": frame, "steps": [steps[0], max(steps[1], steps[0] + 1)], "lines": read}
    )


def _describe(title: str, lines: Sequence[ChartLine]) -> str:
    """The chart in words."""
    texts, most = [], len(COLOURS)
    for line in lines[:most]:
        finite = line.series.finite
        if len(finite):
            first, last = (
                format_value(line.name, float(value)) for value in (finite[0], finite[-1])
            )
            texts.append(
                f"{line.label}: {last}"
                if len(finite) == 1
                else f"{line.label}: from {first} to {last}"
            )
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return f"{title} over the steps of training. {'; '.join(texts) or 'no numbers'}{more}"
