"""A loader as an iterable of batches, one measurement of it, and many in turn."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from statistics import fmean, median, pstdev
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.app.benchmarks.table import OURS, Lap, Result, Row
from lit_data.core.batch_form import count_samples
from lit_data.core.errors import DataError, LitDataError
from lit_data.core.progress import track
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.device_timer import read_clock
from lit_data.loading.samples import SingleSamples
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


Step = Callable[[Batch], Batch]


def keep(batch: Batch) -> Batch:
    """Do nothing to a batch."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Samples that the rows of one method read, and the steps behind its loader.

    Args:
        dataset: A map-style dataset; for `copy` a tensor of ready samples.
        plan: Work on the host before the transfer.
        finish: Work on the device after it.
        options: Of our loaders, beside those that a row sets.
        make_loader: Another way to load, from a row, this candidate and a seed; None takes the
            loader that the method of the row names.
        has_micro_batches: That way makes batches of several parts.
    """

    dataset: Any
    plan: Step = keep
    finish: Step = keep
    options: LoaderOptions = field(default_factory=LoaderOptions)
    make_loader: "Callable[[Row, Candidate, int], Iterable[Batch]] | None" = None
    has_micro_batches: bool = False


@contextmanager
def open_feed(row: Row, candidate: Candidate, *, seed: int) -> Iterator[Iterable[Batch]]:
    """Open an iterable of batches, shuffled, an epoch long; its workers end with the block.

    Args:
        row: Method and sizes.
        candidate: Where samples come from.
        seed: Of the order.

    Raises:
        ConfigError: The loader refuses the row.
    """
    if candidate.make_loader is not None:
        yield candidate.make_loader(row, candidate, seed)
    elif row.method == "copy":
        yield BareCopy(candidate.dataset, row)
    elif row.method in OURS:
        options = _make_options(row, candidate, seed)
        with closing(MicroBatchLoader(candidate.dataset, options, shuffle=True)) as loader:
            yield loader
    else:
        yield make_torch_loader(row, candidate, seed)


def make_torch_loader(row: Row, candidate: Candidate, seed: int) -> DataLoader[Batch]:
    """Make a torch DataLoader as people set it up: workers that stay, pinned where there is CUDA.

    Args:
        row: Sizes.
        candidate: Where samples come from.
        seed: Of the order.
    """
    dataset = candidate.dataset
    collate_fn = None
    if not hasattr(dataset, "__getitem__"):
        dataset = SingleSamples(dataset)
        collate_fn = dataset.collate_fn
    return DataLoader(
        dataset,
        row.batch_size,
        shuffle=True,
        num_workers=row.num_workers,
        collate_fn=collate_fn,
        persistent_workers=row.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed % 2**63),
    )


class BareCopy:
    """Ready samples copied by threads into memory that is used again: the most memory allows.

    Each thread copies whole batches of neighbors, so nothing is chosen, planned or ordered.

    Args:
        samples: [N, ...] ready samples.
        row: Sizes.
    """

    def __init__(self, samples: Tensor, row: Row) -> None:
        self._batches = torch.split(samples, row.batch_size)
        self._threads = row.num_workers

    def __iter__(self) -> Iterator[Batch]:
        todo: SimpleQueue[Tensor] = SimpleQueue()
        for batch in self._batches:
            todo.put(batch)
        free: SimpleQueue[Tensor | None] = SimpleQueue()
        for _ in range(2 * self._threads):
            free.put(torch.empty_like(self._batches[0]))
        copies: SimpleQueue[tuple[Tensor, int]] = SimpleQueue()
        for _ in range(self._threads):
            threading.Thread(target=_copy_batches, args=(todo, free, copies), daemon=True).start()
        try:
            for _ in self._batches:
                buffer, samples = copies.get()
                yield {"image": buffer[:samples]}
                free.put(buffer)
        finally:
            for _ in range(self._threads):
                free.put(None)


def _copy_batches(
    todo: SimpleQueue[Tensor],
    free: SimpleQueue[Tensor | None],
    copies: SimpleQueue[tuple[Tensor, int]],
) -> None:
    """Copy batches into buffers that are free, until there is None in place of a buffer."""
    while (buffer := free.get()) is not None:
        with suppress(Empty):  # the last batches are under way in other threads
            batch = todo.get_nowait()
            # NumPy copies in this thread alone.
            buffer.numpy()[: len(batch)] = batch.numpy()
            copies.put((buffer, len(batch)))


def _make_options(row: Row, candidate: Candidate, seed: int) -> LoaderOptions:
    return replace(
        candidate.options,
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        num_workers=row.num_workers,
        worker_kind="inline" if row.method in ("inline", "device") else row.method,  # type: ignore[arg-type]
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Length of one measurement.

    Args:
        seconds: It ends after this time.
        samples: It ends after this many samples too, if given.
        warmup_batches: Batches before it, beside the first.
    """

    seconds: float
    samples: int | None
    warmup_batches: int


