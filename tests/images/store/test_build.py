"""Building a decoded store in one process: what is written, when it is not, and what the errors say."""

import errno
import io
import logging
import os
import re
import shutil
import stat
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import (
    ConfigError,
    DataError,
    StoreCorruptError,
    StoreError,
    StoreSpaceError,
    StoreStaleError,
)
from lit_data.core.progress import limit_threads
from lit_data.images.decoders import DecodedSource, ImageSource
from lit_data.images.store.arrays import META_NAME
from lit_data.images.store.store import DecodedStore
from lit_inspect.npy import NPY_LOCK

FINGERPRINT = '{"format": 1, "read": {"alpha": "error", "page": null}}'
Usage = namedtuple("Usage", "total used free")


class NpyDecoder:
    """Reads the first file as .npy. Other files are bad at their header, a first pixel of 66 or 77 at its pixels."""

    def __init__(self, fingerprint: str = FINGERPRINT) -> None:
        self.fingerprint = fingerprint
        self.decoded = []

    def header(self, source: ImageSource) -> tuple[int, int, int, str]:
        array = self._load(source.paths[0])
        return (*array.shape, array.dtype.name)

    def __call__(self, source: ImageSource) -> DecodedSource:
        self.decoded.append(Path(source.paths[0]).name)
        array = self._load(source.paths[0])
        if array.flat[0] == 66:
            raise DataError(f"{source.paths[0]}: pixels are damaged")
        if array.flat[0] == 77:
            array = array[:, :1]
        notes = (f"{source.paths[0]}: pixel 55",) if array.flat[0] == 55 else ()
        return DecodedSource(
            array, notes, tuple(zlib.crc32(Path(path).read_bytes()) for path in source.paths)
        )

    def _load(self, path: str) -> np.ndarray:
        raw = Path(path).read_bytes()
        if not raw.startswith(b"\x93NUMPY"):
            raise DataError(f"{path}: not an array")
        with NPY_LOCK:
            return np.load(io.BytesIO(raw))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of six images 0.npy ... 5.npy, whose pixels are their number."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(6):
        save(folder / f"{number}.npy", number)
    return folder


def save(path: Path, value: int, shape: tuple[int, ...] = (3, 4, 5), dtype: str = "uint8") -> None:
    np.save(path, np.full(shape, value, dtype))


def sources_of(folder: Path) -> list[ImageSource]:
    return [ImageSource((str(path),)) for path in sorted(folder.iterdir())]


def build(images: Path, *, decoder: NpyDecoder | None = None, **options: object) -> DecodedStore:
    return DecodedStore.build(
        sources_of(images),
        images.parent / "cache",
        decoder=decoder or NpyDecoder(),
        progress=False,
        **options,
    )


def values(store: DecodedStore) -> list[int]:
    return [int(store[number].flat[0]) for number in range(len(store))]


def list_cache(images: Path) -> set[str]:
    return {path.name for path in (images.parent / "cache").iterdir()} - {".lock"}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in (folder, *folder.rglob("*"))
    }


def test_every_image_is_decoded_once_and_in_order(images: Path) -> None:
    decoder = NpyDecoder()
    with limit_threads(3):
        store = build(images, decoder=decoder)
    assert sorted(decoder.decoded) == [f"{number}.npy" for number in range(6)]
    assert values(store) == list(range(6))
    assert list_cache(images) == {store.key}
    assert re.fullmatch("[0-9a-f]{64}", store.key)


