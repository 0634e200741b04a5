"""Writers of volumes: NIfTI if their position is known, otherwise arrays."""

import gzip
from pathlib import Path

import numpy as np

from lit_data.core.files import explaining, replacing
from lit_data.core.types import Array
from lit_data.wings.volumes.files.volume import import_medical
from lit_inspect.files import fit_name


def write_volume(folder: Path, name: str, volume: Array, affine: Array | None) -> Path:
    """Write a volume, completely or not at all; return the path of the file.

    Args:
        folder: Output folder, created if missing.
        name: Name of the volume.
        volume: [z, y, x].
        affine: [4, 4] from (x, y, z) voxel numbers to mm; None writes a ``.npy`` file.

    Raises:
        ConfigError: nibabel is not installed.
        StoreError: The file cannot be written.
    """
    path = folder / fit_name(name, ".npy" if affine is None else ".nii.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    with explaining(path), replacing(path) as file:
        if affine is None:
            np.save(file, volume)
        else:
            file.write(pack_nifti(volume, affine))
    return path


def pack_nifti(volume: Array, affine: Array) -> bytes:
    """Return the bytes of a ``.nii.gz`` file; arguments and errors are those of `write_volume`."""
    nibabel = import_medical("nibabel")
    image = nibabel.Nifti1Image(volume.T, affine)
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), compresslevel=1, mtime=0)
