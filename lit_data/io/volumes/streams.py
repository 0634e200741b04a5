"""Slices from a stream of bytes that is best read forward, such as an unpacking one."""

from collections.abc import Callable
from typing import IO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.volumes.volume import Triple
from lit_data.types import Array


class StreamSlices:
    """Slices that lie one behind the other in a stream.

    Args:
        stream: Readable and seekable; seeking back may be slow, forward it is not needed.
        offset: Where the first slice begins.
        shape: (z, y, x).
        dtype: As stored.
        close: Closes the stream and what it lies in.
    """

    def __init__(
        self, stream: IO[bytes], offset: int, shape: Triple, dtype: "np.dtype[np.generic]", close: Callable[[], None]
    ) -> None:
        self._stream, self._offset, self._dtype, self._close = stream, offset, dtype, close
        self._at = -1
        self.shape = shape

    def read(self, begin: int, end: int) -> Array:
        """Slices ``begin`` to ``end``; behind the last one the stream's own checksum is compared."""
        slab = np.empty((end - begin, *self.shape[1:]), self._dtype)
        if begin != self._at:
            self._stream.seek(self._offset + begin * slab[0].nbytes)
        self._at = -1
        self._fill(slab.data.cast("B"), begin)
        self._at = end
        if end == self.shape[0]:
            while self._stream.read(2**16):
                pass
            self._at = -1
        return slab

    def close(self) -> None:
        """Close the stream."""
        self._close()

    def _fill(self, rest: memoryview, begin: int) -> None:
        size_bytes = len(rest)
        while rest:
            chunk = self._stream.read(min(len(rest), 2**20))
            if not chunk:
                missing = f"{len(rest)} of {size_bytes} bytes are missing from slice {begin} on"
                raise DataError(f"cut short: {missing}; copy or download the file again")
            rest[: len(chunk)] = chunk
            rest = rest[len(chunk) :]