def test_second_build_writes_nothing(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(images)
    before = snapshot(images.parent)
    opened = os.open

    def open_to_read(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_to_read)
    for name in ("mkdir", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refuse_with(errno.EROFS))
    decoder = NpyDecoder()
    second = build(images, decoder=decoder)
    assert (second.key, values(second), decoder.decoded) == (first.key, list(range(6)), [])
    assert snapshot(images.parent) == before


def refuse_with(number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_unwritable_folder(images: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "mkdir", refuse_with(number))
    message = rf"cannot be written there \({os.strerror(number)}\); make it writable.*paths.cache="
    with pytest.raises(StoreError, match=f"cache: a decoded store {message}"):
        build(images)


def test_cache_path_that_is_a_file_or_cannot_exist(images: Path) -> None:
    (images.parent / "cache").touch()
    with pytest.raises(StoreError, match=r"written there \(File exists\); remove what is in its"):
        build(images)
    folder = images.parent / ("x" * 300)
    with pytest.raises(StoreError, match=r"written there \(File name too long\); check the path"):
        DecodedStore.build(sources_of(images), folder, decoder=NpyDecoder())
    with pytest.raises(StoreError, match="no store of images at"):
        DecodedStore.open(folder)


def test_bad_images_are_all_listed_and_nothing_is_left(images: Path) -> None:
    save(images / "1.npy", 66)
    save(images / "4.npy", 77)
    decoder = NpyDecoder()
    first = "1.npy: pixels are damaged"
    second = r"4.npy: decoded to uint8 \(3, 1, 5\) but its header"
    with pytest.raises(DataError, match=rf"{first}\n.*{second}(.|\n)*2 of 6 images are bad"):
        build(images, decoder=decoder)
    assert len(decoder.decoded) == 6
    assert list_cache(images) == set()
    for name in ("1.npy", "4.npy"):  # bad at their headers, before anything is written
        (images / name).write_text("no image")
    (images.parent / "cache" / ".lock").unlink(missing_ok=True)
    (images.parent / "cache").rmdir()
    message = r"1.npy: not an array\n.*4.npy: not an array(.|\n)*2 of 6 images are bad"
    with pytest.raises(DataError, match=message):
        build(images)
    assert not (images.parent / "cache").exists()


def test_skip_lists_bad_images(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    (images / "1.npy").write_text("no image")
    save(images / "4.npy", 66)
    store = build(images, on_bad="skip")
    assert values(store) == [0, 2, 3, 5]
    names = [Path(store.name(number)).name for number in range(4)]
    assert names == ["0.npy", "2.npy", "3.npy", "5.npy"]
    skipped = [(Path(path).name, problem.split(": ")[1]) for path, problem in store.skipped]
    assert skipped == [("1.npy", "not an array"), ("4.npy", "pixels are damaged")]
    assert store.verify() == []
    assert (store.path / "pixels.npy").stat().st_size == 128 + 4 * 60
    caplog.clear()
    assert build(images, on_bad="skip").skipped == store.skipped
    assert "2 of 6 images are bad and skipped" in caplog.text


def test_skip_with_nothing_left_is_an_error(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in images.iterdir():
        path.write_text("no image")
    with pytest.raises(DataError, match="6 of 6 images are bad"):
        build(images, on_bad="skip")
    save(images / "0.npy", 1)
    monkeypatch.setattr("lit_data.images.store.arrays.MAX_META_BYTES", 100)
    message = "5 bad images are too many to skip; the first: .*1.npy: not an array"
    with pytest.raises(DataError, match=message):
        build(images, on_bad="skip")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 4, 5), "uint16", r"uint16, but .*/0.npy has uint8; .*\nthe images do not fit into"),
        ((1, 4, 5), "uint8", r"1 channel.*, but .*/0.npy has 3 channel(.|\n)*data.read.gray_to"),
        ((3, 4, 5), "float64", "dtype float64 is not allowed; allowed are uint8, uint16, int16, f"),
        ((3, 0, 5), "uint8", r"shape \(3, 0, 5\) has no pixels"),
    ],
)
def test_images_that_differ(images: Path, shape: tuple[int, ...], dtype: str, message: str) -> None:
    save(images / "2.npy", 1, shape, dtype)
    with pytest.raises(DataError, match=f"2.npy: {message}"):
        build(images)
    assert not (images.parent / "cache").exists()


