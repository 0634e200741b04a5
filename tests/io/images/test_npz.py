"""Archives may come from anybody: nothing is unpacked before its header fits its size."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lit_data.errors import DataError
from lit_data.io.volumes import open_volume


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
def test_a_hostile_member_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
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
    monkeypatch.setattr("lit_data.io.volumes.files.MAX_MEMBER_BYTES", 2255)
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
    package = Path(__file__).resolve().parents[3] / "lit_data"
    uses = [
        line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "allow_pickle" in line or "np.load(" in line
    ]
    assert len(uses) >= 2
    assert [line for line in uses if "allow_pickle=False" not in line] == []
