"""Windows of large images: their pixels, their boxes, and which of them train."""

import logging

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import FILL
from lit_data.core.types import Floats
from lit_data.wings.detection.sampling import BoxSampling, PositiveImages
from lit_data.wings.detection.windows import WindowBank, choose_stride, cut_windows
from tests.datasets.banks import MemoryBank

SIZES = np.array([(50, 70), (10, 100)])
PATCH = (32, 32)


def _bank() -> MemoryBank:
    images = []
    for number, (height, width) in enumerate(SIZES.tolist()):
        rng = np.random.default_rng(number)
        images.append(rng.integers(0, 255, (3, height, width), np.uint8))
    return MemoryBank(images)


def _table(*images: list[tuple[int, float, float, float, float]]) -> LabelTable:
    """Boxes of the two images, as (class, left, top, right, bottom) px."""
    rows, ends = [], []
    for (height, width), boxes in zip(SIZES.tolist(), images, strict=True):
        for kind, left, top, right, bottom in boxes:
            centre = ((left + right) / 2 / width, (top + bottom) / 2 / height)
            rows.append((kind, *centre, (right - left) / width, (bottom - top) / height))
        ends.append(len(rows))
    return LabelTable(("a", "b"), np.array(rows, np.float32).reshape(-1, 5), np.array(ends))


def _corners(boxes: Floats) -> list[list[float]]:
    """(class, left, top, right, bottom) px of a window, to a thousandth."""
    _, cx, cy, w, h = (32 * boxes.astype(np.float64)).T
    corners = np.stack((cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2), axis=1).round(3) + 0.0
    return np.hstack((boxes[:, :1], corners)).tolist()


LABELS = _table([(0, 28, 20, 42, 30), (1, 0, 0, 10, 10)], [(1, 20, 3, 40, 7)])


def test_a_window_shows_its_part_of_the_image_and_grey_beyond_it() -> None:
    bank = _bank()
    windows = WindowBank(bank, PATCH, (18, 20))
    places = [windows.grid[number] for number in range(len(windows))]
    assert places[:6] == [(0, 0, 0), (0, 0, 20), (0, 0, 38), (0, 18, 0), (0, 18, 20), (0, 18, 38)]
    assert places[6:] == [(1, 0, 0), (1, 0, 20), (1, 0, 40), (1, 0, 60), (1, 0, 68)]
    for number, (image, top, left) in enumerate(places):
        part = bank[image][:, top : top + 32, left : left + 32]
        expected = np.full((3, 32, 32), FILL, np.uint8)
        expected[:, : part.shape[1], : part.shape[2]] = part
        assert_array_equal(windows[number], expected)
        assert windows.name(number) == f"folder/{image}.png"
    assert windows.windows_of([1]).tolist() == list(range(6, 11))
    assert windows.find_frames(np.array([5])).tolist() == [[38, 18, 70, 50]]
    assert len(WindowBank(bank, (200, 300), (200, 300))) == 2  # larger than all images


def test_boxes_are_moved_cut_at_the_edge_and_left_out_where_too_little_is_seen() -> None:
    windows = cut_windows(LABELS, _bank(), patch_px=PATCH, stride_px=(18, 20), least_visible=0.25)
    expected = [
        [[0, 28, 20, 32, 30], [1, 0, 0, 10, 10]],  # 4 of 14 px of the first one
        [[0, 8, 20, 22, 30]],
        [[0, 0, 20, 4, 30]],
        [[0, 28, 2, 32, 12]],
        [[0, 8, 2, 22, 12]],
        [[0, 0, 2, 4, 12]],
        [[1, 20, 3, 32, 7]],
        [[1, 0, 3, 20, 7]],
        [],
        [],
        [],
    ]
    found = [_corners(windows.labels.of(number)) for number in range(len(windows.bank))]
    assert found == expected
    stricter = cut_windows(LABELS, _bank(), patch_px=PATCH, stride_px=(18, 20), least_visible=0.3)
    found = [_corners(stricter.labels.of(number)) for number in range(len(stricter.bank))]
    expected[0], expected[2], expected[3], expected[5] = [[1, 0, 0, 10, 10]], [], [], []
    assert found == expected