def test_no_images_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the list of images is empty; check the data folder"):
        DecodedStore.build([], tmp_path / "cache", decoder=NpyDecoder())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad": "ignore"}, "on_bad='ignore' is unknown: choose one of error, skip"),
        ({"wait_s": -1}, "wait_s=-1 is not allowed; give 0 or more seconds"),
    ],
)
def test_wrong_options(images: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(images, **options)


def test_several_files_for_one_image(images: Path) -> None:
    paths, cache = sorted(map(str, images.iterdir())), images.parent / "cache"
    sources = [ImageSource(tuple(part)) for part in (paths[:1], paths[1:4], paths[4:])]
    store = DecodedStore.build(sources, cache, decoder=NpyDecoder())
    assert [store.name(number) for number in range(3)] == [paths[0], paths[1], paths[4]]
    assert store.verify() == []
    save(images / "3.npy", 9)
    assert len(store.verify()) == 1
    regrouped = [ImageSource(tuple(paths[:3])), ImageSource(tuple(paths[3:]))]
    assert DecodedStore.build(regrouped, cache, decoder=NpyDecoder()).key != store.key


def test_names_that_are_not_utf8_are_kept_and_shown_escaped(images: Path) -> None:
    (images / "0.npy").rename(os.fsdecode(os.fsencode(images) + b"/\xff\n.npy"))
    folder = images.parent / "new\nline\udcff"
    store = DecodedStore.build(sources_of(images), folder, decoder=NpyDecoder())
    assert os.fsencode(store.name(5)).endswith(b"/\xff\n.npy")
    assert store.verify() == []
    os.truncate(store.path / "pixels.npy", 7)
    message = r"/new\\nline\\xff/[0-9a-f]{64}/pixels.npy: expected 488 bytes"
    with pytest.raises(StoreCorruptError, match=message):
        DecodedStore.open(store.path)


def test_space_and_remarks_are_logged(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in ("2.npy", "3.npy"):
        save(images / name, 55)
    assert build(images, item="mask").notes == {"pixel 55": 2}
    assert "2 images: pixel 55" in caplog.text
    assert re.search(r"store: 6 masks, 1\.\d MB \([\d.]+ .B free\) in ", caplog.text)


# --- stale stores
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "fingerprint", "message"),
    [
        ("2.npy", 9, FINGERPRINT, r"files 1 changed \(first: .*/2.npy\)$"),
        ("6.npy", 9, FINGERPRINT, r"files 1 added \(first: .*/6.npy\)$"),
        ("5.npy", None, FINGERPRINT, r"files 1 removed \(first: .*/5.npy\)$"),
        ("", None, FINGERPRINT.replace("error", "drop"), r"decoder.read.alpha 'error' -> 'drop'$"),
        ("", None, "other", r"decoder '{.*}' -> 'other'$"),
    ],
)
def test_a_change_rebuilds_and_says_why(
    images: Path, name: str, value: int | None, fingerprint: str, message: str, caplog: Any
) -> None:
    old, decoder = build(images), NpyDecoder(fingerprint)
    if value is not None:
        save(images / name, value)
    elif name:
        (images / name).unlink()
    stale = message.replace("$", "; allow rebuilding, run .*prepare")
    with pytest.raises(StoreStaleError, match=f"out of date: {stale}"):
        build(images, rebuild=False, decoder=decoder)
    assert list_cache(images) == {old.key}
    assert caplog.messages == []
    new = build(images, decoder=decoder)
    assert list_cache(images) == {old.key, new.key}
    assert len(caplog.messages) == 1
    assert re.search(
        "rebuilding the decoded store, which has changed: " + message, caplog.text.strip()
    )
    assert values(old) == list(range(6))


