"""Charts of a report: figures of Matplotlib as SVG, which the page turns dark by a filter."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    LogFormatter,
    MaxNLocator,
    PercentFormatter,
)

from lit_data.app.reports.log import Series
from lit_data.app.result import choose_scale, find_direction, find_unit, format_value, split_stage
from lit_data.core.types import Doubles

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, those that turn the direction of text, and halves of surrogate pairs."""
_BASELINE = "_baseline"
_LIMITS = ("memory/free_bytes", "memory/limit_bytes")
_MACHINE_GROUPS = ("amp", "batch", "cache", "data", "memory", "time")

COLOURS = ("#1f5fa8", "#d9730d", "#2a8a57", "#8250c4", "#c2255c", "#0b8a9a", "#8a6d1d", "#64748b")
"""Of lines, by their numbers."""
_DASHES = (0, (3.0, 2.2))
_SOFT = "#5a6576"
_BORDER = "#c2255c"
_STYLE = {
    "svg.fonttype": "none",  # text, which is small
    "svg.hashsalt": "report",
    "font.size": 11.3,
    "text.parse_math": False,  # names of metrics may be anybody's
    "axes.axisbelow": True,
    "axes.edgecolor": _SOFT,
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _SOFT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "grid.color": "#e1e5ea",
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 2.1,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
_WIDTH_PX, _HEIGHT_PX, _LEGEND_ROW_PX = 400, 214, 16
_HANDLE_CHARACTERS = 5
_LEGEND_CHARACTERS = 58  # in a row
_PX = 1 / 72  # of the figure: a point of SVG is a pixel of ours
_LOG_RANGE = 300.0  # largest by smallest value from which an axis is logarithmic
_MOST = 1e60  # a loss that runs away is shown up to here: ranges of larger numbers overflow
_FROM_ZERO = ("B", "%", "s", "us", "ms", "samples/s", "/s")
_LEAST_SPAN = 0.2  # of an axis of scores, whose noise would fill it
_HEADROOM = 0.01
_MOST_EPOCHS = 8
_MOST_POINTS = 300  # of a line
_TICK_STEPS = (1, 2, 5, 10)
_LEAST_SCORE = 1e-9
_NARROW = 0.2
_NEAR = 6.0  # logits
_NEAR_TICKS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_LABEL_WIDTH = 0.1  # of an axis
_FAR_TICKS = (1e-8, 1e-6, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)


@dataclass(frozen=True)
class ChartOf:
    """Chart that a metric is shown in, and its line there.

    Attributes:
        section: Scores of the model, or the machine.
        title: Of the chart.
        label: Of the line in it.
        stage: ``train``, ``val`` or ``test``; empty where the name tells none.
        is_baseline: It is what a simple rule scores.
    """

    section: Literal["model", "machine"]
    title: str
    label: str
    stage: str = ""
    is_baseline: bool = False


def find_chart(name: str) -> ChartOf:
    """Return the chart of a metric: stages share one, and so do memory and parts of a step."""
    stage, metric = split_stage(name)
    if stage:
        is_baseline = metric.endswith(_BASELINE)
        label = f"{stage} baseline" if is_baseline else stage
        return ChartOf("model", metric.removesuffix(_BASELINE), label, stage, is_baseline)
    group, _, last = name.partition("/")
    if name in _LIMITS:
        return ChartOf("machine", "available memory", last.removesuffix("_bytes"))
    if group == "memory" and last.endswith("_bytes"):
        return ChartOf("machine", "memory in use", last.removesuffix("_bytes"))
    if group == "time" and last.endswith("_s"):
        return ChartOf("machine", "time of a step", last.removesuffix("_s"))
    is_of_machine = group in _MACHINE_GROUPS and last != ""
    return ChartOf("machine" if is_of_machine else "model", name, name)


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: Of the metric, which tells the unit.
        label: In the legend.
        series: At least one point.
        look: Number of its color.
        is_dashed: Dashed, as baselines are.
    """

    name: str
    label: str
    series: Series
    look: int = 0
    is_dashed: bool = False

    @property
    def text(self) -> str:
        """Its label and last value, and a remark where it ends in values that are no numbers."""
        if not len(self.series.finite):
            return f"{self.label} no number"
        last = format_value(self.name, self.series.last)
        remark = "" if np.isfinite(self.series.values[-1]) else ", then not a number"
        return f"{self.label} {last}{remark}"


class Chart(NamedTuple):
    """A chart for the page.

    Attributes:
        title: Of the figure.
        unit: Of the numbers, and a remark where the axis is logarithmic.
        uri: The picture.
        height_px: Of the picture, which is 400 px wide.
        description: The same in words.
    """

    title: str
    unit: str
    uri: str
    height_px: int
    description: str


@dataclass
class _Drawing:
    """A figure that is being drawn, and after that its SVG as a data URI."""

    axes: Axes
    height_px: int
    uri: str = field(default="", init=False)


@contextmanager
def _drawing(labels: Sequence[str]) -> Iterator[_Drawing]:
    """Give axes in the style of the page, with room for a legend of the labels below them."""
    rows = -(-len(labels) // _count_columns(labels))
    height_px = _HEIGHT_PX + rows * _LEGEND_ROW_PX
    # Settings of the user's own, such as a text that LaTeX writes, are none of the page's.
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH_PX * _PX, height_px * _PX))
        drawing = _Drawing(figure.subplots(), height_px)
        drawing.axes.locator_params(nbins=5)
        yield drawing
        if labels:
            columns = _count_columns(labels)
            figure.legend(loc="outside lower left", ncols=columns, labelcolor=_SOFT, fontsize=10.5)
        drawing.uri = _write_svg(figure)


def _count_columns(labels: Sequence[str]) -> int:
    """Return how many columns a legend has room for, 1 to 3."""
    longest = max(map(len, labels), default=0)
    return min(3, max(1, _LEGEND_CHARACTERS // (longest + _HANDLE_CHARACTERS)))


def _write_svg(figure: Figure) -> str:
    """Return the figure as a data URI, without what only makes it longer."""
    text = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The text stays text, which the browser has letters for.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    svg = UNPRINTABLE.sub("\ufffd", svg)  # a control character is no XML
    svg = re.sub(r"\s+", " ", svg[svg.index("<svg") :])
    # A page may have hundreds of charts: tenths of a pixel do, but in labels, which end in <.
    svg = re.sub(r"(\d\.\d)\d{3,}(?!\d*<)", r"\1", svg)
    return f"data:image/svg+xml,{quote(svg, safe=' =:/;,.()-')}"


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    epoch_ends: Mapping[int, int] | None = None,
    has_legend: bool = True,
) -> Chart:
    """Draw curves over the steps of a training. Values that are no numbers leave gaps.

    Args:
        title: Of the figure.
        lines: At least one.
        epoch_ends: The last step of each epoch, to mark them.
        has_legend: Name the lines below, with their last values.
    """
    values = np.concatenate([line.series.values for line in lines])
    values = values[np.abs(values) < _MOST]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    unit = find_unit(lines[0].name)
    divisor, unit_name = choose_scale(unit, max(abs(low), abs(high)))
    # Losses and learning rates; bytes, seconds and fractions are compared by their lengths.
    is_log = not unit and low > 0 and high / low > _LOG_RANGE
    labels = [line.text for line in lines] if has_legend else []
    with _drawing(labels) as drawing:
        axes = drawing.axes
        axes.set_xlabel("step", loc="right", labelpad=1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_TICK_STEPS))
        first_step = min(line.series.steps[0] for line in lines)
        axes.set_xlim(first_step, max(*(line.series.steps[-1] for line in lines), first_step + 1))
        for line in lines:
            _draw_line(axes, line, divisor)
        _mark_epochs(axes, epoch_ends or {})
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
            axes.minorticks_off()
        elif unit in _FROM_ZERO and low >= 0:
            axes.set_ylim(bottom=0)
        elif low >= 0 and high <= 1 and find_direction(lines[0].name) == 1:
            _widen(axes, low, high)
    units = [unit_name] if unit_name else []
    if is_log:
        units.append("logarithmic")
    return Chart(title, ", ".join(units), drawing.uri, drawing.height_px, _describe(title, lines))


def _draw_line(axes: Axes, line: ChartLine, divisor: float) -> None:
    steps, *parts = thin(line.series, _MOST_POINTS)
    means, low, high = (np.where(np.abs(part) < _MOST, part / divisor, np.nan) for part in parts)
    colour = COLOURS[line.look % len(COLOURS)]
    if len(means) < len(line.series.values):
        axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0)
    marker = "o" if np.isfinite(means).sum() == 1 else ""  # which makes no line
    (curve,) = axes.plot(steps, means, marker, color=colour, label=line.text)
    curve.set(clip_on=False, linestyle=_DASHES if line.is_dashed else "solid")


def _widen(axes: Axes, low: float, high: float) -> None:
    """Give an axis of scores, which lie in 0..1, a range in which noise does not look like a change."""
    margin = max(0.05 * (high - low), (_LEAST_SPAN - (high - low)) / 2)
    bottom = min(max(0.0, low - margin), 1 - _LEAST_SPAN)
    axes.set_ylim(bottom, max(min(1.0, high + margin), bottom + _LEAST_SPAN) + _HEADROOM)


def _mark_epochs(axes: Axes, epoch_ends: Mapping[int, int]) -> None:
    """Mark where each epoch ends; of many epochs, where some do."""
    first_step, last_step = axes.get_xlim()
    ends = [(epoch, step) for epoch, step in epoch_ends.items() if first_step < step <= last_step]
    if len(ends) > 1 and ends[-1][1] - ends[-2][1] == 1:
        ends.pop()  # the scores after training, which stand in an epoch of their own
    every = max(1, -(-len(ends) // _MOST_EPOCHS))
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


def thin(series: Series, most: int) -> tuple[Doubles, Doubles, Doubles, Doubles]:
    """Make neighbors one point where there are too many.

    Args:
        series: Any length.
        most: Points at most.

    Returns:
        The first steps of the points, the means, and the lowest and the highest values, [N] each;
        NaN where no value is a number.
    """
    together = -(-len(series.values) // most)  # values that become one point
    rows = []
    for first in range(0, len(series.values), together):
        values = series.values[first : first + together]
        numbers = values[np.isfinite(values)]
        point = (numbers.mean(), numbers.min(), numbers.max()) if len(numbers) else (math.nan,) * 3
        rows.append((series.steps[first], *point))
    steps, means, low, high = np.array(rows, np.float64).T
    return steps, means, low, high


def _describe(title: str, lines: Sequence[ChartLine]) -> str:
    """Return the chart in words, of many lines the first ones."""
    texts = []
    for line in lines[: len(COLOURS)]:
        finite = line.series.finite
        if len(finite):
            first, last = format_value(line.name, finite[0]), format_value(line.name, finite[-1])
            course = last if len(finite) == 1 else f"from {first} to {last}"
            texts.append(f"{line.label}: {course}")
    left_out = len(lines) - len(COLOURS)
    more = f"; and {left_out} more" if left_out > 0 else ""
    return f"{title} over the steps of training. {'; '.join(texts) or 'no numbers'}{more}"


def draw_precision_recall(curves: Mapping[str, tuple[Doubles, Doubles]], stage: str) -> Chart:
    """Draw precision over recall.

    Args:
        curves: Recall and precision [N] each, by what they are of: images, pixels, objects.
        stage: Of the images.
    """
    with _drawing(list(curves)) as drawing:
        axes = drawing.axes
        for number, (name, (recall, precision)) in enumerate(curves.items()):
            # The area below the steps is the average precision.
            steps = np.insert(recall, 0, 0.0), np.insert(precision, 0, precision[0])
            style: Any = {"drawstyle": "steps-pre", "clip_on": False}
            axes.plot(*steps, color=COLOURS[number], label=f"of {name}", **style)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="precision")
        axes.set_xlabel("recall", loc="right", labelpad=1)
    names = " and ".join(curves)
    description = f"precision over recall of {names} in {stage}"
    return Chart("Precision and recall", stage, drawing.uri, drawing.height_px, description)


def draw_scores(
    edges: Doubles, counts: Mapping[str, Doubles], threshold: float, stage: str
) -> Chart:
    """Draw how many images of each kind have which score.

    Args:
        edges: [bins + 1] of the scores, which rise.
        counts: [bins] images, by ``good`` and ``defective``.
        threshold: Score from which an image counts as defective.
        stage: Of the images.
    """
    places = _find_logits(edges)
    border = _find_logits(np.array([threshold]))[0]
    ticks = np.array(_FAR_TICKS if np.ptp(places) > _NEAR else _NEAR_TICKS)
    if np.ptp(edges) < _NARROW:
        ticks = np.array(MaxNLocator(4).tick_values(edges[0], edges[-1]))
    ticks = _thin_ticks(ticks, places)
    with _drawing(list(counts)) as drawing:
        axes = drawing.axes
        for number, (kind, images) in enumerate(counts.items()):
            total = images.sum()
            # Fractions of a kind, as there may be a hundred times as many good images.
            axes.stairs(
                images / max(1, total),
                places,
                fill=True,
                alpha=0.55,
                color=COLOURS[number],
                label=f"{kind} ({total:.0f})",
            )
        text = f"threshold {format_value('', threshold)}"
        axes.axvline(border, color=_BORDER, linestyle=_DASHES, label=text)
        axes.set_xlim(places[0], places[-1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("images of a kind")
        axes.set_xlabel("score of an image", loc="right", labelpad=1)
        axes.xaxis.set_major_locator(FixedLocator(list(_find_logits(ticks))))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    description = (
        f"scores of good and defective images in {stage}, and the threshold {threshold:.3g}"
    )
    return Chart("Scores of images", stage, drawing.uri, drawing.height_px, description)


def _thin_ticks(ticks: Doubles, places: Doubles) -> Doubles:
    """Return the scores whose labels do not overlap on an axis from the first place to the last."""
    gap = _LABEL_WIDTH * (places[-1] - places[0])
    thinned: list[float] = []
    last = places[0] - gap
    for tick, logit in zip(ticks.tolist(), _find_logits(ticks).tolist(), strict=True):
        if last + gap <= logit <= places[-1]:
            thinned.append(tick)
            last = logit
    return np.array(thinned)


def _find_logits(scores: Doubles) -> Doubles:
    """Return places on an axis on which scores near 0 and near 1 lie apart."""
    inside = scores.clip(_LEAST_SCORE, 1 - _LEAST_SCORE)
    logits: Doubles = np.log(inside / (1 - inside))
    return logits
