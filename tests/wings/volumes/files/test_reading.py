"""Reading dense volumes: what each kind of file gives, and what is refused."""

import gzip
import io
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array
from lit_data.wings.volumes import find_volumes, open_volume
from lit_data.wings.volumes.files.sources import open_labels
from tests.wings.volumes.files.scans import write_nifti, write_nii, write_npy, write_npz

SHAPE = (5, 4, 3)


@pytest.fixture
def volume() -> Array:
    return np.random.default_rng(0).integers(-1000, 2000, SHAPE, dtype=np.int16)


def _write_npy_fortran(path: Path, volume: Array) -> Path:
    return write_npy(path, np.asfortranarray(volume))


def _write_npz_fortran(path: Path, volume: Array) -> Path:
    return write_npz(path, np.asfortranarray(volume))


WRITERS = [write_npy, _write_npy_fortran, write_npz, _write_npz_fortran, write_nifti, write_nii]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("dtype", ["<i2", ">i2", "<i4", "<f4", "<f8"])
def test_every_kind_gives_the_same_slices_in_any_order(
    tmp_path: Path, volume: Array, write: Callable[[Path, Array], Path], dtype: str
) -> None:
    with open_volume(write(tmp_path, volume.astype(dtype))) as opened:
        assert opened.shape == SHAPE
        assert opened.dtype == (np.int16 if dtype.endswith("i2") else np.float32)
        for begin, end in [(0, 2), (2, 5), (1, 4), (0, 5), (4, 5)]:
            slab = opened.read(begin, end)
            assert slab.dtype == opened.dtype
            assert_array_equal(slab, volume[begin:end])


def test_spacing_and_affine_come_from_the_header(tmp_path: Path, volume: Array) -> None:
    with open_volume(write_nifti(tmp_path, volume)) as opened:
        assert opened.spacing_mm == pytest.approx((2.0, 0.6, 0.5))
        assert_allclose(opened.affine, np.diag([0.5, 0.6, 2.0, 1.0]), rtol=1e-6)
    orders: tuple[Literal["C", "F"], ...] = ("C", "F")
    for order in orders:
        ordered = np.asarray(volume, order=order)
        np.savez(tmp_path / f"{order}.npz", ct=ordered, spacing_mm=np.array([3.0, 1.0, 1.5]))
        with open_volume(tmp_path / f"{order}.npz") as opened:
            assert opened.spacing_mm == (3.0, 1.0, 1.5)
            assert_array_equal(opened.read(0, 5), volume)


@pytest.mark.parametrize(
    ("slope", "intercept", "factor", "added"),
    [
        (np.nan, np.nan, 1, 0),
        (0.0, 5.0, 1, 0),
        (np.inf, 0, 1, 0),
        (2.0, np.nan, 2, 0),
        (1.0, -1024.0, 1, -1024),
    ],
)
def test_scale_fields_of_nifti_that_mean_nothing_change_nothing(
    tmp_path: Path, volume: Array, slope: float, intercept: float, factor: int, added: int
) -> None:
    for dtype in ("<i2", "<i4"):
        path = write_nii(tmp_path, volume.astype(dtype))
        raw = bytearray(path.read_bytes())
        raw[112:120] = struct.pack("<ff", slope, intercept)
        path.write_bytes(raw)
        with open_volume(path) as opened:
            scaled = volume.astype(np.int32) * factor + added
            assert_array_equal(opened.read(0, 5), scaled)


def test_bad_voxels_are_counted_and_the_first_is_named(tmp_path: Path, volume: Array) -> None:
    values = volume.astype(np.float32)
    values[1, 2, 0], values[1, 3, 1], values[4, 0, 0] = np.nan, np.inf, -np.inf
    message = r"v.npz: 3 NaN or infinite voxels, the first at z 1, y 2, x 0; data.nan_fil"
    with open_volume(write_npz(tmp_path, values)) as opened:
        opened.read(0, 1)
        with pytest.raises(DataError, match=message):
            opened.read(1, 2)
    with open_volume(tmp_path / "v.npz", nan_fill=-1024) as opened:
        expected = np.where(np.isfinite(values), values, -1024)
        assert_array_equal(opened.read(0, 5), expected)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.int16), "three axes"),
        (np.zeros((2, 0, 4), np.int16), "three axes"),
        (np.zeros((2, 3, 4), np.complex64), "dtype complex64"),
        (np.zeros((2, 3, 4), object), "Python objects"),
    ],
)
def test_arrays_that_are_no_volumes_are_refused(tmp_path: Path, array: Array, message: str) -> None:
    np.save(tmp_path / "v.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=f"v.npy: .*{message}"):
        open_volume(tmp_path / "v.npy")
    np.savez(tmp_path / "v.npz", one=np.zeros(SHAPE), two=np.zeros(SHAPE))
    message = "2 arrays of three axes out of one, two; save one volume per file"
    with pytest.raises(DataError, match=message):
        open_volume(tmp_path / "v.npz")


@pytest.mark.parametrize("write", [write_npy, write_npz, write_nii])
def test_files_that_are_cut_short_are_refused_when_they_are_opened(
    tmp_path: Path, volume: Array, write: Callable[[Path, Array], Path]
) -> None:
    path = write(tmp_path, volume)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"v\.n"):
        open_volume(path)


