import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.errors import DataError, StoreCorruptError
from lit_data.grid import Edges, PatchGrid
from lit_data.io import DecodedFiles, DecodedStore, ImageDecoder, ImageSource
from lit_data.io.images import image_source as files_module
from lit_data.io.images.header_scan import Survey
from lit_data.io.store.sources import SourceTable, join_paths
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
    message = r"1.png: 17 x 33, folder/2.png: 33 x 17 \(turned by 90 degrees\?\)"
    with pytest.raises(DataError, match=message):
        _dataset(images=[1, 2], masks=wrong)
    with pytest.raises(DataError, match="2 masks for 1 images"):
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
        MicroBatchLoader(dataset, LoaderOptions(batch_size=2, worker_kind=kind))  # type: ignore[arg-type]
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


COUNT = 500_000
WriteFakeStore = Callable[[Path, SourceTable, int], None]


def _fake_files(monkeypatch: pytest.MonkeyPatch, table: SourceTable) -> DecodedFiles:
    ones = np.ones(COUNT, np.int64)
    survey = Survey(
        np.arange(COUNT), ones, ones.copy(), 1, "uint8", (("bad.png", "is bad"),) * 50_000
    )
    monkeypatch.setattr(files_module, "survey_sources", lambda *_, **__: survey)
    monkeypatch.setattr(files_module, "join_paths", lambda _: table)
    return DecodedFiles([ImageSource(("x.png",))] * COUNT, ImageDecoder(), cache_bytes=0)


@pytest.mark.parametrize("kind", ["store", "files"])
def test_half_a_million_images_have_a_small_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_fake_store: WriteFakeStore, kind: str
) -> None:
    table = join_paths((f"folder/{number:06}.png",) for number in range(COUNT))
    if kind == "store":
        write_fake_store(tmp_path, table, COUNT)
    bank = DecodedStore.open(tmp_path) if kind == "store" else _fake_files(monkeypatch, table)
    grid = PatchGrid(bank.heights_px, bank.widths_px, 1, 1)
    dataset = PatchDataset(bank, GridPatches(grid), masks=bank)  # keeps the shared memory
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 4096
    found = pickle.loads(pickled)
    assert found.describe_sample(COUNT - 1) == "folder/499999.png, patch at (y 0, x 0) px"
    owners = [found, found.patches, found.patches.grid]
    if kind == "files":
        owners.append(found.bank)
    for owner in owners:
        for name, value in vars(owner).items():
            if isinstance(value, np.ndarray):
                assert not value.flags.owndata, name
                assert not value.flags.writeable, name
