"""How the main process notices a worker that hangs or dies, wherever it is at that moment."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

_LOOK_S: Final = 0.25


class Watch:
    """Kills the workers when the main thread has waited too long inside the `with` block."""

    def __init__(self, timeout_s: float, processes: list[BaseProcess]) -> None:
        self.fired = False
        self._timeout_s, self._processes = timeout_s, processes
        self._since_s: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> bool:
        """Whether the main thread is inside the block."""
        return self._since_s is not None

    def __enter__(self) -> None:
        self._since_s = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="lit_data-watch", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._since_s = None

    def end(self) -> None:
        """Let the watching thread end."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(min(_LOOK_S, self._timeout_s / 4)):
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > self._timeout_s:
                self.fired = True
                for process in self._processes:
                    process.kill()
                return


class ChildSignal:
    """Keeps torch's report of a dead worker until the loader is asked for the next batch.

    torch raises from its SIGCHLD handler, which can strike in the middle of a training step. There the error would be
    nobody's; here it waits until the main thread is in the loader.

    Args:
        watch: Tells whether the main thread waits for a worker.
        processes: The workers.
    """

    def __init__(self, watch: Watch, processes: Sequence[BaseProcess]) -> None:
        self.closing = False
        self._watch, self._processes = watch, processes
        self._late: RuntimeError | None = None
        self._before: Callable[[int, FrameType | None], Any] | int | None = None

    def install(self) -> None:
        """Stand before torch's handler; only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGCHLD, self._handle)

    def remove(self) -> None:
        """Put torch's handler back, unless somebody else stands in front by now."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._before)

    def raise_late(self) -> None:
        """Raise what was kept."""
        if self._late is not None:
            raise self._late

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        try:
            if callable(self._before):
                self._before(signum, frame)
        except RuntimeError as error:
            ours = any(f"{process.pid}" in str(error) for process in self._processes)
            if not (self.closing or ours) or (self._watch.waiting and not self.closing):
                raise
            self._late = error
