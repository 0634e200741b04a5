"""throughput.png: how fast a training was, batch by batch, and what its time went into."""

from collections.abc import Callable, Iterable, Sequence
from operator import add
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.callbacks.timing.step_clock import PARTS, Part, Seconds
from lit_data.callbacks.timing.totals import Ended

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS: Final[dict[Part, tuple[str, str]]] = {
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
"""Points of the lower picture: shares of single steps would be a comb."""


def _add_up(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(add, first, second))


class BoundedSeries:
    """Rows of numbers over steps or time, in bounded memory: where there are too many, each two
    neighbours become one.

    From then on so many rows make one.

    Args:
        most_rows: Rows kept at most.
        merge: Makes one row of two; by default adds them up.
    """

    def __init__(self, most_rows: int = 2000, merge: Callable[[Any, Any], Any] = _add_up) -> None:
        self._most_rows, self._merge = most_rows, merge
        self._places: list[float] = []
        self._rows: list[Any] = []
        self._stride = 1
        self._in_last = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, place: float, row: Sequence[Any]) -> None:
        """Add the numbers of a step or moment; of some that became one the first place stands."""
        if self._rows and self._in_last < self._stride:
            self._rows[-1] = self._merge(self._rows[-1], row)
            self._in_last += 1
            return
        if len(self) == self._most_rows:
            self._thin()
            self.add(place, row)
            return
        self._places.append(place)
        self._rows.append(row)
        self._in_last = 1

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Places [N] and rows [N, ...]."""
        return np.array(self._places, np.float64), np.array(self._rows, np.float64)

    def _thin(self) -> None:
        pairs = range(0, len(self) - 1, 2)
        last = self._rows[-1:] if len(self) % 2 else []
        self._rows = [
            self._merge(self._rows[first], self._rows[first + 1]) for first in pairs
        ] + last
        self._places = self._places[::2]
        self._in_last += 0 if last else self._stride
        self._stride *= 2


class Throughput:
    """What throughput.png shows.

    Attributes:
        speed: Number of steps, samples, seconds, and batch size times steps.
        parts: Seconds of each of `PARTS`.
        ooms: Steps that ran out of memory; the last ones.
    """

    def __init__(self, most_ooms: int = 200) -> None:
        self.speed, self.parts = BoundedSeries(), BoundedSeries()
        self.ooms: list[int] = []
        self._most_ooms = most_ooms

    def add(self, ended: Iterable[Ended], parts: Iterable[tuple[int, Seconds]]) -> None:
        """Add batches that ended, and the parts of steps, each with its number."""
        for step in ended:
            if step.seconds_s is not None:
                self.speed.add(step.number, (1, step.samples, step.seconds_s, step.size))
        for number, seconds in parts:
            self.parts.add(number, seconds)

    def mark_oom(self, step: int) -> None:
        """A step ran out of memory."""
        if step not in self.ooms[-1:]:
            self.ooms = [*self.ooms[1 - self._most_ooms :], step]


def draw_throughput(history: Throughput, path: Path, title: str) -> None:
    """Write a PNG of 1210 x 770 pixels: samples per second with the batch size, and below it the
    shares of the time.

    Args:
        history: What to draw; at least one step.
        path: The file; its folder exists.
        title: A sentence.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_speed(upper, history)
    _draw_shares(lower, history)
    steps, _ = history.speed.read()
    lower.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    lower.set_xlabel("training batches")
    figure.suptitle(fill(title[:1].upper() + title[1:], 110), fontsize=11)
    figure.savefig(path, format="png")


def _draw_speed(cell: "Axes", history: Throughput) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, rows = history.speed.read()
    counts, samples, seconds, sizes = rows.T
    speeds = samples / seconds
    cell.plot(steps, speeds, ".", color=_SPEED_COLOUR, ms=3, alpha=0.25)
    cell.plot(
        steps,
        _smooth(speeds),
        color=_SPEED_COLOUR,
        lw=1.6,
        label=f"median of {_SMOOTHED_POINTS} points",
    )
    for place, step in enumerate(history.ooms):
        cell.axvline(
            step,
            color=_OOM_COLOUR,
            lw=1.2,
            zorder=1,
            label="" if place else f"out of memory ({len(history.ooms)})",
        )
    cell.set_title(
        f"samples per second, {samples.sum() / seconds.sum():,.1f} on average",
        loc="left",
        fontsize=10,
    )
    cell.set_ylim(0, 1.25 * float(np.quantile(speeds, 0.98)))
    _tidy(cell)
    second = cell.twinx()
    second.step(
        steps,
        sizes / counts,
        where="post",
        color=_SIZE_COLOUR,
        lw=1.1,
        ls=(0, (1, 1)),
        label="batch size",
    )
    second.set_ylabel("samples at once", color=_SIZE_COLOUR)
    second.set_ylim(0, 1.25 * float((sizes / counts).max()))
    second.tick_params(axis="y", colors=_SIZE_COLOUR)
    second.yaxis.set_major_locator(MaxNLocator(integer=True))
    second.spines["top"].set_visible(False)
    handles = [*cell.get_legend_handles_labels()[0], *second.get_legend_handles_labels()[0]]
    second.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.06, 0.5), fontsize=9, frameon=False
    )


def _draw_shares(cell: "Axes", history: Throughput) -> None:
    steps, rows = history.parts.read()
    columns = [PARTS.index(part) for part in _LOOKS]
    together = -(-len(rows) // _DRAWN_BARS)
    firsts = np.arange(0, len(rows), together)
    bars = np.add.reduceat(rows[:, columns], firsts)
    shares = 100 * bars / bars.sum(axis=1, keepdims=True)
    means = 100 * rows[:, columns].sum(axis=0) / rows.sum()
    labels = [
        f"{label}  {mean:.0f} %" for (label, _), mean in zip(_LOOKS.values(), means, strict=True)
    ]
    edges = np.append(steps[firsts], steps[-1] + 1)
    cell.stackplot(
        edges,
        np.vstack([shares, shares[-1:]]).T,
        labels=labels,
        colors=[colour for _, colour in _LOOKS.values()],
        step="post",
        lw=0,
    )
    cell.set_title("where the time goes, % of each step", loc="left", fontsize=10)
    cell.set_ylim(0, 100)
    _tidy(cell)
    handles, names = cell.get_legend_handles_labels()
    cell.legend(
        handles[::-1],
        names[::-1],
        loc="center left",
        bbox_to_anchor=(1.06, 0.5),
        fontsize=9,
        frameon=False,
    )


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of the points around each point, of those there are."""
    half = _SMOOTHED_POINTS // 2
    padded = np.pad(values, half, constant_values=np.nan)
    return np.asarray(
        np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
    )


def _tidy(cell: "Axes") -> None:
    cell.grid(axis="y", color="#e8e8e8", lw=0.8)
    cell.set_axisbelow(True)
    cell.spines[["top", "right"]].set_visible(False)
