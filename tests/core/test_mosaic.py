from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import MosaicPlan, MosaicSpec, move_boxes, sample_mosaics
from lit_data.core.types import Array
from lit_data.images import ImageBank
from lit_data.wings.detection import DetectionDataset

SIZES = np.array([(40, 60), (1, 1), (64, 5), (3, 90), (50, 50), (7, 2), (200, 30)])
SPECS = [
    MosaicSpec(),
    MosaicSpec(tiles=9),
    MosaicSpec(probability=0.5, scale=(0.1, 3.0), translate=1.0),
    MosaicSpec(tiles=9, probability=0.5, scale=(1.0, 1.0), translate=0.0),
]
OUTPUTS = [(64, 64), (33, 97), (1, 1), (120, 9)]


def _plan(
    spec: MosaicSpec | None, index: Any, *, output_px: tuple[int, int] = (64, 64), **options: Any
) -> MosaicPlan:
    index = np.asarray(index)
    given = {"images": index % len(SIZES), "sizes_px": SIZES, "choices": np.arange(len(SIZES))}
    given |= {"seed": 3, "epoch": 2} | options
    return sample_mosaics(spec, index=index, output_px=output_px, **given)


def _of_sample(plan: MosaicPlan, row: int) -> list[Array]:
    mine = plan.row == row
    columns = (plan.image, plan.scale, plan.origin, plan.window, plan.bounds)
    return [values[mine] for values in columns]


@pytest.mark.parametrize("spec", [None, *SPECS])
def test_a_sample_depends_on_its_index_and_not_on_its_batch(spec: MosaicSpec | None) -> None:
    whole, order = _plan(spec, np.arange(60)), np.array([17, 3, 59, 3])
    part = _plan(spec, order)
    for row, index in enumerate(order.tolist()):
        for one, other in zip(_of_sample(part, row), _of_sample(whole, index), strict=True):
            assert_array_equal(one, other)


def test_seed_epoch_and_index_give_other_mosaics() -> None:
    usual = _plan(MosaicSpec(), [5])
    for seed, epoch, index in ((4, 2, 5), (3, 1, 5), (3, 2, 6)):
        other = _plan(MosaicSpec(), [index], seed=seed, epoch=epoch, images=[5])
        assert not np.array_equal(usual.bounds, other.bounds)
        assert usual.image[0] == other.image[0] == 5


@pytest.mark.parametrize(
    ("spec", "output_px"), [(None, (33, 97)), *zip(SPECS, OUTPUTS, strict=True)]
)
def test_windows_never_overlap_and_every_pixel_of_one_lies_in_its_tile(
    spec: MosaicSpec | None, output_px: tuple[int, int]
) -> None:
    plan = _plan(spec, np.arange(150), output_px=output_px)
    covered = np.zeros((150, *output_px), np.int64)
    columns = (plan.row, plan.image, plan.scale, plan.origin, plan.window.tolist())
    for row, image, scale, (down, right), (top, left, bottom, end) in zip(*columns, strict=True):
        covered[row, top:bottom, left:end] += 1
        y = (np.arange(top, bottom) + 0.5) / scale - down
        x = (np.arange(left, end) + 0.5) / scale - right
        height, width = SIZES[image]
        assert ((y > -1e-6) & (y < height + 1e-6)).all()
        assert ((x > -1e-6) & (x < width + 1e-6)).all()
    assert covered.max() == 1
    assert plan.window.min() >= 0


@pytest.mark.parametrize("tiles", [4, 9])
def test_the_share_of_mosaics_and_their_partners(tiles: Any) -> None:
    choices = np.array([0, 4, 6])
    plan = _plan(MosaicSpec(tiles=tiles, probability=0.25), np.arange(2000), choices=choices)
    counts = np.bincount(plan.row)
    assert set(counts.tolist()) == {1, tiles}
    assert abs((counts == tiles).mean() - 0.25) < 0.03
    firsts = np.cumsum(counts) - counts
    assert_array_equal(plan.image[firsts], np.arange(2000) % len(SIZES))
    partners = np.bincount(np.delete(plan.image, firsts), minlength=len(SIZES))
    assert set(np.flatnonzero(partners).tolist()) == set(choices.tolist())
    assert partners.max() < 1.2 * partners[choices].min()


