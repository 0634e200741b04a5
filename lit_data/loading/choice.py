"""Which kind of workers, and how many: by the size of the set, the machine, and a short measurement."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from lit_data.loading.layout import INDICES, Layout
from lit_data.loading.machine import available_memory_bytes, count_cores, count_local_ranks
from lit_data.loading.options import LoaderOptions, WorkerKind
from lit_data.loading.processes import ProcessWorkers
from lit_data.loading.samples import SampleWriter
from lit_data.loading.tasks import Failure, write
from lit_data.loading.workers import InlineWorkers, ThreadWorkers, Workers
from lit_data.types import Array, RowWriter

_PROBES: Final = 3
_PROBE_S: Final = 0.3
_SMALL_S: Final = 0.1
_THREADS_GAIN: Final = 1.3
_PROCESS_BYTES: Final = 300 * 2**20
_MEMORY_SHARE: Final = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers of a loader.

    Attributes:
        kind: `inline`, `thread` or `process`.
        workers: How many; 0 for `inline`.
        reason: One sentence.
        inline_us_per_sample: Measured in the main thread; none if nothing was measured.
        thread_gain: Measured throughput of two threads against the main thread; none if not measured.
    """

    kind: WorkerKind
    workers: int
    reason: str
    inline_us_per_sample: float | None = None
    thread_gain: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """A dict for a file."""
        return asdict(self)


def choose_workers(rows: RowWriter, layout: Layout, options: LoaderOptions, world_size: int) -> Choice:
    """Fill in what the options leave to `auto`, and print it.

    The number of workers is that of the cores of this rank, but no more than one for every four micro-batches of the
    set, and for processes no more than fit into half of the available memory at 300 MiB each. Fewer than four
    micro-batches, or a whole epoch that takes less than 0.1 s, stay in the main thread. Threads are taken where two of
    them are at least 1.3 times as fast as the main thread, otherwise processes; datasets that give single samples
    always get processes, because Python code does not speed up with threads and may not be made for them.
    """
    if options.worker_kind == "inline" or options.num_workers == 0:
        return Choice(kind="inline", workers=0, reason="as configured")
    by_size = len(rows) // (4 * options.micro_batch_size)
    if options.worker_kind != "auto":
        fitting = min(by_size, _count_fitting(options.worker_kind, count_local_ranks(world_size)))
        workers = max(1, fitting) if options.num_workers == "auto" else options.num_workers
        return Choice(kind=options.worker_kind, workers=workers, reason="as configured")
    choice = _choose(rows, layout, options, by_size, world_size)
    log.info("loader: %s, %d workers: %s", choice.kind, choice.workers, choice.reason)
    return choice


def open_workers(rows: RowWriter, layout: Layout, choice: Choice, options: LoaderOptions) -> Workers:
    """Start the chosen workers."""
    if choice.kind == "process":
        method = None if options.start_method == "auto" else options.start_method
        return ProcessWorkers(rows, layout, choice.workers, start_method=method, timeout_s=options.timeout_s)
    if choice.kind == "thread":
        return ThreadWorkers(rows, choice.workers, options.timeout_s)
    return InlineWorkers(rows)


def _choose(rows: RowWriter, layout: Layout, options: LoaderOptions, by_size: int, world_size: int) -> Choice:
    samples, micro = len(rows), options.micro_batch_size
    if options.num_workers == "auto" and by_size == 0:
        return Choice(
            kind="inline", workers=0, reason=f"{samples} samples are fewer than four micro-batches of {micro}"
        )
    inline_s, gain = _measure(rows, layout, min(micro, samples), threads=not isinstance(rows, SampleWriter))
    measured: dict[str, Any] = {"inline_us_per_sample": inline_s * 1e6, "thread_gain": gain}
    epoch_s = inline_s * samples / world_size
    if options.num_workers == "auto" and epoch_s < _SMALL_S:
        return Choice(kind="inline", workers=0, reason=f"a whole epoch takes {epoch_s:.3f} s", **measured)
    kind: WorkerKind = "thread" if (gain or 0) >= _THREADS_GAIN else "process"
    wanted = options.num_workers
    workers = min(by_size, _count_fitting(kind, count_local_ranks(world_size))) if wanted == "auto" else wanted
    return Choice(kind=kind, workers=max(1, workers), reason=_explain(inline_s, gain), **measured)


def _count_fitting(kind: WorkerKind, ranks: int) -> int:
    by_memory = int(_MEMORY_SHARE * available_memory_bytes() / ranks / _PROCESS_BYTES)
    return min(count_cores(ranks), by_memory) if kind == "process" else count_cores(ranks)


def _explain(inline_s: float, gain: float | None) -> str:
    threads = "single samples are not made by threads" if gain is None else f"two threads are {gain:.1f} times as fast"
    return f"{inline_s * 1e6:.0f} us per sample in the main thread, {threads}"


def _measure(rows: RowWriter, layout: Layout, samples: int, *, threads: bool) -> tuple[float, float | None]:
    """Seconds per sample in the main thread, and the gain of two threads, over a few micro-batches all over the set."""
    firsts = np.linspace(0, len(rows) - samples, 2 * _PROBES).astype(np.int64)
    scratch = [_scratch(layout, int(first), samples) for first in firsts]
    times_s: list[float] = []
    for arrays in scratch:  # the first warms up
        times_s.append(_time(rows, [arrays]))
        if sum(times_s) > _PROBE_S and len(times_s) > 1:
            break
    inline_s = median(times_s[1:]) / samples
    if not threads or times_s[-1] > _PROBE_S:
        return inline_s, None if not threads else 1.0
    repeats = max(1, min(20, int(_PROBE_S / 4 / max(median(times_s), 1e-6) / 2)))
    half = len(scratch) // 2
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: _time(rows, part), (scratch[:1], scratch[1:2])))  # start the threads
        started_s = time.perf_counter()
        list(pool.map(lambda part: _time(rows, part * repeats), (scratch[:half], scratch[half:])))
        together_s = time.perf_counter() - started_s
    alone_s = _time(rows, scratch * repeats)
    return inline_s, alone_s / together_s


def _time(rows: RowWriter, parts: Sequence[dict[str, Array]]) -> float:
    started_s = time.perf_counter()
    for arrays in parts:
        answer = write(rows, arrays, 0, len(arrays[INDICES]), 0)
        if isinstance(answer, Failure):
            raise answer.rebuild()
    return time.perf_counter() - started_s


def _scratch(layout: Layout, first: int, samples: int) -> dict[str, Array]:
    arrays = layout.arrays(np.empty(layout.count_bytes(samples), np.uint8), samples)
    arrays[INDICES][:] = np.arange(first, first + samples)
    return arrays
