import pickle

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lit_data.datasets import StripeDataset
from lit_data.datasets.stripes import cut_patch
from lit_data.errors import DataError
from lit_data.grid import Edges, PatchGrid
from lit_data.types import Array, RowWriter

SIZES = [(20, 30), (16, 16), (33, 17), (25, 40)]


class Bank:
    """Images in memory, behind the interface of a store."""

    def __init__(self, images: list[Array]) -> None:
        self.images = images
        self.channels, self.dtype = images[0].shape[0], images[0].dtype
        self.heights_px: NDArray[np.int64] = np.array([image.shape[1] for image in images])
        self.widths_px: NDArray[np.int64] = np.array([image.shape[2] for image in images])
        self.skipped = ()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Array:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"image-{index}"


def _bank(channels: int = 3, sizes: list[tuple[int, int]] = SIZES) -> Bank:
    rng = np.random.default_rng(0)
    return Bank([rng.integers(0, 256, (channels, *size), dtype=np.uint8) for size in sizes])


def _dataset(edges: Edges = "cover", images: list[int] | None = None, masks: Bank | None = None) -> StripeDataset:
    bank = _bank()
    return StripeDataset(bank, PatchGrid(bank.heights_px, bank.widths_px, 16, 12, edges), images=images, masks=masks)


def test_each_sample_is_its_patch() -> None:
    dataset = _dataset()
    assert isinstance(dataset, RowWriter)
    for number in range(len(dataset)):
        sample = dataset[number]
        image, (y, x) = int(sample["image_index"]), sample["position"].tolist()
        assert (image, y, x) == dataset.grid[number]
        assert int(sample["index"]) == number
        expected = torch.from_numpy(dataset.bank[image][:, y : y + 16, x : x + 16])
        assert torch.equal(sample["image"], expected)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_split_keeps_the_numbers_of_the_whole_set() -> None:
    whole, part = _dataset(), _dataset(images=[1, 3])
    numbers = [int(part[n]["index"]) for n in range(len(part))]
    assert numbers == [*whole.grid.patches_of(1), *whole.grid.patches_of(3)]
    for n, number in enumerate(numbers):
        assert torch.equal(part[n]["image"], whole[number]["image"])


def test_rows_are_written_in_place_for_any_order() -> None:
    dataset = _dataset()
    indices = np.array([5, 0, len(dataset) - 1, 5])
    rows = {name: np.zeros((6, *field.shape), field.dtype) for name, field in dataset.fields.items()}
    dataset.write_into({name: array[1:5] for name, array in rows.items()}, indices, epoch=3)
    assert rows["index"].tolist() == [0, *indices.tolist(), 0]
    assert rows["epoch"].tolist() == [0, 3, 3, 3, 3, 0]
    for row, number in zip(range(1, 5), indices.tolist(), strict=True):
        assert np.array_equal(rows["image"][row], dataset[number]["image"].numpy())
    assert not rows["image"][0].any()
    assert not rows["image"][5].any()


def test_masks_are_cut_with_their_images() -> None:
    masks = Bank([np.arange(h * w, dtype=np.uint8).reshape(1, h, w) % 2 for h, w in (SIZES[1], SIZES[2])])
    dataset = _dataset(images=[1, 2], masks=masks)
    for number in range(len(dataset)):
        sample = dataset[number]
        y, x = sample["position"].tolist()
        mask = masks[int(sample["image_index"]) - 1][:, y : y + 16, x : x + 16]
        assert torch.equal(sample["mask"], torch.from_numpy(mask))


def test_masks_must_fit_their_images() -> None:
    wrong = Bank([np.zeros((1, 16, 16), np.uint8), np.zeros((1, 17, 33), np.uint8)])
    with pytest.raises(DataError, match=r"image-1: 17 x 33, image-2: 33 x 17 \(turned by 90 degrees\?\)"):
        _dataset(images=[1, 2], masks=wrong)
    with pytest.raises(DataError, match="2 masks for 1 images"):
        _dataset(images=[1], masks=wrong)


def test_patches_past_the_edge_are_mirrored() -> None:
    dataset = _dataset(edges="pad")
    for number in range(len(dataset)):
        image, y, x = dataset.grid[number]
        pixels = np.pad(dataset.bank[image], ((0, 0), (0, 16), (0, 16)), mode="reflect")
        assert np.array_equal(dataset[number]["image"].numpy(), pixels[:, y : y + 16, x : x + 16])


def test_the_store_stays_as_it_is() -> None:
    image = np.zeros((1, 4, 4), np.uint8)
    image.flags.writeable = False
    patch = np.ones((1, 2, 2), np.uint8)
    cut_patch(image, 1, 1, patch)
    patch += 5
    assert not image.any()


def test_pickle_does_not_grow_with_patches() -> None:
    bank = _bank(sizes=[(40, 40)])
    small, large = (StripeDataset(bank, PatchGrid([40], [40], 16, stride)) for stride in (16, 1))
    assert len(large) > 50 * len(small)
    assert abs(len(pickle.dumps(large)) - len(pickle.dumps(small))) < 64
