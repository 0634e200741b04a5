"""Patches cut on the device are those that the dataset cuts itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.core.grid import Edges, PatchGrid
from lit_data.core.types import Array, Batch, read_rows
from lit_data.datasets import PatchDataset, device_bank
from lit_data.datasets.device_bank import DeviceBank, DevicePatches
from lit_data.datasets.patch_source import GridPatches
from lit_data.images import DecodedFiles, DecodedStore, ImageDecoder, ImageSource

SIZES = [(20, 30), (16, 17), (33, 16), (25, 40)]
CPU = torch.device("cpu")
MakeStore = Callable[[Sequence[Array]], DecodedStore]


def _write(folder: Path, images: Sequence[Array]) -> list[ImageSource]:
    folder.mkdir()
    for number, image in enumerate(images):
        np.save(folder / f"{number}.npy", image)
    return [ImageSource((str(folder / f"{number}.npy"),)) for number in range(len(images))]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(images: Sequence[Array]) -> DecodedStore:
        folder = tmp_path / f"set-{len(list(tmp_path.iterdir()))}"
        return DecodedStore.build(
            _write(folder, images), tmp_path / "cache", decoder=ImageDecoder()
        )

    return make


def _images(channels: int, sizes: Sequence[tuple[int, int]], dtype: str = "uint8") -> list[Array]:
    rng = np.random.default_rng(0)
    low = -30_000 if dtype == "int16" else 0
    high = {"uint8": 256, "int16": 30_000}.get(dtype, 65_536)
    return [rng.integers(low, high, (channels, *size)).astype(dtype) for size in sizes]


def _read(dataset: PatchDataset) -> Batch:
    rows = read_rows(dataset, np.random.default_rng(1).permutation(len(dataset)), epoch=2)
    return {name: torch.from_numpy(array) for name, array in rows.items()}


def _compare(
    make_store: MakeStore, device: torch.device, edges: Edges, dtype: str, patch_px: tuple[int, int]
) -> None:
    store = make_store(_images(3, SIZES, dtype))
    split = [3, 1, 2]
    masks = make_store([mask % 2 for mask in _images(1, [SIZES[image] for image in split])])
    grid = PatchGrid(store.heights_px, store.widths_px, patch_px, (9, 7), edges)
    patches = DevicePatches()
    for images, mask_bank in ((None, None), (split, masks)):
        expected = _read(PatchDataset(store, GridPatches(grid, images), masks=mask_bank))
        dataset = PatchDataset(store, GridPatches(grid, images), masks=mask_bank, pixels=False)
        batch = {name: tensor.to(device) for name, tensor in _read(dataset).items()}
        filled = patches.fill(batch, dataset)
        filled.pop("mask_index", None)
        assert filled.keys() == expected.keys()
        for name, tensor in expected.items():
            assert filled[name].dtype == tensor.dtype
            assert filled[name].device.type == device.type
            assert np.array_equal(filled[name].cpu().numpy(), tensor.numpy())


@pytest.mark.parametrize("edges", get_args(Edges))
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_patches_are_those_of_the_dataset(make_store: MakeStore, edges: Edges, dtype: str) -> None:
    _compare(make_store, CPU, edges, dtype, (5, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("edges", get_args(Edges))
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_patches_on_a_gpu(make_store: MakeStore, edges: Edges, dtype: str) -> None:
    _compare(make_store, torch.device("cuda", 0), edges, dtype, (5, 16))


def test_patches_larger_than_an_image_are_mirrored(make_store: MakeStore) -> None:
    _compare(make_store, CPU, "pad", "uint8", (28, 29))


def test_a_sample_without_pixels_is_a_few_numbers(make_store: MakeStore) -> None:
    store, masks = make_store(_images(3, SIZES)), make_store(_images(1, SIZES))
    grid = PatchGrid(store.heights_px, store.widths_px, 16, 16)
    numbers = {"index", "image_index", "position", "epoch"}
    assert set(PatchDataset(store, GridPatches(grid), pixels=False).fields) == numbers
    dataset = PatchDataset(store, GridPatches(grid), masks=masks, pixels=False)
    assert set(dataset.fields) == numbers | {"mask_index"}
    assert all(field.dtype == "int64" for field in dataset.fields.values())
    assert dataset[0].keys() == dataset.fields.keys()


def test_too_many_pixels_are_refused(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([np.zeros((3, 1000, 1000), np.uint8)])
    asked = []

    def fake(device: torch.device) -> int:
        asked.append(device.type)
        return free_bytes

    monkeypatch.setattr(device_bank, "find_free_bytes", fake)
    free_bytes = 4_000_000
    DeviceBank(store, torch.device("meta"))
    free_bytes = 3_999_996
    message = r"needs 3.0 MB for the decoded pixels on meta, but 4.0 MB is free, a quarter .*: set data.cache=store"
    with pytest.raises(ConfigError, match=message):
        DeviceBank(store, torch.device("meta"))
    assert asked == ["meta", "meta"]


def test_the_host_maps_the_store_and_asks_for_no_room(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_bank, "find_free_bytes", lambda device: 0)
    store = make_store(_images(1, SIZES))
    patch = DeviceBank(store, CPU).cut(torch.tensor([2]), torch.tensor([[5, 0]]), (8, 9))
    assert np.array_equal(patch[0].numpy(), store[2][:, 5:13, :9])


def test_what_a_validation_put_there_serves_training(make_store: MakeStore) -> None:
    store = make_store(_images(1, SIZES, "float32"))
    dataset = PatchDataset(
        store, GridPatches(PatchGrid(store.heights_px, store.widths_px, 16, 16)), pixels=False
    )
    patches = DevicePatches()
    with torch.inference_mode():
        patches.fill(_read(dataset), dataset)
    image = patches.fill(_read(dataset), dataset)["image"]
    weight = torch.ones(1, requires_grad=True)
    (image * weight).sum().backward()
    assert weight.grad == image.sum()


def test_only_a_store_goes_to_the_device(tmp_path: Path) -> None:
    files = DecodedFiles(_write(tmp_path / "set", _images(1, SIZES)), ImageDecoder(), cache_bytes=0)
    dataset = PatchDataset(
        files, GridPatches(PatchGrid(files.heights_px, files.widths_px, 16, 16)), pixels=False
    )
    with pytest.raises(
        ConfigError, match="only a decoded store can go to the device, this is DecodedFiles"
    ):
        DevicePatches().fill(_read(dataset), dataset)
