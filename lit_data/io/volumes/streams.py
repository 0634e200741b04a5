"""Slices from a stream that is best read forward, and how far a packed one may unpack."""

import importlib
from collections.abc import Callable
from typing import IO, Any, Final, Literal

import numpy as np

from lit_data.errors import ConfigError, DataError
from lit_data.io.volumes.volume import Triple
from lit_data.types import Array


def import_medical(name: Literal["nibabel", "pydicom"]) -> Any:  # noqa: ANN401 - a module without types
    """Import one of them.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name} is not installed: pip install {name} to read such files"
        ) from error


FREE_BYTES: Final = 2**30
"""Size up to which a volume may be packed at will: empty masks shrink to a thousandth."""
MAX_RATIO: Final = 200
"""Largest unpacked by packed size of what is larger; air packs to about a hundredth."""
MAX_REST_BYTES: Final = 2**24
"""Behind the last voxel: padding."""


def check_unpacked(packed_bytes: int, unpacked_bytes: int) -> None:
    """Refuse a small file that unpacks to a large volume, before and while it is unpacked.

    Raises:
        DataError: more than ``FREE_BYTES`` and ``MAX_RATIO`` times the packed size.
    """
    if unpacked_bytes > max(FREE_BYTES, packed_bytes * MAX_RATIO):
        raise DataError(
            f"{packed_bytes} bytes that unpack to {unpacked_bytes} or more; above {FREE_BYTES} "
            f"bytes, more than {MAX_RATIO} times as many are taken for an attack; unpack the file "
            "yourself if it is meant so"
        )


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
        self,
        stream: IO[bytes],
        offset: int,
        shape: Triple,
        dtype: "np.dtype[np.generic]",
        close: Callable[[], None],
    ) -> None:
        self._stream, self._offset, self._dtype, self._close = stream, offset, dtype, close
        self._next_slice = -1  # at which the stream stands; -1: nobody knows
        self.shape = shape

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end``; behind the last one a checksum is compared."""
        slab = np.empty((end - begin, *self.shape[1:]), self._dtype)
        if begin != self._next_slice:
            self._stream.seek(self._offset + begin * slab[0].nbytes)
        self._next_slice = -1  # until all has been read
        self._fill(slab.data.cast("B"), begin)
        self._next_slice = end
        if end == self.shape[0]:
            self._finish()
        return slab

    def close(self) -> None:
        """Close the stream."""
        self._close()

    def _finish(self) -> None:
        """Read to the end of the stream, where it has its checksum."""
        self._next_slice = -1
        rest_bytes = 0
        while chunk := self._stream.read(2**16):
            rest_bytes += len(chunk)
            if rest_bytes > MAX_REST_BYTES:
                raise DataError(
                    f"more than {MAX_REST_BYTES} bytes follow the last voxel; "
                    "its header gives too few slices"
                )

    def _fill(self, rest: memoryview, begin: int) -> None:
        """Fill a slab, whatever pieces the stream gives."""
        size_bytes = len(rest)
        while rest:
            chunk = self._stream.read(min(len(rest), 2**20))
            if not chunk:
                missing = f"{len(rest)} of {size_bytes} bytes are missing from slice {begin} on"
                raise DataError(f"cut short: {missing}; copy or download the file again")
            rest[: len(chunk)] = chunk
            rest = rest[len(chunk) :]
