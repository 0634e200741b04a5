"""One measurement of one loader, and many in turn."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import fmean, median, pstdev

import psutil
import torch

from lit_data.batch_form import count_samples
from lit_data.commands.benchmarks.feeds import Candidate, open_feed
from lit_data.commands.benchmarks.rows import Lap, Result, Row
from lit_data.errors import DataError, LitDataError
from lit_data.io.progress import track
from lit_data.loading.device_timer import read_clock
from lit_data.types import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long one measurement takes.

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
    """Measure every row once, then every row again, so that what the machine does beside hits all
    alike.

    Args:
        rows: What to measure.
        candidates: For each method where its samples come from, or why it cannot be measured.
        repeats: How often.
        limits: How long each time.
        device: Where batches go.
        seed: Of the order of the samples.

    Returns:
        A result for each row. A row whose loader refuses or fails has a note instead of
        measurements.

    Raises:
        LitDataError: No row could be measured; the error is the first one.
    """
    results = [Result(row) for row in rows]
    failures: list[Exception] = []
    rounds = list(chain.from_iterable(repeat(results, repeats)))
    able = sum(not isinstance(candidates[row.method], str) for row in rows)
    at_most_s = able * repeats * limits.seconds
    log.info(
        "%d rows, each measured %d times: at most %.0f s, and the time to start them",
        able,
        repeats,
        at_most_s,
    )
    for result in track(rounds, "measuring", len(rounds)):
        candidate = candidates[result.row.method]
        if isinstance(candidate, str):
            result.note = f"not available: {candidate}"
        elif not result.note:
            try:
                with open_feed(result.row, candidate, seed=seed) as feed:
                    # Batches of workers that run in step arrive together: count whole rounds of
                    # them.
                    least = 2 * max(1, result.row.num_workers)
                    result.laps.append(
                        measure(feed, candidate, limits=limits, device=device, least_batches=least)
                    )
            except (
                LitDataError,
                RuntimeError,
            ) as error:  # RuntimeError: what torch's loader raises, and CUDA
                log.debug("%s", result.row, exc_info=True)
                result.note, result.laps = f"not available: {' '.join(str(error).split())}", []
                failures.append(
                    error.with_traceback(None)
                )  # its frames would keep the workers alive
    if failures and not any(result.laps for result in results):
        raise failures[0]
    return results


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
        candidate: What happens to its batches.
        limits: How long.
        device: Where batches go.
        least_batches: Batches to measure, also where they take longer.
    """
    began_s = time.perf_counter()
    batches = _repeat_epochs(feed)
    _take(batches, candidate, device, timed=True)
    first_batch_s = time.perf_counter() - began_s
    transfers_s = [
        _take(batches, candidate, device, timed=True)[1] for _ in range(limits.warmup_batches)
    ]
    samples, loads_s, most_samples = 0, list[float](), limits.samples or math.inf
    began_s, cpu_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
    now_s = began_s
    while (
        now_s - began_s < limits.seconds or len(loads_s) < least_batches
    ) and samples < most_samples:
        samples += _take(batches, candidate, device, timed=False)[0]
        loads_s.append(time.perf_counter() - now_s)
        now_s += loads_s[-1]
    seconds = read_clock(device) - began_s
    cpu_s, thread_s = time.process_time() - cpu_s, time.thread_time() - thread_s
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
    """Memory of this process and its children, shared pages counted once; NaN where the system does not tell."""
    me, total_bytes = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total_bytes += getattr(process.memory_full_info(), "pss", math.nan)
    return total_bytes / 2**20


def _repeat_epochs(feed: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in feed:
            empty = False
            yield batch
        if empty:
            raise DataError(
                "the loader gave no batch: is data.loader.drop_last set, and the batch larger than the set?"
            )


def _take(
    batches: Iterator[Batch], candidate: Candidate, device: torch.device, *, timed: bool
) -> tuple[int, float]:
    """Samples of the next batch, loaded and finished, and the seconds of its transfer if they are wanted."""
    batch = candidate.plan(next(batches))
    began_s = time.perf_counter()
    batch = {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }
    transfer_s = (read_clock(device) if timed else time.perf_counter()) - began_s
    finished = candidate.finish(batch)
    return count_samples(finished), transfer_s
