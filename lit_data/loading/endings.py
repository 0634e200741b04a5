"""How worker processes end, and are made to."""

import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final

_GRACE_S: Final = 1.0


def find_ended(processes: list[BaseProcess], wait_s: float) -> list[BaseProcess]:
    """Those that have ended, by their sentinels: an exit code is lost where a signal strikes as it is read."""
    gone = wait([process.sentinel for process in processes], wait_s)
    return [process for process in processes if process.sentinel in gone or not process.is_alive()]


def send_signal(number: signal.Signals, processes: list[BaseProcess]) -> None:
    """Send a signal to the processes that live, and wait a little for their end."""
    left = [process for process in processes if process not in find_ended(processes, 0)]
    for process in left:
        with suppress(ProcessLookupError):  # it may end at this moment
            os.kill(process.pid or 0, number)
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))


def describe_end(exitcode: int | None) -> tuple[str, str]:
    """How a process ended, and what may help."""
    if exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL)", "The kernel does that when memory runs out: lower data.loader.num_workers."
    if exitcode == -signal.SIGBUS:
        return "was killed (SIGBUS)", "A mapped file became shorter, or memory for a page ran out."
    if exitcode is None:
        return "ended", "Its exit code is lost."
    if exitcode < 0:
        return f"was killed ({signal.Signals(-exitcode).name})", "A library crashed on these samples: read them alone."
    return f"ended with exit code {exitcode}", "Something in the dataset ends the process."
