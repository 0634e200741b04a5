"""Calls side by side: a few threads, each with its share of the cores."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from lit_data.errors import ConfigError

T = TypeVar("T")

_MOST: Final = 4  # by default: each more has tensors of its own


class Lanes:
    """Threads that compute side by side; one lane is the caller's own thread, and a call then ends
    at once.

    The cores that torch uses for one operation are shared out: several threads with few cores each
    do more than one thread with all of them, as the operations of a small image are too short to be
    divided, and some are not at all.

    Args:
        count: How many.

    Attributes:
        count: How many.

    Raises:
        ConfigError: There are none.
    """

    def __init__(self, count: int) -> None:
        check_lanes(count)
        self.count = count
        self._pool = None if count == 1 else _start(count)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Have a call made by the next lane that is free."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def close(self) -> None:
        """End the threads after the calls that they make; those that wait are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def check_lanes(count: int) -> None:
    """Refuse what is no number of lanes.

    Raises:
        ConfigError: It is below 1.
    """
    if count < 1:
        raise ConfigError(f"lanes={count} must be at least 1")


def choose_lanes(device: torch.device) -> int:
    """One for each core that torch uses, at most 4; one where it is the device that computes side by side."""
    return min(_MOST, torch.get_num_threads()) if device.type == "cpu" else 1


def _start(count: int) -> ThreadPoolExecutor:
    cores = torch.get_num_threads()
    share, started = max(1, cores // count), threading.Barrier(count)
    pool = ThreadPoolExecutor(count, thread_name_prefix="lit_data_lane")
    for start in [pool.submit(_take_share, share, started) for _ in range(count)]:
        start.result()
    torch.set_num_threads(cores)  # of this thread as before, and of threads to come
    return pool


def _take_share(cores: int, started: threading.Barrier) -> None:
    """What torch is told holds for the thread that says so, and for others that have not asked yet."""
    torch.set_num_threads(cores)
    torch.get_num_threads()  # asks, so that what others say later does not hold here
    started.wait()
