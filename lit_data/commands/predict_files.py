"""Files of a prediction: whole or absent, also where an image is larger than memory."""

import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import StoreError
from lit_data.io.problems import show_path
from lit_data.types import Array

PART: Final = re.compile(r"\.lit_data-[0-9a-f]{16}\.part")
"""Names of files that are being written; of an interrupted run they are left over."""
_SLAB_PX: Final = 2**22
_COLOUR_TYPES: Final = {1: 0, 3: 2}
_UP: Final = 2  # PNG filter: each byte less the one above it


@dataclass(frozen=True, slots=True)
class ProbabilityMap:
    """Probability of each pixel of an image.

    Args:
        values: [H, W] float32 in 0..1, or uint16 where 65535 is 1, which may be mapped from a file.
    """

    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) px."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, part: slice) -> NDArray[np.float32]:
        """Some rows: [h, W] float32 in 0..1."""
        values = self.values[part]
        scale = np.float32(1 if values.dtype == np.float32 else 65535)
        unit: NDArray[np.float32] = np.divide(values, scale, dtype=np.float32)
        return unit

    def encode(self, part: slice, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
        """Some rows as whole numbers: [h, W], the largest of the dtype is 1."""
        if self.values.dtype == dtype:
            return self.values[part]
        whole: NDArray[Any] = np.rint(self.rows(part) * np.float32(np.iinfo(dtype).max)).astype(dtype)
        return whole


def slabs(shape: tuple[int, int]) -> Iterator[slice]:
    """The rows of an image in parts of bounded size; most images are one part."""
    step = max(1, _SLAB_PX // shape[1])
    return (slice(top, min(top + step, shape[0])) for top in range(0, shape[0], step))


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end, or leaves nothing behind if an error comes.

    Raises:
        StoreError: It cannot be written.
    """
    part = path.with_name(f".lit_data-{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                yield file
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot write {show_path(path)}: {error.strerror}. Free the folder or set paths.runs."
        ) from error


def write_png(path: Path, shape: tuple[int, int], parts: Iterable[Array]) -> None:
    """Write a PNG part by part, whole or not at all.

    Args:
        path: The file; its folder is made.
        shape: (height, width) px.
        parts: Its rows from the top, [h, W] or [h, W, 3] (R, G, B), uint8 or uint16.

    Raises:
        StoreError: It cannot be written.
    """
    with replaced(path) as file:
        packer, above = zlib.compressobj(1), np.zeros((1, 0), np.uint8)
        for number, part in enumerate(parts):
            if number == 0:
                colour, bits = _COLOUR_TYPES[1 if part.ndim == 2 else part.shape[2]], 8 * part.itemsize
                file.write(b"\x89PNG\r\n\x1a\n")
                _write_chunk(file, b"IHDR", struct.pack(">IIBBBBB", shape[1], shape[0], bits, colour, 0, 0, 0))
            rows = np.ascontiguousarray(part, part.dtype.newbyteorder(">")).view(np.uint8).reshape(len(part), -1)
            _write_chunk(file, b"IDAT", packer.compress(_filter(rows, above).data))
            above = rows[-1:]
        _write_chunk(file, b"IDAT", packer.flush())
        _write_chunk(file, b"IEND", b"")


def _filter(rows: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    filtered = np.full((len(rows), rows.shape[1] + 1), _UP, np.uint8)
    filtered[:, 1:] = rows
    filtered[1:, 1:] -= rows[:-1]
    if above.size:
        filtered[:1, 1:] -= above
    return filtered


def _write_chunk(file: BinaryIO, kind: bytes, data: bytes) -> None:
    if data or kind == b"IEND":
        file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
