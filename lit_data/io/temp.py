"""Temporary folders of a build, and how leftovers of dead builds are told from the work of living ones.

The owner of a temporary folder stands in its name: making a folder is one atomic step, so there is no moment at which
a kill leaves a folder whose owner is unknown. The random part makes the name unpredictable.
"""

import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABANDONED_S = 24 * 3600
"""A folder made on another machine, where its owner cannot be looked up, counts as abandoned after this long."""

_NAME = re.compile(r"\.build-(?P<pid>\d{1,9})-(?P<start>\w*)-(?P<machine>[0-9a-f]{8})-(?P<host>.*)-[0-9a-f]{16}")


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
    """Make a temporary folder inside ``folder`` and remove it at the end, unless it was renamed by then.

    Args:
        folder: An existing folder.

    Yields:
        The path of the new, empty folder.
    """
    path = folder / _make_name()
    path.mkdir()
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
    return [(path, Owner(int(m["pid"]), m["start"], m["machine"], m["host"])) for path, m in matches if m]


def _make_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64]
    pid = os.getpid()
    return f".build-{pid}-{_read_start(pid)}-{_identify_machine()}-{host}-{secrets.token_hex(8)}"


def _is_alive(owner: Owner, path: Path) -> bool:
    if owner.machine == _identify_machine():
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
    return _read_start(pid) in ("", start)


def _read_start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "zombie" once it is dead, "" where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "zombie" if fields[0] in b"ZX" else fields[19].decode()


@cache
def _identify_machine() -> str:
    """Eight hex digits that two processes share exactly if they can look each other up by process id."""
    facts = [socket.gethostname()]
    with suppress(OSError):  # only Linux has them; containers may share a host name but not their process ids
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:8]
