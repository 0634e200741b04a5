"""Choice of workers by the size of the dataset, the machine, and a short measurement."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from lit_data.io.machine import available_memory_bytes, count_cores, count_local_ranks
from lit_data.loading.options import LoaderOptions, WorkerKind
from lit_data.loading.processes import ProcessWorkers
from lit_data.loading.samples import SampleWriter
from lit_data.loading.staging import INDICES, Layout
from lit_data.loading.workers import (
    Failure,
    InlineWorkers,
    ThreadWorkers,
    Workers,
    take_one_core,
    write,
)
from lit_data.types import Array, RowWriter

log = logging.getLogger(__name__)


_PROBES = 6
"""Micro-batches that are read for the measurement, all over the dataset."""
_PROBE_S = 0.3
"""Longest time that reading them once may take."""
_PROBE_SAMPLES = 32
_SMALL_S = 0.1
_SAMPLES_PER_WORKER = 32
_THREADS_GAIN = 1.3
_PROCESS_BYTES = 300 * 2**20
_MEMORY_SHARE = 0.5
_TASK_S = 0.001
_TASK_SAMPLES = 16

# Loaders of validation and test are made anew after training: the same message stands once.
_logged: deque[tuple[str, WorkerKind, int]] = deque(maxlen=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers of a loader.

    Attributes:
        kind: `inline`, `thread` or `process`.
        workers: Number of them; 0 for `inline`.
        reason: One sentence.
        micro_batch_size: As configured, or None: see `count_rows`.
        inline_us_per_sample: Measured in the main thread; None if nothing was measured.
        thread_gain: Measured throughput of two threads against the main thread; None if not
            measured.
    """

    kind: WorkerKind
    workers: int
    reason: str
    micro_batch_size: int | None = None
    inline_us_per_sample: float | None = None
    thread_gain: float | None = None

    def count_rows(self, batch_size: int) -> int:
        """Return the samples of a micro-batch.

        Where that is not configured, each worker gets its part of a batch, but no less than 1 ms of
        work, if that was measured, or 16 samples: handing out a task costs a worker process about
        0.1 ms.
        """
        if self.micro_batch_size is not None:
            return min(self.micro_batch_size, batch_size)
        if not self.workers:
            return batch_size
        least = _TASK_SAMPLES
        if self.inline_us_per_sample is not None:
            least = math.ceil(_TASK_S * 1e6 / self.inline_us_per_sample)
        return min(batch_size, max(math.ceil(batch_size / self.workers), least))

    def to_plain(self) -> dict[str, Any]:
        """Return a dict for a file."""
        return asdict(self)


def choose_workers(
    rows: RowWriter, layout: Layout, options: LoaderOptions, world_size: int, stage: str = ""
) -> Choice:
    """Fill in the options that are `auto`, and log the choice.

    The number of workers is that of the cores of this rank, but no more than one for every 32
    samples of the dataset, and for processes no more than fit into half of the available memory at
    300 MiB each. Datasets of fewer than 32 samples, and those whose whole epoch takes less than
    0.1 s, stay in the main thread. Threads are taken where two of them are at least 1.3 times as
    fast as the main thread, otherwise processes; datasets that give single samples always get
    processes, because Python code does not speed up with threads and may not be made for them.
    Where threads were asked for and such a dataset draws from global generators, it gets processes
    too, and a warning.
    """
    if options.worker_kind == "inline" or options.num_workers == 0:
        choice = Choice(kind="inline", workers=0, reason="as configured")
    elif options.worker_kind != "auto":
        kind, reason = _check_threads(rows, options.worker_kind)
        workers = 0
        if kind != "inline":
            workers = _count_workers(kind, options.num_workers, len(rows), world_size)
        choice = Choice(kind=kind, workers=workers, reason=reason)
    else:
        choice = _choose(rows, layout, options.num_workers, world_size)
        _log_once(f"{stage} loader".lstrip(), choice)
    if options.micro_batch_size == "auto":
        return choice
    return replace(choice, micro_batch_size=options.micro_batch_size)


def _log_once(loader: str, choice: Choice) -> None:
    message = (loader, choice.kind, choice.workers)
    level = logging.DEBUG if message in _logged else logging.INFO
    log.log(level, "%s: %s, %d workers: %s", *message, choice.reason)
    _logged.append(message)


