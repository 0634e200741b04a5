"""Which kind of workers, and how many: by the size of the set, the machine, and a short measurement."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from lit_data.loading.machine import available_memory_bytes, count_cores, count_local_ranks
from lit_data.loading.options import LoaderOptions, WorkerKind
from lit_data.loading.processes import ProcessWorkers
from lit_data.loading.samples import SampleWriter
from lit_data.loading.staging import INDICES, Layout
from lit_data.loading.tasks import Failure, write
from lit_data.loading.workers import InlineWorkers, ThreadWorkers, Workers
from lit_data.types import Array, RowWriter

log = logging.getLogger(__name__)


_PROBES: Final = 6
_PROBE_S: Final = 0.3
_PROBE_SAMPLES: Final = 32
_SMALL_S: Final = 0.1
_SAMPLES_PER_WORKER: Final = 32
_THREADS_GAIN: Final = 1.3
_PROCESS_BYTES: Final = 300 * 2**20
_MEMORY_SHARE: Final = 0.5
_TASK_S: Final = 0.001
_TASK_SAMPLES: Final = 16

_told: deque[tuple[str, WorkerKind, int]] = deque(
    maxlen=3
)  # validation and test choose anew after training


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers of a loader.

    Attributes:
        kind: `inline`, `thread` or `process`.
        workers: How many; 0 for `inline`.
        reason: One sentence.
        micro_batch_size: As configured, or none: see `count_rows`.
        inline_us_per_sample: Measured in the main thread; none if nothing was measured.
        thread_gain: Measured throughput of two threads against the main thread; none if not
            measured.
    """

    kind: WorkerKind
    workers: int
    reason: str
    micro_batch_size: int | None = None
    inline_us_per_sample: float | None = None
    thread_gain: float | None = None

    def count_rows(self, batch_size: int) -> int:
        """Samples of a micro-batch, where it is not configured.

        Each worker gets its share of a batch, but no less than 1 ms of work, if that was measured,
        or 16 samples: handing out a task costs a worker process about 0.1 ms.
        """
        if self.micro_batch_size is not None or not self.workers:
            return min(self.micro_batch_size or batch_size, batch_size)
        us = self.inline_us_per_sample
        least = _TASK_SAMPLES if us is None else math.ceil(_TASK_S * 1e6 / us)
        return min(batch_size, max(math.ceil(batch_size / self.workers), least))

    def to_plain(self) -> dict[str, Any]:
        """A dict for a file."""
        return asdict(self)


def choose_workers(
    rows: RowWriter, layout: Layout, options: LoaderOptions, world_size: int, stage: str = ""
) -> Choice:
    """Fill in what the options leave to `auto`, and print it.

    The number of workers is that of the cores of this rank, but no more than one for every 32
    samples of the set, and for processes no more than fit into half of the available memory at 300
    MiB each. Sets of fewer than 32 samples, and those whose whole epoch takes less than 0.1 s, stay
    in the main thread. Threads are taken where two of them are at least 1.3 times as fast as the
    main thread, otherwise processes; datasets that give single samples always get processes,
    because Python code does not speed up with threads and may not be made for them. Where threads
    were asked for and such a dataset draws from global generators, it gets processes too, and a
    warning.
    """
    micro = None if options.micro_batch_size == "auto" else options.micro_batch_size
    if options.worker_kind == "inline" or options.num_workers == 0:
        return Choice(kind="inline", workers=0, reason="as configured", micro_batch_size=micro)
    if options.worker_kind != "auto":
        kind, reason = _check_threads(rows, options.worker_kind)
        workers = (
            _count_workers(kind, options.num_workers, len(rows), world_size)
            if kind != "inline"
            else 0
        )
        return Choice(kind=kind, workers=workers, reason=reason, micro_batch_size=micro)
    choice = replace(_choose(rows, layout, options.num_workers, world_size), micro_batch_size=micro)
    told = f"{stage} loader".lstrip(), choice.kind, choice.workers
    log.log(
        logging.DEBUG if told in _told else logging.INFO,
        "%s: %s, %d workers: %s",
        *told,
        choice.reason,
    )
    _told.append(told)
    return choice


