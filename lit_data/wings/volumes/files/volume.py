"""A dense volume that is read slab by slab, whatever it is stored in."""

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
"""Of a slab: it stays in the cache of a core while it is compared."""

FREE_BYTES = 2**30
"""Size up to which a volume may be packed at will: empty masks shrink to a thousandth."""
MAX_RATIO = 200
"""Largest unpacked by packed size of what is larger; air packs to about a hundredth."""
MAX_REST_BYTES = 2**24
"""Behind the last voxel: padding."""


class SliceReader(Protocol):
    """Stored numbers of a file by slices."""

    @property
    def shape(self) -> Triple:
        """Slices, rows, columns."""

    def read(self, begin: int, end: int) -> Array:
        """Slices ``begin`` to ``end``: [n, y, x] as stored."""

    def close(self) -> None:
        """Close the files."""


class Volume:
    """Hounsfield units of one volume, read in slabs: from a file, or resampled.

    Args:
        name: Of the file, for messages.
        shape: (z, y, x).
        dtype: Of the Hounsfield units: bool, uint8, int16 or float32.
        spacing_mm: (z, y, x) distance of neighboring voxels.
        affine: [4, 4] from voxel numbers in the order (x, y, z) to mm (right, anterior, superior);
            None if unknown.

    Raises:
        DataError: no voxels, slices of more than 1 GiB, or a spacing that is not above 0.
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
        """Bytes that reading one slice takes."""
        return self.slice_bytes

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end``: [n, y, x] Hounsfield units of ``dtype``.

        It is fastest from the first slice to the last.

        Raises:
            DataError: the file is damaged, or has NaN or infinite voxels that nothing replaces.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield first slice and end of each slab: within ``SLAB_BYTES``, but at least one slice."""
        count = max(1, SLAB_BYTES // max(self.work_bytes, 1))
        for begin in range(0, self.shape[0], count):
            yield begin, min(begin + count, self.shape[0])


class FileVolume(Volume):
    """A volume as its file holds it.

    Args:
        name: Path, for messages.
        reader: Reads stored numbers.
        scale: Makes Hounsfield units of them.
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
            DataError: There are some and nothing replaces them; counts those of the whole volume.
        """
        is_finite = np.isfinite(slab)
        if is_finite.all():
            return slab
        if self._nan_fill is not None:
            return np.where(is_finite, slab, np.float32(self._nan_fill))
        # argmin of booleans is the first that is False.
        z, y, x = np.unravel_index(int(is_finite.argmin()), slab.shape)
        count = slab.size - int(is_finite.sum()) + self._count_rest(begin + len(slab))
        raise DataError(
            f"{counted(count, 'NaN or infinite voxel')}, the first at z {begin + z}, y {y}, x {x}; "
            "data.nan_fill=0 replaces them"
        )

    def _count_rest(self, begin: int) -> int:
        """Return the number of NaN and infinite voxels from a slice on."""
        count = 0
        with suppress(DataError):  # the rest is damaged: what was found is enough for a message
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
        """Nothing to close."""


def wrap_array(
    array: Array,
    *,
    name: str = "array",
    spacing_mm: Spacing = (1.0, 1.0, 1.0),
    affine: Array | None = None,
    nan_fill: float | None = None,
) -> Volume:
    """Read an array in memory as a volume.

    Args:
        array: [z, y, x] Hounsfield units, or a mask.
        name: For messages.
        spacing_mm: (z, y, x).
        affine: See ``Volume``.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.

    Raises:
        DataError: not three axes, or a dtype that holds no Hounsfield units.
    """
    scale = StoredScale(array.dtype)
    return FileVolume(
        name, ArraySlices(array), scale, spacing_mm=spacing_mm, affine=affine, nan_fill=nan_fill
    )


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


def check_unpacked(packed_bytes: int, unpacked_bytes: int) -> None:
    """Refuse a small file that unpacks to a large volume, before and while it is unpacked.

    Raises:
        DataError: more than ``FREE_BYTES`` and ``MAX_RATIO`` times the packed size.
    """
    if unpacked_bytes > max(FREE_BYTES, packed_bytes * MAX_RATIO):
        raise DataError(
            f"{packed_bytes} bytes that unpack to {unpacked_bytes} or more; above {FREE_BYTES} "
            f"bytes, a factor of more than {MAX_RATIO} is treated as an attack; unpack the file "
            "yourself if it is intended"
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
        # Seeking in a packed stream unpacks all before it again.
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
                raise DataError(f"truncated: {missing}; copy or download the file again")
            # Straight into the slab, without a second copy.
            rest[: len(chunk)] = chunk
            rest = rest[len(chunk) :]
