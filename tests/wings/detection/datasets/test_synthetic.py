"""Synthetic defects on samples of a detector, and their boxes."""

from typing import Any

import numpy as np
import pytest

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import MosaicSpec
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectSpec
from lit_data.testing import check_dataset
from lit_data.wings.detection import DetectionDataset
from lit_data.wings.detection.synthetic import SyntheticObjects, check_synthesis
from lit_data.wings.watermarks import WatermarkSpec
from tests.datasets.banks import MemoryBank

SIZES = [(64, 64), (64, 16), (20, 64), (64, 64)]
CLASSES = ("real", "spot", "scratch")
BYTES = ValueRange(0, 255, whole=True)
ONE = DefectSpec(probability=1, count=(1, 1), true_count=(1, 1), amplitude=(0.4, 0.4))


def _objects(spec: DefectSpec = ONE, values: ValueRange = BYTES, **names: str) -> SyntheticObjects:
    return SyntheticObjects.of(spec, names or "spot", CLASSES, seed=5, values=values)


def _dataset(
    synthetic: SyntheticObjects | None, dtype: str = "uint8", level: float = 128, **options: Any
) -> DetectionDataset:
    """Four flat images, the last of them with a real box."""
    bank = MemoryBank([np.full((3, *size), level, dtype) for size in SIZES])
    real = np.array([[0, 0.25, 0.5, 0.25, 0.5]], np.float32)
    labels = LabelTable(CLASSES, real, np.array([0, 0, 0, 1]))
    settings = {"size_px": (64, 64), "synthetic": synthetic, "fill": level} | options
    return DetectionDataset(bank, labels, np.array(SIZES), **settings)


def _corners(boxes: Any) -> list[list[float]]:
    """(class, left, top, right, bottom) px."""
    number, centre, side = boxes[:, 1:2], 64 * boxes[:, 2:4], 64 * boxes[:, 4:]
    return np.hstack((number, centre - side / 2, centre + side / 2)).tolist()


@pytest.mark.parametrize(
    ("dtype", "level", "values"),
    [
        ("uint8", 128, BYTES),
        ("uint16", 2_000, ValueRange(0, 4095, whole=True)),
        ("float32", 0.5, ValueRange()),
    ],
)
def test_a_box_is_what_a_defect_changes_and_comes_behind_the_real_ones(
    dtype: str, level: float, values: ValueRange
) -> None:
    dataset = _dataset(_objects(values=values), dtype, level)
    seen = 0
    for epoch in range(4):
        dataset.set_epoch(epoch)
        for number in (0, 3):
            sample = dataset[number]
            changed = (sample["image"].numpy() != np.full((), level, dtype)).any(0)
            rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
            expected = [1, columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            found = _corners(sample["boxes"].numpy())
            if number == 3:
                assert found.pop(0) == [0, 8, 16, 24, 48]
            assert found == [expected]
            assert 1 <= changed.sum() <= 15  # a spot of 3 x 3 or 3 x 5 px, perhaps at the edge
            seen += 1
    assert seen == 8


def test_no_centre_lies_on_the_grey_around_an_image() -> None:
    dataset = _dataset(_objects())
    counts = {1: 0, 2: 0}
    for epoch in range(40):
        dataset.set_epoch(epoch)
        for number in counts:
            for _, left, top, right, bottom in _corners(dataset[number]["boxes"].numpy()):
                counts[number] += 1
                low, high = ((left, right), (top, bottom))[number - 1]
                first, last = ((24, 40), (22, 42))[number - 1]  # of the image in its sample
                assert first - 3 < low < high < last + 3
    # An image that fills a quarter or a third of its sample gets as many of the defects.
    assert 3 <= counts[1] <= 18
    assert 5 <= counts[2] <= 22


@pytest.mark.parametrize("mosaic", [None, MosaicSpec(scale=(1.0, 1.0))])
def test_samples_are_pure_functions_with_room_for_all_boxes(mosaic: MosaicSpec | None) -> None:
    families = {"spot": {}, "scratch": {}, "stain": {}}
    spec = DefectSpec(probability=1, count=(5, 5), true_count=(4, 5), families=families)
    synthetic = _objects(spec, spot="spot", scratch="scratch")
    assert [family.name for family in synthetic.spec.members] == ["spot", "scratch"]
    assert synthetic.classes.tolist() == [1, 2]
    dataset = _dataset(synthetic, mosaic=mosaic)
    assert dataset.fields["boxes"].max_items == (4 if mosaic else 1) + 5
    check_dataset(dataset)
    classes = np.concatenate([dataset[number]["boxes"][:, 1] for number in range(4)])
    assert {1, 2} <= set(classes.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (None, "does not set the class .* choose one of real, spot, scratch, or give"),
        ("spit", "synthetic_class='spit' is unknown: choose one of real, spot, scratch"),
        ({"spot": "hole"}, "synthetic_class='hole' is unknown"),
        ({"sport": "spot"}, "synthetic_class: family='sport' is unknown: choose one of spot"),
        ({}, "families is empty"),
    ],
)
def test_unknown_classes_and_families_are_refused(chosen: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticObjects.of(ONE, chosen, CLASSES, seed=0, values=BYTES)


def test_what_draws_nothing_is_refused() -> None:
    for spec, name, on_device, message in (
        (None, "spot", False, "is for synthetic defects: set synthesis=library"),
        (WatermarkSpec(), None, False, "WatermarkSpec, which draws no defects"),
        (ONE, None, True, "set mosaic_on=worker, or mosaic=null"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_synthesis(spec, name, mosaics_on_device=on_device)
