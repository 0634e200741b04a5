"""Which loaders are measured, and with which sizes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lit_data.files import write_table

OURS: Final = ("inline", "thread", "process", "device")
METHODS: Final = ("copy", "original", "improved", "dataloader", "textbook", *OURS)
NAMES: Final = {
    "copy": "bare copy of ready patches",
    "original": "original loader: whole files, whole-image defects",
    "improved": "improved: crop first, decoded images in memory",
    "dataloader": "torch DataLoader over the decoded samples",
    "textbook": "micro-batches joined by torch.cat",
    "inline": "lit_data, inline",
    "thread": "lit_data, threads",
    "process": "lit_data, processes",
    "device": "lit_data, cache=device",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        method: One of `METHODS`.
        batch_size: Samples per batch.
        num_workers: Threads or processes; 0 is the main thread.
        micro_batch_size: Samples that a worker makes at a time; the batch size for methods without micro-batches.
    """

    method: str
    batch_size: int
    num_workers: int
    micro_batch_size: int


def list_rows(
    methods: Sequence[str], *, workers: Sequence[int], micro_batch_sizes: Sequence[int], batch_sizes: Sequence[int]
) -> list[Row]:
    """Every different combination that means something, in the order of `METHODS`.

    Args:
        methods: Which methods.
        workers: Numbers of workers.
        micro_batch_sizes: Sizes of micro-batches; one larger than the batch counts as the batch.
        batch_sizes: Sizes of batches.
    """
    rows = (
        Row(method, batch_size, count, min(size, batch_size))
        for method in sorted(set(methods), key=METHODS.index)
        for batch_size in batch_sizes
        for count in _choose_workers(method, workers)
        for size in (micro_batch_sizes if method in ("textbook", "inline", "thread", "process") else [batch_size])
    )
    return list(dict.fromkeys(rows))


def _choose_workers(method: str, workers: Sequence[int]) -> Iterator[int]:
    if method in ("inline", "device"):
        yield 0
    else:
        yield from (count for count in workers if count or method not in ("copy", "thread", "process"))


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
