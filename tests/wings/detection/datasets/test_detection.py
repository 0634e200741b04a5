from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import FILL, MosaicSpec
from lit_data.core.types import Array, read_rows
from lit_data.testing import check_dataset
from lit_data.wings.detection import DetectionDataset
from tests.datasets.banks import MemoryBank

SIZES = np.array([(40, 60), (30, 30), (64, 16), (20, 64), (64, 64), (10, 12)])
ORIGINALS = SIZES * 2
BOXES = [
    (0, [(1, 0.5, 0.5, 1.0, 1.0), (0, 0.25, 0.5, 0.5, 0.2)]),
    (1, [(2, 0.1, 0.2, 0.2, 0.4)]),
    (4, [(0, 0.5, 0.5, 0.001, 0.001), (1, 0.5, 0.25, 0.5, 0.5), (2, 0.75, 0.75, 0.5, 0.5)]),
]


IMAGES = [
    np.random.default_rng(number).integers(0, 256, (3, *size), dtype=np.uint8)
    for number, size in enumerate(SIZES)
]
BANK = MemoryBank(IMAGES)


def _table() -> LabelTable:
    counts = np.zeros(len(SIZES), np.int64)
    for image, boxes in BOXES:
        counts[image] = len(boxes)
    flat = np.array([box for _, boxes in BOXES for box in boxes], np.float32)
    return LabelTable(("a", "b", "c"), flat, np.cumsum(counts))


def _dataset(bank: MemoryBank = BANK, **options: Any) -> DetectionDataset:
    return DetectionDataset(bank, _table(), ORIGINALS, **({"size_px": (64, 64)} | options))


def test_an_image_alone_lies_in_the_middle_of_grey_with_all_its_boxes() -> None:
    sample = _dataset()[2]
    assert sample.keys() == {"image", "boxes", "index", "image_index", "shape", "epoch"}
    assert_array_equal(sample["image"][:, :, 24:40], IMAGES[2])
    assert (sample["image"][:, :, :24] == FILL).all()
    assert (sample["image"][:, :, 40:] == FILL).all()
    assert sample["boxes"].shape == (0, 6)
    assert sample["shape"].tolist() == [128, 32]
    assert (sample["index"], sample["image_index"], sample["epoch"]) == (2, 2, 0)


def test_boxes_move_with_the_image_and_none_is_lost() -> None:
    sample = _dataset()[4]
    assert_allclose(sample["boxes"][:, 1:], BOXES[2][1], atol=1e-6)
    wide = _dataset(size_px=(64, 128))[4]
    expected = [(kind, cx / 2 + 0.25, cy, w / 2, h) for kind, cx, cy, w, h in BOXES[2][1]]
    assert_allclose(wide["boxes"][:, 1:], expected, atol=1e-6)
    assert sample["boxes"].dtype == torch.float32


@pytest.mark.parametrize("mosaic", [None, MosaicSpec(), MosaicSpec(tiles=9, probability=0.5)])
def test_a_sample_depends_on_no_other(mosaic: MosaicSpec | None) -> None:
    check_dataset(_dataset(mosaic=mosaic, seed=3))


def test_mosaics_change_with_the_epoch_and_end_at_theirs() -> None:
    dataset, plain = _dataset(mosaic=MosaicSpec(), mosaic_epochs=2), _dataset()
    found = []
    for epoch in range(4):
        dataset.set_epoch(epoch)
        found.append(dataset[4])
    assert not torch.equal(found[0]["image"], found[1]["image"])
    for late in found[2:]:
        for key in ("image", "boxes"):
            assert torch.equal(late[key], plain[4][key])
    assert len(found[2]["boxes"]) == 3, (
        "the tiny box, below min_box_px, is there as when predicting"
    )


def test_a_split_has_its_own_images_and_partners_and_keeps_the_numbers_of_all() -> None:
    dataset = _dataset(images=[1, 4], mosaic=MosaicSpec())
    assert len(dataset) == 2
    assert [int(dataset[n]["image_index"]) for n in range(2)] == [1, 4]
    plan = dataset.plan(dataset.images, 0)
    assert set(plan.image.tolist()) == {1, 4}
    assert dataset.describe_sample(1) == "folder/4.png"
    with pytest.raises(IndexError, match="sample 2 of 2"):
        dataset[2]


@pytest.mark.parametrize("tiles", [4, 9])
def test_a_whole_set_as_one_batch_has_the_mosaics_that_would_be_written(tiles: Any) -> None:
    spec, images = MosaicSpec(tiles=tiles, probability=0.8), np.arange(len(SIZES))
    # each fills the sample
    sizes = np.array([(64, 64), (64, 30), (64, 16), (20, 64), (32, 64), (1, 64)])
    bank = MemoryBank([np.zeros((3, *size), np.uint8) for size in sizes])
    written = _dataset(bank, mosaic=spec, seed=5)
    rows = read_rows(written, images, 3)
    alone = _dataset(bank, mosaic=spec, seed=5, draws_mosaics=False)
    made = alone.plan_batch(images, spec, 3)
    for name in ("row", "image", "scale", "origin", "window", "bounds"):
        planned = getattr(written.plan(images, 3), name)
        assert_array_equal(getattr(made.plan, name), planned)
    assert_array_equal(made.counts, rows["boxes_count"])
    expected = [rows["boxes"][row, :count, 1:] for row, count in enumerate(made.counts.tolist())]
    assert_array_equal(made.boxes[:, 1:], np.concatenate(expected))
    assert_array_equal(made.boxes[:, 0], np.repeat(images, made.counts))
    plain = _dataset(bank)
    for index in range(6):
        assert torch.equal(alone[index]["boxes"], plain[index]["boxes"])
        top, left, bottom, right = made.places_px[index].tolist()
        assert (alone[index]["image"][:, top:bottom, left:right] == 0).all()
        assert (alone[index]["image"] == 0).sum() == 3 * sizes[index].prod()


@pytest.mark.parametrize("size_px", [(64, 64), (50, 90), (31, 17)])
def test_boxes_found_in_samples_go_back_to_the_image_on_the_disk(size_px: tuple[int, int]) -> None:
    dataset = _dataset(size_px=size_px)
    for image, expected in BOXES:
        boxes = dataset[image]["boxes"].numpy().astype(np.float64)
        corners = _corners(boxes[:, 2:]) * np.tile(size_px[::-1], 2)
        found = dataset.find_originals(corners, np.full(len(boxes), image))
        true = _corners(np.array(expected)[:, 1:]) * np.tile(ORIGINALS[image][::-1], 2)
        assert_allclose(found, true, atol=1e-3)
    beyond = dataset.find_originals(np.array([[-9.0, -9.0, 999.0, 999.0]]), np.array([2]))
    assert beyond.tolist() == [[0, 0, 32, 128]]


def _corners(boxes: Array) -> Array:
    """(x1, y1, x2, y2) of boxes (cx, cy, w, h)."""
    sides = boxes[:, 2:] / 2
    return np.hstack([boxes[:, :2] - sides, boxes[:, :2] + sides])


def test_banks_and_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 images, boxes of 6 and sizes of 2 of them"):
        DetectionDataset(BANK, _table(), ORIGINALS[:2], size_px=(64, 64))