def test_moved_boxes_are_those_of_a_slow_definition() -> None:
    rng = np.random.default_rng(0)
    spec = MosaicSpec(min_box_px=1.5, min_box_visible=0.2, max_box_aspect=8)
    plan = _plan(spec, np.arange(80))
    tile = np.sort(rng.integers(0, len(plan), 1500))
    boxes = np.concatenate((rng.uniform(0, 1, (1500, 2)), rng.uniform(0.01, 1, (1500, 2))), axis=1)
    edges, kept = move_boxes(boxes, tile, plan, SIZES, spec)
    slow = {n: _move_slowly(boxes[n], int(tile[n]), plan, spec) for n in range(1500)}
    expected = {n: box for n, box in slow.items() if box is not None}
    assert 100 < len(expected) < 1400
    assert kept.tolist() == list(expected)
    assert_allclose(edges, list(expected.values()), atol=1e-9)


def _move_slowly(
    box: Array, tile: int, plan: MosaicPlan, spec: MosaicSpec
) -> tuple[float, ...] | None:
    height, width = SIZES[plan.image[tile]]
    cx, cy, w, h = box
    scale, (down, right) = plan.scale[tile], plan.origin[tile]
    y = [(cy * height + sign * h * height / 2 + down) * scale for sign in (-1, 1)]
    x = [(cx * width + sign * w * width / 2 + right) * scale for sign in (-1, 1)]
    top, left, bottom, end = plan.bounds[tile]
    cut = max(y[0], top), max(x[0], left), min(y[1], bottom), min(x[1], end)
    high, wide = cut[2] - cut[0], cut[3] - cut[1]
    if min(high, wide) <= 0 or min(high, wide) < spec.min_box_px:
        return None
    is_hidden = high * wide < spec.min_box_visible * (y[1] - y[0]) * (x[1] - x[0])
    return None if is_hidden or max(high / wide, wide / high) > 8 else cut


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"tiles": 5}, "tiles=5 must be 4 or 9"),
        ({"scale": (0.0, 1.0)}, "0 < smallest <= largest"),
        ({"scale": (2.0, 1.0)}, "0 < smallest <= largest"),
        ({"scale": (1.0,)}, "smallest, largest"),
        ({"probability": 1.5}, "probability=1.5 must be between 0 and 1"),
        ({"translate": -0.1}, "translate=-0.1"),
        ({"min_box_visible": float("nan")}, "min_box_visible=nan"),
        ({"min_box_px": -1.0}, "at least 0"),
        ({"max_box_aspect": 0.5}, "max_box_aspect at least 1"),
        ({"close_epochs": -1}, "close_epochs"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(MosaicSpec(), **wrong)


IMAGES = 110  # their numbers are greys below 114, which is what nothing covers


class Bank(ImageBank):
    channels, dtype, skipped = 3, np.dtype(np.uint8), ()

    def __init__(self, images: list[Array]) -> None:
        self.images = images
        self.heights_px, self.widths_px = np.array([image.shape[1:] for image in images]).T

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Array:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"image {index}"


def _make_probe(
    rng: np.random.Generator, spec: MosaicSpec | None, output_px: tuple[int, int], largest: int
) -> DetectionDataset:
    """Images with one rectangle each, where 255 in the first channel crosses 255 in the second.

    The first channel has it in the rectangle's rows, the second in its columns: half of 255 is then
    exactly at its edges however far it is enlarged. The third channel, as the class of the box, is
    the number of the image.
    """
    sizes = rng.integers(1, largest, (IMAGES, 2))
    low = rng.integers(0, sizes)
    high = rng.integers(low + 1, sizes + 1)
    images = []
    for number, (height, width) in enumerate(sizes.tolist()):
        image = np.zeros((3, height, width), np.uint8)
        image[0, low[number, 0] : high[number, 0]] = 255
        image[1, :, low[number, 1] : high[number, 1]] = 255
        image[2] = number
        images.append(image)
    centre, side = ((low + high) / 2 / sizes)[:, ::-1], ((high - low) / sizes)[:, ::-1]
    boxes = np.concatenate((np.arange(IMAGES)[:, None], centre, side), axis=1).astype(np.float32)
    table = LabelTable(tuple(map(str, range(IMAGES))), boxes, np.arange(1, IMAGES + 1))
    return DetectionDataset(Bank(images), table, sizes, size_px=output_px, mosaic=spec, seed=7)


def _write(dataset: DetectionDataset, epoch: int) -> dict[str, Array]:
    count, fields = len(dataset), dataset.fields
    rows = {name: np.zeros((count, *field.shape), field.dtype) for name, field in fields.items()}
    rows["boxes"] = np.zeros((count, fields["boxes"].max_items or 0, 6), np.float32)
    rows["boxes_count"] = np.zeros(count, np.int64)
    dataset.write_into(rows, np.arange(count), epoch)
    return rows


def _read_edges(boxes: Array, size_px: tuple[int, int]) -> dict[int, Array]:
    """(top, left, bottom, right) px by class, of which there must be one box each."""
    _, kind, cx, cy, w, h = boxes.astype(np.float64).T
    edges = np.stack((cy - h / 2, cx - w / 2, cy + h / 2, cx + w / 2), axis=1) * np.tile(size_px, 2)
    assert len(set(kind.tolist())) == len(kind)
    return dict(zip(kind.astype(int).tolist(), edges, strict=True))


def _check_object(visible: Array, box: Array | None, least_px: float) -> None:
    """A box lies around the pixels that are seen of its object; without a box these are few."""
    if box is not None and (box[2:] - box[:2]).min() <= 1.25:
        return  # so thin an object may come out at half of 255, which OpenCV rounds up or down along a row
    if not visible.any():
        assert box is None, "a box of nothing"
        return
    rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
    extents = np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1])
    if box is None:
        assert (extents[2:] - extents[:2]).min() <= least_px + 1, "an object without a box"
    else:
        assert np.abs(box - extents).max() < 1


