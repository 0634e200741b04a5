"""Worker processes that read a whole decoded store hold one copy of it together."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from lit_data.core.types import FieldSpec, Ints
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions
from lit_data.images.store.store import DecodedStore
from lit_data.loading import LoaderOptions, MicroBatchLoader
from tests.loading.rows import FORK, Indices, Rows

IMAGES, SIDE_PX = 16, 2048  # 201 MB with three channels
WORKERS = 3

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),
]


class WholeStore(Indices):
    """For each sample every pixel is read."""

    def __init__(self, store: DecodedStore) -> None:
        number = FieldSpec((), "int64")
        super().__init__(4 * WORKERS, sum=number, process=number)
        self.store = store

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        rows["process"][:] = os.getpid()
        images = (self.store[number] for number in range(IMAGES))
        rows["sum"][:] = sum(int(image.sum(dtype=np.int64)) for image in images)


def test_the_pixels_are_in_memory_once(tmp_path: Path) -> None:
    store, total = _build(tmp_path)
    before_bytes = _measure_pss_bytes(tmp_path)
    workers = FORK | {"num_workers": WORKERS}
    options = LoaderOptions(batch_size=WORKERS, micro_batch_size=1, **workers)
    loader = MicroBatchLoader(WholeStore(store), options, shuffle=True)
    try:
        readers = set()
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
    decoder = ImageDecoder(ReadOptions())
    store = DecodedStore.build(sources, folder / "store", decoder=decoder, progress=False)
    assert store.nbytes == IMAGES * SIDE_PX * SIDE_PX * 3
    return store, total


def _measure_pss_bytes(folder: Path) -> int:
    """Memory of this process and its workers; a page that several of them map counts once.

    Of files only those of a folder count: the share in a library falls with each other program that
    loads it.
    """
    main, pss_bytes = psutil.Process(), 0
    for process in (main, *main.children(recursive=True)):
        for part in process.memory_maps():
            path = Path(part.path)
            if folder in path.parents or not path.is_file():
                pss_bytes += part.pss
    return pss_bytes
