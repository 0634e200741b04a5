"""The original way to make mosaics: boxes lie where objects are drawn."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from benchmarks.mosaic_variants import (
    MosaicRecipe,
    OriginalMosaics,
    change_colours,
    collate_boxes,
    keep_images,
    read_fitting,
)
from lit_data.datasets.detection.labels import LabelTable
from lit_data.errors import DataError
from lit_data.mosaic import FILL, MosaicSpec
from lit_data.types import Array

IMAGES = 40
SIZE_PX = (60, 80)
LOOSE = MosaicSpec(min_box_visible=0.0, max_box_aspect=1000.0)


class Bank:
    """Images with one white rectangle each on its grey; its class is the image's number."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.images, boxes = [], []
        for number in range(IMAGES):
            height, width = ((60, 50), (40, 80), (60, 80))[number % 3]
            y = np.sort(rng.choice(height // 4, 2, replace=False)) * 4
            x = np.sort(rng.choice(width // 4, 2, replace=False)) * 4
            image = np.full((3, height, width), number, np.uint8)
            image[:, y[0] : y[1], x[0] : x[1]] = 255
            self.images.append(image)
            centre = x.mean() / width, y.mean() / height
            boxes.append((number, *centre, np.ptp(x) / width, np.ptp(y) / height))
        names, ends = tuple(map(str, range(IMAGES))), np.arange(1, IMAGES + 1)
        self.labels = LabelTable(names, np.array(boxes, np.float32), ends)

    def __getitem__(self, index: int) -> Array:
        return self.images[index]


def _mosaics(bank: Bank, spec: MosaicSpec = LOOSE, **options: Any) -> OriginalMosaics:
    recipe = MosaicRecipe(size_px=SIZE_PX, spec=spec, **({"gains": (0.0, 0.0, 0.0)} | options))
    kept = keep_images(bank, range(IMAGES))  # type: ignore[arg-type]  # all that is asked of a bank is an image
    return OriginalMosaics(kept.__getitem__, bank.labels, range(IMAGES), recipe, seed=3)


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_boxes_lie_around_the_pixels_of_their_objects(flip: float) -> None:
    looked_at = 0
    for sample in map(_mosaics(Bank(), flip=flip).__getitem__, list(range(IMAGES)) * 2):
        image, boxes = sample["image"].numpy(), sample["boxes"].numpy().astype(np.float64)
        assert image.shape == (3, *SIZE_PX)
        white = (image > 180).all(0)
        for _, _, cx, cy, w, h in boxes * (1, 1, SIZE_PX[1], SIZE_PX[0], SIZE_PX[1], SIZE_PX[0]):
            rows = slice(max(0, round(cy - h / 2 - 1)), round(cy + h / 2 + 1))
            columns = slice(max(0, round(cx - w / 2 - 1)), round(cx + w / 2 + 1))
            inside = white[rows, columns]
            assert abs(inside.any(1).sum() - h) <= 2
            assert abs(inside.any(0).sum() - w) <= 2
            white[rows, columns] = False
            looked_at += 1
        assert white.sum() <= 2 * sum(SIZE_PX), "an object without a box"
    assert looked_at > 130


def test_four_images_are_shown_on_grey_and_the_first_one_is_that_of_the_index() -> None:
    mosaics = _mosaics(Bank(), MosaicSpec(scale=(0.5, 0.5), translate=0.0))
    greys = [set(np.unique(mosaics[index]["image"]).tolist()) for index in range(IMAGES)]
    assert all(index in found for index, found in enumerate(greys))
    assert all(len(found & set(range(IMAGES))) >= 2 for found in greys)
    assert all(FILL in found for found in greys)


def test_small_cut_and_thin_boxes_are_left_out() -> None:
    spec = MosaicSpec(min_box_px=8.0, min_box_visible=0.6, max_box_aspect=2.0)
    boxes = torch.cat([_mosaics(Bank(), spec)[index]["boxes"] for index in range(IMAGES)]).numpy()
    sides = boxes[:, 4:].astype(np.float64) * SIZE_PX[::-1]
    assert 10 < len(sides) < 100
    assert sides.min() >= 8 - 1e-4
    assert (sides.max(1) / sides.min(1)).max() <= 2 + 1e-4


def test_batches_have_the_row_of_each_box() -> None:
    mosaics = _mosaics(Bank())
    samples = [mosaics[index] for index in (4, 9, 17)]
    batch = collate_boxes(samples)
    assert batch["image"].shape == (3, 3, *SIZE_PX)
    assert batch["image"].dtype == torch.uint8
    counts = [len(sample["boxes"]) for sample in samples]
    assert batch["boxes"][:, 0].tolist() == np.repeat(np.arange(3), counts).tolist()


def test_colours_change_as_they_are_told() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    image[:] = 40, 80, 160  # B, G, R
    assert_array_equal(change_colours(image, 1, 1, 1), image)
    assert np.abs(change_colours(image, 1, 1, 0.5).astype(int) - image // 2).max() <= 1
    grey = change_colours(image, 1, 0, 1)
    assert (grey == 160).all()


def test_files_are_scaled_until_they_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "image.png")
    image = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    cv2.imwrite(path, image)
    assert_array_equal(read_fitting(path, (30, 40)), image)
    assert read_fitting(path, (60, 80)).shape == (60, 40, 3)
    assert read_fitting(path, (60, 10)).shape == (15, 10, 3)
    with pytest.raises(DataError, match=r"^OpenCV cannot read .*none\.png$"):
        read_fitting(str(tmp_path / "none.png"), (30, 40))
