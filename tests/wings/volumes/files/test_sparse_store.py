"""The sparse store: built once, by several processes, and never believed blindly."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import DataError, StoreCorruptError
from lit_data.wings.volumes import IndexOptions, Resolution, SparseStore, index_volume, wrap_array
from lit_data.wings.volumes.files import sparse_store
from tests.wings.volumes.files.scans import OPTIONS, SHAPE, build_store, check_store, write_scans

pytestmark = [pytest.mark.timeout(120)]


def test_nobody_reads_an_index_who_may_not_read_its_volume(tmp_path: Path) -> None:
    write_scans(tmp_path, 2, labels=False)
    scans = [tmp_path / "ct" / f"v{number:02}.npy" for number in range(2)]
    scans[1].chmod(0o600)
    modes = [path.stat().st_mode & 0o044 for path in build_store(tmp_path).paths]
    assert modes == [scans[0].stat().st_mode & 0o044, 0]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_store_holds_what_the_volumes_hold(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = write_scans(tmp_path)
    store = build_store(tmp_path, processes=processes)
    check_store(store, volumes)
    assert store.counts.tolist() == [int((volume > 500).sum()) for volume in volumes]
    assert store.name(1) == str(tmp_path / "ct" / "v01.npy")
    assert not store[0].positions.flags.writeable
    for sparse, volume in zip(store, volumes, strict=True):
        labels = wrap_array((volume > 0).astype(np.uint8) * 3)
        expected = index_volume(wrap_array(volume), 500, labels=labels)
        for name in ("positions", "values", "slices", "labels"):
            found, wanted = getattr(sparse, name), getattr(expected, name)
            assert found.dtype == wanted.dtype
            assert_array_equal(found, wanted)
        assert_array_equal(sparse.label_index.of(3), np.flatnonzero(volume > 0))
    check_store(pickle.loads(pickle.dumps(store)), volumes)
    # A whole store is opened without reading a dense volume.
    monkeypatch.setattr(sparse_store, "write_volume", lambda *args: pytest.fail("built again"))
    check_store(build_store(tmp_path), volumes)


def test_only_what_changed_is_made_again_and_the_old_file_goes(tmp_path: Path) -> None:
    volumes = write_scans(tmp_path)
    first = build_store(tmp_path)
    old = first[1]
    states = {path: path.stat().st_mtime_ns for path in first.paths[0].parent.iterdir()}
    np.save(tmp_path / "ct" / "v01.npy", volumes[2])
    second = build_store(tmp_path)
    check_store(second, [volumes[0], volumes[2], volumes[2]])
    assert second.paths[0].stat().st_mtime_ns == states[second.paths[0]]
    assert not first.paths[1].exists()
    assert_array_equal(old.values, volumes[1][volumes[1] > 500])  # its map reads on
    assert len(list(second.paths[0].parent.glob("*.voxels"))) == 3


def test_other_options_make_another_store_beside(tmp_path: Path) -> None:
    write_scans(tmp_path)
    smaller = IndexOptions(low_hu=500, resolution=Resolution(4))
    options = (OPTIONS, IndexOptions(low_hu=501), smaller)
    stores = [build_store(tmp_path, options=each) for each in options]
    assert len({store.paths[0].parent for store in stores}) == 3
    assert stores[2][0].shape == (4, 4, 4)


def test_bad_volumes_are_listed_or_left_out(tmp_path: Path) -> None:
    volumes = write_scans(tmp_path)
    np.save(tmp_path / "ct" / "a.npy", np.full(SHAPE, np.nan, np.float32))
    (tmp_path / "ct" / "z.npy").write_bytes(b"no array")
    message = r"a\.npy: 3600 NaN(.|\n)*z\.npy: not a NumPy(.|\n)*2 of 5 volumes are bad"
    for processes in (1, 2):
        with pytest.raises(DataError, match=message):
            build_store(tmp_path, processes=processes)
    store = build_store(tmp_path, on_bad="skip")
    check_store(store, volumes)
    assert [Path(path).name for path, _ in store.skipped] == ["a.npy", "z.npy"]
    assert store.dense_bytes == sum(volume.nbytes for volume in volumes)
    assert str(store).startswith(f"3 volumes, {store.counts.sum()} foreground voxels: ")
    assert str(store).endswith("; 2 skipped")


@pytest.mark.parametrize("name", ["meta.json", "positions.npy", "values.npy", "slices.npy"])
@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-64], lambda raw: raw + bytes(64), lambda raw: b""]
)
def test_damaged_files_are_refused(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    write_scans(tmp_path, 1, labels=False)
    path = build_store(tmp_path).paths[0] / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreCorruptError, match="delete the folder"):
        build_store(tmp_path)


def test_every_byte_is_verified_and_a_file_cut_while_it_is_mapped_is_found(tmp_path: Path) -> None:
    write_scans(tmp_path, 1)
    store = build_store(tmp_path)
    assert store.find_damages() == []
    assert len(store[0]) > 0
    store.check_size()
    for path in sorted(store.paths[0].glob("*.npy")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    lines = SparseStore([store.paths[0]]).find_damages()
    assert len(lines) == 7
    assert all("expected CRC-32" in line for line in lines)
    path = store.paths[0] / "values.npy"
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(StoreCorruptError, match=r"expected \d+ bytes, found \d+"):
        store.check_size()
