"""throughput.png: how fast a training was, batch by batch, and what its time went into."""

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.callbacks.timeline import Timeline, add_rows
from lit_data.callbacks.timing.step_clock import PARTS, Part, Seconds
from lit_data.callbacks.timing.totals import EndedBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PART_STYLES: Final[dict[Part, tuple[str, str]]] = {
    "forward": ("forward", "#1f5fa8"),
    "backward": ("backward", "#8fbce6"),
    "optimizer": ("optimizer", "#5fae8b"),
    "augment": ("augment", "#b9a3d8"),
    "transfer": ("transfer", "#f6d36b"),
    "assemble": ("assemble", "#f2a65a"),
    "wait": ("wait for data", "#b5460f"),
    "other": ("other", "#c8c8c8"),
}
"""From the bottom: what the device should do, then what it should not wait for."""

_SPEED_COLOUR: Final = "#1f5fa8"
_SIZE_COLOUR: Final = "#555555"
_OOM_COLOUR: Final = "#d62728"
_SMOOTHED_POINTS: Final = 15
_DRAWN_BARS: Final = 120
"""Points of the lower picture: fractions of single steps would be a comb."""


class Throughput:
    """Course of a training, for throughput.png.

    Attributes:
        speed: Number of steps, samples, seconds, and batch size times steps; marks of ``oom``.
        parts: Seconds of each of `PARTS`.
    """

    def __init__(self) -> None:
        self.speed = Timeline(add_rows)
        self.parts = Timeline(add_rows)
        self._last_oom = -1

    def add(self, ended: Iterable[EndedBatch], parts: Iterable[tuple[int, Seconds]]) -> None:
        """Add batches that ended, and the parts of steps, each with its number."""
        for batch in ended:
            if batch.seconds_s is not None:
                row = (1, batch.samples, batch.seconds_s, batch.size)
                self.speed.add(batch.number, row)
        for number, seconds in parts:
            self.parts.add(number, seconds)

    def mark_oom(self, step: int) -> None:
        """Mark a step that ran out of memory, once however often it did."""
        if step != self._last_oom:
            self.speed.marks["oom"].add(step)
        self._last_oom = step


def draw_throughput(history: Throughput, path: Path, title: str) -> None:
    """Write a PNG of 1210 x 770 pixels.

    Above samples per second with the batch size, and below the fractions of the parts.

    Args:
        history: Course of a training of at least one step.
        path: The file; its folder exists.
        title: A sentence.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_speed(upper, history.speed)
    _draw_parts(lower, history.parts)
    steps, _ = history.speed.read()
    lower.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))  # also of a few batches
    lower.set_xlabel("training batches")
    figure.suptitle(fill(title[:1].upper() + title[1:], 110), fontsize=11)
    figure.savefig(path, format="png")


def _draw_speed(cell: "Axes", speed: Timeline) -> None:
    steps, rows = speed.read()
    counts, samples, seconds, sizes = rows.T
    speeds = samples / seconds
    smooth_label = f"median of {_SMOOTHED_POINTS} points"
    cell.plot(steps, speeds, ".", color=_SPEED_COLOUR, ms=3, alpha=0.25)
    cell.plot(steps, _smooth(speeds), color=_SPEED_COLOUR, lw=1.6, label=smooth_label)
    _draw_ooms(cell, speed)
    mean = samples.sum() / seconds.sum()
    cell.set_title(f"samples per second, {mean:,.1f} on average", loc="left", fontsize=10)
    cell.set_ylim(0, 1.25 * float(np.quantile(speeds, 0.98)))
    _tidy(cell)
    second = cell.twinx()
    _draw_sizes(second, steps, sizes / counts)
    # one legend for the lines of both axes
    handles = [*cell.get_legend_handles_labels()[0], *second.get_legend_handles_labels()[0]]
    _put_legend_beside(second, handles)


def _draw_ooms(cell: "Axes", speed: Timeline) -> None:
    marks = speed.marks["oom"]
    label = f"out of memory ({marks.count})"
    for step, _ in marks.spans:
        cell.axvline(step, color=_OOM_COLOUR, lw=1.2, zorder=1, label=label)
        label = ""  # the legend names the first line alone


def _draw_sizes(cell: "Axes", steps: NDArray[np.float64], sizes: NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    dots = (0, (1, 1))
    cell.step(steps, sizes, where="post", color=_SIZE_COLOUR, lw=1.1, ls=dots, label="batch size")
    cell.set_ylabel("samples at once", color=_SIZE_COLOUR)
    cell.set_ylim(0, 1.25 * float(sizes.max()))
    cell.tick_params(axis="y", colors=_SIZE_COLOUR)
    cell.yaxis.set_major_locator(MaxNLocator(integer=True))
    cell.spines["top"].set_visible(False)


def _draw_parts(cell: "Axes", parts: Timeline) -> None:
    steps, rows = parts.read()
    rows = rows[:, [PARTS.index(part) for part in _PART_STYLES]]
    percents = 100 * rows.sum(axis=0) / rows.sum()
    labels = []
    colours = []
    for (name, colour), percent in zip(_PART_STYLES.values(), percents, strict=True):
        labels.append(f"{name}  {percent:.0f} %")
        colours.append(colour)
    rows_per_bar = -(-len(rows) // _DRAWN_BARS)
    firsts = np.arange(0, len(rows), rows_per_bar)
    bars = np.add.reduceat(rows, firsts)
    heights = 100 * bars / bars.sum(axis=1, keepdims=True)
    # the last bar ends one step after the last point
    edges = np.append(steps[firsts], steps[-1] + 1)
    heights = np.vstack([heights, heights[-1:]])
    cell.stackplot(edges, heights.T, labels=labels, colors=colours, step="post", lw=0)
    cell.set_title("where the time goes, % of each step", loc="left", fontsize=10)
    cell.set_ylim(0, 100)
    _tidy(cell)
    handles, _ = cell.get_legend_handles_labels()
    _put_legend_beside(cell, handles[::-1])  # in the order of the picture, from the top


def _put_legend_beside(cell: "Axes", handles: list[Any]) -> None:
    cell.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.06, 0.5), fontsize=9, frameon=False
    )


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of the points around each point, of fewer at the ends."""
    half = _SMOOTHED_POINTS // 2
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.asarray(np.nanmedian(windows, axis=1))


def _tidy(cell: "Axes") -> None:
    cell.grid(axis="y", color="#e8e8e8", lw=0.8)
    cell.set_axisbelow(True)
    cell.spines[["top", "right"]].set_visible(False)
