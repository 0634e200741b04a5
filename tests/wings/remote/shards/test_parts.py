"""Shards in parts: each part alone, in any order and from any machine, gives what one process gives."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import ConfigError, DataError, StoreSpaceError
from lit_data.core.parts import Part
from lit_data.datamodules import InspectionDataModule
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.images.decoders import ImageDecoder
from lit_data.images.read_options import ReadOptions
from lit_data.images.writing import write_png
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.remote import Root
from lit_data.wings.remote.transport import FolderTransport
from lit_data.wings.volumes import CTDataModule
from tests.helpers.reading import read_folder
from tests.wings.remote.servers import WebServer
from tests.wings.remote.shards.test_shards import open_files, open_store, write_photos

SHARD_BYTES = 6_000  # one image of 60 x 100 grey pixels; eight are a group
PARTS = 2


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, two of them bad, and the shards that one process makes of them."""
    folder = tmp_path_factory.mktemp("parts")
    write_photos(folder / "photos")
    (folder / "photos/images/04.png").write_bytes(b"no image")
    content = (folder / "photos/images/05.png").read_bytes()
    (folder / "photos/images/05.png").write_bytes(content[:-500])
    report = make(folder / "photos", folder / "cache").publish(
        str(folder / "one.shards"), SHARD_BYTES
    )
    counts = {"images": 22, "skipped": 2, "shards": 22, "shards_kept": 0}
    assert report == counts | {"bytes": report["bytes"]}
    return folder


def make(root: Path | str, cache: Path, **options: Any) -> InspectionFiles:
    return open_files(root, cache, **{"on_bad": "skip"} | options)


def write_part(
    root: Path | str, cache: Path, address: Path, number: int, **options: Any
) -> dict[str, int]:
    part = Part(number, PARTS)
    return make(root, cache, **options).publish(str(address), SHARD_BYTES, part=part)


def finish(root: Path | str, cache: Path, address: Path, **options: Any) -> dict[str, int]:
    return make(root, cache, **options).publish(str(address), SHARD_BYTES, finish=True)


def test_parts_give_what_one_process_gives(sets: Path, tmp_path: Path) -> None:
    address = tmp_path / "set.shards"
    # Another machine has the files elsewhere.
    elsewhere = Path(shutil.copytree(sets / "photos", tmp_path / "elsewhere/photos"))
    report = write_part(elsewhere, tmp_path / "a", address, 1)
    assert (report["images"], report["skipped"]) == (16, 0)
    with pytest.raises(
        DataError,
        match=r"1 of 3 groups of images is not written with these options.* images/00.png: run their parts",
    ):
        finish(sets / "photos", tmp_path / "b", address)
    assert not (address / "set.json").exists()
    report = write_part(sets / "photos", tmp_path / "c", address, 0)
    assert (report["images"], report["skipped"], report["shards_kept"]) == (6, 2, 0)
    report = finish(elsewhere, tmp_path / "d", address)
    counts = {"images": 22, "skipped": 2, "shards": 22, "shards_kept": 22}
    assert report == counts | {"bytes": report["bytes"]}
    assert read_folder(address) == read_folder(sets / "one.shards")
    files = make(address, tmp_path / "reader")
    store = open_store(files)
    names = [files.name(path) for path, _ in store.skipped]
    assert names == ["images/04.png", "images/05.png"]
    assert store.similar[20] == store.similar[21]