def _check_probe(dataset: DetectionDataset, least_px: float, epochs: int) -> int:
    """Returns how many objects were looked at."""
    looked_at = 0
    for epoch in range(epochs):
        rows, plan = _write(dataset, epoch), dataset.plan(np.arange(len(dataset)), epoch)
        for row, image in enumerate(rows["image"]):
            shown = plan.image[plan.row == row].tolist()
            if len(set(shown)) < len(shown):
                continue  # an image that is there twice has its colours twice
            found = _read_edges(rows["boxes"][row, : rows["boxes_count"][row]], dataset.size_px)
            assert found.keys() <= set(shown), "a box of an image that the sample does not show"
            crossing = (image[0] >= 128) & (image[1] >= 128)
            for number in shown:
                _check_object(crossing & (image[2] == number), found.get(number), least_px)
            looked_at += len(shown)
    return looked_at


_LOOSE = {"min_box_visible": 0.0, "max_box_aspect": 1000.0}
PROBES = [
    (MosaicSpec(**_LOOSE), (48, 48), 40),
    (MosaicSpec(**_LOOSE, tiles=9), (37, 71), 40),
    (MosaicSpec(**_LOOSE, probability=0.3, scale=(0.3, 2.5), translate=0.4), (64, 40), 90),
    (MosaicSpec(**_LOOSE, scale=(0.9, 1.1), min_box_px=4.0), (40, 41), 12),
    (None, (48, 48), 100),
    (None, (31, 80), 100),
]


@pytest.mark.parametrize(("spec", "output_px", "largest"), PROBES)
@pytest.mark.parametrize("objects", [12_000, pytest.param(150_000, marks=pytest.mark.slow)])
def test_boxes_lie_around_the_pixels_of_their_objects(
    objects: int, spec: MosaicSpec | None, output_px: tuple[int, int], largest: int
) -> None:
    rng, looked_at = np.random.default_rng(objects), 0
    while looked_at < objects // len(PROBES):
        dataset = _make_probe(rng, spec, output_px, largest)
        looked_at += _check_probe(dataset, spec.min_box_px if spec else 0.0, 3)
