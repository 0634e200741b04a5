"""Survey of a dataset before its first batch: structure of its samples, and the time to read them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import numpy as np
import torch

from lit_data.core.errors import ConfigError, WorkerDiedError, first_line
from lit_data.core.machine import count_files
from lit_data.core.types import Array, RowWriter
from lit_data.loading.apart import can_start_processes, read_apart
from lit_data.loading.options import LoaderOptions
from lit_data.loading.samples import UNREAD, Collate, Facts, MapStyle, SampleWriter
from lit_data.loading.staging import INDICES, Layout
from lit_data.loading.workers import Failure, take_one_core, write

SAMPLES_PER_WORKER = 32
"""Number of samples for each worker: a smaller dataset has fewer workers."""
_PROBES = 6
"""Micro-batches to read for the measurement, spread over the dataset."""
_PROBE_S = 0.3
"""Longest time in which to read them once."""
_PROBE_SAMPLES = 32


def as_rows(
    dataset: RowWriter | MapStyle,
    options: LoaderOptions,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> RowWriter:
    """Return the dataset if it writes rows, else a writer of its samples.

    Args:
        dataset: The dataset.
        options: Options of its loader.
        collate_fn: Makes batches of its samples.
        worker_init_fn: Called first in each process that reads it.

    Raises:
        ConfigError: Its samples cannot be put into a batch, or it writes rows and there is a
            `collate_fn`.
    """
    if not isinstance(dataset, RowWriter):
        rows = SampleWriter(dataset, seed=options.seed, collate_fn=collate_fn)
        rows.worker_init_fn = worker_init_fn
        rows.facts = _survey(rows, options)
        if options.worker_kind == "thread":
            rows.isolated = rows.probe()
        return rows
    if collate_fn is not None:
        raise ConfigError(
            f"{type(dataset).__name__} writes into the rows of a batch itself: remove collate_fn"
        )
    return dataset


def _survey(rows: SampleWriter, options: LoaderOptions) -> Facts:
    """Read the first samples; in a separate process if workers may be processes."""
    kind = options.worker_kind
    may_have_processes = kind in ("auto", "process") and options.num_workers != 0
    if not may_have_processes or not can_start_processes():
        return read_facts(rows, options)
    if kind == "process" and rows.collate_fn is not None:
        return UNREAD  # each worker detects whether it draws
    try:
        return read_apart(partial(read_facts, options=options), rows, options)
    except WorkerDiedError:
        raise
    except Exception as error:
        if kind == "process":
            raise
        trouble = f"{type(error).__name__}: {first_line(error)}"
    # No process will be forked after this, so files may be opened here.
    return read_facts(rows, options)._replace(trouble=trouble)


def read_facts(rows: SampleWriter, options: LoaderOptions) -> Facts:
    """Read sample 0, and more samples to measure their time if `auto` chooses the workers."""
    _, files_before = count_files()
    rows.facts = rows.describe()
    sample_s = None
    if options.worker_kind == "auto" and may_have_workers(rows, options):
        sample_s, _ = measure(rows, Layout(rows.fields), threads=False)
    _, files = count_files()
    return rows.facts._replace(
        draws=rows.draws, keeps_files=files > files_before, sample_s=sample_s
    )


def may_have_workers(rows: RowWriter, options: LoaderOptions) -> bool:
    """Return False if the main thread reads regardless of the time per sample."""
    if options.num_workers == "auto":
        return len(rows) >= SAMPLES_PER_WORKER
    return options.num_workers > 0


def measure(rows: RowWriter, layout: Layout, *, threads: bool) -> tuple[float, float | None]:
    """Return the seconds per sample in the main thread, and the speedup of two threads.

    A few micro-batches are measured, spread over the dataset. If a single sample already takes too
    long for that, two threads are assumed to be twice as fast.
    """
    time_batches(rows, [_scratch(layout, 0, 1)])  # opens files, fills caches
    one_s = time_batches(rows, [_scratch(layout, len(rows) // 2, 1)])
    if one_s > _PROBE_S / _PROBES:
        return one_s, 2.0 if threads else None
    samples = min(len(rows), _PROBE_SAMPLES, max(1, int(_PROBE_S / _PROBES / one_s)))
    firsts = np.linspace(0, len(rows) - samples, _PROBES).astype(np.int64).tolist()
    scratch = [_scratch(layout, first, samples) for first in firsts]
    times_s = [time_batches(rows, [arrays]) for arrays in scratch]
    inline_s = median(times_s[1:]) / samples
    gain = compare_threads(rows, scratch, median(times_s)) if threads else None
    return inline_s, gain


def compare_threads(
    rows: RowWriter, scratch: list[dict[str, Array]], micro_batch_s: float
) -> float:
    """Return the throughput of two threads divided by that of one; each uses one core, as workers do."""
    repeats = max(1, min(20, int(_PROBE_S / 8 / micro_batch_s)))
    half = len(scratch) // 2
    halves = scratch[:half] * repeats, scratch[half:] * repeats
    fill = partial(time_batches, rows)
    torch_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(2, initializer=take_one_core) as pool:
            list(pool.map(fill, (scratch[:1], scratch[1:2])))  # starts the threads
            started_s = time.perf_counter()
            list(pool.map(fill, halves))
            together_s = time.perf_counter() - started_s
            alone_s = pool.submit(fill, scratch * repeats).result()
    finally:
        torch.set_num_threads(torch_threads)
    return alone_s / together_s


def time_batches(rows: RowWriter, batches: Sequence[dict[str, Array]]) -> float:
    """Return the seconds that writing the samples of some batches takes."""
    started_s = time.perf_counter()
    for arrays in batches:
        answer = write(rows, arrays, 0, len(arrays[INDICES]), 0)
        if isinstance(answer, Failure):
            raise answer.rebuild()
    return time.perf_counter() - started_s


def _scratch(layout: Layout, first: int, samples: int) -> dict[str, Array]:
    arrays = layout.arrays(np.empty(layout.count_bytes(samples), np.uint8), samples)
    arrays[INDICES][:] = np.arange(first, first + samples)
    return arrays
