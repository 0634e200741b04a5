"""A progress bar of bytes that stays away from short work."""

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lit_data.io.progress import DELAY_S

if TYPE_CHECKING:
    from rich.progress import Progress


class BytesBar:
    """Shows on stderr how many bytes have arrived, once that has taken longer than ``DELAY_S``; a context manager.

    Args:
        what: One or two words in front of the bar.
        total_bytes: How many there will be.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, new_bytes: int) -> None:
        """Count bytes, from any thread; negative ones are those that have to be read again."""
        with self._lock:
            self._done_bytes += new_bytes
            if self._bar is None and time.monotonic() - self._started_s > DELAY_S:
                self._bar = _start(self._what, self._total_bytes)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done_bytes)


def _start(what: str, total_bytes: int) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=total_bytes)
    bar.start()
    return bar
