"""`NpyTarget`: an image of any size, written to a file as it is stitched."""

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.filesize import decimal
from torch import Tensor

from lit_data.errors import StoreSpaceError, show_path
from lit_data.files import replacing
from lit_data.io.store.writer import reserve, write_all

FileDtype = Literal["float32", "float16", "uint8", "uint16"]

_CHUNK_BYTES: Final = 2**20  # stays in the processor's cache while it is encoded
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NpyTarget:
    """Rows of a ``.npy`` file, each written to its place.

    The rows are written and not mapped, because a full disk then is an error and not a signal that kills the process.

    Args:
        fd: A new, empty file.
        shape: [K, H, W].
        dtype: Of the file; whole numbers hold values 0..1 as 0..255 or 0..65535.
    """

    def __init__(self, fd: int, shape: tuple[int, int, int], dtype: FileDtype) -> None:
        self._fd, self._shape, self._dtype = fd, shape, np.dtype(dtype)
        header = io.BytesIO()
        form = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, form)
        self._offset = header.tell()
        reserve(fd, self._offset + int(np.prod(shape)) * self._dtype.itemsize)
        write_all(fd, memoryview(header.getvalue()))

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows."""
        step = max(1, _CHUNK_BYTES // values[0, 0].nbytes)
        for channel, rows in enumerate(values):
            for first in range(0, len(rows), step):
                part = encode(rows[first : first + step], self._dtype)
                row = channel * self._shape[1] + top_px + first
                _write_at(self._fd, part.data.cast("B"), self._offset + row * part[0].nbytes)

    def close(self) -> None:
        """Whoever opened the file closes it."""


@contextmanager
def replacing_file(path: Path) -> Iterator[int]:
    """A new file that takes the place of `path` at the end, or leaves nothing behind if an error comes.

    Yields:
        A descriptor open for writing.

    Raises:
        StoreSpaceError: The disk, the quota or the largest allowed file is too small.
    """
    try:
        with replacing(path) as file:
            yield file.fileno()
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise StoreSpaceError(
            f"{show_path(path)}: no room for the prediction ({error.strerror}): free are "
            f"{decimal(shutil.disk_usage(path.parent).free)}; choose dtype=float16 or uint8, or another folder"
        ) from error


def encode(values: Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values in the dtype of a file; for whole numbers 0..1 becomes 0..largest, with what lies outside cut off."""
    if dtype.kind == "f":
        return values.to(getattr(torch, dtype.name)).contiguous().numpy()
    largest = float(np.iinfo(dtype.name).max)
    return values.nan_to_num(0).clamp(0, 1).mul_(largest).round_().numpy().astype(dtype)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
