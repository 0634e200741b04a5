"""Lines of a measurement: as CSV, and as a table in the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lit_data.files import write_table

_WIDTH: Final = 150


def write_lines(lines: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Write a CSV, numbers with six digits; an empty cell is a number that there is not."""
    write_table(path, columns, ({name: _write_cell(value) for name, value in line.items()} for line in lines))


def show_table(table: Table, console: Console | None = None) -> Console:
    """Print a table, wide where the output is no terminal; return what it was printed on."""
    console = console or Console()
    console = console if console.is_terminal else Console(width=_WIDTH, file=console.file)
    console.print(table)
    return console


def format_number(value: float) -> str:
    """Three digits, or whole with a gap between thousands; a dash for a number that there is not."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"


def _write_cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
