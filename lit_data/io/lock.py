"""The lock that lets one process build while the others wait. It saves work and nothing else rests on it.

A build is right without any lock, because it writes under a name of its own and renames at the end. So a lock that a
mount does not offer, or that a dead process seems to hold, is passed by. The lock file itself is never written to.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_data.errors import StoreBusyError, show_path
from lit_data.io.temp import find_builder

LOCK_NAME = ".lock"
POLL_S = 0.2
TELL_EVERY_S = 15.0
ORPHANED_S = 5.0
"""A lock that is held for this long while nobody builds is held by nobody who matters."""

log = logging.getLogger(__name__)


@contextmanager
def build_lock(folder: Path, *, wait_s: float, is_done: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder's build lock, or go on without it once waiting for it has no more use.

    Args:
        folder: An existing folder.
        wait_s: Longest wait for another process that builds.
        is_done: Says whether the other process has made what we want; ends the wait.

    Raises:
        StoreBusyError: Another process still builds after ``wait_s``.
    """
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        _tell_unlockable(folder, error)
        yield
        return
    try:
        _wait(fd, folder, wait_s, is_done)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked child may share the descriptor
        os.close(fd)


def _wait(fd: int, folder: Path, wait_s: float, is_done: Callable[[], bool]) -> None:
    started_s = seen_s = time.monotonic()
    told_s = float("-inf")
    name = show_path(folder)
    while not _try(fd, folder) and not is_done():
        now_s = time.monotonic()
        builder = find_builder(folder)
        if builder is not None:
            seen_s = now_s
        elif now_s - seen_s > ORPHANED_S:
            log.warning("%s: its lock is held but nobody builds; going on without it", name)
            return
        if now_s - started_s > wait_s:
            raise StoreBusyError(
                f"{name}: {builder or 'an unknown process'} still builds there after wait_s={wait_s:g} s; "
                "wait for it, raise wait_s, or end that process"
            )
        if now_s - told_s > TELL_EVERY_S:
            log.warning("%s: waiting for %s, which builds there (%.0f s)", name, builder, now_s - started_s)
            told_s = now_s
        time.sleep(POLL_S)


def _try(fd: int, folder: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _tell_unlockable(folder, error)
    return True


def _tell_unlockable(folder: Path, error: OSError) -> None:
    log.warning("%s: cannot be locked (%s); going on without it", show_path(folder / LOCK_NAME), error.strerror)
