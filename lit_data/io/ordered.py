"""A bounded thread pool that gives its results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2
"""Calls under way or finished but not yet taken, per thread: bounds the memory of their results."""


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """Call the function on each item in threads and yield the results in the order of the items.

    Args:
        function: Called once for each item; what it raises is raised here.
        items: Taken one by one, no further ahead than ``AHEAD * workers``.
        workers: Number of threads.
    """
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="lit_data") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
