"""memory.png: memory and batch size over the time of a run, with what happened meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.callbacks.timing.plot import BoundedSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES: Final = (
    "allocated_bytes",
    "peak_bytes",
    "reserved_bytes",
    "rss_bytes",
    "pss_bytes",
    "batch_size",
)
"""The values of each point of a timeline."""

MARKS: Final = ("oom", "release", "precision", "checkpoint", "validation")
"""What can be marked on a timeline."""

_LABELS: Final = {
    "reserved_bytes": ("reserved", "#8fbce6"),
    "peak_bytes": ("peak", "#1f5fa8"),
    "allocated_bytes": ("allocated", "#17becf"),
    "rss_bytes": ("RSS, main process", "#f2a65a"),
    "pss_bytes": ("PSS, with workers", "#b5460f"),
}
_MARK_LOOKS: Final = {
    "oom": ("out of memory", "#d62728", "-"),
    "release": ("cache released", "#2ca02c", "--"),
    "precision": ("precision", "#9467bd", "-."),
    "checkpoint": ("checkpoint", "#7f7f7f", ":"),
    "validation": ("validation", "#dfe3ea", "-"),
}
_BATCH_COLOUR: Final = "#767676"
_TIME_UNITS: Final = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_MIB: Final = 2.0**20


class Timeline:
    """Values and events over time, in bounded memory however long the run is.

    Points that become one keep the lowest and the highest of each value. Of each kind of event
    every second is dropped when there are too many, and all are counted.

    Args:
        most_points: Points kept at most.
        most_marks: Events of each kind kept at most.
    """

    def __init__(self, most_points: int = 2000, most_marks: int = 200) -> None:
        self._points = BoundedSeries(most_points, _merge)  # each [2, series]: lowest, highest
        self.marks = {kind: Marks(most_marks) for kind in MARKS}

    def __len__(self) -> int:
        return len(self._points)

    def add(self, time_s: float, values: Sequence[float]) -> None:
        """Add a sample.

        Args:
            time_s: Since the start.
            values: One for each of `SERIES`; NaN where it was not measured.
        """
        self._points.add(time_s, np.array([values, values], np.float64))  # type: ignore[arg-type]  # of two rows

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Times in seconds [N], and the lowest and the highest values of each point [N, series]."""
        times_s, ranges = self._points.read()
        ranges = ranges.reshape(-1, 2, len(SERIES))
        return times_s, ranges[:, 0], ranges[:, 1]


@dataclass
class Marks:
    """Events of one kind.

    Attributes:
        most: Kept at most.
        count: All there were.
        spans_s: Begin and end of those that are kept, in seconds; equal for a moment.
    """

    most: int
    count: int = 0

    def __post_init__(self) -> None:
        self.spans_s: list[tuple[float, float]] = []
        self._stride = 1

    def add(self, began_s: float, ended_s: float | None = None) -> None:
        """Add an event; one without an end is a moment."""
        if self.count % self._stride == 0:
            self.spans_s.append((began_s, began_s if ended_s is None else ended_s))
        self.count += 1
        if len(self.spans_s) > self.most:
            self.spans_s, self._stride = self.spans_s[::2], 2 * self._stride


