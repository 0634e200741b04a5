"""Sets of volumes whose index and shards a stranger wrote: one line, no traceback, bounded memory."""

import dataclasses
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import ConfigError, StoreCorruptError
from lit_data.core.types import Array
from lit_data.images.store.arrays import ArrayWriter
from lit_data.images.store.files import write_tar
from lit_data.wings.remote.shards.index import Shard
from lit_data.wings.volumes.datasets.distance import empty_box
from lit_data.wings.volumes.datasets.points import WindowRows
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.files.hounsfield import Window
from lit_data.wings.volumes.files.indexing import IndexOptions, index_source
from lit_data.wings.volumes.files.sources import find_volumes
from lit_data.wings.volumes.files.sparse import SparseVolume
from lit_data.wings.volumes.files.sparse_file import KIND, VERSION, SparseFacts
from lit_data.wings.volumes.shards import Described, VolumeIndex, open_shard

OPTIONS = IndexOptions(low_hu=0)


@pytest.fixture
def volume(tmp_path: Path) -> SparseVolume:
    """A volume of 4 x 5 x 6 voxels with two classes of labels."""
    voxels = np.random.default_rng(0).integers(-500, 500, (4, 5, 6), np.int16)
    labels = np.zeros((4, 5, 6), np.uint8)
    labels[1, 1:3, 2:5], labels[2, 1:3, 2:5] = 1, 2
    np.save(tmp_path / "a.npy", voxels)
    np.save(tmp_path / "a_labels.npy", labels)
    return index_source(find_volumes(tmp_path)[0], OPTIONS)


def write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    folder.mkdir()
    write(folder)
    tar = folder.with_suffix(".tar")
    write_tar({path.name: path for path in folder.iterdir()}, tar)
    return tar


def write_shard(folder: Path, volume: SparseVolume, changed: dict[str, Any], **facts: Any) -> Path:
    index = volume.label_index
    arrays = {
        "positions": volume.positions,
        "values": volume.values,
        "slices": volume.slices,
        "labels": volume.labels,
        "classes": index.classes,
        "class_starts": index.starts,
        "class_positions": index.positions,
    }
    known = SparseFacts(
        name="a", path="a", shape=volume.shape, spacing_mm=(1, 1, 1), affine=None,
        low_hu=0, high_hu=None,
    )  # fmt: skip

    def write(temp: Path) -> None:
        writer = ArrayWriter(temp)
        for name, array in (arrays | changed).items():
            writer.add(name, array)
        writer.finish(KIND, VERSION, "0" * 64, dataclasses.asdict(known) | facts)

    return write_folder(folder, write)


