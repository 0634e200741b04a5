"""Small scans in every format, and a store of some, that tests of files share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.types import Array
from lit_data.wings.volumes import IndexOptions, SparseStore, find_volumes

SHAPE = (6, 20, 30)
OPTIONS = IndexOptions(low_hu=500)


def write_npy(path: Path, volume: Array) -> Path:
    np.save(path / "v.npy", volume)
    return path / "v.npy"


def write_npz(path: Path, volume: Array, **more: Array) -> Path:
    np.savez_compressed(path / "v.npz", volume=volume, note=np.array("CT"), **more)
    return path / "v.npz"


def write_nifti(path: Path, volume: Array, name: str = "v.nii.gz") -> Path:
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(volume.T, np.diag([0.5, 0.6, 2.0, 1.0]))
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path / name)
    return path / name


def write_nii(path: Path, volume: Array) -> Path:
    return write_nifti(path, volume, "v.nii")


def write_scans(folder: Path, count: int = 3, *, labels: bool = True) -> list[Array]:
    """Noise as ``v00.npy``, ``v01.npy``, ... below ``ct``, labelled 3 above 0 HU."""
    (folder / "ct").mkdir()
    rng = np.random.default_rng(0)
    volumes = [rng.integers(-1000, 1000, SHAPE, dtype=np.int16) for _ in range(count)]
    for number, volume in enumerate(volumes):
        np.save(folder / "ct" / f"v{number:02}.npy", volume)
        if labels:
            np.save(folder / "ct" / f"v{number:02}_labels.npy", (volume > 0).astype(np.uint8) * 3)
    return volumes


def build_store(folder: Path, **arguments: Any) -> SparseStore:
    """The store of the scans below a folder, in its ``cache``."""
    arguments = {"options": OPTIONS} | arguments
    return SparseStore.build(find_volumes(folder / "ct"), folder / "cache", **arguments)


def check_store(store: SparseStore, volumes: list[Array]) -> None:
    assert len(store) == len(volumes)
    for sparse, volume in zip(store, volumes, strict=True):
        assert_array_equal(sparse.coords(), np.argwhere(volume > 500))
        assert_array_equal(sparse.values, volume[volume > 500])
