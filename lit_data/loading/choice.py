"""Choice of workers by the size of the dataset, the machine, and a short measurement."""

import logging
import math
import multiprocessing
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from lit_data.core.errors import ConfigError
from lit_data.core.machine import available_memory_bytes, count_cores, count_local_ranks
from lit_data.core.types import RowWriter
from lit_data.loading.apart import can_start_processes, maps_files, read_apart
from lit_data.loading.options import LoaderOptions, WorkerKind
from lit_data.loading.processes import ProcessWorkers
from lit_data.loading.samples import UNREAD, SampleWriter
from lit_data.loading.staging import Layout
from lit_data.loading.survey import SAMPLES_PER_WORKER, may_have_workers, measure
from lit_data.loading.workers import InlineWorkers, ThreadWorkers, Workers
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


_SMALL_S = 0.1
_THREADS_GAIN = 1.3
_PROCESS_BYTES = 300 * 2**20
_MEMORY_SHARE = 0.5
_TASK_S = 0.001
_TASK_SAMPLES = 16
_KEEPS_FILES = "reading samples leaves files open, which processes of other loaders must not share"

# Loaders of validation and test are created again after training: log the same message once.
_logged: deque[tuple[str, WorkerKind, int]] = deque(maxlen=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers of a loader.

    Attributes:
        kind: `inline`, `thread` or `process`.
        workers: Number of workers; 0 for `inline`.
        reason: One sentence.
        micro_batch_size: As configured; None for `auto`, see `count_rows`.
        inline_us_per_sample: Microseconds per sample in the main thread; None if not measured.
        thread_gain: Throughput of two threads divided by that of the main thread; None if not
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

        If it is not configured, each worker gets an equal part of a batch, but at least 1 ms of
        work, or 16 samples if nothing was measured: each task of a process costs about 0.1 ms.
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
    """Choose the workers for options that are `auto`, and log the choice.

    The number of workers is the number of cores of this rank, but at most one for every 32 samples
    of the dataset. Processes must also fit into half of the available memory at 300 MiB each. The
    main thread reads datasets of fewer than 32 samples, and datasets whose whole epoch takes less
    than 0.1 s. Workers are threads if two of them are at least 1.3 times as fast as the main
    thread, otherwise processes. Datasets that return single samples always get processes, because
    threads do not speed up Python code, which may not support them either. The smallest ones do
    too if they keep files open, because processes that other loaders fork would share those files.
    If `worker_kind` is `thread` and such a dataset draws from global generators, the main thread
    reads it, and a warning is logged.

    Raises:
        ConfigError: `worker_kind` is `process`, and this process cannot start any.
    """
    if options.worker_kind == "inline" or options.num_workers == 0:
        choice = Choice(kind="inline", workers=0, reason="as configured")
    elif options.worker_kind != "auto":
        kind, reason = _check_kind(rows, options.worker_kind)
        workers = _count_workers(kind, options.num_workers, len(rows), world_size)
        choice = Choice(kind=kind, workers=workers, reason=reason)
    else:
        choice = _choose(rows, layout, options, world_size)
        _log_once(f"{stage} loader".lstrip(), choice)
    if options.micro_batch_size == "auto":
        return choice
    return replace(choice, micro_batch_size=options.micro_batch_size)


def _log_once(loader: str, choice: Choice) -> None:
    message = (loader, choice.kind, choice.workers)
    level = logging.DEBUG if message in _logged else logging.INFO
    workers = counted(choice.workers, "worker") if choice.workers else "no workers"
    log.log(level, "%s: %s, %s: %s", loader, choice.kind, workers, choice.reason)
    _logged.append(message)


def open_workers(
    rows: RowWriter,
    layout: Layout,
    choice: Choice,
    options: LoaderOptions,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Workers:
    """Start the chosen workers."""
    if choice.kind == "process":
        method = options.start_method
        if method == "auto" and getattr(rows, "fetches", False):
            # A fork would copy locks that threads hold while they fetch.
            method = "forkserver"
        return ProcessWorkers(
            rows,
            layout,
            choice.workers,
            start_method=method,
            timeout_s=options.timeout_s,
            worker_init_fn=worker_init_fn,
        )
    if choice.kind == "thread":
        return ThreadWorkers(rows, choice.workers, options.timeout_s)
    return InlineWorkers(rows)


def _check_kind(rows: RowWriter, kind: WorkerKind) -> tuple[WorkerKind, str]:
    """Return the kind of worker and the reason; no threads if they would change the samples."""
    if kind == "process" and multiprocessing.current_process().daemon:
        raise ConfigError(
            "worker_kind=process: this process is a daemon, as workers of loaders are, and daemons "
            "start no processes: set worker_kind=thread or num_workers=0"
        )
    if kind != "thread" or not is_isolated(rows):
        return kind, "as configured"
    log.warning(
        "worker_kind=thread: %s draws from the global generators of torch, NumPy or random, "
        "which threads share with training, so samples would change from run to run: only the "
        "main thread reads it; for several workers set worker_kind=process",
        type(rows.dataset if isinstance(rows, SampleWriter) else rows).__name__,
    )
    return "inline", "the dataset draws from global generators, which threads share"


def is_isolated(rows: RowWriter) -> bool:
    """Return True if samples draw from global generators, which threads must not share."""
    return bool(getattr(rows, "isolated", False))


def _choose(rows: RowWriter, layout: Layout, options: LoaderOptions, world_size: int) -> Choice:
    facts = rows.facts if isinstance(rows, SampleWriter) else UNREAD
    if facts.trouble:
        reason = f"it cannot be read in a separate process ({facts.trouble})"
        return Choice(kind="inline", workers=0, reason=reason)
    must_be_apart = facts.keeps_files and can_start_processes()
    num_workers = options.num_workers
    if not may_have_workers(rows, options):
        if must_be_apart:
            return Choice(kind="process", workers=1, reason=_KEEPS_FILES)
        reason = f"{counted(len(rows), 'sample')}, fewer than {SAMPLES_PER_WORKER}"
        return Choice(kind="inline", workers=0, reason=reason)
    if getattr(rows, "fetches", False) and not is_isolated(rows):
        workers = _count_workers("thread", num_workers, len(rows), world_size)
        reason = "shards are not downloaded yet, so nothing is measured"
        return Choice(kind="thread", workers=workers, reason=reason)
    inline_s, gain = _time(rows, layout, options)
    epoch_s = inline_s * len(rows) / world_size
    kind: WorkerKind
    if num_workers == "auto" and epoch_s < _SMALL_S and not must_be_apart:
        kind, workers = "inline", 0
        reason = f"a whole epoch takes {epoch_s:.3f} s"
    else:
        is_gain = gain is not None and gain >= _THREADS_GAIN
        without_threads: WorkerKind = "process" if can_start_processes() else "inline"
        kind = "thread" if is_gain else without_threads
        workers = _count_workers(kind, num_workers, len(rows), world_size)
        reason = _explain(inline_s, gain)
    return Choice(
        kind=kind,
        workers=workers,
        reason=reason,
        inline_us_per_sample=inline_s * 1e6,
        thread_gain=gain,
    )


def _time(rows: RowWriter, layout: Layout, options: LoaderOptions) -> tuple[float, float | None]:
    """Return the seconds per sample of one reader, and the speedup of two threads."""
    if isinstance(rows, SampleWriter):
        assert rows.facts.sample_s is not None
        return rows.facts.sample_s, None
    if maps_files(rows) or not can_start_processes():
        return measure(rows, layout, threads=not is_isolated(rows))
    try:
        return read_apart(partial(measure, layout=layout, threads=True), rows, options)
    except ConfigError:  # it cannot be sent to a process, so none will be forked later
        return measure(rows, layout, threads=True)


def _count_workers(
    kind: WorkerKind, num_workers: int | Literal["auto"], samples: int, world_size: int
) -> int:
    if kind == "inline":
        return 0
    if num_workers != "auto":
        return num_workers
    ranks = count_local_ranks(world_size)
    most = min(samples // SAMPLES_PER_WORKER, count_cores(ranks))
    if kind == "process":
        memory_bytes = _MEMORY_SHARE * available_memory_bytes() / ranks
        most = min(most, int(memory_bytes / _PROCESS_BYTES))
    return max(1, most)


def _explain(inline_s: float, gain: float | None) -> str:
    time = f"{inline_s * 1e6:.0f} us per sample"
    if gain is None:
        return f"{time} in one process, threads do not read single samples"
    return f"{time} in the main thread, two threads are {gain:.1f} times as fast"