def test_a_box_that_no_window_shows_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    labels = _table([(0, 0, 0, 70, 50)], [(1, 20, 3, 40, 7)])
    with caplog.at_level(logging.WARNING):
        windows = cut_windows(
            labels, _bank(), patch_px=(16, 16), stride_px=(16, 16), least_visible=0.5
        )
    assert set(windows.labels.boxes[:, 0].tolist()) == {1}
    assert (
        "1 of 2 boxes is skipped, because each window shows less than data.min_visible=0.5"
        in caplog.text
    )


def test_the_largest_object_fits_into_what_windows_share() -> None:
    assert choose_stride(LABELS, SIZES, PATCH) == (32 - 10, 32 - 16)  # 20 px are more than half
    assert choose_stride(LABELS, SIZES, (64, 64)) == (64 - 10, 64 - 20)
    assert choose_stride(_table([], []), SIZES, PATCH) == (16, 16)


def test_positives_are_drawn_by_class_and_file_as_a_function_of_the_sample() -> None:
    # Files 0 and 1 have 40 windows each; class 0 is in 30 windows of file 0 and in one of file 1.
    classes = np.full(80, -1)
    classes[:30], classes[40], classes[50] = 0, 0, 1
    shown = classes >= 0
    boxes = np.hstack((classes[shown][:, None], np.full((32, 4), 0.5))).astype(np.float32)
    labels = LabelTable(("a", "b"), boxes, np.cumsum(shown, dtype=np.int64))
    images, sources = np.arange(80), np.arange(80) // 40
    drawn = PositiveImages(labels, images, sources, {"": 0.5}, 3)
    indices = np.arange(40_000)
    chosen = drawn.choose(indices, 2)
    fraction = np.bincount(chosen, minlength=80) / len(chosen)
    assert fraction[50] == pytest.approx(0.25, abs=0.01)  # all of its class
    assert fraction[40] == pytest.approx(0.125, abs=0.01)  # as often as all 30 of the other file
    assert fraction[:30].sum() == pytest.approx(0.125, abs=0.01)
    assert fraction[~shown].sum() == pytest.approx(0.5, abs=0.01)
    assert_array_equal(drawn.choose(indices[77:99], 2), chosen[77:99])
    assert (drawn.choose(indices, 3) != chosen).any()
    assert np.isin(drawn.partners, np.flatnonzero(shown)).mean() == pytest.approx(0.5, abs=0.01)
    rare = PositiveImages(labels, images, sources, {"b": 0.9}, 3).choose(indices, 0)
    assert (rare == 50).mean() == pytest.approx(0.9, abs=0.01)
    assert not np.isin(rare, np.flatnonzero(classes == 0)).any()


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ({"c": 0.5}, "sampling.positives='c' is unknown: choose one of a, b"),
        ({"b": 0.5}, "none of the 1 training samples shows 'b': are the labels right"),
    ],
)
def test_classes_that_cannot_be_drawn_are_refused(shares: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PositiveImages(_table([(0, 1, 1, 9, 9)], []), np.array([0]), np.array([0]), shares, 0)


def test_fractions_have_the_words_of_masks() -> None:
    assert BoxSampling().find_shares(has_windows=True) == {"": 0.5}
    assert BoxSampling().find_shares(has_windows=False) == {}
    assert BoxSampling(positives=None).find_shares(has_windows=True) == {}
    assert BoxSampling(positives={"a": 0.2}).find_shares(has_windows=False) == {"a": 0.2}
    with pytest.raises(ConfigError, match="positives='some' must be auto, null, a fraction"):
        BoxSampling(positives="some")
    with pytest.raises(ConfigError, match="must add up to at most 1"):
        BoxSampling(positives={"a": 0.7, "b": 0.7})
