"""How the main process notices a worker that hangs or dies, wherever it is at that moment."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

_LOOK_S: Final = 0.25
_WAIT: Final = "_try_get_data"
_WAITING_FILES: Final = ("selectors.py", "connection.py", "queues.py", "synchronize.py")


class Watch:
    """Looks after worker processes: kills them when somebody waits too long, and ends the wait when one is gone.

    torch alone sees a worker that ended with exit code 0, or under a fork server, only after 5 s, and it raises from
    its SIGCHLD handler, which can strike in the middle of a training step, where the error would be nobody's. Here a
    worker that is gone is remembered until the main thread waits for one.

    Args:
        timeout_s: Longest wait.
        processes: The workers; the list may fill up later.

    Attributes:
        timed_out: The workers were killed because a wait took too long.
        lost: A worker is gone.
    """

    def __init__(self, timeout_s: float, processes: Sequence[BaseProcess]) -> None:
        self.timed_out = self.lost = False
        self._timeout_s, self._processes = timeout_s, processes
        self._waiter: tuple[int, float] | None = None  # thread, and since when
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, once the processes are there."""
        _front.install()
        _front.watches = [*_front.watches, self]
        self._thread = threading.Thread(target=self._look, name="lit_data-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the watching thread end."""
        self._ended.set()
        _front.watches = [watch for watch in _front.watches if watch is not self]
        if self._thread not in (None, threading.current_thread()):  # which may collect garbage
            self._thread.join()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The main thread waits for a worker inside this block.

        Raises:
            RuntimeError: A worker is gone; also in the middle of the block.
        """
        self._waiter = threading.get_ident(), time.monotonic()
        try:
            if self.lost:
                raise RuntimeError("a worker process has ended")
            yield
        finally:
            self._waiter = None

    def owns(self, error: RuntimeError) -> bool:
        """Whether an error of torch speaks of one of these workers."""
        return any(f"(pid {process.pid})" in str(error) for process in self._processes)

    def interrupt(self, frame: FrameType | None) -> None:
        """End the wait of the main thread, which is at `frame` and calls this, if a worker is gone.

        Only inside torch's wait for an answer: anywhere else, such as in a finalizer, an exception would do harm, and
        the next look comes soon.
        """
        waits = self._waiter is not None and self._waiter[0] == threading.get_ident()
        if self.lost and waits and _is_waiting(frame):
            raise RuntimeError("a worker process has ended")

    def _look(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while not self._ended.wait(min(_LOOK_S, self._timeout_s / 4)):
            waiter = self._waiter
            if waiter and not self.timed_out and time.monotonic() - waiter[1] > self._timeout_s:
                self.timed_out = True
                for process in self._processes:
                    process.kill()
            self.lost = self.lost or bool(wait(sentinels, 0))
            if self.lost and waiter and waiter[0] == threading.main_thread().ident:
                signal.pthread_kill(waiter[0], signal.SIGCHLD)  # the handler below ends the wait


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether the main thread is in torch's function that waits for an answer, or in the modules that it waits in."""
    while frame is not None and frame.f_code.co_filename.endswith(_WAITING_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _WAIT


class _Front:
    """One SIGCHLD handler before that of torch, for all watches."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self._before: list[Callable[[int, FrameType | None], Any]] = []

    def install(self) -> None:
        """Stand before torch's handler; only the main thread can.

        More than once: a Lightning Trainer puts back, at its end, the handlers that it found, and torch, which installs
        its own only once, would be deaf from then on.
        """
        current = signal.getsignal(signal.SIGCHLD)
        if current != self._handle and threading.current_thread() is threading.main_thread():
            if callable(current) and current not in self._before:
                self._before.append(current)
            signal.signal(signal.SIGCHLD, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        try:
            for handler in self._before:
                handler(signum, frame)
        except RuntimeError as error:
            owners = [watch for watch in self.watches if watch.owns(error)]
            if not owners:
                raise
            for watch in owners:
                watch.lost = True
        for watch in self.watches:
            watch.interrupt(frame)


_front: Final = _Front()
