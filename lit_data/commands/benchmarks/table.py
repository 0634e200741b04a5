"""Results as a table: medians and ratios, in a file, on the terminal and as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lit_data.commands.benchmarks.measure import Result
from lit_data.commands.benchmarks.rows import METHODS, NAMES, OURS, format_number, show_table

MEASURED: Final = (
    "samples_per_s",
    "process_cpu_ms_per_1000",
    "main_thread_cpu_ms_per_1000",
    "first_batch_ms",
    "load_ms_mean",
    "load_ms_std",
    "transfer_ms",
    "pss_mib",
)
COLUMNS: Final = (
    "method",
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
_HEADINGS: Final = {
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


def tabulate(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One dict of `COLUMNS` for each row, with medians over its measurements; NaN where there are none.

    `ratio_to_dataloader` is that of the medians, to the DataLoader row of the same batch size and number of workers, or
    without one of that number to the fastest of the same batch size.
    """
    lines = []
    for result in results:
        row = result.row
        values = {column: result.median(column) for column in MEASURED}
        lines.append(
            {
                "method": row.method,
                "batch_size": row.batch_size,
                "num_workers": row.num_workers,
                "micro_batch_size": row.micro_batch_size,
                **values,
                "ratio_to_dataloader": values["samples_per_s"] / _find_reference(results, result),
                "samples": sum(lap.samples for lap in result.laps),
                "repeats": len(result.laps),
                "note": result.note,
            }
        )
    return lines


def find_best(lines: Sequence[Mapping[str, Any]], methods: Sequence[str], batch_size: int) -> Mapping[str, Any] | None:
    """The fastest line of some methods at one batch size; none if nothing of it was measured."""
    found = [
        line for line in lines if line["method"] in methods and line["batch_size"] == batch_size and line["repeats"]
    ]
    return max(found, key=lambda line: float(line["samples_per_s"]), default=None)


def collect_metrics(lines: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """The keys of summary.json, see `lit_data.commands.benchmark.run`."""
    metrics: dict[str, Any] = {"benchmark/batch_size": batch_size}
    best = find_best(lines, OURS, batch_size)
    for method in METHODS:
        line = find_best(lines, [method], batch_size)
        if line:
            metrics |= {f"benchmark/{method}_{column}": line[column] for column in MEASURED}
        if line and best and method not in OURS:
            name = "share_of_copy" if method == "copy" else f"ratio_to_{method}"
            metrics[f"benchmark/{name}"] = best["samples_per_s"] / line["samples_per_s"]
    if best:
        metrics |= {"benchmark/best_method": best["method"], "benchmark/best_samples_per_s": best["samples_per_s"]}
    return metrics


def print_table(lines: Sequence[Mapping[str, Any]], title: str, console: Console | None = None) -> None:
    """Print the table, wide where the output is no terminal."""
    table = Table(title=title, title_justify="left")
    for heading in ("method", "batch", "workers", "micro"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for heading in _HEADINGS.values():
        table.add_column(heading, justify="right")
    for line in lines:
        sizes = [str(line[name]) for name in ("method", "batch_size", "num_workers", "micro_batch_size")]
        table.add_row(*sizes, *(format_number(line[name]) for name in _HEADINGS))
    console = show_table(table, console)
    for note in dict.fromkeys(f"{line['method']} {line['note']}" for line in lines if line["note"]):
        console.print(note, markup=False, highlight=False)


def draw_bars(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw samples/s of the fastest row of each method, one panel for each batch size."""
    batch_sizes = list(dict.fromkeys(line["batch_size"] for line in lines))
    figure = Figure(figsize=(9.5, 0.6 + len(batch_sizes) * 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, batch_size in zip(figure.subplots(len(batch_sizes), squeeze=False)[:, 0], batch_sizes, strict=True):
        best = [line for method in METHODS if (line := find_best(lines, [method], batch_size))]
        speeds = [line["samples_per_s"] for line in best]
        bars = axis.barh(
            [_describe(line) for line in best],
            speeds,
            color=["#007aff" if line["method"] in OURS else "#a0a4ab" for line in best],
        )
        axis.bar_label(bars, [format_number(speed) for speed in speeds], padding=4, fontsize=9)
        axis.set_xscale("log")
        axis.set_xlim(min(speeds, default=1) / 3, max(speeds, default=1) * 3)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("samples/s (logarithmic)")
        axis.set_title(f"batches of {batch_size}", fontsize=10, loc="left")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _find_reference(results: Sequence[Result], wanted: Result) -> float:
    same_batch = [r for r in results if r.row.method == "dataloader" and r.row.batch_size == wanted.row.batch_size]
    same = [r for r in same_batch if r.row.num_workers == wanted.row.num_workers and r.laps] or same_batch
    speeds = [result.median("samples_per_s") for result in same if result.laps]
    return max(speeds, default=math.nan)


def _describe(line: Mapping[str, Any]) -> str:
    workers = f"{line['num_workers']} workers" if line["num_workers"] else "no workers"
    micro = f", micro-batch {line['micro_batch_size']}" if line["micro_batch_size"] != line["batch_size"] else ""
    return f"{NAMES[line['method']]}\n{workers}{micro}"
