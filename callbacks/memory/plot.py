"""memory.png: memory and batch size over the time of a run, with what happened meanwhile."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.callbacks.timeline import Timeline

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
"""Columns of the rows of a timeline of memory."""

_DEVICE_SERIES: Final = ("reserved_bytes", "peak_bytes", "allocated_bytes")
_HOST_SERIES: Final = ("rss_bytes", "pss_bytes")
_LABELS: Final = {
    "reserved_bytes": ("reserved", "#8fbce6"),
    "peak_bytes": ("peak", "#1f5fa8"),
    "allocated_bytes": ("allocated", "#17becf"),
    "rss_bytes": ("RSS, main process", "#f2a65a"),
    "pss_bytes": ("PSS, with workers", "#b5460f"),
}
MARK_STYLES: Final = {
    "oom": ("out of memory", "#d62728", "-"),
    "release": ("cache released", "#2ca02c", "--"),
    "precision": ("precision", "#9467bd", "-."),
    "checkpoint": ("checkpoint", "#7f7f7f", ":"),
    "validation": ("validation", "#dfe3ea", "-"),
}
"""Label, colour and line of each kind of event, in the order of the legend."""

_BATCH_COLOUR: Final = "#767676"
_LIMIT_COLOUR: Final = "#d62728"
_TIME_UNITS: Final = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))
"""Shortest run in seconds, seconds of the unit, and its name."""

_MIB: Final = 2.0**20


class _Course(NamedTuple):
    """Memory over time.

    Attributes:
        times: [N] in the unit of the picture.
        lowest: [N, series] bytes.
        highest: [N, series] bytes.
    """

    times: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]


def draw_timeline(timeline: Timeline, path: Path, *, device: str, limit_bytes: int) -> None:
    """Write a timeline as a PNG of 1210 x 770 pixels, or 1210 x 484 where there is only the host.

    Args:
        timeline: Rows [2, series] of the lowest and the highest values of `SERIES`, over seconds;
            at least one.
        path: The file; its folder exists.
        device: Name of the device; for ``cpu`` there is only host memory.
        limit_bytes: Bytes that the device can hold; drawn where the run comes near them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_device = device != "cpu"
    figure = Figure(figsize=(11, 7 if has_device else 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.subplots(2 if has_device else 1, 1, sharex=True, squeeze=False)[:, 0]
    seconds, rows = timeline.read()
    unit_s, unit = _choose_unit(seconds[-1])
    course = _Course(seconds / unit_s, rows[:, 0], rows[:, 1])
    if has_device:
        _draw_memory(cells[0], course, _DEVICE_SERIES, limit_bytes)
        cells[0].set_title(f"{device} memory", loc="left", fontsize=10)
    _draw_memory(cells[-1], course, _HOST_SERIES, 0 if has_device else limit_bytes)
    cells[-1].set_title("host memory", loc="left", fontsize=10)
    cells[-1].set_xlabel(f"{unit} since the start")
    _draw_batch_size(cells[0], course)
    for cell in cells:
        _draw_marks(cell, timeline, unit_s)
        _finish(cell, course.times)
    handles = list(_explain_marks(timeline))
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            fontsize=9,
            frameon=False,
        )
    figure.savefig(path, format="png")


def _choose_unit(run_s: float) -> tuple[float, str]:
    for shortest_s, unit_s, unit in _TIME_UNITS:
        if run_s >= shortest_s:
            return unit_s, unit
    return 1.0, "seconds"


def _draw_memory(cell: "Axes", course: _Course, names: Sequence[str], limit_bytes: int) -> None:
    columns = [SERIES.index(name) for name in names]
    top_bytes = float(np.nanmax(course.highest[:, columns], initial=1.0))
    scale, unit = (1024 * _MIB, "GiB") if top_bytes >= 2048 * _MIB else (_MIB, "MiB")
    for name, column in zip(names, columns, strict=True):
        is_known = ~np.isnan(course.highest[:, column])
        if not is_known.any():
            continue
        times = course.times[is_known]
        lowest = course.lowest[is_known, column] / scale
        highest = course.highest[is_known, column] / scale
        text, colour = _LABELS[name]
        label = f"{text}: up to {highest.max():.1f} {unit}"
        cell.fill_between(times, lowest, highest, color=colour, lw=0, alpha=0.3)
        cell.plot(times, highest, color=colour, lw=1.6, label=label)
    # a limit far above the curves would squeeze them into the lowest part of the picture
    if limit_bytes and top_bytes > 0.5 * limit_bytes:
        dashes = (0, (6, 3))
        cell.axhline(limit_bytes / scale, color=_LIMIT_COLOUR, lw=1, ls=dashes, label="limit")
    cell.set_ylabel(unit)
    cell.set_ylim(bottom=0)
    cell.margins(y=0.15)
    cell.grid(axis="y", color="#e8e8e8", lw=0.8)
    cell.set_axisbelow(True)
    cell.spines[["top", "right"]].set_visible(False)


def _draw_batch_size(cell: "Axes", course: _Course) -> None:
    sizes = course.highest[:, SERIES.index("batch_size")]
    is_known = ~np.isnan(sizes)
    if not is_known.any():
        return
    second = cell.twinx()
    second.step(course.times[is_known], sizes[is_known], where="post", color=_BATCH_COLOUR, lw=1.1)
    # an empty line on the first axes, whose legend shows it
    cell.plot([], [], color=_BATCH_COLOUR, lw=1.1, label="batch size (right)")
    second.set_ylabel("samples at once", color=_BATCH_COLOUR)
    second.set_ylim(0, 1.25 * float(sizes[is_known].max()))
    second.tick_params(axis="y", colors=_BATCH_COLOUR)
    second.spines["top"].set_visible(False)


def _draw_marks(cell: "Axes", timeline: Timeline, unit_s: float) -> None:
    for kind, (_, colour, style) in MARK_STYLES.items():
        for began_s, ended_s in timeline.marks[kind].spans:
            began, ended = began_s / unit_s, ended_s / unit_s
            if ended > began:
                cell.axvspan(began, ended, color=colour, lw=0, zorder=0)
            else:
                cell.axvline(began, color=colour, ls=style, lw=1.2, zorder=1)


def _finish(cell: "Axes", times: NDArray[np.float64]) -> None:
    margin = max(0.01 * (times[-1] - times[0]), 1e-6)
    cell.set_xlim(times[0], times[-1] + margin)  # so that a mark at the very end shows too
    cell.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=5,
        fontsize=8,
        frameon=False,
        borderaxespad=0.2,
    )


def _explain_marks(timeline: Timeline) -> Iterator[Any]:
    """Yield a handle for the legend of each kind of event that there was."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for kind, (label, colour, style) in MARK_STYLES.items():
        marks = timeline.marks[kind]
        if marks.count == 0:
            continue
        text = f"{label} ({marks.count})"
        if any(ended > began for began, ended in marks.spans):
            yield Patch(color=colour, label=text)
        else:
            yield Line2D([], [], color=colour, ls=style, label=text)
