"""Volumes in single files: ``.npy`` by memory map, ``.npz`` and NIfTI read slab by slab."""

import mmap
import os
import shutil
import tempfile
import zipfile
from typing import Any, Literal

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.opening import check_regular, naming, open_source
from lit_data.core.types import Array, Spacing, Triple
from lit_data.images.npy import (
    NpyHeader,
    check_directory,
    read_array_header,
)
from lit_data.wings.volumes.files.hounsfield import StoredScale
from lit_data.wings.volumes.files.volume import (
    FileVolume,
    SliceReader,
    StreamSlices,
    check_unpacked,
    import_medical,
)
from lit_inspect.npy import NPY_LOCK

MAX_MEMBER_BYTES = 2**36
"""Maximum unpacked size of all members of an archive; they are never in memory at once."""
SPACING_NAME = "spacing_mm"

_MM = {"unknown": 1.0, "mm": 1.0, "meter": 1000.0, "micron": 0.001}
_SIZES = {348: "Nifti1Header", 540: "Nifti2Header"}
_ROUNDING = 1e-3  # of the axes in a header
_MAX_OFFSET = 2**26
"""Maximum offset of the voxels; larger header extensions before them are not skipped."""


def open_npy(path: str, nan_fill: float | None) -> FileVolume:
    """Open a ``.npy`` file by memory map as a volume (z, y, x).

    Args:
        path: The file.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: The file is damaged, or not a plain array of three axes.
    """
    with open_source(path) as stream:
        header = read_array_header(stream, os.fstat(stream.fileno()).st_size)
        offset = stream.tell()
        slices = MappedSlices(stream.fileno(), header, offset)
        return FileVolume(path, slices, StoredScale(header.dtype), nan_fill=nan_fill)


def open_npz(path: str, nan_fill: float | None) -> FileVolume:
    """Open an array of an ``.npz`` archive as a volume (z, y, x).

    A member ``spacing_mm`` [3] is its spacing. An array in Fortran order is first unpacked into a
    temporary file, because its slices are not contiguous.

    Args:
        path: The archive.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: The archive is damaged, or has no array of three axes, or several.
    """
    check_regular(path)
    # It stays open as long as slices are read from it.
    archive = zipfile.ZipFile(path)
    try:
        headers = read_directory(archive)
        member = archive.getinfo(f"{_choose(headers)}.npy")
        header = headers[member.filename[:-4]]
        spacing_mm = _read_npz_spacing(archive, headers)
        slices = _open_member(archive, member, header)  # closes the archive if it is unpacked
        scale = StoredScale(header.dtype)
        return FileVolume(path, slices, scale, spacing_mm=spacing_mm, nan_fill=nan_fill)
    except BaseException:
        archive.close()
        raise


def has_spacing(path: str) -> bool:
    """Return True if an ``.npz`` archive states a spacing; also if it is damaged, which is reported elsewhere."""
    try:
        with zipfile.ZipFile(path) as archive:
            return f"{SPACING_NAME}.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return True


def read_directory(archive: zipfile.ZipFile) -> dict[str, NpyHeader]:
    """Read the headers of all arrays of an archive, and compare them with its directory.

    Returns:
        Headers by name.

    Raises:
        DataError: A member is not a plain array, or differs from its directory entry.
    """
    members = archive.infolist()
    check_directory(members, MAX_MEMBER_BYTES)
    packed_bytes = sum(member.compress_size for member in members)
    check_unpacked(packed_bytes, sum(member.file_size for member in members))
    headers: dict[str, NpyHeader] = {}
    for member in members:
        with naming(member.filename), archive.open(member) as stream:
            headers[member.filename[:-4]] = read_array_header(stream, member.file_size)
    return headers


class MappedSlices:
    """Slices of a mapped file; few of its pages are in memory, whatever the volume's size.

    Args:
        fd: File descriptor; may be closed afterwards.
        header: Header of the array.
        offset: Byte at which its values begin.
    """

    def __init__(self, fd: int, header: NpyHeader, offset: int) -> None:
        self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        order: Literal["C", "F"] = "F" if header.is_fortran else "C"
        self._array = np.ndarray(header.shape, header.dtype, self._map, offset, order=order)
        self._offset, self._is_fortran = offset, header.is_fortran
        self.shape: Triple = header.shape  # type: ignore[assignment]  # Volume checks the number of axes

    def read(self, begin: int, end: int) -> Array:
        """Read slices ``begin`` to ``end`` as a view, [n, y, x]; releases the pages before them."""
        if begin and not self._is_fortran and hasattr(mmap, "MADV_DONTNEED"):
            done_bytes = self._offset + begin * self._array[0].nbytes
            # A volume is read forward, so the pages before are not needed again.
            self._map.madvise(mmap.MADV_DONTNEED, 0, done_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        return self._array[begin:end]

    def close(self) -> None:
        """Do nothing: the map is closed with its last view."""


def _open_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: NpyHeader
) -> SliceReader:
    stream = archive.open(member)
    read_array_header(stream, member.file_size)
    offset = stream.tell()
    if not header.is_fortran:

        def close() -> None:
            stream.close()
            archive.close()

        return StreamSlices(stream, offset, header.shape, header.dtype, close)  # type: ignore[arg-type]
    stream.seek(0)
    with stream, tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, 2**20)
        unpacked.flush()
        archive.close()
        return MappedSlices(unpacked.fileno(), header, offset)


def _choose(headers: dict[str, NpyHeader]) -> str:
    """Return the name of the only array of three axes."""
    volumes = [name for name, header in headers.items() if len(header.shape) == 3]
    if len(volumes) != 1:
        raise DataError(
            f"{len(volumes)} arrays of three axes out of {', '.join(headers)}; save one volume "
            "per file"
        )
    return volumes[0]