def test_what_is_there_is_not_written_again(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, sent = Path(shutil.copytree(sets / "one.shards", tmp_path / "set.shards")), []
    put = FolderTransport.put

    def count(self: FolderTransport, path: Path, name: str) -> None:
        sent.append(name)
        put(self, path, name)

    monkeypatch.setattr(FolderTransport, "put", count)
    monkeypatch.setattr(InspectionFiles, "decoder", property(lambda _: _Unused()))
    monkeypatch.setattr("lit_data.wings.remote.shards.publish.FIRST_IMAGES", 3)
    for number in range(PARTS):
        report = write_part(sets / "photos", tmp_path / "cache", address, number)
        assert report["shards_kept"] == report["shards"] > 0
    assert sent == []


class _Unused:
    """Decoder that reads the headers of three images and no more."""

    def __init__(self) -> None:
        self._decoder = ImageDecoder(ReadOptions())
        self.fingerprint = self._decoder.fingerprint

    def header(self, source: Any) -> Any:
        assert Path(source.paths[0]).stem < "03"
        return self._decoder.header(source)

    def __call__(self, source: Any) -> Any:
        raise AssertionError("nothing is to be decoded")


def test_parts_of_little_may_be_empty(sets: Path, tmp_path: Path) -> None:
    address = tmp_path / "set.shards"
    files = make(sets / "photos", tmp_path / "cache")
    reports = [files.publish(str(address), 2**20, part=Part(number, 3)) for number in range(3)]
    assert [report["images"] for report in reports] == [0, 0, 22]
    assert files.publish(str(address), 2**20, finish=True)["images"] == 22


def test_an_address_that_takes_nothing_is_named(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"file/set.shards: cannot be read \(Not a directory\)"):
        write_part(sets / "photos", tmp_path, tmp_path / "file/set.shards", 0)

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(StoreSpaceError, match=r"set.shards: cannot be written \(No space left"):
        write_part(sets / "photos", tmp_path, tmp_path / "set.shards", 0)


@pytest.mark.parametrize("damage", ["note", "note of another", "shard"])
def test_damaged_notes_and_lost_shards_are_written_again(
    sets: Path, tmp_path: Path, damage: str
) -> None:
    address = Path(shutil.copytree(sets / "one.shards", tmp_path / "set.shards"))
    notes = sorted((address / "notes").iterdir())
    if damage == "note":
        content = bytearray(notes[0].read_bytes())
        content[len(content) // 2] ^= 1  # of the largest array
        notes[0].write_bytes(content)
    elif damage == "note of another":
        notes[0].write_bytes(notes[1].read_bytes())
    else:
        next((address / "shards").iterdir()).unlink()
    (address / "set.json").unlink()
    with pytest.raises(DataError, match=r"1 of 3 groups of images is not written"):
        finish(sets / "photos", tmp_path / "cache", address)
    for number in range(PARTS):
        write_part(sets / "photos", tmp_path / "cache", address, number)
    finish(sets / "photos", tmp_path / "cache", address)
    assert read_folder(address) == read_folder(sets / "one.shards")


def test_parts_unlike_the_first_images_are_refused(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "photos", tmp_path / "photos"))
    write_png(root / "images/20.png", np.zeros((60, 100), np.uint16))
    message = r"(?s)20.png: uint16, but .*00.png has uint8.*do not fit into one store"
    with pytest.raises(DataError, match=message):
        write_part(root, tmp_path, tmp_path / "set.shards", 1)


def test_a_part_is_no_finish(sets: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"prepare.finish=true joins all parts: remove prepare.part=0/2"
    ):
        make(sets / "photos", tmp_path).publish(
            str(tmp_path / "set.shards"), part=Part(0, 2), finish=True
        )


@dataclass(frozen=True)
class Kind:
    """A kind of data on a server.

    Attributes:
        write: Makes its files below a folder.
        open: Makes its datamodule.
        suffix: Of the files whose content is asked for one by one.
        asked: How many of them part 1 of 2 asks for.
    """

    write: Callable[[Path], None]
    open: Callable[..., Any]
    suffix: str
    asked: int


def write_boxes(root: Path) -> None:
    """Write 20 images with boxes; one is no image, and one has a good header alone."""
    rng = np.random.default_rng(0)
    (root / "labels").mkdir(parents=True)
    for number in range(20):
        pixels = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        write_png(root / f"images/{number:02}.png", pixels)
        label = root / f"labels/{number:02}.txt"
        label.write_text("0 .5 .5 .2 .2\n" * (number % 3))
    (root / "classes.txt").write_text("cat\n")
    (root / "images/07.png").write_bytes(b"no image")
    cut_short = root / "images/11.png"
    cut_short.write_bytes(cut_short.read_bytes()[:-500])


def write_volumes(root: Path) -> None:
    root.mkdir(parents=True)
    for number in range(4):
        np.save(root / f"{number}.npy", np.full((4, 5, 6 + number), 300 + number, np.int16))


def write_series(root: Path) -> None:
    """Write three series of two slices, two of them in one folder."""
    pydicom = pytest.importorskip("pydicom")
    dataset = pydicom.dcmread(pydicom.data.get_testdata_file("CT_small.dcm"))
    for series in range(3):
        dataset.SeriesInstanceUID = f"1.2.{series}"
        for height in range(2):
            dataset.ImagePositionPatient = [0, 0, 10 * height]
            path = root / f"{'ab'[series > 1]}/{series}_{height}.dcm"
            path.parent.mkdir(parents=True, exist_ok=True)
            dataset.save_as(path)


KINDS = {
    "photographs": Kind(write_photos, InspectionDataModule, ".png", 13),
    "boxes": Kind(write_boxes, partial(DetectionDataModule, size_px=(30, 40)), ".png", 5),
    "volumes": Kind(write_volumes, partial(CTDataModule, processes=1), ".npy", 2),
    "series": Kind(write_series, partial(CTDataModule, processes=1), ".dcm", 6),
}


@pytest.mark.parametrize("name", KINDS)
def test_files_of_a_server_are_read_one_by_one(
    name: str, tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_data.wings.remote.shards.publish.FIRST_IMAGES", 1)
    kind, local = KINDS[name], tmp_path / "local/set"
    kind.write(local)
    for path in local.rglob("*.*"):
        web.files[f"set/{path.relative_to(local).as_posix()}"] = path.read_bytes()
    remote = RemoteOptions(backoff_s=0.01, retries=2)
    mirror = Root(f"{web.url}/set", tmp_path / "mirrors", remote)
    mirror.refresh()

    def publish(root: Path | str, address: str, **options: Any) -> None:
        cache = str(tmp_path / "cache")
        data = kind.open(str(root), cache_dir=cache, on_bad="skip", remote=remote)
        data.source.publish(str(tmp_path / address), SHARD_BYTES, **options)

    publish(mirror.folder, "one.shards")
    web.asked.clear()
    for path in web.files:
        web.faults[path] = ["cut", 503]
    publish(f"{web.url}/set", "set.shards", part=Part(1, 2))
    # Content is asked for of its own files, and of the first, which says how large a group is.
    asked = {path for method, path in web.asked if method == "GET" and path.endswith(kind.suffix)}
    assert len(asked) == kind.asked
    publish(f"{web.url}/set", "set.shards", part=Part(0, 2))
    publish(f"{web.url}/set", "set.shards", finish=True)
    assert read_folder(tmp_path / "set.shards") == read_folder(tmp_path / "one.shards")
    assert not list((tmp_path / "cache").rglob(f"*{kind.suffix}"))
