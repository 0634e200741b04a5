"""Worker processes that read a whole decoded store hold one copy of it together."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.options import ReadOptions
from lit_data.io.store.store import DecodedStore
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.types import FieldSpec

IMAGES, SIDE_PX = 16, 2048  # 201 MB with three channels
WORKERS = 3

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),
]


class WholeStore:
    """For each sample every pixel is read."""

    fields: Mapping[str, FieldSpec] = {
        "sum": FieldSpec((), "int64"),
        "process": FieldSpec((), "int64"),
    }

    def __init__(self, store: DecodedStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 4 * WORKERS

    def write_into(
        self, rows: Mapping[str, NDArray[Any]], indices: NDArray[np.int64], epoch: int
    ) -> None:
        rows["process"][:] = os.getpid()
        rows["sum"][:] = sum(
            int(self.store[number].sum(dtype=np.int64)) for number in range(IMAGES)
        )


def test_the_pixels_are_in_memory_once(tmp_path: Path) -> None:
    store, total = _build(tmp_path)
    before_bytes = _measure_pss_bytes(tmp_path)
    options = LoaderOptions(
        batch_size=WORKERS,
        micro_batch_size=1,
        worker_kind="process",
        num_workers=WORKERS,
        start_method="fork",
    )
    loader = MicroBatchLoader(WholeStore(store), options, shuffle=True)
    try:
        readers: set[int] = set()
        for epoch in range(10):
            loader.set_epoch(epoch)
            for batch in loader:
                assert batch["sum"].tolist() == [total] * WORKERS
                readers |= set(batch["process"].tolist())
            if len(readers) == WORKERS:
                break
        assert len(readers - {os.getpid()}) == WORKERS
        grown_bytes = _measure_pss_bytes(tmp_path) - before_bytes
    finally:
        loader.close()
    assert 0.9 * store.nbytes < grown_bytes < 1.3 * store.nbytes


def _build(folder: Path) -> tuple[DecodedStore, int]:
    rng = np.random.default_rng(0)
    sources, total = [], 0
    for number in range(IMAGES):
        image = np.full((SIDE_PX, SIDE_PX, 3), rng.integers(1, 256), np.uint8)
        np.save(folder / f"{number:02}.npy", image)
        sources.append(ImageSource((str(folder / f"{number:02}.npy"),)))
        total += int(image[0, 0, 0]) * image.size
    store = DecodedStore.build(
        sources, folder / "store", decoder=ImageDecoder(ReadOptions()), progress=False
    )
    assert store.nbytes == IMAGES * SIDE_PX * SIDE_PX * 3
    return store, total


def _measure_pss_bytes(folder: Path) -> int:
    """Memory of this process and its workers; a page that several of them map counts once.

    Of files only those of a folder count: the share in a library falls with each other program that
    loads it.
    """
    main = psutil.Process()
    maps = [
        part for process in (main, *main.children(recursive=True)) for part in process.memory_maps()
    ]
    return sum(
        part.pss
        for part in maps
        if folder in Path(part.path).parents or not Path(part.path).is_file()
    )
