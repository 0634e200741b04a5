"""What was measured, as a table on the terminal, in a file, and as bars."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
_WIDTH: Final = 150


def report_lines(
    lines: Sequence[Line],
    columns: Sequence[str],
    folder: Path,
    title: str,
    **shown: Any,  # noqa: ANN401
) -> None:
    """Write ``benchmark.csv`` into a folder and print the same table.

    Args:
        lines: The rows.
        columns: Of the file.
        folder: Of the run.
        title: Of the printed table.
        shown: Other arguments of `show_lines`.
    """
    path = folder / "benchmark.csv"
    write_lines(lines, columns, path)
    show_lines(
        lines, title, **{"headings": {name: name.replace("_", " ") for name in columns}, **shown}
    )
    log.info("table: %s", path)


def write_lines(lines: Sequence[Line], columns: Sequence[str], path: Path) -> None:
    """Write a CSV, numbers with six digits; an empty cell is a number that there is not."""
    write_table(
        path,
        columns,
        ({name: _write_cell(value) for name, value in line.items()} for line in lines),
    )


def show_lines(
    lines: Sequence[Line],
    title: str,
    *,
    headings: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print a table, wide where the output is no terminal, and below it the ``note`` of each line
    that has one.

    Args:
        lines: The rows.
        title: Of the table.
        headings: The columns that are printed.
        labels: What stands for the values of the first one.
        console: Where to; by default the standard output.
    """
    table, (first, *_) = Table(title=title, title_justify="left"), headings

    def label(line: Line) -> str:
        return str((labels or {}).get(line[first], line[first]))

    for name, heading in headings.items():
        is_text = any(isinstance(line[name], str) for line in lines)
        table.add_column(heading, justify="left" if is_text else "right")
    for line in lines:
        table.add_row(label(line), *(_show_cell(line[name]) for name in headings if name != first))
    console = console or Console()
    console = console if console.is_terminal else Console(width=_WIDTH, file=console.file)
    console.print(table)
    for line in lines:
        if line.get("note"):
            console.print(f"{label(line)}: {line['note']}", markup=False, highlight=False)


def collect(lines: Sequence[Line], columns: Sequence[str]) -> dict[str, Any]:
    """Keys of summary.json: ``benchmark/ROW_COLUMN`` for each number that there is; the first column names the row."""
    first, *rest = columns
    return {
        f"benchmark/{line[first]}_{name}": line[name]
        for line in lines
        for name in rest
        if not (isinstance(line[name], float) and math.isnan(line[name]))
    }


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
    """Draw panels of bars one below the other, on logarithmic axes; with a legend where groups have several bars."""
    inches = [0.6 + len(panel.names) * (0.16 + 0.24 * len(panel.bars)) for panel in panels]
    figure = Figure(figsize=(9.5, 1.2 + sum(inches)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=inches)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        height = 0.8 / len(panel.bars)
        for number, (label, lengths) in enumerate(panel.bars.items()):
            places = [
                row + (number - (len(panel.bars) - 1) / 2) * height for row in range(len(lengths))
            ]
            bars = axis.barh(places, lengths, height, color=panel.colours[label], label=label)
            axis.bar_label(
                bars, [format_number(length) for length in lengths], padding=4, fontsize=8
            )
        axis.set_yticks(range(len(panel.names)), panel.names, fontsize=8)
        axis.set_xscale("log")
        axis.margins(x=0.15, y=0.01)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(f"{axis_label} (logarithmic)")
        axis.set_title(panel.title, fontsize=10, loc="left")
    if len(panels[0].bars) > 1:
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
        )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    log.info("picture: %s", path)


def format_number(value: float) -> str:
    """Three digits, or whole with a gap between thousands; a dash for a number that there is not."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"


def _show_cell(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _write_cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