def draw_timeline(timeline: Timeline, path: Path, *, device: str, limit_bytes: int) -> None:
    """Write a timeline as a PNG of 1210 x 770 pixels, or 1210 x 484 without a memory of the
    device's own.

    Args:
        timeline: What to draw.
        path: The file; its folder exists.
        device: Name of the device; for ``cpu`` there is only host memory.
        limit_bytes: What the device can hold; drawn where the run comes near it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    own = device != "cpu"
    figure = Figure(figsize=(11, 7 if own else 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.subplots(1 + own, 1, sharex=True, squeeze=False)[:, 0]
    times_s, low, high = timeline.read()
    unit_s, unit = next((size, name) for least, size, name in _TIME_UNITS if times_s[-1] >= least)
    times = times_s / unit_s
    if own:
        _draw_memory(
            cells[0],
            times,
            low,
            high,
            ("reserved_bytes", "peak_bytes", "allocated_bytes"),
            limit_bytes,
        )
        cells[0].set_title(f"{device} memory", loc="left", fontsize=10)
    _draw_memory(cells[-1], times, low, high, ("rss_bytes", "pss_bytes"), 0 if own else limit_bytes)
    cells[-1].set_title("host memory", loc="left", fontsize=10)
    cells[-1].set_xlabel(f"{unit} since the start")
    _draw_batch_size(cells[0], times, high[:, SERIES.index("batch_size")])
    for cell in cells:
        _draw_marks(cell, timeline, unit_s)
        cell.set_xlim(
            times[0], times[-1] + max(0.01 * (times[-1] - times[0]), 1e-6)
        )  # what ends a run shows too
        cell.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=5,
            fontsize=8,
            frameon=False,
            borderaxespad=0.2,
        )
    handles = _explain_marks(timeline)
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            fontsize=9,
            frameon=False,
        )
    figure.savefig(path, format="png")


def _merge(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.fmin(first[0], second[0]), np.fmax(first[1], second[1])])


def _draw_memory(
    cell: "Axes",
    times: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    names: Sequence[str],
    limit_bytes: int,
) -> None:
    columns = [SERIES.index(name) for name in names]
    top = float(np.nanmax(high[:, columns], initial=1.0))
    scale, unit = (1024 * _MIB, "GiB") if top >= 2048 * _MIB else (_MIB, "MiB")
    for name, column in zip(names, columns, strict=True):
        there = ~np.isnan(high[:, column])
        if there.any():
            text, colour = _LABELS[name]
            label = f"{text}: up to {high[there, column].max() / scale:.1f} {unit}"
            cell.fill_between(
                times[there],
                low[there, column] / scale,
                high[there, column] / scale,
                color=colour,
                lw=0,
                alpha=0.3,
            )
            cell.plot(times[there], high[there, column] / scale, color=colour, lw=1.6, label=label)
    if limit_bytes and top > 0.5 * limit_bytes:
        cell.axhline(limit_bytes / scale, color="#d62728", lw=1, ls=(0, (6, 3)), label="limit")
    cell.set_ylabel(unit)
    cell.set_ylim(bottom=0)
    cell.margins(y=0.15)
    cell.grid(axis="y", color="#e8e8e8", lw=0.8)
    cell.set_axisbelow(True)
    cell.spines[["top", "right"]].set_visible(False)


def _draw_batch_size(cell: "Axes", times: NDArray[np.float64], sizes: NDArray[np.float64]) -> None:
    there = ~np.isnan(sizes)
    if not there.any():
        return
    second = cell.twinx()
    second.step(times[there], sizes[there], where="post", color=_BATCH_COLOUR, lw=1.1)
    cell.plot([], [], color=_BATCH_COLOUR, lw=1.1, label="batch size (right)")
    second.set_ylabel("samples at once", color=_BATCH_COLOUR)
    second.set_ylim(0, 1.25 * float(sizes[there].max()))
    second.tick_params(axis="y", colors=_BATCH_COLOUR)
    second.spines["top"].set_visible(False)


def _draw_marks(cell: "Axes", timeline: Timeline, unit_s: float) -> None:
    for kind, marks in timeline.marks.items():
        _, colour, style = _MARK_LOOKS[kind]
        for began_s, ended_s in marks.spans_s:
            if ended_s > began_s:
                cell.axvspan(began_s / unit_s, ended_s / unit_s, color=colour, lw=0, zorder=0)
            else:
                cell.axvline(began_s / unit_s, color=colour, ls=style, lw=1.2, zorder=1)


def _explain_marks(timeline: Timeline) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for kind, marks in timeline.marks.items():
        label, colour, style = _MARK_LOOKS[kind]
        if marks.count:
            text = f"{label} ({marks.count})"
            span = any(ended_s > began_s for began_s, ended_s in marks.spans_s)
            handles.append(
                Patch(color=colour, label=text)
                if span
                else Line2D([], [], color=colour, ls=style, label=text)
            )
    return handles
