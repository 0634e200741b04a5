"""Measurements as rows of a table: on the terminal and in a file."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from lit_data.app.result import print_table
from lit_data.core.files import write_table

log = logging.getLogger(__name__)


OURS = ("inline", "thread", "process", "device")
METHODS = ("copy", "dataloader", *OURS)
MICRO_BATCHED = ("inline", "thread", "process")
MEASURED = (
    "samples_per_s",
    "process_cpu_ms_per_1000",
    "main_thread_cpu_ms_per_1000",
    "first_batch_ms",
    "load_ms_mean",
    "load_ms_std",
    "transfer_ms",
    "pss_mib",
)
COLUMNS = (
    "method",
    "until",
    "batch_size",
    "num_workers",
    "micro_batch_size",
    "samples_per_s",
    "ratio_to_dataloader",
    *MEASURED[1:],
    "samples",
    "repeats",
    "note",
)
HEADINGS = {
    "method": "method",
    "until": "until",
    "batch_size": "batch",
    "num_workers": "workers",
    "micro_batch_size": "micro",
    "samples_per_s": "samples/s",
    "ratio_to_dataloader": "x DataLoader",
    "process_cpu_ms_per_1000": "CPU ms/1000",
    "main_thread_cpu_ms_per_1000": "main thread",
    "first_batch_ms": "first ms",
    "load_ms_mean": "load ms",
    "load_ms_std": "+-",
    "transfer_ms": "transfer ms",
    "pss_mib": "PSS MiB",
}
_WIDTH = 158  # of the table of loaders, the widest

Line = Mapping[str, Any]
"""A row of a table: a value for each column; NaN for a number that there is not."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        method: One of `METHODS`, or another way to load.
        batch_size: Samples per batch.
        num_workers: Threads or processes; 0 is the main thread.
        micro_batch_size: Samples that a worker makes at a time; the batch size for methods without
            micro-batches.
    """

    method: str
    batch_size: int
    num_workers: int
    micro_batch_size: int


def list_rows(
    methods: Sequence[str],
    *,
    workers: Sequence[int],
    micro_batch_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    micro_batched: Collection[str] = MICRO_BATCHED,
) -> list[Row]:
    """List every different combination that means something, method by method.

    Args:
        methods: The methods.
        workers: Numbers of workers.
        micro_batch_sizes: Sizes of micro-batches; one larger than the batch counts as the batch.
        batch_sizes: Sizes of batches.
        micro_batched: Methods that have micro-batches.
    """
    rows = []
    for method in methods:
        worker_counts = _choose_worker_counts(method, workers)
        for batch_size in batch_sizes:
            sizes = micro_batch_sizes if method in micro_batched else [batch_size]
            for count in worker_counts:
                # Sizes above the batch are the same row once more, and fall out below.
                rows += [Row(method, batch_size, count, min(size, batch_size)) for size in sizes]
    return list(dict.fromkeys(rows))


def _choose_worker_counts(method: str, workers: Sequence[int]) -> list[int]:
    if method in ("inline", "device"):  # the main thread does all
        return [0]
    needs_workers = method in ("copy", "thread", "process")
    return [count for count in workers if count or not needs_workers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """Result of one measurement; fields are columns, see `lit_data.app.benchmark.run`."""

    samples: int
    samples_per_s: float
    process_cpu_ms_per_1000: float
    main_thread_cpu_ms_per_1000: float
    first_batch_ms: float
    load_ms_mean: float
    load_ms_std: float
    transfer_ms: float
    pss_mib: float


@dataclass(slots=True)
class Result:
    """The measurements of a row so far, or why there are none."""

    row: Row
    laps: list[Lap] = field(default_factory=list)
    note: str = ""

    def median(self, column: str) -> float:
        """Median of a column over the measurements; NaN without any."""
        return median(getattr(lap, column) for lap in self.laps) if self.laps else math.nan


def tabulate(results: Sequence[Result], until: str) -> list[dict[str, Any]]:
    """Return a dict of `COLUMNS` for each row: medians of its measurements, NaN without any.

    `ratio_to_dataloader` is that of the medians, to the DataLoader row of the same batch size and
    number of workers, or without one of that number to the fastest of the same batch size.

    Args:
        results: Of each row.
        until: Where batches are when they are counted: ``device`` or ``host``.
    """
    lines = []
    for result in results:
        row = result.row
        # Medians, as other work on the machine makes some measurements too slow.
        medians = {column: result.median(column) for column in MEASURED}
        dataloader_speed = _find_dataloader_speed(results, row)
        lines.append(
            {
                "method": row.method,
                "until": until,
                "batch_size": row.batch_size,
                "num_workers": row.num_workers,
                "micro_batch_size": row.micro_batch_size,
                **medians,
                "ratio_to_dataloader": medians["samples_per_s"] / dataloader_speed,
                "samples": sum(lap.samples for lap in result.laps),
                "repeats": len(result.laps),
                "note": result.note,
            }
        )
    return lines


def find_best(
    lines: Sequence[Mapping[str, Any]], methods: Sequence[str], batch_size: int
) -> Mapping[str, Any] | None:
    """Find the fastest line of some methods at one batch size; None if nothing was measured."""
    candidates = [
        line
        for line in lines
        if line["method"] in methods and line["batch_size"] == batch_size and line["repeats"]
    ]
    return max(candidates, key=lambda line: float(line["samples_per_s"]), default=None)


def collect_metrics(lines: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """Return the keys of summary.json, see `lit_data.app.benchmark.run`."""
    metrics: dict[str, Any] = {"benchmark/batch_size": batch_size}
    best = find_best(lines, OURS, batch_size)
    for method in list_methods(lines):
        line = find_best(lines, [method], batch_size)
        if line is None:
            continue
        # Of each method its fastest row, and how far our best one is from those of others.
        metrics |= {f"benchmark/{method}_{column}": line[column] for column in MEASURED}
        if best and method not in OURS:
            name = "share_of_copy" if method == "copy" else f"ratio_to_{method}"
            metrics[f"benchmark/{name}"] = best["samples_per_s"] / line["samples_per_s"]
    if best:
        metrics["benchmark/best_method"] = best["method"]
        metrics["benchmark/best_samples_per_s"] = best["samples_per_s"]
    return metrics


def list_methods(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the methods of a table, each once, in their order."""
    return list(dict.fromkeys(line["method"] for line in lines))


