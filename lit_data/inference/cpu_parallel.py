"""Inference threads: calls of a net side by side, each with its part of the cores."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from lit_data.errors import ConfigError

T = TypeVar("T")

_MOST_THREADS: Final = 4
"""By default: each more has tensors of its own."""


class InferenceThreads:
    """Threads that compute side by side.

    A single one is the caller's own thread, and a call then ends at once. The cores that torch uses
    for one operation are divided among several: they do more with few cores each than one thread
    with all of them, as the operations of a small image are too short to be divided, and some are
    not at all.

    Args:
        count: Number of threads.

    Attributes:
        count: Number of threads.

    Raises:
        ConfigError: There are none.
    """

    def __init__(self, count: int) -> None:
        check_threads(count)
        self.count = count
        self._pool = None if count == 1 else _start(count)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Have a call made by the next thread that is free."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def close(self) -> None:
        """End the threads after the calls that they make; those that wait are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def check_threads(count: int) -> None:
    """Refuse a number of threads that is none.

    Raises:
        ConfigError: It is below 1.
    """
    if count < 1:
        raise ConfigError(f"threads={count} must be at least 1")


def choose_threads(device: torch.device) -> int:
    """Return one for each core that torch uses, at most 4; on an accelerator one."""
    return min(_MOST_THREADS, torch.get_num_threads()) if device.type == "cpu" else 1


def _start(count: int) -> ThreadPoolExecutor:
    """Start all threads at once, each with its part of the cores."""
    all_cores = torch.get_num_threads()
    cores = max(1, all_cores // count)
    has_started = threading.Barrier(count)  # so that no thread takes two of the calls
    pool = ThreadPoolExecutor(count, thread_name_prefix="lit_data_inference")
    starts = [pool.submit(_take_cores, cores, has_started) for _ in range(count)]
    for start in starts:
        start.result()
    torch.set_num_threads(all_cores)  # of this thread as before, and of threads to come
    return pool


def _take_cores(cores: int, has_started: threading.Barrier) -> None:
    # It holds for the thread that sets it, and for others that have not asked yet: this one asks.
    torch.set_num_threads(cores)
    torch.get_num_threads()
    has_started.wait()
