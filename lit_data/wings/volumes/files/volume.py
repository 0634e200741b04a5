"""Dense volumes that are read slab by slab, in any format."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, Literal, Protocol, Self

import numpy as np

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.opening import naming
from lit_data.core.types import Array, Spacing, Triple
from lit_data.wings.volumes.files.hounsfield import StoredScale
from lit_inspect.counts import counted

MAX_SLICE_BYTES = 2**30
SLAB_BYTES = 2 * 2**20
"""Size of a slab, which stays in the cache of a core while it is compared."""

FREE_BYTES = 2**30
"""Size up to which any compression ratio is allowed: empty masks shrink to a thousandth."""
MAX_RATIO = 200
"""Maximum compression ratio of larger volumes; air shrinks to about a hundredth."""
MAX_REST_BYTES = 2**24
"""Maximum number of bytes after the last voxel, which are padding."""


class SliceReader(Protocol):
    """Reads stored numbers of a file by slices."""

    @property
    def shape(self) -> Triple:
        """Slices, rows, columns."""

    def read(self, begin: int, end: int) -> Array:
        """Return slices ``begin`` to ``end`` as stored: [n, y, x]."""

    def close(self) -> None:
        """Close the files."""


class Volume:
    """Hounsfield units of one volume, read in slabs, from a file or resampled.

    Args:
        name: Name of the file, for messages.
        shape: (z, y, x).
        dtype: Dtype of the Hounsfield units: bool, uint8, int16 or float32.
        spacing_mm: (z, y, x) distance of neighboring voxels.
        affine: [4, 4] from voxel numbers in the order (x, y, z) to mm (right, anterior, superior);
            None if unknown.

    Raises:
        DataError: There are no voxels, a slice exceeds 1 GiB, or a spacing is not above 0.
    """

    def __init__(
        self,
        name: str,
        *,
        shape: Triple,
        dtype: "np.dtype[Any]",
        spacing_mm: Spacing,
        affine: Array | None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.spacing_mm = spacing_mm
        self.affine = affine
        if len(shape) != 3 or min(shape) < 1:
            raise DataError(
                f"shape {shape}; a volume has three axes (z, y, x) with voxels along each"
            )
        if self.slice_bytes > MAX_SLICE_BYTES:
            raise DataError(
                f"shape {shape}: a slice takes {self.slice_bytes} bytes, "
                f"at most {MAX_SLICE_BYTES} are read"
            )
        if not all(math.isfinite(mm) and mm > 0 for mm in spacing_mm):
            raise DataError(
                f"voxel spacing {spacing_mm} mm; each must be above 0; correct it in the file's "
                "header"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice of Hounsfield units."""
        return self.shape[1] * self.shape[2] * self.dtype.itemsize

    @property
    def work_bytes(self) -> int:
        """Memory in bytes that reading one slice takes."""
        return self.slice_bytes

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end``: [n, y, x] Hounsfield units of ``dtype``.

        Reading is fastest from the first slice to the last.

        Raises:
            DataError: The file is damaged, or has NaN or infinite voxels that nothing replaces.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each slab, within ``SLAB_BYTES``, but at least one slice."""
        count = max(1, SLAB_BYTES // max(self.work_bytes, 1))
        for begin in range(0, self.shape[0], count):
            yield begin, min(begin + count, self.shape[0])


class FileVolume(Volume):
    """A volume as stored in its file.

    Args:
        name: Path, for messages.
        reader: Reads stored numbers.
        scale: Converts them to Hounsfield units.
        spacing_mm: See ``Volume``.
        affine: See ``Volume``.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.
    """

    def __init__(
        self,
        name: str,
        reader: SliceReader,
        scale: StoredScale,
        *,
        spacing_mm: Spacing = (1.0, 1.0, 1.0),
        affine: Array | None = None,
        nan_fill: float | None = None,
    ) -> None:
        super().__init__(
            name, shape=reader.shape, dtype=scale.dtype, spacing_mm=spacing_mm, affine=affine
        )
        self._reader, self._scale, self._nan_fill = reader, scale, nan_fill

    def read(self, begin: int, end: int) -> Array:
        """See ``Volume.read``."""
        with naming(self.name):
            slab = self._scale.apply(self._reader.read(begin, end))
            if slab.dtype.kind != "f":
                return slab
            return self._check_finite(slab, begin)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _check_finite(self, slab: Array, begin: int) -> Array:
        """Replace NaN and infinite voxels of a slab.

        Raises:
            DataError: There are some and nothing replaces them; the message counts those of the
                whole volume.
        """
        is_finite = np.isfinite(slab)
        if is_finite.all():
            return slab
        if self._nan_fill is not None:
            return np.where(is_finite, slab, np.float32(self._nan_fill))
        # argmin of booleans is the first False.
        z, y, x = np.unravel_index(int(is_finite.argmin()), slab.shape)
        count = slab.size - int(is_finite.sum()) + self._count_rest(begin + len(slab))
        raise DataError(
            f"{counted(count, 'NaN or infinite voxel')}, the first at z {begin + z}, y {y}, x {x}; "
            "data.nan_fill=0 replaces them"
        )

    def _count_rest(self, begin: int) -> int:
        """Return the number of NaN and infinite voxels from slice `begin` on."""
        count = 0
        with suppress(DataError):  # the rest is damaged: the count so far is enough for a message
            for first, last in self.slabs():
                if last > begin:
                    slab = self._scale.apply(self._reader.read(max(first, begin), last))
                    count += slab.size - int(np.isfinite(slab).sum())
        return count


class ArraySlices:
    """Slices of an array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape: Triple = array.shape  # Volume checks the number of axes

    def read(self, begin: int, end: int) -> Array:
        """See ``SliceReader``."""
        return self._array[begin:end]

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def wrap_array(
    array: Array,
    *,
    name: str = "array",
    spacing_mm: Spacing = (1.0, 1.0, 1.0),
    affine: Array | None = None,
    nan_fill: float | None = None,
) -> Volume:
    """Wrap an array in memory as a volume.

    Args:
        array: [z, y, x] Hounsfield units, or a mask.
        name: Name for messages.
        spacing_mm: (z, y, x).
        affine: See ``Volume``.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.

    Raises:
        DataError: The array does not have three axes, or its dtype holds no Hounsfield units.
    """
    scale = StoredScale(array.dtype)
    return FileVolume(
        name, ArraySlices(array), scale, spacing_mm=spacing_mm, affine=affine, nan_fill=nan_fill
    )


