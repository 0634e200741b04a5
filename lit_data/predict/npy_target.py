"""Writes predictions that are larger than memory into a ``.npy`` file, row by row."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from lit_data.core.errors import StoreSpaceError, show_path
from lit_data.core.files import NO_SPACE, replacing
from lit_data.core.types import Array
from lit_data.images.store.files import reserve, write_all

FileDtype = Literal["float32", "float16", "uint8", "uint16"]

_CHUNK_BYTES = 2**20
"""Rows that are encoded at once, which stay in the processor's cache."""


class NpyTarget:
    """Writes rows to their place in a ``.npy`` file.

    The file is not memory-mapped: a full disk then raises an error, instead of a signal that kills
    the process.

    Args:
        fd: A new, empty file.
        shape: [K, H, W].
        dtype: Type of the file; integers hold values 0..1 as 0..255 or 0..65535.
        check: Called with rows before they are encoded.
    """

    def __init__(
        self,
        fd: int,
        shape: tuple[int, int, int],
        dtype: FileDtype,
        check: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._fd = fd
        self._check = check
        self._shape = shape
        self._dtype = np.dtype(dtype)
        header = io.BytesIO()
        fields = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(header, fields)
        self._offset = header.tell()
        # so that a full disk shows before anything is predicted
        reserve(fd, self._offset + int(np.prod(shape)) * self._dtype.itemsize)
        write_all(fd, memoryview(header.getvalue()))

    def write(self, top_px: int, values: Tensor) -> None:
        """Write rows."""
        if self._check is not None:
            self._check(values)
        rows_at_once = max(1, _CHUNK_BYTES // values[0, 0].nbytes)
        for channel, rows in enumerate(values):
            for first in range(0, len(rows), rows_at_once):
                encoded = encode(rows[first : first + rows_at_once], self._dtype)
                row = channel * self._shape[1] + top_px + first
                offset = self._offset + row * encoded[0].nbytes
                _write_at(self._fd, encoded.data.cast("B"), offset)


@contextmanager
def replacing_file(path: Path) -> Iterator[int]:
    """Open a new file that replaces `path` at the end; after an error it is removed.

    Yields:
        A descriptor open for writing.

    Raises:
        StoreSpaceError: The disk, the quota or the largest allowed file is too small.
    """
    try:
        with replacing(path) as file:
            yield file.fileno()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        free = decimal(shutil.disk_usage(path.parent).free)
        raise StoreSpaceError(
            f"{show_path(path)}: no space for the prediction ({error.strerror}), {free} free: "
            "choose dtype=float16 or uint8, or another folder"
        ) from error


def encode(values: Tensor, dtype: np.dtype[Any]) -> Array:
    """Return values in the dtype of a file; for integers, 0..1 is clipped and becomes 0..largest."""
    if dtype.kind == "f":
        return values.to(getattr(torch, dtype.name)).contiguous().numpy()
    # NaN becomes 0, as whole numbers have none
    largest = float(np.iinfo(dtype.name).max)
    return values.nan_to_num(0).clamp(0, 1).mul_(largest).round_().numpy().astype(dtype)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:  # a call may write a part only
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset = offset + count
