"""The build lock and the temporary folders: who waits for whom, and whose leftovers go."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_data.core import temp
from lit_data.core import temp as lock
from lit_data.core.errors import StoreBusyError
from lit_data.core.temp import LOCK_NAME, build_lock, sweep, temp_folder

ME = f"process {os.getpid()} on host {socket.gethostname()}"


class Clock:
    """Time passes by sleeping alone; ``steps`` are called at the given seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = {}

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for when_s in [when_s for when_s in self.steps if when_s <= self.now_s]:
            self.steps.pop(when_s)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


def take_lock(folder: Path) -> int | None:
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


@pytest.fixture
def held(tmp_path: Path) -> Iterator[ExitStack]:
    """The lock of ``tmp_path``, held by somebody else until the stack is closed."""
    with ExitStack() as stack:
        stack.callback(os.close, take_lock(tmp_path))
        yield stack


def name_of(pid: int, start: str, machine: str = "", host: str = "far-away") -> str:
    return f".build-{pid}-{start}-{machine or temp.identify_machine()}-{host}-0123456789abcdef"


def test_second_one_waits_and_says_for_whom(
    tmp_path: Path, clock: Clock, held: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    held.enter_context(temp_folder(tmp_path))
    clock.steps[40.0] = held.close
    with build_lock(tmp_path, wait_s=3600, is_done=lambda: False):
        assert 40 <= clock.now_s < 41
        assert take_lock(tmp_path) is None
    waits = [f"{tmp_path}: waiting for {ME}, which is building there ({s} s)" for s in (0, 15, 30)]
    assert caplog.messages == waits
    fd = take_lock(tmp_path)
    assert fd is not None
    os.close(fd)


@pytest.mark.parametrize("wait_s", [0, 7])
def test_long_waits_name_the_holder(
    tmp_path: Path, clock: Clock, held: ExitStack, wait_s: int
) -> None:
    clock.now_s = 1.0
    if wait_s:
        held.enter_context(temp_folder(tmp_path))
    holder = ME if wait_s else "an unknown process"
    message = (
        f"{tmp_path}: {holder} is still building there after wait_s={wait_s} s; wait for it, raise"
    )
    with (
        pytest.raises(StoreBusyError, match=message),
        build_lock(tmp_path, wait_s=wait_s, is_done=lambda: False),
    ):
        pytest.fail("got the lock")
    assert wait_s < clock.now_s < wait_s + 2


def test_wait_ends_when_the_store_is_there(tmp_path: Path, clock: Clock, held: ExitStack) -> None:
    held.enter_context(temp_folder(tmp_path))
    with build_lock(tmp_path, wait_s=3600, is_done=lambda: clock.now_s > 5):
        assert 5 < clock.now_s < 6


def test_lock_that_nobody_alive_builds_under_is_passed_by(
    tmp_path: Path, clock: Clock, held: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name_of(os.getpid(), "1")).mkdir()
    with build_lock(tmp_path, wait_s=3600, is_done=lambda: False):
        assert 5 < clock.now_s < 10
    message = "its lock is held but no process is building; continuing without it"
    assert caplog.messages[-1] == f"{tmp_path}: {message}"


@pytest.mark.parametrize(
    ("call", "number"), [("flock", errno.ENOLCK), ("flock", errno.ENOSYS), ("open", errno.EACCES)]
)
def test_place_that_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, call: str, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl if call == "flock" else os, call, refuse)
        with build_lock(tmp_path, wait_s=0, is_done=lambda: False):
            pass
    message = f"cannot be locked ({os.strerror(number)}); continuing without it"
    assert caplog.messages == [f"{tmp_path / LOCK_NAME}: {message}"]


def test_lock_is_not_emptied_nor_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOCK_NAME).write_text("content")
    with build_lock(tmp_path, wait_s=0, is_done=lambda: False):
        pass
    assert (tmp_path / LOCK_NAME).read_text() == "content"
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "victim")
    with build_lock(tmp_path, wait_s=0, is_done=lambda: False):
        assert "cannot be locked" in caplog.text
    assert not (tmp_path / "victim").exists()


def test_sweep_takes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    dead = [name_of(os.getpid(), "1"), name_of(999_999_999, "5")]
    alive = [
        name_of(os.getpid(), temp.read_start(os.getpid())),
        name_of(1, temp.read_start(1)),
        ".build-odd",
        "other",
    ]
    for name in (*dead, *alive):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pixels.bin").touch()
    assert sweep(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == set(alive)


@pytest.mark.parametrize(
    ("age_s", "swept"), [(temp.ABANDONED_S - 600, 0), (temp.ABANDONED_S + 600, 1)]
)
def test_folders_of_other_machines_are_judged_by_age(
    tmp_path: Path, age_s: float, swept: int
) -> None:
    path = tmp_path / name_of(1, "5", machine="00000000")
    path.mkdir()
    (path / "pixels.bin").touch()
    written_s = path.stat().st_mtime - age_s
    os.utime(path / "pixels.bin", (written_s, written_s))
    os.utime(path, (0, 0))
    assert sweep(tmp_path) == swept
