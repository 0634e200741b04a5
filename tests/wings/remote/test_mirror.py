"""The mirror of a folder of fsspec's own file system in memory."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import ConfigError, DataError, StoreError, StoreSpaceError
from lit_data.images.scope import Scope
from lit_data.wings.remote import Root, mirror
from lit_data.wings.remote.fetching import MANIFEST_NAME as NAME
from lit_data.wings.remote.fetching import Fetcher

QUICK = RemoteOptions(backoff_s=0.001, retries=2)
Open = Callable[..., Path]


FILES = {"a/1.png": b"one", "a/2.png": b"two", "notes.txt": b"text"}


@pytest.fixture(autouse=True)
def remote() -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pipe({f"/set/{name}": content for name, content in FILES.items()} | {"/else/x.png": b"no"})
    yield fs
    fs.store.clear()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read from the server."""
    names = []
    original = MemoryFileSystem.get_file

    def get_file(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> None:
        names.append(path.removeprefix("/set/"))
        original(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    return names


@pytest.fixture
def fetch(tmp_path: Path) -> Open:
    def open_root(*, scope: Scope | None = None, refresh: bool = True, **options: Any) -> Path:
        chosen = RemoteOptions(backoff_s=0.001, retries=options.pop("retries", 2), **options)
        root = Root("memory://set", tmp_path / "remote", chosen, scope)
        if refresh:
            root.refresh()
        return root.folder

    return open_root


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _break(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, after: int = 0) -> None:
    """Let a method of the server raise, from some call on."""
    original, calls = getattr(MemoryFileSystem, method), iter(range(after))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, method, broken)


def test_local_roots_stay_where_they_are(tmp_path: Path) -> None:
    root = Root(str(tmp_path), tmp_path / "remote", QUICK)
    root.refresh()
    assert root.folder == tmp_path
    assert not (tmp_path / "remote").exists()


def test_a_mirror_holds_what_the_server_has_and_nothing_else(
    fetch: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = fetch()
    assert folder.name == "set"
    assert _files(folder) == FILES
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", NAME, "set"]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "lit_data" in name or "fsspec" in name]
    line = "memory://set: 3 files, 10 bytes; 3 to read (10 bytes), 0 gone; mirror in "
    assert line in caplog.text


def test_only_changes_are_reread(remote: MemoryFileSystem, reads: list[str], fetch: Open) -> None:
    before = (fetch() / "a" / "2.png").stat().st_mtime_ns
    remote.pipe({"/set/a/2.png": b"TWO", "/set/new.png": b"new"})
    remote.rm("/set/notes.txt")
    reads.clear()
    folder = fetch()
    assert sorted(reads) == ["a/2.png", "new.png"]
    assert _files(folder) == {"a/1.png": b"one", "a/2.png": b"TWO", "new.png": b"new"}
    # so that a store of it is made anew
    assert (folder / "a" / "2.png").stat().st_mtime_ns != before
    reads.clear()
    fetch()
    assert reads == []


def test_without_a_refresh_the_server_is_not_asked_and_a_root_refreshes_once(
    fetch: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = fetch(refresh=False)  # nothing there yet, so it is
    root = Root("memory://set", tmp_path, QUICK)
    root.refresh()
    _break(monkeypatch, "find", AssertionError("asked"))
    root.refresh()
    assert fetch(refresh=False) == folder
    assert fetch(offline="always") == folder


def test_patterns_choose_what_is_read(
    remote: MemoryFileSystem, reads: list[str], fetch: Open
) -> None:
    images = Scope.of_images(("a/*",))
    assert fetch(scope=images) == fetch()  # one mirror for both
    assert sorted(reads) == ["a/1.png", "a/2.png", "notes.txt"]
    remote.pipe("/set/notes.txt", b"new text")
    remote.pipe("/set/a/1.png", b"ONE")
    reads.clear()
    fetch(scope=images)
    assert reads == ["a/1.png"]
    with pytest.raises(DataError, match="there is no complete mirror"):
        fetch(offline="always")  # of all files there is none now, for one of them is old
    assert _files(fetch())["notes.txt"] == b"new text"


def test_changes_in_the_mirror_are_mended(fetch: Open, tmp_path: Path) -> None:
    folder, outside = fetch(), tmp_path / "outside"
    outside.mkdir()
    (outside / "keep.png").write_bytes(b"mine")
    (folder / "a" / "1.png").write_bytes(b"changed")
    (folder / "a" / "2.png").unlink()
    (folder / "a" / "2.png").symlink_to(outside / "keep.png")
    (folder / "notes.bak").mkdir()
    assert _files(fetch()) == FILES
    assert _files(outside) == {"keep.png": b"mine"}


def test_only_what_the_server_removed_goes(remote: MemoryFileSystem, fetch: Open) -> None:
    images = Scope.of_images(("a/*",))
    (fetch(scope=images) / "mine.txt").write_bytes(b"not of the server")
    remote.rm("/set/a/1.png")
    assert _files(fetch(scope=images)) == {"a/2.png": b"two", "mine.txt": b"not of the server"}
    remote.rm("/set/a", recursive=True)  # the folder goes with its last file
    remote.pipe("/set/a", b"a file now")
    left = {"notes.txt": b"text", "mine.txt": b"not of the server"}
    assert _files(fetch()) == left | {"a": b"a file now"}


def test_a_record_names_no_files_elsewhere(fetch: Open, tmp_path: Path) -> None:
    folder, thesis = fetch(), tmp_path / "thesis.png"
    thesis.write_bytes(b"mine")
    line = {"name": os.path.relpath(thesis, folder), "version": "", "size_bytes": 4, "mtime_ns": 0}
    with (folder.parent / NAME).open("a") as record:
        record.write(json.dumps(line) + "\n")
    fetch()
    assert thesis.read_bytes() == b"mine"


@pytest.mark.parametrize("place", ["remote", "shelf", "folder", "a"])
def test_links_are_refused_and_nothing_behind_them_is_touched(
    fetch: Open, tmp_path: Path, place: str
) -> None:
    folder, outside = fetch(), tmp_path / "outside"
    shelf = {"shelf": folder.parent, "remote": folder.parents[1]}
    linked = ({"a": folder / "a", "folder": folder} | shelf)[place]
    shutil.move(linked, outside)
    (outside / "thesis.png").write_bytes(b"mine")
    before = _files(outside)
    linked.symlink_to(outside)
    with pytest.raises(StoreError, match=r"is a link, but a mirror needs its own folders"):
        fetch()
    assert _files(outside) == before


def test_too_much_is_refused_before_anything_is_read(
    reads: list[str], fetch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        r"3 files with 10 bytes in total .* more than data\.remote\.max_bytes=9 .*data\.patterns"
    )
    with pytest.raises(ConfigError, match=message):
        fetch(max_bytes=9)
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    message = r"it needs 10 bytes, and 9 bytes is free; .*paths\.cache"
    with pytest.raises(StoreSpaceError, match=message):
        fetch()
    assert reads == []
    assert len(_files(fetch(scope=Scope.of_images(("**/*",)), max_bytes=6))) == 2


def test_empty_folders_are_named(fetch: Open, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"memory://set: no file there matches .*\*\.bmp"):
        fetch(scope=Scope(("*.bmp",)))
    with pytest.raises(DataError, match="memory://nothing: no such folder"):
        Root("memory://nothing", tmp_path, QUICK).refresh()
    with pytest.raises(DataError, match="is a file: give its folder"):
        Root("memory://set/notes.txt", tmp_path, QUICK).refresh()


def test_a_killed_read_goes_on_where_it_stopped(
    reads: list[str], fetch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    with monkeypatch.context() as patch:
        original = Path.replace

        def replace(self: Path, target: Path) -> Path:
            if target.name == "2.png":
                raise Killed
            return original(self, target)

        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            fetch(connections=1)
    with pytest.raises(DataError, match="no complete mirror"):
        fetch(offline="always")
    done = set(reads) - {"a/2.png"}
    reads.clear()
    assert len(_files(fetch())) == 3
    assert set(reads) == {"a/1.png", "a/2.png", "notes.txt"} - done
    assert done


@pytest.mark.parametrize("offline", ["warn", "error"])
def test_out_of_reach(fetch: Open, monkeypatch: Any, caplog: Any, offline: str) -> None:
    _break(monkeypatch, "find", ConnectionResetError("gone"), after=1)
    folder = fetch()
    if offline == "warn":
        assert fetch(offline=offline) == folder
        assert "no connection (gone), 3 times" in caplog.text
        assert "continuing with the complete mirror" in caplog.text
        (folder / "a" / "1.png").unlink()
    message = r"memory://set: no connection \(gone\), 3 times; try again later"
    with pytest.raises(DataError, match=message):
        fetch(offline=offline)


def test_all_files_that_cannot_be_read_are_listed(
    fetch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(monkeypatch, "get_file", PermissionError("secret://user:password@host"), after=1)
    message = r"2 of 3 files of memory://set could not be read:\n  credentials belong"
    with pytest.raises(DataError, match=message) as caught:
        fetch(connections=1)
    assert str(caught.value).count("credentials belong") == 1
    assert str(caught.value).count("access denied (403)") == 2
    assert "password" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (PermissionError(13, "Permission denied", "/cache/0"), StoreError, "there .Permission"),
        (OSError(28, "No space left on device"), StoreSpaceError, "the local disk is full"),
    ],
)
def test_a_disk_that_cannot_be_written_is_named(
    fetch: Open, monkeypatch: Any, fault: Any, error: Any, message: str
) -> None:
    _break(monkeypatch, "get_file", fault)
    with pytest.raises(error, match=message):
        fetch()


def test_a_mirror_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = r"file is not a folder of this user, but a mirror needs its own folders.*paths\.cache"
    with pytest.raises(StoreError, match=message):
        Root("memory://set", tmp_path / "file", QUICK).refresh()


def test_two_readers_share_each_file(reads: list[str], fetch: Open) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetch(refresh=False), range(2)))
    assert folders[0] == folders[1]
    assert sorted(reads) == ["a/1.png", "a/2.png", "notes.txt"]


def test_an_interrupted_read_ends_at_once_and_leaves_nothing(
    fetch: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main_thread, cancelled = threading.main_thread().ident, []

    async def press_ctrl_c(self: Fetcher, files: object) -> None:
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(files)

    monkeypatch.setattr(Fetcher, "run", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert len(cancelled) == 1
    assert not list(tmp_path.rglob(".build-*"))
    assert not [thread for thread in threading.enumerate() if "lit_data" in thread.name]


def test_a_list_of_sums_is_used_and_left_out(remote: MemoryFileSystem, fetch: Open) -> None:
    sums = [f"{hashlib.sha256(b'one').hexdigest()}  a/1.png", f"{'0' * 64}  a/2.png"]
    remote.pipe("/set/SHA256SUMS", "\n".join(sums).encode())
    message = r"a/2\.png: its SHA256 sum is 3fc4ccf.*states 0000(.|\n)*1 of 3 files"
    with pytest.raises(DataError, match=message):
        fetch()
    assert sorted(_files(fetch(checksums=False))) == ["a/1.png", "a/2.png", "notes.txt"]
    remote.pipe("/set/SHA256SUMS", b"0" * 64 + b"  missing.png\n")
    message = r"missing\.png(.|\n)*1 file of memory://set/SHA256SUMS is missing"
    with pytest.raises(DataError, match=message):
        fetch()


def test_what_cannot_be_read_says_what_to_do(
    fetch: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"remote\.anon is for S3, and data\.root is memory://"):
        fetch(anon=True)

    def fail(scheme: str) -> None:
        raise ImportError("Install s3fs")

    for root, message in (
        ("nosuch://x", "does not know this scheme"),
        ("gs://x", "needs a package"),
        ("s3://bucket/set", "pip install s3fs"),
    ):
        if root.startswith("s3"):
            monkeypatch.setattr(fsspec, "get_filesystem_class", fail)
        with pytest.raises(ConfigError, match=message):
            Root(root, tmp_path, QUICK).refresh()


def test_a_server_that_sends_more_than_it_states_is_cut_off(
    fetch: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = [0]

    def flood(self: MemoryFileSystem, path: str, *args: Any, callback: Any, **kwargs: Any) -> None:
        for _ in range(1000):
            sent[0] += 1000
            callback.relative_update(1000)

    monkeypatch.setattr(MemoryFileSystem, "get_file", flood)
    message = r"more than the allowed \d bytes(.|\n)*3 of 3 files"
    with pytest.raises(DataError, match=message):
        fetch()
    assert sent[0] <= 3 * 1000, "each of three files is broken off at the first piece"
    assert not [path for path in tmp_path.rglob("*.png") if path.stat().st_size]


RECORDS = [
    b"",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"format": 1, "url": 3}',
    b'{"format": 1, "complete": [1]}',
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_damaged_records_cost_time_only(fetch: Open, record: bytes) -> None:
    path = fetch().parent / NAME
    path.write_bytes(record + b"\n")
    assert _files(fetch()) == FILES
    head = path.read_bytes().splitlines()[0]
    for complete in (b'["x"]', b'{"x": "y"}', b"7"):
        changed = re.sub(rb'"complete": \{[^}]*\}', b'"complete": ' + complete, head)
        assert changed != head
        path.write_bytes(changed + b"\n")
        assert _files(fetch())["notes.txt"] == b"text"
