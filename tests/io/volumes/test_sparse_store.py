"""The sparse store: built once, by several processes, and never believed blindly."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_data.errors import DataError, StoreCorruptError
from lit_data.io.volumes import (
    IndexOptions,
    Resolution,
    SparseStore,
    find_volumes,
    index_volume,
    sparse_store,
    wrap_array,
)
from lit_data.io.volumes.sparse_file import MAX_OPEN
from lit_data.types import Array

pytestmark = [pytest.mark.timeout(120)]

SHAPE = (6, 20, 30)
OPTIONS = IndexOptions(low_hu=500)


def _write(folder: Path, count: int = 3, *, labels: bool = False) -> list[Array]:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    volumes = [rng.integers(-1000, 1000, SHAPE, dtype=np.int16) for _ in range(count)]
    for number, volume in enumerate(volumes):
        np.save(folder / f"v{number}.npy", volume)
        if labels:
            np.save(folder / f"v{number}_labels.npy", (volume > 0).astype(np.uint8) * 3)
    return volumes


def _build(tmp_path: Path, **arguments: object) -> SparseStore:
    settings = {"options": OPTIONS, "progress": False} | arguments
    return SparseStore.build(find_volumes(tmp_path / "ct"), tmp_path / "cache", **settings)  # type: ignore[arg-type]


def test_nobody_reads_an_index_who_may_not_read_its_volume(tmp_path: Path) -> None:
    _write(tmp_path / "ct", 2)
    (tmp_path / "ct" / "v1.npy").chmod(0o600)
    store = _build(tmp_path)
    assert [store.paths[number].stat().st_mode & 0o044 for number in range(2)][1] == 0
    assert (
        store.paths[0].stat().st_mode & 0o044 == (tmp_path / "ct" / "v0.npy").stat().st_mode & 0o044
    )


def _check(store: SparseStore, volumes: list[Array]) -> None:
    assert len(store) == len(volumes)
    for sparse, volume in zip(store, volumes, strict=True):
        np.testing.assert_array_equal(sparse.coords(), np.argwhere(volume > 500))
        np.testing.assert_array_equal(sparse.values, volume[volume > 500])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_store_holds_what_the_volumes_hold(tmp_path: Path, processes: int) -> None:
    volumes = _write(tmp_path / "ct", labels=True)
    store = _build(tmp_path, processes=processes)
    _check(store, volumes)
    assert store.counts.tolist() == [int((volume > 500).sum()) for volume in volumes]
    assert store.name(1) == str(tmp_path / "ct" / "v1.npy")
    assert not store[0].positions.flags.writeable
    for sparse, volume in zip(store, volumes, strict=True):
        expected = index_volume(
            wrap_array(volume), 500, labels=wrap_array((volume > 0).astype(np.uint8) * 3)
        )
        for name in ("positions", "values", "slices", "labels"):
            found, wanted = getattr(sparse, name), getattr(expected, name)
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
        assert sparse.label_index is not None
        np.testing.assert_array_equal(sparse.label_index.of(3), np.flatnonzero(volume > 0))
    _check(pickle.loads(pickle.dumps(store)), volumes)


def test_a_whole_store_is_opened_without_reading_a_dense_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = _write(tmp_path / "ct")
    _build(tmp_path)
    monkeypatch.setattr(sparse_store, "write_volume", lambda *args: pytest.fail("built again"))
    _check(_build(tmp_path), volumes)


def test_only_what_changed_is_made_again_and_the_old_file_goes(tmp_path: Path) -> None:
    volumes = _write(tmp_path / "ct")
    first = _build(tmp_path)
    old = first[1]
    states = {path: path.stat().st_mtime_ns for path in first.paths[0].parent.iterdir()}
    np.save(tmp_path / "ct" / "v1.npy", volumes[2])
    second = _build(tmp_path)
    _check(second, [volumes[0], volumes[2], volumes[2]])
    assert second.paths[0].stat().st_mtime_ns == states[second.paths[0]]
    assert not first.paths[1].exists()
    np.testing.assert_array_equal(old.values, volumes[1][volumes[1] > 500])  # its map reads on
    assert len(list(second.paths[0].parent.glob("*.voxels"))) == 3


def test_other_options_make_another_store_beside(tmp_path: Path) -> None:
    _write(tmp_path / "ct")
    stores = [
        _build(tmp_path, options=options)
        for options in (
            OPTIONS,
            IndexOptions(low_hu=501),
            IndexOptions(low_hu=500, resolution=Resolution(4)),
        )
    ]
    assert len({store.paths[0].parent for store in stores}) == 3
    assert stores[2][0].shape == (4, 4, 4)


def test_bad_volumes_are_listed_or_left_out(tmp_path: Path) -> None:
    volumes = _write(tmp_path / "ct")
    np.save(tmp_path / "ct" / "a.npy", np.full(SHAPE, np.nan, np.float32))
    (tmp_path / "ct" / "z.npy").write_bytes(b"no array")
    for processes in (1, 2):
        with pytest.raises(
            DataError,
            match=r"a\.npy: 3600 NaN(.|\n)*z\.npy: not a NumPy(.|\n)*2 of 5 volumes are bad",
        ):
            _build(tmp_path, processes=processes)
    store = _build(tmp_path, on_bad="skip")
    _check(store, volumes)
    assert [Path(path).name for path, _ in store.skipped] == ["a.npy", "z.npy"]
    assert store.dense_bytes == sum(volume.nbytes for volume in volumes)
    assert str(store).startswith(f"3 volumes, {store.counts.sum()} occupied voxels: ")
    assert str(store).endswith("; 2 refused")


def test_a_set_of_bad_volumes_alone_is_refused_even_if_they_are_to_be_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "ct").mkdir()
    (tmp_path / "ct" / "z.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match="1 of 1 volumes are bad"):
        _build(tmp_path, on_bad="skip")


def test_labels_of_another_shape_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "ct", 1)
    np.save(tmp_path / "ct" / "v0_seg.npy", np.zeros((6, 30, 20), np.uint8))
    with pytest.raises(DataError, match=r"v0_seg\.npy: labels of shape \(6, 30, 20\) \(turned\?\)"):
        _build(tmp_path)


@pytest.mark.parametrize("name", ["meta.json", "positions.npy", "values.npy", "slices.npy"])
@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-64], lambda raw: raw + bytes(64), lambda raw: b""]
)
def test_a_damaged_file_is_never_read(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    _write(tmp_path / "ct", 1)
    path = _build(tmp_path).paths[0]
    (path / name).write_bytes(damage((path / name).read_bytes()))
    with pytest.raises(StoreCorruptError, match="delete the folder"):
        _build(tmp_path)


def test_many_volumes_need_few_descriptors(tmp_path: Path) -> None:
    _write(tmp_path / "ct", 1)
    first = _build(tmp_path).paths[0]
    paths = [first.with_name(f"{number}{first.suffix}") for number in range(2 * MAX_OPEN)]
    for path in paths:
        shutil.copytree(first, path, copy_function=os.link)
    store = SparseStore(paths)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert sum(len(volume) for volume in store) == 2 * MAX_OPEN * len(store[0])
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3 * MAX_OPEN


def test_a_file_that_is_cut_while_it_is_mapped_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "ct")
    store = _build(tmp_path)
    assert len(store[1]) > 0
    store.check_size()
    path = store.paths[1] / "values.npy"
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(StoreCorruptError, match=r"expected \d+ bytes, found \d+"):
        store.check_size()


def test_every_byte_is_verified(tmp_path: Path) -> None:
    _write(tmp_path / "ct", 1, labels=True)
    store = _build(tmp_path)
    assert store.find_damages() == []
    for path in sorted(store.paths[0].glob("*.npy")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    lines = SparseStore([store.paths[0]]).find_damages()
    assert len(lines) == 7
    assert all("expected CRC-32" in line for line in lines)