def put(array: Array, place: int, value: int) -> Array:
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("positions", lambda array: put(array, 0, -1), "positions, slices"),
        ("positions", lambda array: put(array, -1, 120), "positions, slices"),
        ("positions", lambda array: array[::-1].copy(), "positions, slices"),
        ("positions", lambda array: array * 0, "positions, slices"),
        ("slices", lambda array: put(array, 1, 0), "slices"),
        ("values", lambda array: np.full(len(array), np.nan, np.float32), "values"),
        ("labels", lambda array: np.full(len(array), -9, np.int32), "labels"),
        ("classes", lambda array: put(array, 0, 2**31 - 1), "classes"),
        ("classes", lambda array: put(array, 0, -7), "classes"),
        ("class_positions", lambda array: put(array, 0, -1), "labeled voxels"),
        ("class_positions", lambda array: put(array, -1, 120), "labeled voxels"),
        ("class_positions", lambda array: array[::-1].copy(), "labeled voxels"),
    ],
)
def test_voxels_that_no_volume_has_are_refused(
    name: str,
    change: Callable[[Array], Array],
    fault: str,
    volume: SparseVolume,
    tmp_path: Path,
) -> None:
    source = volume.label_index if name.startswith("class") else volume
    array = getattr(source, {"class_positions": "positions"}.get(name, name))
    shard = write_shard(tmp_path / "shard", volume, {name: change(array)})
    with pytest.raises(StoreCorruptError, match=rf"wrong: {fault}; delete the folder") as caught:
        open_shard(shard)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"spacing_mm": [0, 1, 1]}, "wrong: spacing_mm"),
        ({"spacing_mm": [-1, 1, 1]}, "wrong: spacing_mm"),
        ({"spacing_mm": [10**400, 1, 1]}, "wrong: a number"),
        ({"shape": [2**40, 2**40, 2**40]}, "wrong: shape"),
    ],
)
def test_facts_that_no_volume_has_are_refused(
    facts: dict[str, Any], fault: str, volume: SparseVolume, tmp_path: Path
) -> None:
    with pytest.raises(StoreCorruptError, match=rf"not the facts of a volume \({fault}\)"):
        open_shard(write_shard(tmp_path / "shard", volume, {}, **facts))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", 0),
        ("depth", 2**62),
        ("height", 2**40),
        ("width", 2**64 - 1),
        ("points", 121),
        ("points", 2**63),
        ("nbytes", 0),
        ("nbytes", 2**62),
        ("itemsize", 0),
        ("itemsize", 2**62),
        ("has_labels", 2),
    ],
)
def test_an_index_of_volumes_that_cannot_be_is_refused(
    field: str, value: int, tmp_path: Path
) -> None:
    shard = Shard("a" * 64, "b" * 64, 10_000)
    described = Described("a", "a", (4, 5, 6), 100, 700, 2, True, shard)
    index = VolumeIndex.of([described], {"options": "{}", "skipped": []})
    assert len(VolumeIndex.open(write_folder(tmp_path / "right", index.write)).volumes) == 1
    index.volumes[field] = np.uint64(value)
    with pytest.raises(StoreCorruptError, match=r"volume 0 cannot be: \(.*\)") as caught:
        VolumeIndex.open(write_folder(tmp_path / "wrong", index.write))
    assert "\n" not in str(caught.value)


def _make_tar(kind: str) -> bytes:
    header = tarfile.TarInfo("x")
    text = b""
    if kind == "a header of a terabyte":
        header.type, header.size = tarfile.XHDTYPE, 2**33 - 1
        return header.tobuf(tarfile.GNU_FORMAT)
    if kind == "a file of exabytes":
        header.type, text = tarfile.XHDTYPE, b"26 size=999999999999999999\n"
    elif kind == "names of names":
        header.type, text = tarfile.GNUTYPE_LONGNAME, b"abc\0"
    elif kind == "headers of headers":
        header.type, text = tarfile.XHDTYPE, b"9 a=bcde\n"
    header.size = len(text)
    block = header.tobuf(tarfile.GNU_FORMAT) + text.ljust(512 if text else 0, b"\0")
    if kind == "a file of exabytes":
        return block + tarfile.TarInfo("meta.json").tobuf() + bytes(1024)
    return block * 5000


@pytest.mark.parametrize(
    "kind",
    [
        "a header of a terabyte",
        "a file of exabytes",
        "names of names",
        "headers of headers",
        "many files",
    ],
)
def test_a_hostile_tar_ends_in_a_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(_make_tar(kind))
    with pytest.raises(StoreCorruptError) as caught:
        open_shard(tmp_path / "shard.tar")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"a":' * 200_000, b"5", b"\xff", b'{"arrays": {"../a": 5}}']
)
def test_a_hostile_text_ends_in_a_line(text: bytes, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("meta.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    (tmp_path / "index.tar").write_bytes(stream.getvalue())
    with pytest.raises(StoreCorruptError, match="not a text that was written") as caught:
        VolumeIndex.open(tmp_path / "index.tar")
    assert "\n" not in str(caught.value)


def test_more_windows_than_can_be_listed_are_refused() -> None:
    bank = SimpleNamespace(shapes=[(2**20, 2**10, 2**10)])
    with pytest.raises(ConfigError, match=r"^2147483648 windows of 1 volumes .*data.windows.size"):
        WindowRows(
            bank,
            np.array([0]),
            window=Window(-1000, 400),
            spec=WindowSpec(size=8, mode="sliding"),
            draws=False,
            has_labels=False,
            sdf=False,
            most_mm=None,
            seed=0,
        )


def test_distances_that_memory_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1048576 x 1024 x 1024 voxels at once need 6.6 TB"):
        empty_box((2**20, 2**10, 2**10))
