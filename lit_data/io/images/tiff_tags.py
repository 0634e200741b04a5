"""Directories and tags of TIFF files, each checked to lie inside the file before it is read.

https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf,
https://www.awaresystems.be/imaging/tiff/bigtiff.html
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError

MAX_TAGS = 512
"""More tags than this in one directory are junk (cgohlke/tifffile#102: 3 126 of them took 64 GB)."""

_MAX_PAGES = 65_536
_TYPE_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_NUMBERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}


@dataclass(frozen=True, slots=True)
class TiffLayout:
    """Byte order and sizes of the numbers of a file (``order`` as for ``struct``), and its first directory."""

    order: str
    big: bool
    first: int

    @property
    def count_format(self) -> str:
        """Number of tags, at the start of a directory."""
        return self.order + ("Q" if self.big else "H")

    @property
    def offset_format(self) -> str:
        """Place of the next directory, at the end of a directory."""
        return self.order + ("Q" if self.big else "I")

    @property
    def tag_format(self) -> str:
        """Code, type, number of values, the values or their place."""
        return self.order + ("HHQ8s" if self.big else "HHI4s")


def read_layout(stream: BinaryIO) -> TiffLayout:
    """Read the first bytes of a TIFF or BigTIFF.

    Raises:
        DataError: damaged.
    """
    stream.seek(0)
    start = stream.read(16)
    order = "<" if start[:2] == b"II" else ">"
    big = start[2:4] in (b"+\x00", b"\x00+")
    if len(start) < 8 or (big and start[4:8] != struct.pack(order + "HH", 8, 0)):
        raise DataError(f"damaged TIFF header {start!r}")
    return TiffLayout(
        order, big, *_unpack(order + ("Q" if big else "I"), start[8:] if big else start[4:8])
    )


def find_pages(stream: BinaryIO, size_bytes: int, layout: TiffLayout) -> list[int]:
    """Follow the chain of directories.

    Returns:
        Where each is, in order.

    Raises:
        DataError: the chain leaves the file, loops, or has more than 65 536 pages.
    """
    offsets: dict[int, None] = {}
    offset = layout.first
    while offset:
        if offset in offsets or len(offsets) >= _MAX_PAGES:
            raise DataError(f"damaged TIFF: its directories loop, or are more than {_MAX_PAGES}")
        offsets[offset] = None
        end = (
            offset
            + struct.calcsize(layout.count_format)
            + _count_tags(stream, size_bytes, layout, offset)
        )
        stream.seek(end)
        (offset,) = _unpack(
            layout.offset_format, stream.read(struct.calcsize(layout.offset_format))
        )
    if not offsets:
        raise DataError("damaged TIFF: no directory")
    return list(offsets)


class Directory:
    """The tags of one page; values are read when asked for.

    Args:
        stream: The file.
        size_bytes: Its size.
        layout: How its numbers are written.
        place: Where the directory is.

    Raises:
        DataError: more than 512 tags, values outside the file, or more bytes of values than the
            file has.
    """

    def __init__(self, stream: BinaryIO, size_bytes: int, layout: TiffLayout, offset: int) -> None:
        self._stream = stream
        self._layout = layout
        self._tags: dict[int, tuple[int, int, bytes]] = {}
        table_bytes = _count_tags(stream, size_bytes, layout, offset)
        stream.seek(offset + struct.calcsize(layout.count_format))
        total_bytes = 0
        for code, kind, count, field in struct.iter_unpack(
            layout.tag_format, stream.read(table_bytes)
        ):
            self._tags.setdefault(code, (kind, count, field))
            value_bytes = count * _TYPE_BYTES.get(kind, 0)
            if value_bytes > len(field):
                total_bytes += value_bytes
                end = self._place(field) + value_bytes
                if max(end, total_bytes) > size_bytes:
                    raise DataError(
                        f"truncated or damaged TIFF: tag {code} needs {end} bytes, {size_bytes} "
                        "found"
                    )

    def __contains__(self, code: int) -> bool:
        return code in self._tags

    def count(self, code: int) -> int:
        """Count the values of a tag; 0 if there is none."""
        return self._tags[code][1] if code in self._tags else 0

    def read(self, code: int) -> bytes:
        """The values of a tag as they stand in the file; nothing if there is none."""
        if code not in self._tags:
            return b""
        kind, count, field = self._tags[code]
        value_bytes = count * _TYPE_BYTES.get(kind, 0)
        if value_bytes <= len(field):
            return field[:value_bytes]
        self._stream.seek(self._place(field))
        return self._stream.read(value_bytes)

    def numbers(self, code: int) -> NDArray[np.uint64]:
        """The values of a tag of whole numbers, none if there is no such tag.

        Raises:
            DataError: the tag holds something else.
        """
        kind = self._tags[code][0] if code in self._tags else 1
        if kind not in _NUMBERS:
            raise DataError(f"damaged TIFF: tag {code} has type {kind} where whole numbers belong")
        return np.frombuffer(self.read(code), self._layout.order + _NUMBERS[kind]).astype(np.uint64)

    def number(self, code: int, default: int) -> int:
        """The first value of a tag of whole numbers, or the default."""
        numbers = self.numbers(code)
        return int(numbers[0]) if len(numbers) else default

    def _place(self, field: bytes) -> int:
        offset: int = struct.unpack(self._layout.offset_format, field)[0]
        return offset


def _count_tags(stream: BinaryIO, size_bytes: int, layout: TiffLayout, offset: int) -> int:
    """Bytes of a directory's table of tags, which is checked to lie inside the file."""
    stream.seek(min(offset, size_bytes))
    (count,) = _unpack(layout.count_format, stream.read(struct.calcsize(layout.count_format)))
    if count > MAX_TAGS:
        raise DataError(
            f"damaged TIFF: {count} tags at byte {offset}; at most {MAX_TAGS} are allowed"
        )
    table_bytes = int(count) * struct.calcsize(layout.tag_format)
    end = (
        offset
        + struct.calcsize(layout.count_format)
        + table_bytes
        + struct.calcsize(layout.offset_format)
    )
    if end > size_bytes:
        raise DataError(f"truncated TIFF: a directory needs {end} bytes, {size_bytes} found")
    return table_bytes


def _unpack(form: str, data: bytes) -> tuple[int, ...]:
    if len(data) < struct.calcsize(form):
        raise DataError("truncated TIFF: a directory lies outside the file")
    return struct.unpack(form, data)
