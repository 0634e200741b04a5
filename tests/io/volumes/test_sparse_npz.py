"""Sparse archives: written whole, read by anybody, believed in nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.errors import DataError, StoreSpaceError
from lit_data.io.volumes import (
    SparseVolume,
    index_volume,
    open_volume,
    read_sparse_npz,
    wrap_array,
    write_npz,
)
from lit_data.types import Array

SHAPE = (6, 5, 4)


def _draw() -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    return rng.integers(-1000, 1000, SHAPE, dtype=np.int16), rng.choice([0, 0, 2, 5], SHAPE).astype(
        np.uint8
    )


def _index(low_hu: float = 300, high_hu: float | None = 900) -> SparseVolume:
    volume, labels = _draw()
    dense = wrap_array(volume, spacing_mm=(2.0, 1.0, 0.5), affine=np.diag([0.5, 1.0, 2.0, 1.0]))
    return index_volume(dense, low_hu, high_hu, labels=wrap_array(labels))


def test_an_archive_gives_back_what_was_written(tmp_path: Path) -> None:
    volume = _index()
    write_npz(volume, tmp_path / "new" / "a.npz")
    again = read_sparse_npz(tmp_path / "new" / "a.npz")
    for name in ("positions", "values", "slices", "labels", "affine"):
        expected, found = getattr(volume, name), getattr(again, name)
        assert expected.dtype == found.dtype
        np.testing.assert_array_equal(found, expected)
    assert (again.shape, again.spacing_mm) == (SHAPE, (2.0, 1.0, 0.5))
    assert (again.low_hu, again.high_hu) == (300, 900)
    np.testing.assert_array_equal(again.window_labels((0, 0, 0), SHAPE), _draw()[1])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.npz"]


@pytest.mark.parametrize(("low", "high"), [(300, 900), (500.5, 600)])
def test_an_archive_is_a_source_of_the_volume_it_was_made_from(
    tmp_path: Path, low: float, high: float
) -> None:
    write_npz(_index(), tmp_path / "a.npz")
    with open_volume(tmp_path / "a.npz") as dense:
        found = index_volume(dense, low, high, labels=dense.labels)
    expected = _index(low, high)
    for name in ("positions", "values", "labels", "slices"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.spacing_mm == expected.spacing_mm


@pytest.mark.parametrize(("low", "high"), [(299, 900), (300, None), (300, 901)])
def test_an_archive_cannot_give_voxels_that_it_left_out(
    tmp_path: Path, low: float, high: float | None
) -> None:
    write_npz(_index(), tmp_path / "a.npz")
    with (
        open_volume(tmp_path / "a.npz") as dense,
        pytest.raises(DataError, match=r"made for 300\.0 to 900\.0 HU"),
    ):
        index_volume(dense, low, high)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": np.int64(2)}, "another layout"),
        ({"values": None}, "not a sparse volume of layout 1: values"),
        ({"positions": lambda a: a[::-1]}, "not ascending"),
        ({"positions": lambda a: a + 10**6}, "not below 120"),
        ({"positions": lambda a: a - 200}, "not ascending, or not below"),
        ({"positions": lambda a: a.astype(np.int64)}, "dtype int64"),
        ({"slices": lambda a: a[:-1]}, "slices"),
        ({"slices": lambda a: np.maximum(a - 1, 0)}, "slices do not say"),
        ({"values": lambda a: a[:-1]}, "values"),
        ({"values": lambda a: a.astype(np.float64)}, "values float64"),
        ({"shape": lambda a: -a}, "shape"),
        ({"occupied_hu": lambda a: a * np.nan}, "occupied from nan"),
        ({"affine": lambda a: a[:3]}, "affine of shape"),
        ({"labels": None}, "labels need all of"),
        ({"classes": lambda a: a[::-1].copy()}, "not ascending whole numbers"),
        ({"class_starts": lambda a: a + 1}, "classes of a sparse volume"),
        ({"class_positions": lambda a: a + 119}, "not ascending, or not below"),
    ],
)
def test_archives_that_lie_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.npz"
    write_npz(_index(), path)
    arrays = dict(np.load(path, allow_pickle=False))
    for name, change in changes.items():
        array = arrays.pop(name)
        if change is not None:
            arrays[name] = change(array) if callable(change) else change
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=rf"a\.npz: .*{message}"):
        read_sparse_npz(path)


def test_a_name_without_its_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends in \.npz"):
        write_npz(_index(), tmp_path / "a.np")


def test_a_full_disk_leaves_the_old_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(_index(), tmp_path / "a.npz")
    before = (tmp_path / "a.npz").read_bytes()

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StoreSpaceError, match="no room"):
        write_npz(_index(500), tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
