"""Temporary folders of a build, and how leftovers of dead builds are told from the work of living
ones.

The owner of a temporary folder stands in its name: making a folder is one atomic step, so there is
no moment at which a kill leaves a folder whose owner is unknown. The random part makes the name
unpredictable.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lit_data.errors import StoreBusyError, show_path

log = logging.getLogger(__name__)


ABANDONED_S = 24 * 3600
"""A folder made on another machine, where its owner cannot be looked up, counts as abandoned after this long."""

_NAME = re.compile(
    r"\.build-(?P<pid>\d{1,9})-(?P<start>\w*)-(?P<machine>[0-9a-f]{8})-(?P<host>.*)-[0-9a-f]{16}"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made a temporary folder."""

    pid: int
    start: str
    machine: str
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


@contextmanager
def temp_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder inside ``folder`` and remove it at the end, unless it was renamed by
    then.

    Args:
        folder: An existing folder.

    Yields:
        The path of the new, empty folder.
    """
    path = folder / _make_name()
    path.mkdir(0o775)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder so that nobody sees a part of it: it is renamed to a temporary name first."""
    doomed = path.with_name(_make_name())
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Remove the temporary folders whose owner is gone, and return how many there were."""
    gone = [path for path, owner in _list_owned(folder) if not _is_alive(owner, path)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return len(gone)


def find_builder(folder: Path) -> Owner | None:
    """Return a living owner of a temporary folder, that is a process that builds in ``folder`` now."""
    return next((owner for path, owner in _list_owned(folder) if _is_alive(owner, path)), None)


def _list_owned(folder: Path) -> list[tuple[Path, Owner]]:
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.glob(".build-*"))
    return [
        (path, Owner(int(m["pid"]), m["start"], m["machine"], m["host"]))
        for path, m in matches
        if m
    ]


def _make_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64]
    pid = os.getpid()
    return f".build-{pid}-{read_start(pid)}-{identify_machine()}-{host}-{secrets.token_hex(8)}"


def _is_alive(owner: Owner, path: Path) -> bool:
    if owner.machine == identify_machine():
        return _is_running(owner.pid, owner.start)
    try:
        newest_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return False
    return time.time() - newest_s < ABANDONED_S


def _is_running(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process: it exists
    return read_start(pid) in ("", start)


def read_start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "zombie" once it is dead, "" where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "zombie" if fields[0] in b"ZX" else fields[19].decode()


@cache
def identify_machine() -> str:
    """Eight hex digits that two processes share exactly if they can look each other up by process id."""
    facts = [socket.gethostname()]
    with suppress(
        OSError
    ):  # only Linux has them; containers may share a host name but not their process ids
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:8]


LOCK_NAME = ".lock"
POLL_S = 0.2
TELL_EVERY_S = 15.0
ORPHANED_S = 5.0
"""A lock that is held for this long while nobody builds is held by nobody who matters."""


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
        fd = os.open(
            folder / LOCK_NAME,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o664,
        )
    except OSError as error:
        _tell_unlockable(folder, error)
        yield
        return
    with _giving_back(fd):
        _wait(fd, folder, wait_s, is_done)
        yield


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock among all processes and threads of this machine; the system gives it back if its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
    with _giving_back(fd):
        with suppress(OSError):  # a file system without locks: work may be done twice
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextmanager
def _giving_back(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(
                fd, fcntl.LOCK_UN
            )  # closing is not enough: a forked child may share the descriptor
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
            log.warning(
                "%s: waiting for %s, which builds there (%.0f s)", name, builder, now_s - started_s
            )
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
    log.warning(
        "%s: cannot be locked (%s); going on without it",
        show_path(folder / LOCK_NAME),
        error.strerror,
    )
