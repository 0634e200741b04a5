"""Images and maps by rows: in memory, or in a file of which memory holds a few rows."""

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import ImageError
from lit_inspect.files import open_regular
from lit_inspect.npy import read_into

Pixels = NDArray[Any]


class ArrayRows:
    """An image in memory.

    Args:
        pixels: Pixels [C, H, W].
    """

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.shape: tuple[int, int, int] = pixels.shape

    def read(self, top: int, bottom: int) -> Pixels:
        """Return rows [C, bottom - top, W]."""
        return self.pixels[:, top:bottom]

    def write(self, top: int, values: NDArray[np.float32]) -> None:
        """Write rows."""
        self.pixels[:, top : top + values.shape[1]] = values


class FileRows:
    """Rows of a ``.npy`` file, which are read, not mapped, so that they do not stay in memory.

    Args:
        path: The file.
        offset: Position of its first pixel, in bytes.
        shape: Shape [C, H, W].
        dtype: Stored dtype.
        is_last: True if the file holds [H, W, C].
        options: Options for `finish`.
        finish: Function that returns the net's input for rows [C, h, W].
    """

    def __init__(
        self,
        path: Path,
        offset: int,
        shape: tuple[int, int, int],
        dtype: "np.dtype[Any]",
        is_last: bool,
        options: Any,  # noqa: ANN401 - those of `finish`
        finish: Callable[[Pixels, Any], Pixels],
    ) -> None:
        self._path = path
        self._offset = offset
        self._stored = shape
        self._dtype = dtype
        self._is_last = is_last
        self._finish = finish
        self._options = options
        self.shape = (len(self.read(0, 1)), *shape[1:])

    def read(self, top: int, bottom: int) -> Pixels:
        """Return rows [C, bottom - top, W]."""
        channels, height, width = self._stored
        if self._is_last:
            rows = self._load(top * width * channels, (bottom - top, width, channels))
            planes = np.moveaxis(rows, -1, 0)
        else:
            parts = []
            for channel in range(channels):
                start = (channel * height + top) * width
                parts.append(self._load(start, (bottom - top, width)))
            planes = np.stack(parts)
        native = self._dtype.newbyteorder("=")
        return self._finish(planes.astype(native, copy=False), self._options)

    def _load(self, start: int, shape: tuple[int, ...]) -> Pixels:
        count = math.prod(shape)
        values = np.empty(count, self._dtype)
        try:
            with open_regular(self._path) as stream:
                stream.seek(self._offset + start * self._dtype.itemsize)
                missing = values.nbytes - read_into(stream, values)
        except (OSError, ValueError) as error:  # it was replaced by another file
            raise ImageError(f"{self._path}: {error}") from error
        if missing:
            raise ImageError(f"{self._path}: truncated array")
        return values.reshape(shape)


class MapFile:
    """A map of a large image in a temporary file of 16 bits; 65535 is probability 1.

    Args:
        folder: Folder of the file.
        shape: Shape [K, H, W].
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".lit_inspect-")  # noqa: SIM115
        size_bytes = 2 * int(np.prod(shape))
        if hasattr(os, "posix_fallocate"):  # detects a full disk early; on Windows `truncate` does
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        else:
            self._file.truncate(size_bytes)

    def write(self, top: int, values: NDArray[np.float32]) -> None:
        """Write rows [K, n, W] in 0..1."""
        encoded = np.rint(np.clip(values, 0, 1) * 65535).astype(np.uint16)
        for channel, rows in enumerate(encoded):
            self._seek(channel, top)
            self._file.write(np.ascontiguousarray(rows).data)
        self._file.flush()

    def read(self, top: int, bottom: int) -> Pixels:
        """Return rows [K, bottom - top, W] uint16."""
        channels, _, width = self.shape
        rows = np.empty((channels, bottom - top, width), np.uint16)
        for channel, part in enumerate(rows):
            self._seek(channel, top)
            self._file.readinto(part.data)
        return rows

    def close(self) -> None:
        """Free the space on the disk."""
        self._file.close()

    def _seek(self, channel: int, top: int) -> None:
        self._file.seek(2 * (channel * self.shape[1] + top) * self.shape[2])
