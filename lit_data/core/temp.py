"""Locks and temporary folders of builds, which tell leftovers of dead builds from live ones.

The name of a temporary folder contains its owner. A folder is created in one atomic step, so a kill
never leaves a folder with an unknown owner. The random part makes the name unpredictable.
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
from tempfile import gettempdir

from filelock import FileLock, Timeout

from lit_data.core.errors import StoreBusyError, show_path

log = logging.getLogger(__name__)


ABANDONED_S = 24 * 3600
"""Age from which a folder of another machine, whose owner cannot be looked up, is abandoned."""

_NAME = re.compile(
    r"\.build-(?P<pid>\d{1,9})-(?P<start>\w*)-(?P<machine>[0-9a-f]{8})-(?P<host>.*)-[0-9a-f]{16}"
)

LOCK_NAME = ".lock"
POLL_S = 0.2
TELL_EVERY_S = 15.0
ORPHANED_S = 5.0
"""A lock held for this long while nobody builds is one that a network disk forgot to free."""


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
def temp_folder(folder: Path, mode: int = 0o775) -> Iterator[Path]:
    """Make a temporary folder, and remove it at the end unless it was renamed by then.

    Args:
        folder: An existing folder.
        mode: Who may read and write it.

    Yields:
        The path of the new, empty folder.
    """
    path = folder / _make_name()
    path.mkdir(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a folder of this user in the temporary folder of the system, see `temp_folder`.

    Leftovers of killed processes are removed first.
    """
    folder = Path(gettempdir())
    sweep(folder)
    with temp_folder(folder, 0o700) as path:
        yield path


def remove_folder(path: Path) -> None:
    """Remove a folder atomically for other processes, by renaming it to a temporary name first."""
    doomed = path.with_name(_make_name())
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Remove the temporary folders whose owner is gone, and return their number."""
    removed = 0
    for path, owner in _list_owned(folder):
        if not _is_alive(owner, path):
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def find_builder(folder: Path) -> Owner | None:
    """Return a live owner of a temporary folder, which is a process that builds in ``folder`` now."""
    for path, owner in _list_owned(folder):
        if _is_alive(owner, path):
            return owner
    return None


def _list_owned(folder: Path) -> list[tuple[Path, Owner]]:
    """Return the temporary folders in a folder with their owners."""
    owned = []
    for path in folder.glob(".build-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            owner = Owner(int(match["pid"]), match["start"], match["machine"], match["host"])
            owned.append((path, owner))
    return owned


def _make_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64]
    pid = os.getpid()
    return f".build-{pid}-{read_start(pid)}-{identify_machine()}-{host}-{secrets.token_hex(8)}"


def _is_alive(owner: Owner, path: Path) -> bool:
    if owner.machine == identify_machine():
        return _is_running(owner.pid, owner.start)
    # Of another machine nothing can be asked, so the age of what it wrote last decides.
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
    """Return the start time of a process in clock ticks since boot.

    Returns:
        "zombie" once the process is dead, "" where its state cannot be read.
    """
    try:
        # Behind the name of the program, which may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "zombie" if fields[0] in b"ZX" else fields[19].decode()


@cache
def identify_machine() -> str:
    """Return eight hex digits, equal in processes that can look each other up by their ids."""
    facts = [socket.gethostname()]
    # Only Linux has these; containers may share a host name but not their process ids.
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:8]


def kernel_lock(path: Path) -> FileLock:
    """Return an unlocked lock that the system releases if its holder dies."""
    # Others than the group may not write it whatever the umask is; and a lock that is a mere file,
    # which filelock offers where the system has none, would outlast a holder that is killed.
    return FileLock(path, mode=0o664, thread_local=False, fallback_to_soft=False)


@contextmanager
def build_lock(folder: Path, *, wait_s: float, is_done: Callable[[], bool]) -> Iterator[None]:
    """Hold the build lock of the folder, or continue without it once it is not needed anymore.

    Args:
        folder: An existing folder.
        wait_s: Longest wait for another process that builds.
        is_done: Returns True once the other process has built the result, which ends the wait.

    Raises:
        StoreBusyError: Another process still builds after ``wait_s``.
    """
    lock = kernel_lock(folder / LOCK_NAME)
    try:
        _wait(lock, folder, wait_s, is_done)
        yield
    finally:
        with suppress(OSError):
            lock.release(force=True)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock among all processes and threads of this machine.

    The system frees it if its holder dies.
    """
    # Not by filelock, which polls: those that wait are woken at once and in order here, or a shard
    # that is needed next would come behind one that is needed last.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o664)
    try:
        with suppress(OSError):  # a file system without locks: work may be done twice
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _wait(lock: FileLock, folder: Path, wait_s: float, is_done: Callable[[], bool]) -> None:
    """Wait until the lock is held, or is not needed anymore."""
    started_s = last_seen_s = time.monotonic()
    last_message_s = float("-inf")
    name = show_path(folder)
    while not _try(lock, folder) and not is_done():
        now_s = time.monotonic()
        builder = find_builder(folder)
        if builder is not None:
            last_seen_s = now_s
        elif now_s - last_seen_s > ORPHANED_S:
            log.warning(
                "%s: its lock is held but no process is building; continuing without it", name
            )
            return
        waited_s = now_s - started_s
        if waited_s > wait_s:
            raise StoreBusyError(
                f"{name}: {builder or 'an unknown process'} is still building there after "
                f"wait_s={wait_s:g} s; wait for it, raise wait_s, or end that process"
            )
        if now_s - last_message_s > TELL_EVERY_S:
            log.warning(
                "%s: waiting for %s, which is building there (%.0f s)", name, builder, waited_s
            )
            last_message_s = now_s
        time.sleep(POLL_S)


def _try(lock: FileLock, folder: Path) -> bool:
    """Return True if the lock is held now, or if there can be none in this folder."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    except OSError as error:  # a read-only folder, or a network disk without locks
        path = show_path(folder / LOCK_NAME)
        log.warning("%s: cannot be locked (%s); continuing without it", path, error.strerror)
    return True
