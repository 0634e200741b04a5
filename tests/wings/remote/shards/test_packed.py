"""Shards with the files of images: decoded here to the bytes of decoded shards, within their bound, or refused."""

import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, DataError, StoreCorruptError
from lit_data.core.files import find_sha256
from lit_data.core.parts import Part
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.images.decoders import ImageDecoder
from lit_data.images.read_options import ReadOptions
from lit_data.images.store.arrays import ArrayFolder
from lit_data.images.store.sources import join_paths
from lit_data.wings.remote.shards.packed import unpack
from lit_data.wings.remote.shards.store import ShardedStore
from lit_data.wings.volumes.datamodule import CTDataModule
from tests.helpers.reading import read_folder
from tests.wings.remote.shards.test_shards import open_files, open_store, write_changed

IMAGES = 12
SHARD_BYTES = 3 * 3 * 96 * 128  # three images
DECODER = ImageDecoder(ReadOptions())


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, of which one is bad, and both kinds of shards."""
    folder = tmp_path_factory.mktemp("packed")
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = rng.integers(0, 255, (6, 8, 3), np.uint8)
        photo = cv2.resize(coarse, (128, 96), interpolation=cv2.INTER_CUBIC)
        path = folder / "photos" / f"{number % 2}/{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), photo)
    bad = folder / "photos/1/07.jpg"
    bad.write_bytes(bad.read_bytes()[:-200])
    reports = {}
    for encoding in ("decoded", "source"):
        reports[encoding] = publish(folder, folder / f"{encoding}.shards", encoding=encoding)
    decoded_bytes = reports["decoded"]["bytes"]
    source_bytes = reports["source"]["bytes"]
    assert reports["source"] == reports["decoded"] | {
        "bytes": source_bytes, "decoded_bytes": decoded_bytes
    }  # fmt: skip
    assert source_bytes < 0.6 * decoded_bytes  # of small images, with tables of some kB
    return folder


def make(root: Path, cache: Path, **options: Any) -> InspectionFiles:
    return open_files(root, cache, **{"on_bad": "skip"} | options)


def publish(sets: Path, address: Path, cache: str = "writer", **options: Any) -> dict[str, int]:
    files = make(sets / "photos", address.parent / cache)
    return files.publish(str(address), SHARD_BYTES, **{"encoding": "source"} | options)


def open_set(root: Path, cache: Path, **options: Any) -> ShardedStore:
    return open_store(make(root, cache, **options))


def test_they_are_decoded_to_the_bytes_of_decoded_shards(sets: Path, tmp_path: Path) -> None:
    packed = open_set(sets / "source.shards", tmp_path / "a")
    decoded = open_set(sets / "decoded.shards", tmp_path / "b")
    local = make(sets / "photos", tmp_path / "c").open_images()
    assert len(packed) == len(decoded) == len(local) == IMAGES - 1
    for number in range(len(local)):
        assert_array_equal(packed[number], local[number])
    assert packed.verify(progress=False) == []
    assert packed.key == decoded.key
    numbers = range(len(packed.cache.shards))
    for number in numbers:
        assert packed.stamp(number) == decoded.stamp(number)
        copies = [store.cache.fetch(number).read_bytes() for store in (packed, decoded)]
        assert copies[0] == copies[1]
    assert [Path(path).name for path, _ in packed.skipped] == ["07.jpg"]
    assert list((packed.cache.folder / "decoding").iterdir()) == []
    copy = pickle.loads(pickle.dumps(packed))
    assert_array_equal(copy[5], local[5])


def test_parts_and_ended_runs_give_the_same(sets: Path, tmp_path: Path) -> None:
    address = tmp_path / "set.shards"
    for number in (1, 0):
        publish(sets, address, f"cache-{number}", part=Part(number, 2))
    shutil.rmtree(address / "notes")  # as if it was killed before: shards are fetched again
    publish(sets, address, part=Part(0, 2))
    assert publish(sets, address, part=Part(1, 2))["shards_kept"] == 4
    publish(sets, address, finish=True)
    assert read_folder(address) == read_folder(sets / "source.shards")
    # Shards of the other encoding are others.
    assert publish(sets, address, encoding="decoded")["shards_kept"] == 0


def test_copies_stay_in_their_bound(sets: Path, tmp_path: Path) -> None:
    sizes = [
        shard.nbytes for shard in open_set(sets / "source.shards", tmp_path / "a").cache.shards
    ]
    most = 4 * max(sizes)
    store = open_set(sets / "source.shards", tmp_path / "b", cache_bytes=most)
    assert not store.fits
    taken = []

    def measure(*args: Any, **options: Any) -> Path:
        decoded = unpack(*args, **options)
        files = [path for path in store.cache.folder.rglob("*") if path.is_file()]
        taken.append(sum(path.stat().st_size for path in files))
        return decoded

    with patch.object(store.cache, "_unpack", lambda *args: measure(*args, decoder=DECODER)):
        for number in (*range(len(store)), 0):
            store[number]
    assert len(taken) == len(sizes) + 1
    assert most // 2 < max(taken) <= most
    with pytest.raises(ConfigError, match="must hold at least four shards"):
        open_set(sets / "source.shards", tmp_path / "c", cache_bytes=most - 1)


def test_other_pixels_than_those_that_were_written_are_refused(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_set(sets / "source.shards", tmp_path / "a")
    call = ImageDecoder.__call__

    def decode(self: ImageDecoder, source: Any) -> Any:  # another version of a library
        decoded = call(self, source)
        decoded.array[0, 0, 0] ^= 1
        return decoded

    monkeypatch.setattr(ImageDecoder, "__call__", decode)
    with pytest.raises(
        DataError, match="decode to different pixels here than where it was written"
    ):
        store[0]
    assert list(store.cache.folder.glob("*.tar")) == []
    monkeypatch.undo()
    for path in (sets / "source.shards/shards").iterdir():
        copy = tmp_path / "there.shards/shards" / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes()[:-1] + b"x")
    for path in (sets / "source.shards").glob("*.*"):
        shutil.copy(path, tmp_path / "there.shards")
    with pytest.raises(DataError, match=r"packed.tar: its SHA-256 sum is wrong, twice"):
        open_set(tmp_path / "there.shards", tmp_path / "b")[0]


def rewrite(tar: Path, folder: Path, facts: dict[str, Any], arrays: dict[str, Any]) -> Path:
    """Write a packed shard with other content."""
    changed = write_changed(tar, ("packed", 1), folder, facts, arrays)
    (folder / "temp").mkdir()
    return changed


def test_hostile_shards_are_refused(sets: Path, tmp_path: Path) -> None:
    tar = max((sets / "source.shards/shards").iterdir())
    assert find_sha256(tar) in tar.name
    old = ArrayFolder(tar, "packed", 1)
    (tmp_path / "plain").mkdir()
    most = SHARD_BYTES * 2
    assert unpack(tar, tmp_path / "plain", most, decoder=DECODER).stat().st_size > SHARD_BYTES // 2
    table = join_paths([[f"../../{number}.jpg"] for number in range(len(old.map("firsts")))])
    outside = np.array(old.map("files"))
    outside["name_end"] = table.files["name_end"]
    same = join_paths([["a/b.jpg"], ["a"], *[[f"{number}.jpg"] for number in range(9)]])
    clash = np.array(old.map("files"))
    clash["name_end"] = same.files["name_end"][: len(clash)]
    clash_names = same.names[: clash["name_end"][-1]]
    negative = np.array(old.map("files"))
    negative["size_bytes"][0] = -5
    hostile = [
        ("leads out of the folder", {}, {"files": outside, "names": table.names}),
        ("a file has the name of a folder", {}, {"files": clash, "names": clash_names}),
        ("no packed shard", {}, {"files": negative}),
        ("no packed shard", {}, {"bytes": np.zeros(7, np.uint8)}),
        ("no packed shard", {}, {"firsts": np.array(old.map("firsts"))[::-1].copy()}),
        ("bytes of pixels", {}, {"widths": np.array(old.map("widths")) * 4000}),
        ("no packed shard", {"dtype": "object"}, {}),
        ("no packed shard", {"band_px": "x"}, {}),
        ("no packed shard", {"on_bad": []}, {}),
    ]
    for number, (message, facts, arrays) in enumerate(hostile):
        changed = rewrite(tar, tmp_path / str(number), facts, arrays)
        with pytest.raises(StoreCorruptError, match=message) as caught:
            unpack(changed, changed.parent / "temp", most, decoder=DECODER)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("../*.jpg"))


def test_a_file_that_changes_while_it_is_packed(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "photos", tmp_path / "photos"))
    call = ImageDecoder.__call__

    def decode(self: ImageDecoder, source: Any) -> Any:
        decoded = call(self, source)
        path = Path(source.paths[0])
        path.write_bytes(path.read_bytes()[:-1] + b"x")  # of the same length
        return decoded

    with (
        patch.object(ImageDecoder, "__call__", decode),
        pytest.raises(DataError, match="it changed while it was read"),
    ):
        make(root, tmp_path / "cache").publish(str(tmp_path / "set.shards"), encoding="source")
    assert not (tmp_path / "set.shards/set.json").exists()


def test_what_cannot_be_packed(sets: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prepare.encoding='png' is unknown"):
        publish(sets, tmp_path / "set.shards", encoding="png")
    (tmp_path / "volumes").mkdir()
    np.save(tmp_path / "volumes/0.npy", np.full((4, 5, 6), 300, np.int16))
    data = CTDataModule(str(tmp_path / "volumes"), cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"prepare.encoding=source is for images"):
        data.source.publish(str(tmp_path / "set.shards"), encoding="source")
