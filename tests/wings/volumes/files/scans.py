"""Small scans, and a store of them, that tests of sparse stores share."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

from lit_data.core.types import Array
from lit_data.wings.volumes import IndexOptions, SparseStore, find_volumes

SHAPE = (6, 20, 30)
OPTIONS = IndexOptions(low_hu=500)


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
    arguments = {"options": OPTIONS, "progress": False} | arguments
    return SparseStore.build(find_volumes(folder / "ct"), folder / "cache", **arguments)


def check_store(store: SparseStore, volumes: list[Array]) -> None:
    assert len(store) == len(volumes)
    for sparse, volume in zip(store, volumes, strict=True):
        assert_array_equal(sparse.coords(), np.argwhere(volume > 500))
        assert_array_equal(sparse.values, volume[volume > 500])
