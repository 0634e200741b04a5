"""Measurements as a table on the terminal, in a file, and as bars."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lit_data.files import write_table

log = logging.getLogger(__name__)

Line = Mapping[str, Any]
"""A row of a table: a value for each column; NaN for a number that there is not."""

OURS_COLOUR: Final = "#007aff"
OTHERS_COLOUR: Final = "#a0a4ab"
_WIDTH: Final = 158  # of the table of loaders, the widest


def report_lines(
    lines: Sequence[Line],
    columns: Sequence[str],
    folder: Path,
    title: str,
    *,
    headings: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Write ``benchmark.csv`` into a folder and print the same table.

    Args:
        lines: The rows.
        columns: Of the file.
        folder: Of the run.
        title: Of the printed table.
        headings: The columns that are printed; None prints those of the file.
        labels: Words in the place of the values of the first one.
    """
    path = folder / "benchmark.csv"
    write_lines(lines, columns, path)
    if headings is None:
        headings = {name: name.replace("_", " ") for name in columns}
    show_lines(lines, title, headings=headings, labels=labels)
    log.info("table: %s", path)


def write_lines(lines: Sequence[Line], columns: Sequence[str], path: Path) -> None:
    """Write a CSV, numbers with six digits; an empty cell is a number that there is not."""
    rows = []
    for line in lines:
        rows.append({name: _write_cell(value) for name, value in line.items()})
    write_table(path, columns, rows)


def show_lines(
    lines: Sequence[Line],
    title: str,
    *,
    headings: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print a table, and below it the ``note`` of each line that has one.

    Args:
        lines: The rows.
        title: Of the table.
        headings: The columns that are printed.
        labels: Words in the place of the values of the first one.
        console: Where to; by default the standard output, wide where that is no terminal.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)
    first_column, *other_columns = headings
    table = Table(title=title, title_justify="left")
    for name, heading in headings.items():
        is_text = any(isinstance(line[name], str) for line in lines)
        table.add_column(heading, justify="left" if is_text else "right")
    notes = []
    for line in lines:
        value = line[first_column]
        label = str((labels or {}).get(value, value))
        table.add_row(label, *(_show_cell(line[name]) for name in other_columns))
        if line.get("note"):
            notes.append(f"{label}: {line['note']}")
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def collect(lines: Sequence[Line], columns: Sequence[str]) -> dict[str, Any]:
    """Return a key of summary.json, ``benchmark/ROW_COLUMN``, for each number that there is.

    Args:
        lines: The rows.
        columns: The first one names the row.
    """
    first_column, *other_columns = columns
    metrics = {}
    for line in lines:
        for name in other_columns:
            value = line[name]
            if not (isinstance(value, float) and math.isnan(value)):
                metrics[f"benchmark/{line[first_column]}_{name}"] = value
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars beside names.

    Args:
        names: A group of bars each.
        bars: For each label the length of its bar in every group.
        colours: For each label the colour of its bars, or a list of them.
        title: Above the panel.
    """

    names: Sequence[str]
    bars: Mapping[str, Sequence[float]]
    colours: Mapping[str, str | Sequence[str]]
    title: str = ""


def draw_bars(panels: Sequence[Panel], path: Path, title: str, axis_label: str) -> None:
    """Draw panels of bars one below the other, on logarithmic axes.

    Args:
        panels: From above; where groups have several bars there is a legend.
        path: The PNG to write.
        title: Above all panels.
        axis_label: What a length means.
    """
    heights = [0.6 + len(panel.names) * (0.16 + 0.24 * len(panel.bars)) for panel in panels]
    figure = Figure(figsize=(9.5, 1.2 + sum(heights)), dpi=110, layout="constrained")  # inches
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
        axis.set_xlabel(f"{axis_label} (logarithmic)")
    if len(panels[0].bars) > 1:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    log.info("picture: %s", path)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    height = 0.8 / len(panel.bars)  # in rows; the rest is the gap between groups
    middle = (len(panel.bars) - 1) / 2
    for number, (label, lengths) in enumerate(panel.bars.items()):
        rows = [row + (number - middle) * height for row in range(len(lengths))]
        bars = axis.barh(rows, lengths, height, color=panel.colours[label], label=label)
        texts = [format_number(length) for length in lengths]
        axis.bar_label(bars, texts, padding=4, fontsize=8)
    axis.set_yticks(range(len(panel.names)), panel.names, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.15, y=0.01)
    axis.invert_yaxis()  # the first name on top
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(panel.title, fontsize=10, loc="left")


def format_number(value: float) -> str:
    """Format a number with three digits, or whole with a gap between thousands; NaN is a dash."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _show_cell(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _write_cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