def open_workers(
    rows: RowWriter, layout: Layout, choice: Choice, options: LoaderOptions
) -> Workers:
    """Start the chosen workers."""
    if choice.kind == "process":
        method = None if options.start_method == "auto" else options.start_method
        if method is None and getattr(rows, "fetches", False):
            method = "forkserver"  # a fork would copy locks that the threads hold which fetch
        return ProcessWorkers(
            rows, layout, choice.workers, start_method=method, timeout_s=options.timeout_s
        )
    if choice.kind == "thread":
        return ThreadWorkers(rows, choice.workers, options.timeout_s)
    return InlineWorkers(rows)


def _check_threads(rows: RowWriter, kind: WorkerKind) -> tuple[WorkerKind, str]:
    """Another kind of worker for a dataset whose samples would change from run to run in threads."""
    if kind != "thread" or not isinstance(rows, SampleWriter):
        return kind, "as configured"
    rows.isolated = rows.probe()
    if not rows.isolated:
        return kind, "as configured"
    instead: WorkerKind = "process" if hasattr(os, "memfd_create") else "inline"
    log.warning(
        "worker_kind=thread: %s draws from the global generators of torch, NumPy or random, which threads share with "
        "training, so samples would change from run to run: worker_kind=%s is taken",
        type(rows.dataset).__name__,
        instead,
    )
    return instead, "the dataset draws from global generators, which threads share"


def _choose(rows: RowWriter, layout: Layout, wanted: int | str, world_size: int) -> Choice:
    if wanted == "auto" and len(rows) < _SAMPLES_PER_WORKER:
        reason = f"{len(rows)} samples are fewer than {_SAMPLES_PER_WORKER}"
        return Choice(kind="inline", workers=0, reason=reason)
    if getattr(rows, "fetches", False):
        workers = _count_workers("thread", wanted, len(rows), world_size)
        return Choice(
            kind="thread",
            workers=workers,
            reason="samples all over the set are not here to be measured",
        )
    inline_s, gain = _measure(rows, layout, threads=not isinstance(rows, SampleWriter))
    measured: dict[str, Any] = {"inline_us_per_sample": inline_s * 1e6, "thread_gain": gain}
    epoch_s = inline_s * len(rows) / world_size
    if wanted == "auto" and epoch_s < _SMALL_S:
        return Choice(
            kind="inline", workers=0, reason=f"a whole epoch takes {epoch_s:.3f} s", **measured
        )
    kind: WorkerKind = "thread" if (gain or 0) >= _THREADS_GAIN else "process"
    workers = _count_workers(kind, wanted, len(rows), world_size)
    return Choice(kind=kind, workers=workers, reason=_explain(inline_s, gain), **measured)


def _count_workers(kind: WorkerKind, wanted: int | str, samples: int, world_size: int) -> int:
    if not isinstance(wanted, str):
        return wanted
    ranks = count_local_ranks(world_size)
    fitting = min(samples // _SAMPLES_PER_WORKER, count_cores(ranks))
    if kind == "process":
        fitting = min(
            fitting, int(_MEMORY_SHARE * available_memory_bytes() / ranks / _PROCESS_BYTES)
        )
    return max(1, fitting)


def _explain(inline_s: float, gain: float | None) -> str:
    threads = (
        "single samples are not made by threads"
        if gain is None
        else f"two threads are {gain:.1f} times as fast"
    )
    return f"{inline_s * 1e6:.0f} us per sample in the main thread, {threads}"


def _measure(rows: RowWriter, layout: Layout, *, threads: bool) -> tuple[float, float | None]:
    """Seconds per sample in the main thread, and the gain of two threads, over a few micro-batches
    all over the set.

    Where one sample alone takes longer than the whole measurement may, threads are assumed to gain.
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
    return inline_s, compare_threads(rows, scratch, median(times_s)) if threads else None


def compare_threads(
    rows: RowWriter, scratch: list[dict[str, Array]], micro_batch_s: float
) -> float:
    """How many times faster two threads fill batches than one."""
    repeats = max(1, min(20, int(_PROBE_S / 8 / micro_batch_s)))
    half = len(scratch) // 2
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(lambda part: time_batches(rows, part), (scratch[:1], scratch[1:2]))
        )  # start the threads
        started_s = time.perf_counter()
        list(
            pool.map(
                lambda part: time_batches(rows, part * repeats), (scratch[:half], scratch[half:])
            )
        )
        together_s = time.perf_counter() - started_s
    return time_batches(rows, scratch * repeats) / together_s


def time_batches(rows: RowWriter, parts: Sequence[dict[str, Array]]) -> float:
    """Seconds in which the samples of some batches are written."""
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
