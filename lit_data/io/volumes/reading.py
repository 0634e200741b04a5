"""Opening a volume, whatever it is stored in."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from lit_data.errors import DataError, show_path
from lit_data.io.source import check_regular, naming
from lit_data.io.volumes.file_dicom import open_dicom
from lit_data.io.volumes.file_npy import open_npy, open_npz
from lit_data.io.volumes.hounsfield import StoredScale
from lit_data.io.volumes.sources import VolumeSource, find_volumes, guess_kind
from lit_data.io.volumes.volume import (
    FileVolume,
    Spacing,
    StreamSlices,
    Triple,
    Volume,
    check_unpacked,
    import_medical,
)
from lit_data.types import Array

log = logging.getLogger(__name__)


_MM: Final = {"unknown": 1.0, "mm": 1.0, "meter": 1000.0, "micron": 0.001}
_SIZES: Final = {348: "Nifti1Header", 540: "Nifti2Header"}
_MAX_OFFSET: Final = 2**26
"""Extensions of a header lie before the voxels; larger ones are not skipped."""


def open_nifti(path: str, nan_fill: float | None) -> FileVolume:
    """Open a ``.nii`` or ``.nii.gz`` file as a volume (z, y, x) in the order of its voxels.

    Scale fields that are NaN, infinite or 0 mean what the standard says: stored numbers are the
    values.

    Args:
        path: The file.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: not NIfTI, cut short, of more than three axes, or of a dtype that holds no
            Hounsfield units.
    """
    check_regular(path)
    opener = import_medical("nibabel").openers.Opener(path, "rb", keep_open=True)
    try:
        header = _read_header(opener)
        shape = _read_shape(header)
        scale = StoredScale(header.get_data_dtype(), *_read_scale(header))
        offset = _read_offset(opener, header)
        reader = StreamSlices(opener, offset, shape, scale.stored, opener.close)
        volume = FileVolume(
            path,
            reader,
            scale,
            spacing_mm=_read_spacing(header),
            affine=_read_affine(header),
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
    x, y, z, *more = [*stored, 1, 1, 1]
    if not stored or any(length != 1 for length in more):
        raise DataError(
            f"shape {tuple(stored)}; a volume has three axes, take one volume out of it"
        )
    return z, y, x


def _read_scale(header: Any) -> tuple[float, float]:  # noqa: ANN401
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if not np.isfinite(slope) or slope == 0:
        return 1.0, 0.0
    return slope, intercept if np.isfinite(intercept) else 0.0


def _read_spacing(header: Any) -> Spacing:  # noqa: ANN401
    unit_mm = _MM[header.get_xyzt_units()[0]]
    sizes = [float(size) * unit_mm for size in header.get_zooms()]
    x_mm, y_mm, z_mm = [*sizes, unit_mm, unit_mm][:3]  # a header may have fewer than three axes
    return z_mm, y_mm, x_mm


def _read_affine(header: Any) -> Array:  # noqa: ANN401
    affine: Array = np.array(header.get_best_affine(), np.float64)
    affine[:3] *= _MM[header.get_xyzt_units()[0]]
    return affine


def _read_offset(stream: Any, header: Any) -> int:  # noqa: ANN401
    """Return the byte at which the voxels begin."""
    offset, least = int(header["vox_offset"]), int(header.single_vox_offset)
    # 0 stands for right behind the header, if no extensions follow there.
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
        raise DataError(f"cut short: {needed_bytes} bytes expected, {found_bytes} found")


def open_volume(
    source: VolumeSource | str | os.PathLike[str],
    *,
    npz_key: str | None = None,
    nan_fill: float | None = None,
) -> Volume:
    """Open a volume for reading slab by slab; close it, or use it in a ``with`` block.

    Args:
        source: What ``find_volumes`` found, or the path of a file or of the folder of one DICOM
            series.
        npz_key: Name of the array in ``.npz`` files; None takes the only one of three axes.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.

    Raises:
        DataError: it cannot be read; says why and what to do.
        ConfigError: the library that reads it is not installed.
    """
    if not isinstance(source, VolumeSource):
        source = _find_one(source)
    with naming(source.path):
        if source.kind == "dicom":
            return open_dicom(source.files, source.path, nan_fill)
        if source.kind == "nifti":
            return open_nifti(source.files[0], nan_fill)
        if source.kind == "npy":
            return open_npy(source.files[0], nan_fill)
        return open_npz(source.files[0], npz_key, nan_fill)


def open_labels(
    source: VolumeSource, volume: Volume, *, npz_key: str | None = None
) -> Volume | None:
    """Open the labels that lie beside a volume.

    Args:
        source: The volume's.
        volume: It, opened.
        npz_key: As in ``open_volume``.

    Returns:
        The labels, of the shape of the volume; None if there are none.

    Raises:
        DataError: they cannot be read, or have another shape.
    """
    if source.labels is None:
        return None
    kind = guess_kind(source.labels)
    labels = open_volume(
        VolumeSource(source.name, source.labels, kind, (source.labels,)), npz_key=npz_key
    )
    if labels.shape != volume.shape:
        labels.close()
        with naming(source.labels):
            check_same_shape(labels, volume)
    if not _lie_alike(labels, volume):
        log.warning(
            "%s: its header puts it elsewhere than its volume; are its axes turned?",
            show_path(source.labels),
        )
    return labels


def check_same_shape(labels: Volume, volume: Volume) -> None:
    """Refuse labels of another shape than their volume.

    Raises:
        DataError: the shapes differ.
    """
    if labels.shape != volume.shape:
        turned = " (turned?)" if sorted(labels.shape) == sorted(volume.shape) else ""
        raise DataError(
            f"labels of shape {labels.shape}{turned}, "
            f"but {show_path(volume.name)} has {volume.shape}"
        )


def _lie_alike(labels: Volume, volume: Volume) -> bool:
    """Return True if the corners of labels and volume lie within half a voxel of each other.

    Also if one of them does not say where it is.
    """
    if labels.affine is None or volume.affine is None:
        return True
    z, y, x = (length - 1 for length in volume.shape)
    corners = np.array([(*corner, 1) for corner in itertools.product((0, x), (0, y), (0, z))])
    apart_mm = np.linalg.norm(corners @ (labels.affine - volume.affine).T, axis=1)
    return bool(apart_mm.max() <= 0.5 * max(volume.spacing_mm))


def _find_one(path: str | os.PathLike[str]) -> VolumeSource:
    path = Path(path)
    if not path.is_dir():
        return VolumeSource(path.name, os.fspath(path), guess_kind(path), (os.fspath(path),))
    sources = find_volumes(path)
    if len(sources) != 1:
        raise DataError(
            f"{show_path(path)}: {len(sources)} volumes; use find_volumes and open each"
        )
    return sources[0]