def open_workers(
    rows: RowWriter, layout: Layout, choice: Choice, options: LoaderOptions
) -> Workers:
    """Start the chosen workers."""
    if choice.kind == "process":
        method = None if options.start_method == "auto" else options.start_method
        if method is None and getattr(rows, "fetches", False):
            # A fork would copy locks that are held by the threads which fetch.
            method = "forkserver"
        return ProcessWorkers(
            rows, layout, choice.workers, start_method=method, timeout_s=options.timeout_s
        )
    if choice.kind == "thread":
        return ThreadWorkers(rows, choice.workers, options.timeout_s)
    return InlineWorkers(rows)


def _check_threads(rows: RowWriter, kind: WorkerKind) -> tuple[WorkerKind, str]:
    """Return the kind of worker, and why: no threads where they would change the samples."""
    if kind != "thread" or not isinstance(rows, SampleWriter):
        return kind, "as configured"
    rows.isolated = rows.probe()
    if not rows.isolated:
        return kind, "as configured"
    instead = _choose_without_threads()
    log.warning(
        "worker_kind=thread: %s draws from the global generators of torch, NumPy or random, which "
        "threads share with training, so samples would change from run to run: worker_kind=%s is "
        "taken",
        type(rows.dataset).__name__,
        instead,
    )
    return instead, "the dataset draws from global generators, which threads share"


def _choose_without_threads() -> WorkerKind:
    # Worker processes share memory without a name, which Linux alone has.
    return "process" if hasattr(os, "memfd_create") else "inline"


def _choose(
    rows: RowWriter, layout: Layout, num_workers: int | Literal["auto"], world_size: int
) -> Choice:
    if num_workers == "auto" and len(rows) < _SAMPLES_PER_WORKER:
        reason = f"{len(rows)} samples are fewer than {_SAMPLES_PER_WORKER}"
        return Choice(kind="inline", workers=0, reason=reason)
    if getattr(rows, "fetches", False):
        workers = _count_workers("thread", num_workers, len(rows), world_size)
        reason = "samples all over the set are not here to be measured"
        return Choice(kind="thread", workers=workers, reason=reason)
    inline_s, gain = _measure(rows, layout, threads=not isinstance(rows, SampleWriter))
    epoch_s = inline_s * len(rows) / world_size
    kind: WorkerKind
    if num_workers == "auto" and epoch_s < _SMALL_S:
        kind, workers = "inline", 0
        reason = f"a whole epoch takes {epoch_s:.3f} s"
    else:
        is_gain = gain is not None and gain >= _THREADS_GAIN
        kind = "thread" if is_gain else _choose_without_threads()
        workers = 0
        if kind != "inline":
            workers = _count_workers(kind, num_workers, len(rows), world_size)
        reason = _explain(inline_s, gain)
    return Choice(
        kind=kind,
        workers=workers,
        reason=reason,
        inline_us_per_sample=inline_s * 1e6,
        thread_gain=gain,
    )


def _count_workers(
    kind: WorkerKind, num_workers: int | Literal["auto"], samples: int, world_size: int
) -> int:
    if num_workers != "auto":
        return num_workers
    ranks = count_local_ranks(world_size)
    most = min(samples // _SAMPLES_PER_WORKER, count_cores(ranks))
    if kind == "process":
        memory_bytes = _MEMORY_SHARE * available_memory_bytes() / ranks
        most = min(most, int(memory_bytes / _PROCESS_BYTES))
    return max(1, most)


def _explain(inline_s: float, gain: float | None) -> str:
    if gain is None:
        threads = "single samples are not made by threads"
    else:
        threads = f"two threads are {gain:.1f} times as fast"
    return f"{inline_s * 1e6:.0f} us per sample in the main thread, {threads}"


def _measure(rows: RowWriter, layout: Layout, *, threads: bool) -> tuple[float, float | None]:
    """Return the seconds per sample in the main thread, and the gain of two threads.

    They are measured over a few micro-batches all over the dataset. Where one sample alone takes
    longer than the whole measurement may, threads are assumed to gain.
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
    """Return the throughput of two threads against that of one; each takes one core, as workers do."""
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
    """Return the seconds in which the samples of some batches are written."""
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
