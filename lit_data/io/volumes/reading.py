"""Opening a volume, whatever it is stored in."""

import itertools
import logging
import os
from pathlib import Path

import numpy as np

from lit_data.errors import DataError, show_path
from lit_data.io.source import naming
from lit_data.io.volumes.file_dicom import open_dicom
from lit_data.io.volumes.file_nifti import open_nifti
from lit_data.io.volumes.file_npy import open_npy, open_npz
from lit_data.io.volumes.sources import VolumeSource, find_volumes, guess_kind
from lit_data.io.volumes.sparse_npz import is_sparse_npz, open_sparse_npz
from lit_data.io.volumes.volume import Volume

log = logging.getLogger(__name__)


def open_volume(
    source: VolumeSource | str | os.PathLike[str], *, npz_key: str | None = None, nan_fill: float | None = None
) -> Volume:
    """Open a volume for reading slab by slab; close it, or use it in a ``with`` block.

    Args:
        source: What ``find_volumes`` found, or the path of a file or of the folder of one DICOM series.
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
        if npz_key is None and is_sparse_npz(source.files[0]):
            return open_sparse_npz(source.files[0])
        return open_npz(source.files[0], npz_key, nan_fill)


def open_labels(source: VolumeSource, volume: Volume, *, npz_key: str | None = None) -> Volume | None:
    """Open the labels that lie beside a volume or came with it.

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
        return volume.labels
    kind = guess_kind(source.labels)
    labels = open_volume(VolumeSource(source.name, source.labels, kind, (source.labels,)), npz_key=npz_key)
    if labels.shape != volume.shape:
        labels.close()
        with naming(source.labels):
            check_same_shape(labels, volume)
    if not _lie_alike(labels, volume):
        log.warning("%s: its header puts it elsewhere than its volume; are its axes turned?", show_path(source.labels))
    return labels


def check_same_shape(labels: Volume, volume: Volume) -> None:
    """Refuse labels of another shape than their volume.

    Raises:
        DataError: the shapes differ.
    """
    if labels.shape != volume.shape:
        turned = " (turned?)" if sorted(labels.shape) == sorted(volume.shape) else ""
        raise DataError(f"labels of shape {labels.shape}{turned}, but {show_path(volume.name)} has {volume.shape}")


def _lie_alike(labels: Volume, volume: Volume) -> bool:
    """Whether the corners of labels and volume lie within half a voxel of each other, where both say where they are."""
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
        raise DataError(f"{show_path(path)}: {len(sources)} volumes; use find_volumes and open each")
    return sources[0]
