"""One sparse volume in one file, made to be mapped: a JSON header, then arrays that begin at multiples of 64 bytes.

    8 bytes "LDSPARSE", 8 bytes length of the header (little-endian), the header, then the arrays of ``_SECTIONS`` in
    that order, little-endian, each followed by zeros up to the next multiple of 64.

Nothing is read past the header until an array is used, and a file that is not as long as its header says is refused.
"""

import dataclasses
import json
import math
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from lit_data.errors import DataError
from lit_data.io.store.header import CHECKSUM, MAX_LENGTH, corrupt, dump_plain, open_regular, refuse_twice
from lit_data.io.volumes.sparse import LABEL_DTYPES, VALUE_DTYPES, LabelIndex, SparseVolume, index_dtype
from lit_data.io.volumes.volume import Triple
from lit_data.types import Array

MAGIC: Final = b"LDSPARSE"
VERSION: Final = 1
"""Version of the layout; part of every key."""
ALIGN_BYTES: Final = 64
MAX_HEADER_BYTES: Final = 2**16
_PREFIX_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseHeader:
    """The facts of one file.

    Args:
        key: SHA-256 of the source files' states and the options.
        name: Of the volume.
        path: Of its source.
        shape: (z, y, x).
        spacing_mm: (z, y, x).
        affine: 16 numbers, row by row; None if unknown.
        low_hu: See ``SparseVolume``.
        high_hu: See ``SparseVolume``.
        values_dtype: One of ``VALUE_DTYPES``.
        labels_dtype: One of ``LABEL_DTYPES``; None without labels.
        points: Occupied voxels.
        classes: Labels that occur.
        labelled: Labelled voxels.
        version: Of the layout.
    """

    key: str
    name: str
    path: str
    shape: Triple
    spacing_mm: tuple[float, float, float]
    affine: tuple[float, ...] | None
    low_hu: float
    high_hu: float | None
    values_dtype: str
    labels_dtype: str | None
    points: int
    classes: int
    labelled: int
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("shape", "spacing_mm", "affine"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        numbers = [*self.spacing_mm, *(self.affine or ()), self.low_hu, 0 if self.high_hu is None else self.high_hu]
        checks = {
            "version": self.version == VERSION,
            "shape": len(self.shape) == 3 and all(_is_count(length) and length > 0 for length in self.shape),
            "affine": self.affine is None or len(self.affine) == 16,
            "spacing_mm": len(self.spacing_mm) == 3,
            "a number": all(isinstance(number, int | float) and math.isfinite(number) for number in numbers),
            "values_dtype": self.values_dtype in VALUE_DTYPES,
            "labels_dtype": self.labels_dtype is None or self.labels_dtype in LABEL_DTYPES,
            "a count": all(map(_is_count, (self.points, self.classes, self.labelled))),
            "a text": all(isinstance(text, str) for text in (self.key, self.name, self.path)),
        }
        wrong = [name for name, is_right in checks.items() if not is_right]
        if wrong or math.prod(self.shape) * 8 > MAX_LENGTH:
            raise ValueError(f"wrong: {', '.join(wrong) or 'shape'}")

    @property
    def dense_bytes(self) -> int:
        """Bytes of the volume as a dense array of the values' dtype."""
        return math.prod(self.shape) * np.dtype(self.values_dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        sizes = (pad_up(np.dtype(dtype).itemsize * length) for dtype, length in self.sections().values())
        return len(self.encode()) + sum(sizes)

    def sections(self) -> dict[str, tuple[str, int]]:
        """Dtype and length of each array, in the order of the file."""
        positions = index_dtype(self.shape).name
        sections = {
            "slices": ("int64", self.shape[0] + 1),
            "positions": (positions, self.points),
            "values": (self.values_dtype, self.points),
        }
        if self.labels_dtype is not None:
            sections |= {
                "labels": (self.labels_dtype, self.points),
                "classes": ("int32", self.classes),
                "class_starts": ("int64", self.classes + 1),
                "class_positions": (positions, self.labelled),
            }
        return sections

    def encode(self) -> bytes:
        """What the file begins with, up to the first array."""
        fields = dataclasses.asdict(self)
        text = dump_plain(fields | {CHECKSUM: zlib.crc32(dump_plain(fields))})
        start = MAGIC + len(text).to_bytes(8, "little") + text
        return start + bytes(pad(len(start)))

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """The header of a file's first bytes.

        Raises:
            ValueError: or TypeError, RecursionError: not what ``encode`` wrote.
        """
        length = int.from_bytes(raw[8:_PREFIX_BYTES], "little")
        if raw[:8] != MAGIC or length > MAX_HEADER_BYTES - _PREFIX_BYTES:
            raise ValueError(f"starts with {raw[:8]!r}")
        fields = json.loads(raw[_PREFIX_BYTES : _PREFIX_BYTES + length], object_pairs_hook=refuse_twice)
        if not isinstance(fields, dict) or fields.keys() != {f.name for f in dataclasses.fields(cls)} | {CHECKSUM}:
            raise ValueError("other keys")
        del fields[CHECKSUM]
        header = cls(**fields)
        if not raw.startswith(header.encode()):
            raise ValueError("its bytes are not those that were written")
        return header


def read_sparse_header(path: Path) -> SparseHeader:
    """Read the header of a file and hold the file's length against it.

    Raises:
        StoreError: it cannot be opened.
        StoreCorruptError: damaged, or not of this version.
    """
    fd = open_regular(path)
    try:
        return _read_header(fd, path)
    finally:
        os.close(fd)


def map_sparse_file(path: Path) -> SparseVolume:
    """Map a file: its arrays are read-only views that are read when they are used.

    Raises:
        StoreError: it cannot be opened.
        StoreCorruptError: damaged, or not of this version.
    """
    fd = open_regular(path)
    try:
        header = _read_header(fd, path)
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    arrays: dict[str, Array] = {}
    at = len(header.encode())
    for name, (dtype, length) in header.sections().items():
        arrays[name] = np.ndarray((length,), np.dtype(dtype).newbyteorder("<"), data, at)
        at += pad_up(arrays[name].nbytes)
    try:
        return _build_volume(header, arrays)
    except DataError as error:
        raise corrupt(path, str(error)) from error


def pad(size_bytes: int) -> int:
    """Zeros that follow so many bytes."""
    return -size_bytes % ALIGN_BYTES


def pad_up(size_bytes: int) -> int:
    """Bytes with the zeros that follow them."""
    return size_bytes + pad(size_bytes)


def _read_header(fd: int, path: Path) -> SparseHeader:
    try:
        header = SparseHeader.decode(os.pread(fd, MAX_HEADER_BYTES, 0))
    except (ValueError, TypeError, RecursionError) as error:
        raise corrupt(path, f"not a sparse volume of version {VERSION} ({error!s:.200})") from error
    found_bytes = os.fstat(fd).st_size
    if found_bytes != header.nbytes:
        raise corrupt(path, f"expected {header.nbytes} bytes, found {found_bytes}")
    return header


def _build_volume(header: SparseHeader, arrays: dict[str, Array]) -> SparseVolume:
    index = None
    if header.labels_dtype is not None:
        index = LabelIndex(header.shape, arrays["classes"], arrays["class_starts"], arrays["class_positions"])
    return SparseVolume(
        positions=arrays["positions"],
        values=arrays["values"],
        shape=header.shape,
        spacing_mm=header.spacing_mm,
        slices=arrays["slices"],
        affine=None if header.affine is None else np.array(header.affine).reshape(4, 4),
        low_hu=header.low_hu,
        high_hu=header.high_hu,
        labels=arrays.get("labels"),
        label_index=index,
    )


def _is_count(value: Any) -> bool:  # noqa: ANN401 - whatever a JSON text holds
    return type(value) is int and 0 <= value <= MAX_LENGTH
