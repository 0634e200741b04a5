"""Progress bars for long work only, and an ordered map in threads."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Self, TypeVar

from lit_data.core.machine import available_memory_bytes, count_cores

if TYPE_CHECKING:
    from rich.progress import Progress

Item = TypeVar("Item")
R = TypeVar("R")
DELAY_S = 2.0
_limit: ContextVar[int | None] = ContextVar("limit", default=None)

AHEAD = 2
"""Calls under way or finished but not yet taken, per thread: bounds the memory of their results."""


@contextmanager
def limit_threads(threads: int | None) -> Iterator[None]:
    """Limit the number that `count_threads` returns within the block; None changes nothing."""
    token = _limit.set(threads)
    try:
        yield
    finally:
        _limit.reset(token)


def count_threads(item_bytes: int = 0) -> int:
    """Return the number of threads that read and decode files in parallel.

    There is one for each core that this process may use, and fewer if their data would take more
    than a quarter of the available memory.

    Args:
        item_bytes: Bytes of one decoded file.
    """
    limit = _limit.get()
    if limit is not None:
        return limit
    # A thread decodes one file while others wait; decoding takes about as much memory again.
    thread_bytes = 2 * (AHEAD + 1) * max(item_bytes, 1)
    return max(1, min(count_cores(), available_memory_bytes() // (4 * thread_bytes)))


def ordered_map(
    function: Callable[[Item], R], items: Iterable[Item], workers: int
) -> Generator[R, None, None]:
    """Call the function on each item in threads and yield the results in the order of the items.

    Args:
        function: Called once for each item; its exceptions are raised here.
        items: Items, which are taken one by one, at most ``AHEAD * workers`` ahead.
        workers: Number of threads.
    """
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lit_data")
    is_abandoned = False
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except GeneratorExit:
        # Perhaps of the garbage collector, which may hold a lock that an ending thread needs.
        is_abandoned = True
        raise
    finally:
        pool.shutdown(wait=not is_abandoned, cancel_futures=True)


class ProgressBar:
    """Progress bar on stderr, shown once the work has taken longer than ``DELAY_S``; a context manager.

    Args:
        what: One or two words in front of the bar.
        total: Total number of items or bytes.
        in_bytes: Count bytes, and show their speed.
        enabled: False shows nothing.

    Attributes:
        note: Text behind the count, shown from the next `advance` on.
    """

    def __init__(
        self, what: str, total: int, *, in_bytes: bool = False, enabled: bool = True
    ) -> None:
        self._what = what
        self._total = total
        self._in_bytes = in_bytes
        self._enabled = enabled
        self.note = ""
        self._done = 0
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        """Count items or bytes, from any thread; a negative number must be done again."""
        if not self._enabled:
            return
        with self._lock:
            self._done += count
            elapsed_s = time.monotonic() - self._started_s
            if self._bar is None and elapsed_s > DELAY_S:
                self._bar = self._start()
            if self._bar is not None:
                speed = f"{self._done / elapsed_s:.3g}/s"
                task = self._bar.task_ids[0]
                self._bar.update(task, completed=self._done, speed=speed, note=self.note)

    def _start(self) -> "Progress":
        from rich import progress  # imported for long work only
        from rich.console import Console

        counts: list[progress.ProgressColumn] = [
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"),
        ]
        if self._in_bytes:
            counts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *counts,
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        bar.add_task(self._what, total=self._total, speed="", note="")
        bar.start()
        return bar


def track(
    items: Iterable[Item], what: str, total: int, *, enabled: bool = True
) -> Generator[Item, None, None]:
    """Yield the items, and count them in a `ProgressBar`.

    Args:
        items: Items to yield.
        what: One or two words in front of the bar.
        total: Total number of items.
        enabled: False shows nothing.
    """
    with ProgressBar(what, total, enabled=enabled) as bar:
        for item in items:
            yield item
            bar.advance()
