"""Which loaders are measured, with which sizes, and what came out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

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
        for size in (
            micro_batch_sizes
            if method in ("textbook", "inline", "thread", "process")
            else [batch_size]
        )
    )
    return list(dict.fromkeys(rows))


def _choose_workers(method: str, workers: Sequence[int]) -> Iterator[int]:
    if method in ("inline", "device"):
        yield 0
    else:
        yield from (
            count for count in workers if count or method not in ("copy", "thread", "process")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """What one measurement gave; the fields are columns of the table, see `lit_data.commands.benchmark.run`."""

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
HEADINGS: Final = {
    "method": "method",
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


def tabulate(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One dict of `COLUMNS` for each row, with medians over its measurements; NaN where there are
    none.

    `ratio_to_dataloader` is that of the medians, to the DataLoader row of the same batch size and
    number of workers, or without one of that number to the fastest of the same batch size.
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


def find_best(
    lines: Sequence[Mapping[str, Any]], methods: Sequence[str], batch_size: int
) -> Mapping[str, Any] | None:
    """The fastest line of some methods at one batch size; none if nothing of it was measured."""
    found = [
        line
        for line in lines
        if line["method"] in methods and line["batch_size"] == batch_size and line["repeats"]
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
        metrics |= {
            "benchmark/best_method": best["method"],
            "benchmark/best_samples_per_s": best["samples_per_s"],
        }
    return metrics


def _find_reference(results: Sequence[Result], wanted: Result) -> float:
    same_batch = [
        r
        for r in results
        if r.row.method == "dataloader" and r.row.batch_size == wanted.row.batch_size
    ]
    same = [
        r for r in same_batch if r.row.num_workers == wanted.row.num_workers and r.laps
    ] or same_batch
    speeds = [result.median("samples_per_s") for result in same if result.laps]
    return max(speeds, default=math.nan)