def import_medical(name: Literal["nibabel", "pydicom"]) -> Any:  # noqa: ANN401 - a module without types
    """Import nibabel or pydicom.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name} is not installed: pip install {name} to read such files"
        ) from error


def check_unpacked(packed_bytes: int, unpacked_bytes: int) -> None:
    """Refuse a small file that unpacks to a large volume, before and while it is unpacked.

    Raises:
        DataError: The unpacked size exceeds ``FREE_BYTES`` and ``MAX_RATIO`` times the packed size.
    """
    if unpacked_bytes > max(FREE_BYTES, packed_bytes * MAX_RATIO):
        raise DataError(
            f"{packed_bytes} bytes that unpack to {unpacked_bytes} or more; above {FREE_BYTES} "
            f"bytes, a factor of more than {MAX_RATIO} is treated as an attack; unpack the file "
            "yourself if it is intended"
        )


class StreamSlices:
    """Consecutive slices in a stream.

    Args:
        stream: Readable and seekable stream; seeking back may be slow, reading forward needs no
            seek.
        offset: Byte at which the first slice begins.
        shape: (z, y, x).
        dtype: Stored dtype.
        close: Closes the stream and the file that contains it.
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
        self._next_slice = -1  # position of the stream; -1: unknown
        self.shape = shape

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end``; after the last slice, the checksum is compared."""
        slab = np.empty((end - begin, *self.shape[1:]), self._dtype)
        # Seeking in a packed stream unpacks everything before again.
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
        """Read to the end of the stream, where its checksum is."""
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
        """Fill a slab from the stream, which may return any number of bytes at once."""
        size_bytes = len(rest)
        while rest:
            chunk = self._stream.read(min(len(rest), 2**20))
            if not chunk:
                missing = f"{len(rest)} of {size_bytes} bytes are missing from slice {begin} on"
                raise DataError(f"truncated: {missing}; copy or download the file again")
            # Directly into the slab, without a second copy.
            rest[: len(chunk)] = chunk
            rest = rest[len(chunk) :]