def measure_rows(
    rows: Sequence[Row],
    candidates: Mapping[str, Candidate | str],
    *,
    repeats: int,
    limits: Limits,
    device: torch.device,
    seed: int,
) -> list[Result]:
    """Measure every row once, then every row again, so that other work hits all alike.

    Args:
        rows: The rows.
        candidates: For each method where its samples come from, or why it cannot be measured.
        repeats: Measurements of each row.
        limits: Length of each measurement.
        device: Where batches go.
        seed: Of the order of the samples.

    Returns:
        A result for each row. A row whose loader refuses or fails has a note instead of
        measurements.

    Raises:
        LitDataError: No row could be measured; the error is the first one.
    """
    results = [Result(row) for row in rows]
    measurable_rows = 0
    for result in results:
        candidate = candidates[result.row.method]
        if isinstance(candidate, str):
            result.note = f"not available: {candidate}"
        else:
            measurable_rows += 1
    log.info(
        "%s, each measured %s: at most %.0f s, and the time to start them",
        counted(measurable_rows, "row"),
        counted(repeats, "time"),
        measurable_rows * repeats * limits.seconds,
    )
    failures: list[Exception] = []
    rounds = results * repeats
    for result in track(rounds, "measuring", len(rounds)):
        candidate = candidates[result.row.method]
        if result.note or isinstance(candidate, str):
            continue
        try:
            with open_feed(result.row, candidate, seed=seed) as feed:
                # Batches of workers that run in step arrive together: whole rounds of them count.
                least_batches = 2 * max(1, result.row.num_workers)
                lap = measure(
                    feed, candidate, limits=limits, device=device, least_batches=least_batches
                )
            result.laps.append(lap)
        except (LitDataError, RuntimeError) as error:  # RuntimeError: of torch's loader and CUDA
            log.debug("%s", result.row, exc_info=True)
            result.note = f"not available: {_describe(error)}"
            result.laps = []
            failures.append(error.with_traceback(None))  # its frames would keep the workers alive
    if failures and not any(result.laps for result in results):
        raise failures[0]
    return results


def _describe(error: Exception) -> str:
    """Return an error in one line; one of a worker of torch is a traceback, which ends with it."""
    text = str(error).strip()
    return " ".join(text.split()) if isinstance(error, LitDataError) else text.rpartition("\n")[2]


@torch.no_grad()
def measure(
    feed: Iterable[Batch],
    candidate: Candidate,
    *,
    limits: Limits,
    device: torch.device,
    least_batches: int = 1,
) -> Lap:
    """Measure one loader, from the start of its workers on.

    Args:
        feed: The loader.
        candidate: The steps behind it.
        limits: Length of the measurement.
        device: Where batches go.
        least_batches: Batches to measure, also where they take longer.
    """
    began_s = time.perf_counter()
    batches = _repeat_epochs(feed)
    _take(batches, candidate, device, timed=True)
    first_batch_s = time.perf_counter() - began_s
    transfers_s = []
    for _ in range(limits.warmup_batches):
        transfers_s.append(_take(batches, candidate, device, timed=True)[1])
    samples = 0
    most_samples = limits.samples or math.inf
    loads_s: list[float] = []
    began_cpu_s, began_thread_s = time.process_time(), time.thread_time()
    now_s = began_s = time.perf_counter()
    while samples < most_samples:
        if now_s - began_s >= limits.seconds and len(loads_s) >= least_batches:
            break
        samples += _take(batches, candidate, device, timed=False)[0]
        loads_s.append(time.perf_counter() - now_s)
        now_s += loads_s[-1]
    seconds = read_clock(device) - began_s  # waits for what the device has not finished
    cpu_s = time.process_time() - began_cpu_s
    thread_s = time.thread_time() - began_thread_s
    return Lap(
        samples=samples,
        samples_per_s=samples / seconds,
        process_cpu_ms_per_1000=1e6 * cpu_s / samples,
        main_thread_cpu_ms_per_1000=1e6 * thread_s / samples,
        first_batch_ms=1e3 * first_batch_s,
        load_ms_mean=1e3 * fmean(loads_s),
        load_ms_std=1e3 * pstdev(loads_s),
        transfer_ms=1e3 * median(transfers_s) if device.type != "cpu" else 0.0,
        pss_mib=measure_pss_mib(),
    )


def measure_pss_mib() -> float:
    """Measure the memory of this process and its children, shared pages counted once.

    NaN where the system does not say.
    """
    this_process = psutil.Process()
    total_bytes = 0.0
    for process in (this_process, *this_process.children(recursive=True)):
        with suppress(psutil.Error):  # it ended meanwhile
            total_bytes += getattr(process.memory_full_info(), "pss", math.nan)
    return total_bytes / 2**20


def _repeat_epochs(feed: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        is_empty = True
        for batch in feed:
            is_empty = False
            yield batch
        if is_empty:
            raise DataError(
                "the loader gave no batch: is data.loader.drop_last set, and the batch larger "
                "than the dataset?"
            )


def _take(
    batches: Iterator[Batch], candidate: Candidate, device: torch.device, *, timed: bool
) -> tuple[int, float]:
    """Load and finish the next batch.

    Returns:
        Its samples, and the seconds of its transfer if it is timed, for which the device is waited.
    """
    batch = candidate.plan(next(batches))
    began_s = time.perf_counter()
    moved: Batch = {}
    for key, value in batch.items():
        is_tensor = isinstance(value, torch.Tensor)
        moved[key] = value.to(device, non_blocking=True) if is_tensor else value
    transfer_s = (read_clock(device) if timed else time.perf_counter()) - began_s
    finished = candidate.finish(moved)
    return count_samples(finished), transfer_s
