"""BMP: its header without decoding, and the indices of a palette image.

https://learn.microsoft.com/windows/win32/gdi/bitmap-storage
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.stored import StoredImage

_RGB, _BITFIELDS = 0, 3


@dataclass(frozen=True, slots=True)
class BmpLayout:
    """Where the pixels of a BMP are and how they are packed."""

    height_px: int
    width_px: int
    bits: int
    bottom_up: bool
    pixels_at: int
    alpha: bool
    palette: NDArray[np.uint8]
    """[n, 3] R, G, B; no rows if there is none."""

    @property
    def row_bytes(self) -> int:
        """Rows fill whole groups of 4 bytes."""
        return (self.width_px * self.bits + 31) // 32 * 4


def read_bmp_header(stream: BinaryIO, size_bytes: int) -> StoredImage:
    """Read the header and the palette.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.

    Returns:
        The image; one whose palette holds only greys counts as grey.

    Raises:
        DataError: damaged, cut or compressed.
    """
    layout = read_bmp_layout(stream)
    end = layout.pixels_at + layout.row_bytes * layout.height_px
    if end > size_bytes:
        raise DataError(f"truncated BMP: {end} bytes expected, {size_bytes} found")
    indexed = layout.bits <= 8
    gray = indexed and bool((layout.palette == layout.palette[:, :1]).all())
    return StoredImage(
        kind="bmp",
        height_px=layout.height_px,
        width_px=layout.width_px,
        colors=1 if indexed else 3,
        dtype=np.dtype(np.uint8),
        bits_per_pixel=layout.bits,
        alpha=(3,) if layout.alpha else (),
        palette=indexed and not gray,
    )


def read_bmp_layout(stream: BinaryIO) -> BmpLayout:
    """Read where the pixels are.

    Raises:
        DataError: damaged or compressed.
    """
    stream.seek(10)
    pixels_at, info_bytes = struct.unpack("<II", stream.read(8).ljust(8, b"\0"))
    if info_bytes not in (12, *range(40, 125)):
        raise DataError(f"not a BMP, though it starts so: information header of {info_bytes} bytes")
    info = stream.read(info_bytes - 4)
    if len(info) < info_bytes - 4:
        raise DataError("truncated BMP: its header is cut")
    if info_bytes == 12:
        width_px, height_px, _, bits = struct.unpack("<HHHH", info)
        compression = used = 0
    else:
        width_px, height_px, _, bits, compression, _, _, _, used = struct.unpack_from("<iiHHIIiiI", info)
    if bits not in (1, 4, 8, 16, 24, 32) or compression not in (_RGB, _BITFIELDS if bits in (16, 32) else _RGB):
        raise DataError(f"BMP with {bits} bits and compression {compression} is not read; save it as PNG")
    return BmpLayout(
        height_px=abs(height_px),
        width_px=width_px,
        bits=bits,
        bottom_up=height_px > 0,
        pixels_at=pixels_at,
        alpha=bits == 32 and compression == _BITFIELDS and any(info[48:52]),
        palette=_read_palette(stream, min(used or 2**bits, 2**bits), 3 if info_bytes == 12 else 4, bits),
    )


def read_bmp_indices(stream: BinaryIO) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read a palette image.

    Returns:
        indices [H, W] and palette [n, 3] R, G, B.
    """
    layout = read_bmp_layout(stream)
    stream.seek(layout.pixels_at)
    packed = np.frombuffer(stream.read(layout.row_bytes * layout.height_px), np.uint8)
    rows = packed.reshape(layout.height_px, layout.row_bytes)
    bits = np.unpackbits(rows, axis=1).reshape(layout.height_px, -1, layout.bits)
    indices = np.packbits(bits, axis=2)[:, : layout.width_px, 0] >> np.uint8(8 - layout.bits)
    return indices[::-1] if layout.bottom_up else indices, layout.palette


def _read_palette(stream: BinaryIO, count: int, entry_bytes: int, bits: int) -> NDArray[np.uint8]:
    if bits > 8:
        return np.empty((0, 3), np.uint8)
    table = stream.read(count * entry_bytes)
    if len(table) < count * entry_bytes:
        raise DataError("truncated BMP: its palette is cut")
    return np.frombuffer(table, np.uint8).reshape(count, entry_bytes)[:, 2::-1]
