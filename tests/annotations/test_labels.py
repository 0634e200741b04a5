import logging
from typing import Any

import numpy as np
import pytest

from lit_data.annotations.labels import BoxCollector, BoxForm, Frame, LabelTable, is_share_box
from lit_data.core.errors import DataError

FRAMES = [Frame((100, 200)), Frame((50, 50))]
FORM = BoxForm(
    "a test",
    "box {}",
    ("pixels", "shares"),
    is_share_box,
    lambda boxes, sizes_px: boxes / np.hstack([sizes_px, sizes_px]),
)


def collect(*boxes: tuple[float, ...], on_bad: Any = "error") -> LabelTable:
    """A table of boxes (x1, y1, x2, y2) in px of the first image, 100 high and 200 wide."""
    collector = BoxCollector(FORM, FRAMES, on_bad=on_bad)
    collector.start_file("a.txt")
    for place, box in enumerate(boxes, 1):
        collector.add(0, place, 0, box)
    return collector.finish(["cat"])


def test_a_box_a_little_outside_is_cut_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # By 2 % of its size, and by a millionth of the image: that is rounding to six decimals.
    assert collect((-0.0002, 0, 0.01, 0.01)).boxes[0, 1] == pytest.approx(0.000025)
    assert not caplog.records
    table = collect((-1, 0, 99, 50), (101, 0, 201, 50), (10, 10, 20, 20))
    cut = np.float32([[0.2475, 0.25, 0.495, 0.5], [0.7525, 0.25, 0.495, 0.5]])
    assert table.boxes[:2, 1:].tolist() == pytest.approx(cut)
    message = "reached up to 1 % of the size, or a pixel, beyond the image and got clipped"
    assert caplog.messages == [f"2 boxes {message}"]


def test_a_small_box_may_reach_a_pixel_out_of_its_image() -> None:
    # 0.6 px of 15 px are 4 %; a box that lies outside for more than half of it is refused.
    table = collect((185.6, 10, 200.6, 50))
    assert table.boxes[0, 1:].tolist() == pytest.approx(np.float32([0.964, 0.3, 0.072, 0.4]))
    with pytest.raises(DataError, match=r"is 60 % outside .*; 1 %, or one pixel, is allowed"):
        collect((199.6, 10, 200.6, 50))


def test_duplicates_are_kept_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    table = collect((0, 0, 9, 9), (1, 1, 9, 9), (0, 0, 9, 9), (0, 0, 9, 9))
    assert len(table.boxes) == 4
    message = (
        "2 boxes duplicate another box of the image, and all are used; the first: a.txt, box 3"
    )
    assert caplog.messages == [f"{message}: box (0, 0, 9, 9)"]


def test_skip_leaves_bad_boxes_out_and_lists_them(caplog: pytest.LogCaptureFixture) -> None:
    table = collect((0, 0, 0, 9), (0, 0, 10, 10), (500, 0, 510, 10), on_bad="skip")
    assert table.boxes.shape == (1, 5)
    assert "2 bad boxes or entries are skipped" in caplog.text
    assert "a.txt: box 3" in caplog.text