def test_packed_files_are_checked_when_they_are_read(tmp_path: Path, volume: Array) -> None:
    path = write_nifti(tmp_path, volume)
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-7]))
    with (
        open_volume(path) as opened,
        pytest.raises(DataError, match="truncated: 7 of 24 bytes are missing from slice 4"),
    ):
        opened.read(4, 5)
    path.write_bytes(whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    with open_volume(path) as opened, pytest.raises(DataError, match=r"v\.nii\.gz.*CRC"):
        opened.read(0, 5)


NAN_SPACING = struct.pack("<4f", 1, 0.5, 0.6, np.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"no volume" * 100, "not a NIfTI file"),
        (lambda raw: raw[:344] + b"ni1\0" + raw[348:], "without its voxels"),
        (lambda raw: raw[:76] + NAN_SPACING + raw[92:], "voxel spacing"),
        (lambda raw: raw[:70] + struct.pack("<hh", 32, 64) + raw[74:], "dtype complex64"),
        (lambda raw: raw[:40] + struct.pack("<5h", 4, 3, 4, 5, 2) + raw[50:], "save one volume"),
        (lambda raw: raw[:40] + struct.pack("<4h", 3, 32000, 32000, 5) + raw[48:], "a slice takes"),
    ],
)
def test_nifti_headers_that_make_no_volume_are_refused(
    tmp_path: Path, volume: Array, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write_nifti(tmp_path, volume)
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    with pytest.raises(DataError, match=f"v.nii.gz: .*{message}"):
        open_volume(path)


def test_a_missing_library_says_what_to_install(
    tmp_path: Path, volume: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_nifti(tmp_path, volume)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ConfigError, match="nibabel is not installed: pip install nibabel"):
        open_volume(path)


@pytest.mark.parametrize(("flip", "warned"), [(1, 0), (-1, 1)])
def test_labels_that_lie_elsewhere_are_told(
    tmp_path: Path, volume: Array, flip: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    nib = pytest.importorskip("nibabel")
    labels = np.ones(SHAPE[::-1], np.uint8)
    nib.save(nib.Nifti1Image(volume.T, np.eye(4)), tmp_path / "v.nii")
    nib.save(nib.Nifti1Image(labels, np.diag([1, flip, 1, 1])), tmp_path / "v_labels.nii")
    (source,) = find_volumes(tmp_path)
    with open_volume(source) as opened:
        opened_labels = open_labels(source, opened)
        opened_labels.close()
    assert caplog.text.count("are its axes rotated?") == warned


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _write(path: Path, *members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)


GOOD = _npy(np.arange(4))
LONG_HEADER = b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(99)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../a.npy", GOOD)], r"member '../a.npy'; names are letters, digits and underscores"),
        ([("a/b.npy", GOOD)], r"member 'a/b.npy'; names are"),
        ([("a.txt", b"text")], r"member 'a.txt'; names are"),
        ([("b\n.npy", GOOD)], r"member 'b\\n.npy'; names are"),
        ([("a.npy", _npy(np.array([1, None])))], "a.npz: a.npy: array of Python objects"),
        ([("a.npy", GOOD + b"x")], r"shape \(4,\), int64: 32 bytes expected, 33 found"),
        ([("a.npy", GOOD[:-1])], "32 bytes expected, 31 found"),
        ([("a.npy", b"")], "a.npy: not a NumPy array"),
        ([("a.npy", b"text")], "a.npy: not a NumPy array of version 1, 2 or 3, starts with b'text"),
        ([("a.npy", LONG_HEADER)], "array header of 2147483647 bytes; at most 111"),
    ],
)
def test_hostile_members(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    _write(tmp_path / "a.npz", *members)
    with pytest.raises(DataError, match=message):
        open_volume(tmp_path / "a.npz")


# 237 bytes that made NumPy ask for 8 TiB
def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (8796093022208,), }"
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    _write(tmp_path / "a.npz", ("a.npy", header))
    with pytest.raises(DataError, match="8796093022208 bytes expected, 0 found"):
        open_volume(tmp_path / "a.npz")
    monkeypatch.setattr("lit_data.wings.volumes.files.single_files.MAX_MEMBER_BYTES", 2255)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1000, np.uint8), b=np.zeros(1000, np.uint8))
    with pytest.raises(DataError, match="2256 bytes unpacked, more than max_total_bytes=2255"):
        open_volume(tmp_path / "a.npz")


# zipfile warns when such an archive is written
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_archives_than_those_of_numpy_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.npz", ("a.npy", GOOD), ("a.npy", GOOD))
    with pytest.raises(DataError, match=r"two members are named 'a.npy'"):
        open_volume(tmp_path / "a.npz")
    _write(tmp_path / "a.npz", ("a.npy", GOOD), method=zipfile.ZIP_LZMA)
    with pytest.raises(DataError, match=r"encrypted or packed by method 14; save with numpy"):
        open_volume(tmp_path / "a.npz")


def test_no_file_of_the_package_lets_numpy_unpickle() -> None:
    package = Path(__file__).resolve().parents[4] / "lit_data"
    uses = [
        line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "allow_pickle" in line or "np.load(" in line
    ]
    assert len(uses) >= 2
    assert [line for line in uses if "allow_pickle=False" not in line] == []
