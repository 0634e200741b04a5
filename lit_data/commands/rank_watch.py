"""What becomes of a run when a rank of it dies: a message with its number and exit code 6, within seconds.

Lightning kills all ranks without a word when it sees that one is gone (`_ChildProcessObserver`, 2.6.6), and the first
rank may hang in a collective until then. Ranks that torchrun or srun started are watched by these.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from lit_data.errors import WorkerDiedError

_OBSERVER: Final = "child-process-observer"
_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0  # for the first rank to say itself what is wrong, and for the others to end
_TOLD_S: Final = 60.0  # for the first rank to save, where another was told to stop
_ELSEWHERE: Final = ": its own message says why, if it had time for one"
_TOLD: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)


class RankWatch(threading.Thread):
    """Takes over the processes that Lightning has started and would watch, and ends this one with them.

    Attributes:
        children: The other ranks of this machine, from rank 1 on.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="rank-watch")
        self.children: list[subprocess.Popen[bytes]] = []
        self._done = threading.Event()

    def run(self) -> None:
        """Look at the ranks until they are needed no more."""
        while not self._done.wait(_POLL_S):
            self._take_over()
            failed = self._find_failed()
            told = failed is not None and failed[1] in _TOLD
            if failed and not self._done.wait(_TOLD_S if told else _GRACE_S):
                self.end_others(wait_s=0)
                print(f"lit_data: {_describe(*failed)}", file=sys.stderr, flush=True)
                os._exit(WorkerDiedError.exit_code)  # the main thread hangs in a collective

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()
        self._take_over()

    def describe_dead(self, *, wait_s: float) -> str:
        """Which rank has failed and how, or nothing if none fails within this time."""
        until_s = time.monotonic() + wait_s
        while self._waits_for_cause(failed := self._find_failed()) and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)
        return _describe(*failed) if failed else ""

    def end_others(self, *, wait_s: float) -> None:
        """Wait for the ranks that are left, then kill them; they may hang in a collective and heed nothing else."""
        until_s = time.monotonic() + wait_s
        while any(child.poll() is None for child in self.children) and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def _find_failed(self) -> tuple[int, int] | None:
        """Rank and exit code of one that failed, if possible not just because another did."""
        failed = [(rank, code) for rank, child in enumerate(self.children, 1) if (code := child.poll())]
        return min(failed, key=lambda found: found[1] == WorkerDiedError.exit_code, default=None)

    def _waits_for_cause(self, failed: tuple[int, int] | None) -> bool:
        running = any(child.poll() is None for child in self.children)
        return running and (failed is None or failed[1] == WorkerDiedError.exit_code)

    def _take_over(self) -> None:
        for thread in threading.enumerate():
            if thread.name == _OBSERVER:
                observer: Any = thread
                self.children += observer._child_processes
                observer._child_processes = []  # which ends it


@contextmanager
def watching_ranks() -> Iterator[None]:
    """Around a job that may start other ranks, or be one.

    Raises:
        WorkerDiedError: Another rank died, and this one lost its connection for that.
    """
    watch = RankWatch()
    watch.start()
    try:
        yield
    except Exception as error:
        if not _is_lost_connection(error):
            raise
        watch.stop()
        dead = watch.describe_dead(wait_s=_GRACE_S)
        raise WorkerDiedError(dead or f"the connection to another rank broke{_ELSEWHERE}") from error
    finally:
        watch.stop()
        watch.end_others(wait_s=_GRACE_S)


def _is_lost_connection(error: Exception) -> bool:
    dist = sys.modules.get("torch.distributed")  # where nothing has loaded it there is no connection
    text = str(error)
    return (dist is not None and isinstance(error, dist.DistError)) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


def _describe(rank: int, code: int) -> str:
    how = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    return f"rank {rank} of this machine {how}{_ELSEWHERE}"