def test_skipped_image_that_was_repaired(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    (images / "1.npy").write_text("no image")
    build(images, on_bad="skip")
    save(images / "1.npy", 1)
    caplog.clear()
    assert values(build(images, on_bad="skip")) == list(range(6))
    assert caplog.messages[0].endswith("changed: a file that was skipped")


def test_other_content_with_the_size_and_time_of_the_old_one_is_decoded(images: Path) -> None:
    path = images / "2.npy"
    old = build(images, rebuild=False)  # the first one needs no permission
    status = path.stat()
    save(path, 9)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (line,) = old.verify()
    assert line.startswith(f"{path}: the source has CRC-32")
    with pytest.raises(StoreStaleError, match="out of date: the content of files"):
        build(images, rebuild=False)
    new = build(images)
    assert values(new) == [0, 1, 9, 3, 4, 5]
    assert new.key != old.key
    assert values(old) == list(range(6))


def test_a_folder_swapped_for_one_with_equal_sizes_and_times_is_decoded(images: Path) -> None:
    other = images.with_name("other")
    other.mkdir()
    for number in range(6):
        save(other / f"{number}.npy", 10 + number)
        shutil.copystat(images / f"{number}.npy", other / f"{number}.npy")
    build(images)
    images.rename(images.with_name("old"))
    other.rename(images)
    assert values(build(images)) == list(range(10, 16))


def test_files_with_new_change_times_alone_are_compared_once(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = build(images)
    for path in images.iterdir():
        path.chmod(0o600)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        decoder = NpyDecoder()
        again = build(images, decoder=decoder, rebuild=False)
        assert (again.path, again.key, decoder.decoded) == (store.path, store.key, [])
    assert caplog.text.count("comparing 6 files") == 1
    shutil.rmtree(store.path)  # the link to it leads nowhere now
    assert values(build(images)) == list(range(6))


def test_damaged_store_is_reported_and_not_rebuilt(images: Path) -> None:
    path = build(images).path
    os.truncate(path / "pixels.npy", 7)
    with pytest.raises(StoreCorruptError, match=f"found 7; delete the folder {path} and run"):
        build(images)


# --- old stores
# -----------------------------------------------------------------------------------------------------


def build_variants(images: Path, count: int) -> Iterator[DecodedStore]:
    for variant in range(count):
        store = build(images, decoder=NpyDecoder(f"variant {variant}"))
        os.utime(store.path, ns=(variant, variant))
        yield store


def test_two_newest_stores_are_kept_and_readers_read_on(images: Path) -> None:
    stores = list(build_variants(images, 4))
    assert list_cache(images) == {store.key for store in stores[-2:]}
    for store in stores:
        assert values(store) == list(range(6))
        store.check_size()
    (stores[2].path / META_NAME).write_text("{}")  # one that cannot be read counts as old
    new = build(images)
    assert list_cache(images) == {stores[3].key, new.key}


def test_stores_of_other_images_and_other_folders_stay(images: Path) -> None:
    cache, sources, others = images.parent / "cache", sources_of(images), images.parent / "others"
    halves = [
        DecodedStore.build(half, cache, decoder=NpyDecoder()) for half in (sources[:3], sources[3:])
    ]
    (cache / "notes").mkdir()
    (cache / "0123").touch()
    others.mkdir()
    save(others / "a.npy", 1)
    stores = list(build_variants(others, 3))
    assert list_cache(images) == {"notes", "0123", *(store.key for store in (*halves, *stores[1:]))}


# --- disk space and temporary files
# ---------------------------------------------------------------------------------


def test_too_little_free_space(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = build(images)
    save(images / "2.npy", 9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 3000))
    message = (
        r"\(checked before writing\): it needs 1.0 MB, and 3.0 kB is free; .*paths.cache=<folder>"
    )
    with pytest.raises(StoreSpaceError, match=f"cache: no space .*{message}"):
        build(images)
    assert list_cache(images) == {old.key}
    assert old.verify() == [line for line in old.verify() if "2.npy" in line]


@pytest.mark.parametrize(
    ("call", "number"),
    [("posix_fallocate", errno.ENOSPC), ("write", errno.EDQUOT), ("fsync", errno.EFBIG)],
)
def test_full_disk(images: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    monkeypatch.setattr(os, call, refuse_with(number))
    message = rf"no space for the decoded store \({os.strerror(number)}\): it needs"
    with pytest.raises(StoreSpaceError, match=message):
        build(images)
    assert list_cache(images) == set()


def test_no_reservation_and_small_writes(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "posix_fallocate", refuse_with(errno.EOPNOTSUPP))
    store = build(images)
    assert (values(store), store.verify()) == (list(range(6)), [])
    monkeypatch.delattr(os, "posix_fallocate")
    assert values(build(images, decoder=NpyDecoder("other"))) == list(range(6))


def test_store_that_another_process_publishes_first_is_used(
    images: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    theirs = []

    class Overtaken(NpyDecoder):
        def __call__(self, source: ImageSource) -> DecodedSource:
            if not theirs:
                theirs.append(build(images))
            return super().__call__(source)

    with limit_threads(1):
        ours = build(images, decoder=Overtaken())
    assert ours.key == theirs[0].key
    assert os.path.samestat(ours.path.stat(), theirs[0].path.stat())
    assert values(ours) == values(theirs[0]) == list(range(6))
    assert list_cache(images) == {ours.key}
    assert "another process published this store first; it is used" in caplog.text


@pytest.mark.parametrize(("mode", "expected"), [(0o644, 0o755), (0o640, 0o750), (0o600, 0o700)])
def test_a_store_is_as_private_as_its_sources(images: Path, mode: int, expected: int) -> None:
    before = os.umask(0o022)
    try:
        for path in images.iterdir():
            path.chmod(mode if path.name == "1.npy" else 0o644)
        store = build(images)
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.path.stat().st_mode) == expected


@pytest.mark.parametrize(("first", "second"), [("error", "skip"), ("skip", "error")])
def test_a_store_of_good_images_serves_both_rules(images: Path, first: str, second: str) -> None:
    key = build(images, on_bad=first).key
    assert build(images, on_bad=second, rebuild=False).key == key
    (images / "1.npy").write_text("no image")
    build(images, on_bad="skip")
    with pytest.raises(DataError, match=r"1.npy(.|\n)*1 of 6 images is bad"):
        build(images, on_bad="error")