def _read_npz_spacing(archive: zipfile.ZipFile, headers: dict[str, NpyHeader]) -> Spacing:
    if SPACING_NAME not in headers:
        return 1.0, 1.0, 1.0
    if headers[SPACING_NAME].shape != (3,):
        raise DataError(
            f"{SPACING_NAME} of shape {headers[SPACING_NAME].shape}; give three numbers (z, y, x)"
        )
    with archive.open(f"{SPACING_NAME}.npy") as stream, NPY_LOCK:
        z, y, x = np.lib.format.read_array(stream, allow_pickle=False).astype(np.float64).tolist()
    return z, y, x


def open_nifti(path: str, nan_fill: float | None) -> FileVolume:
    """Open a ``.nii`` or ``.nii.gz`` file as a volume (z, y, x) in the order of its voxels.

    Scale fields that are NaN, infinite or 0 are treated as in the standard: stored numbers are the
    values.

    Args:
        path: The file.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: The file is not NIfTI, is truncated, has more than three axes, or a dtype that
            holds no Hounsfield units.
    """
    check_regular(path)
    opener = import_medical("nibabel").openers.Opener(path, "rb", keep_open=True)
    try:
        header = _read_header(opener)
        shape = _read_shape(header)
        scale = StoredScale(header.get_data_dtype(), *_read_scale(header))
        offset = _read_offset(opener, header)
        affine = _read_affine(header)
        reader = StreamSlices(opener, offset, shape, scale.stored, opener.close)
        volume = FileVolume(
            path,
            reader,
            scale,
            spacing_mm=_read_spacing(header, affine),
            affine=affine,
            nan_fill=nan_fill,
        )
        _check_length(path, offset + int(np.prod(shape, dtype=object)) * scale.stored.itemsize)
        return volume
    except BaseException:
        opener.close()
        raise


def _read_header(stream: Any) -> Any:  # noqa: ANN401 - nibabel has no types
    # A header begins with its own size, in the byte order of the file.
    start = stream.read(4)
    size = int.from_bytes(start, "little")
    if size not in _SIZES:
        size = int.from_bytes(start, "big")
    if size not in _SIZES:
        raise DataError(f"not a NIfTI file, starts with {start!r}")
    make_header = getattr(import_medical("nibabel"), _SIZES[size])
    header = make_header(start + stream.read(size - len(start)), check=False)
    if bytes(header["magic"]).rstrip(b"\0\r\n\x1a")[:3] not in (b"n+1", b"n+2"):
        raise DataError("a NIfTI header without its voxels; give single .nii or .nii.gz files")
    return header


def _read_shape(header: Any) -> Triple:  # noqa: ANN401
    stored: list[int] = [int(length) for length in header.get_data_shape()]
    # Missing axes count as one voxel; a fourth axis of length 1 is ignored.
    x, y, z, *more = [*stored, 1, 1, 1]
    if not stored or any(length != 1 for length in more):
        raise DataError(
            f"shape {tuple(stored)}; a volume has three axes; save one volume separately"
        )
    return z, y, x


def _read_scale(header: Any) -> tuple[float, float]:  # noqa: ANN401
    # Programs that do not scale leave NaN or 0 here.
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if not np.isfinite(slope) or slope == 0:
        return 1.0, 0.0
    return slope, intercept if np.isfinite(intercept) else 0.0


def _read_spacing(header: Any, affine: Array) -> Spacing:  # noqa: ANN401
    unit_mm = _MM[header.get_xyzt_units()[0]]
    sizes = [float(size) * unit_mm for size in header.get_zooms()]
    x_mm, y_mm, z_mm = [*sizes, unit_mm, unit_mm][:3]  # a header may have fewer than three axes
    return z_mm * _find_shear(affine), y_mm, x_mm


def _find_shear(affine: Array) -> float:
    """Return the distance of slices as a fraction of their step; below 1 for a tilted gantry."""
    axes = affine[:3, :3]
    if not np.isfinite(axes).all():
        return 1.0  # refused where the affine is used
    volume_mm3 = abs(float(np.linalg.det(axes)))
    box_mm3 = float(np.linalg.norm(axes, axis=0).prod())
    is_sheared = 0 < volume_mm3 < (1 - _ROUNDING) * box_mm3
    return volume_mm3 / box_mm3 if is_sheared else 1.0


def _read_affine(header: Any) -> Array:  # noqa: ANN401
    affine: Array = np.array(header.get_best_affine(), np.float64)
    affine[:3] *= _MM[header.get_xyzt_units()[0]]
    return affine


def _read_offset(stream: Any, header: Any) -> int:  # noqa: ANN401
    """Return the byte at which the voxels begin."""
    offset, least = int(header["vox_offset"]), int(header.single_vox_offset)
    # 0 means directly after the header, if no extensions follow there.
    if offset == 0 and not any(stream.read(4)[:1]):
        return least
    if not least <= offset <= _MAX_OFFSET:
        raise DataError(
            f"vox_offset {offset}; voxels of a single file begin at {least} to {_MAX_OFFSET}, "
            "save it again"
        )
    return offset


def _check_length(path: str, needed_bytes: int) -> None:
    found_bytes = os.stat(path).st_size  # noqa: PTH116 - the path is text
    if not path.lower().endswith(".nii"):
        check_unpacked(found_bytes, needed_bytes)
    elif found_bytes < needed_bytes:
        raise DataError(f"truncated: {needed_bytes} bytes expected, {found_bytes} found")
