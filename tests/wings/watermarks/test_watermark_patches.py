from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import cut_patch
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import (
    GridPatches,
    ProgressiveSize,
    RandomPatches,
    make_padded_grid,
)
from lit_data.testing import check_dataset
from lit_data.wings.watermarks import GlyphBank, WatermarkSpec
from lit_data.wings.watermarks.writer import WatermarkWriter, check_colours
from tests.datasets.banks import MemoryBank

SIZES = [(60, 90), (64, 64), (20, 100), (7, 1)]
GROWING = ProgressiveSize(((0, 16), (1, 32), (2, 24)))


def _bank(channels: int = 3, numbers: Sequence[int] = range(4)) -> MemoryBank:
    draws = [(np.random.default_rng(number), (channels, *SIZES[number])) for number in numbers]
    return MemoryBank([rng.integers(0, 256, shape, dtype=np.uint8) for rng, shape in draws])


BANK = _bank()


def _dataset(
    *,
    images: Sequence[int] = range(4),
    samples_per_image: int | None = None,
    stride_px: int = 32,
    progressive: ProgressiveSize | None = None,
    **options: Any,
) -> PatchDataset:
    numbers = np.array(images)
    patches = GridPatches(make_padded_grid(BANK, (32, 32), stride_px), numbers)
    if samples_per_image is not None:
        patches = RandomPatches(BANK, numbers, samples_per_image, progressive or (32, 32), 3)
    if "masks" not in options:
        marks = GlyphBank(WatermarkSpec(texts=("DRAFT", "COPY"), size_px=(8, 24)))
        options["writer"] = WatermarkWriter(marks, 3)
    return PatchDataset(BANK, patches, **options)


def _train(**options: Any) -> PatchDataset:
    return _dataset(samples_per_image=5, **options)


@pytest.mark.parametrize("dataset", [_train(), _dataset(), _train(progressive=GROWING)])
def test_a_sample_depends_on_no_other_and_stays_in_its_corner(dataset: PatchDataset) -> None:
    check_dataset(dataset, epochs=(0, 1, 2))
    for epoch in (0, 1, 2):
        size, fields = dataset.patches.size_at(epoch)[0], dataset.fields.items()
        rows = {name: np.full((1, *field.shape), 9, field.dtype) for name, field in fields}
        dataset.write_into(rows, np.array([3]), epoch)
        for name in ("image", "cover"):
            assert (rows[name][:, :, size:] == 9).all()


def test_a_sample_is_a_patch_of_its_image_mirrored_where_that_ends() -> None:
    for dataset in (_train(), _dataset()):
        for index in range(len(dataset)):
            sample = dataset[index]
            image, (y, x) = BANK[int(sample["image_index"])], sample["position"].tolist()
            padded = np.pad(image, ((0, 0), (0, 64), (0, 64)), mode="reflect")
            assert_array_equal(sample["image"], padded[:, y : y + 32, x : x + 32])
            height, width = image.shape[1:]
            assert 0 <= y <= max(0, height - 32)
            assert 0 <= x <= max(0, width - 32)
    for shape in ((3, 1, 1), (3, 2, 5), (1, 40, 3)):  # tiny images, as often as need be
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        expected = np.pad(image, ((0, 0), (0, 30), (0, 30)), mode="reflect")[:, :30, :30]
        assert_array_equal(cut_patch(image, 0, 0, (30, 30)), expected)


def test_training_patches_are_new_in_each_epoch_and_the_grid_covers_all() -> None:
    train, grid = _train(), _dataset(stride_px=20)
    found = []
    for epoch in (0, 1):
        train.set_epoch(epoch)
        found.append([train[index]["position"].tolist() for index in range(len(train))])
    assert len(train) == 20
    assert found[0] != found[1]
    seen = np.zeros((60, 90), bool)
    for index in range(len(grid)):
        sample = grid[index]
        if sample["image_index"] == 0:
            y, x = sample["position"].tolist()
            seen[y : y + 32, x : x + 32] = True
    assert seen.all()


def test_masks_are_cut_with_their_images() -> None:
    masks = _bank(1, [1, 2])
    dataset = _train(masks=masks, images=[1, 2])
    assert dataset.fields.keys() == {"image", "mask", "index", "image_index", "position", "epoch"}
    for index in range(len(dataset)):
        sample = dataset[index]
        y, x = sample["position"].tolist()
        mask = np.pad(masks[index // 5], ((0, 0), (0, 64), (0, 64)), mode="reflect")
        assert_array_equal(sample["mask"], mask[:, y : y + 32, x : x + 32])


def test_what_does_not_fit_is_refused() -> None:
    writer = WatermarkWriter(GlyphBank(WatermarkSpec()), 0)
    cases = [
        ({"masks": _bank(1), "writer": writer}, ConfigError, "not both"),
        ({"masks": _bank(1, [0, 1])}, DataError, "2 masks for 4 images"),
        ({"masks": _bank(1, [1, 0, 2, 3])}, DataError, r"1.png(.|\n)*2 masks differ in size from"),
        ({"samples_per_image": 0}, ConfigError, "samples_per_image=0 is not usable:"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            _dataset(**options)
    with pytest.raises(DataError, match=r"need three of uint8; set data\.read\.gray_to_rgb=true"):
        check_colours(_bank(1))