def _find_dataloader_speed(results: Sequence[Result], row: Row) -> float:
    """Find the samples per second that a row is compared with; NaN if none were measured."""
    speeds, speeds_of_same_workers = [], []
    for result in results:
        other = result.row
        if other.method != "dataloader" or other.batch_size != row.batch_size or not result.laps:
            continue
        speeds.append(result.median("samples_per_s"))
        if other.num_workers == row.num_workers:
            speeds_of_same_workers.append(speeds[-1])
    return max(speeds_of_same_workers or speeds, default=math.nan)


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
) -> None:
    """Print a table, and below it the ``note`` of each line that has one.

    Args:
        lines: The rows.
        title: Of the table.
        headings: The columns that are printed.
        labels: Words in the place of the values of the first one.
    """
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width, and takes the table unbroken
        console = Console(width=_WIDTH)
    first_column, *other_columns = headings
    texts, rows, notes = [], [], []
    for name, heading in headings.items():
        if any(isinstance(line[name], str) for line in lines):
            texts.append(heading)
    for line in lines:
        value = line[first_column]
        label = str((labels or {}).get(value, value))
        rows.append([label, *(_show_cell(line[name]) for name in other_columns)])
        if line.get("note"):
            notes.append(f"{label}: {line['note']}")
    print_table([*headings.values()], rows, texts=texts, title=title, console=console)
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
