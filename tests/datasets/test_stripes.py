import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import DataError, StoreCorruptError
from lit_data.core.grid import Edges, PatchGrid
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.images import DecodedFiles, DecodedStore, ImageDecoder, ImageSource
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.testing import check_dataset
from tests.datasets.banks import MemoryBank

SIZES = [(20, 30), (16, 16), (33, 17), (25, 40)]


def _bank(channels: int = 3, sizes: list[tuple[int, int]] = SIZES) -> MemoryBank:
    rng = np.random.default_rng(0)
    return MemoryBank([rng.integers(0, 256, (channels, *size), dtype=np.uint8) for size in sizes])


def _dataset(
    edges: Edges = "cover", images: list[int] | None = None, masks: MemoryBank | None = None
) -> PatchDataset:
    bank = _bank()
    grid = PatchGrid(bank.heights_px, bank.widths_px, 16, 12, edges)
    return PatchDataset(bank, GridPatches(grid, images), masks=masks)


@pytest.mark.parametrize("edges", ["cover", "pad"])
def test_each_sample_is_its_patch_with_its_mask(edges: Edges) -> None:
    sizes = SIZES[1:3]
    masks = MemoryBank([np.arange(h * w, dtype=np.uint8).reshape(1, h, w) % 2 for h, w in sizes])
    for dataset in (_dataset(edges), _dataset(edges, [1, 2], masks)):
        check_dataset(dataset)
        for number in range(len(dataset)):
            sample = dataset[number]
            image, (y, x) = int(sample["image_index"]), sample["position"].tolist()
            assert (image, y, x) == dataset.patches.grid[int(sample["index"])]
            planes = {"image": dataset.bank[image]}
            if dataset.masks is not None:
                planes["mask"] = masks[image - 1]
            for name, plane in planes.items():
                reflected = np.pad(plane, ((0, 0), (0, 16), (0, 16)), mode="reflect")
                assert np.array_equal(sample[name], reflected[:, y : y + 16, x : x + 16])
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_masks_must_fit_their_images() -> None:
    wrong = MemoryBank([np.zeros((1, 16, 16), np.uint8), np.zeros((1, 17, 33), np.uint8)])
    message = (
        r"1.png: 17 x 33, folder/2.png: 33 x 17 \(turned by 90 degrees\?\)\n.*\n"
        "  if EXIF tags turn the images, set data.read.exif=apply and data.mask_read.exif=apply"
    )
    with pytest.raises(DataError, match=message):
        _dataset(images=[1, 2], masks=wrong)
    with pytest.raises(DataError, match="2 masks for 1 image"):
        _dataset(images=[1], masks=wrong)


def test_a_sample_is_named_by_file_and_place() -> None:
    dataset = _dataset(images=[1, 3])
    image, y, x = dataset.patches.grid[int(dataset[4]["index"])]
    assert (image, y, x) == (3, 9, 0)
    assert dataset.describe_sample(4) == "folder/3.png, patch at (y 9, x 0) px"


def _write_images(folder: Path, channels: int, count: int) -> list[ImageSource]:
    folder.mkdir(parents=True)
    rng, paths = np.random.default_rng(channels), []
    for number in range(count):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], rng.integers(0, 2, (channels, 16 + number, 20), dtype=np.uint8))
    return [ImageSource((str(path),)) for path in paths]


def _open(sources: list[ImageSource], folder: Path, kind: str) -> Any:
    if kind == "store":
        return DecodedStore.build(sources, folder, decoder=ImageDecoder())
    return DecodedFiles(sources, ImageDecoder(), cache_bytes=2**20 if kind == "lru" else 0)


def test_a_store_that_was_cut_short_is_found(tmp_path: Path) -> None:
    images, masks = (
        _open(_write_images(tmp_path / str(n), n, 3), tmp_path / "cache", "store") for n in (3, 1)
    )
    grid = PatchGrid(images.heights_px, images.widths_px, 16, 16)
    dataset = PatchDataset(images, GridPatches(grid), masks=masks)
    dataset.check_sources()
    loaders = [
        MicroBatchLoader(dataset, LoaderOptions(batch_size=2, worker_kind=kind))
        for kind in ("inline", "thread")
    ]
    for loader in loaders:
        assert list(loader)
    for bank in (masks, images):
        os.truncate(bank.path / "pixels.npy", 5)
        message = f"{bank.path}/pixels.npy: expected .* bytes, found 5"
        with pytest.raises(StoreCorruptError, match=message):
            dataset.check_sources()
        for loader in loaders:  # before the next epoch reads past its end
            with pytest.raises(StoreCorruptError, match=message):
                list(loader)
    for loader in loaders:
        loader.close()
    _dataset().check_sources()
