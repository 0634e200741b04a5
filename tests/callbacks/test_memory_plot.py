import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lit_data.callbacks.timeline import MARK_STYLES, SERIES, Timeline, draw_memory, widen_rows

GIB = 2.0**30


def _row(allocated: float, **others: float) -> NDArray[np.float64]:
    """Return a sample as it lies in the timeline, [2, series]: lowest and highest are equal."""
    values = {"allocated_bytes": allocated, **others}
    return np.array([[values.get(name, math.nan) for name in SERIES]] * 2)


@pytest.mark.parametrize(("device", "size"), [("cuda:0", (1210, 770)), ("cpu", (1210, 484))])
def test_the_picture_is_a_png_of_the_stated_size(
    device: str, size: tuple[int, int], tmp_path: Path
) -> None:
    timeline = Timeline(widen_rows)
    for step in range(5):
        host = {"rss_bytes": 2 * GIB, "pss_bytes": math.nan if step % 2 else 3 * GIB}
        timeline.add(
            60.0 * step,
            _row(step * GIB, reserved_bytes=8 * GIB, batch_size=64, peak_bytes=7 * GIB, **host),
        )
    for kind in MARK_STYLES:
        timeline.marks[kind].add(30.0, 90.0 if kind == "validation" else None)
    draw_memory(timeline, tmp_path / "memory.png", device=device, limit_bytes=int(10 * GIB))
    with Image.open(tmp_path / "memory.png") as picture:
        assert (picture.format, picture.size) == ("PNG", size)
    assert _find_colours(tmp_path / "memory.png") == {"oom", "release", "validation", "rss", "pss"}


def test_a_picture_of_a_quiet_run_has_no_marks_and_no_lines_of_what_is_not_known(
    tmp_path: Path,
) -> None:
    timeline = Timeline(widen_rows)
    for step in range(2):
        timeline.add(float(step), _row(1.0, rss_bytes=5e6))
    draw_memory(timeline, tmp_path / "memory.png", device="cpu", limit_bytes=0)
    assert _find_colours(tmp_path / "memory.png") == {"rss"}


def _find_colours(path: Path) -> set[str]:
    colours = {
        "oom": "d62728",
        "release": "2ca02c",
        "validation": "dfe3ea",
        "rss": "f2a65a",
        "pss": "b5460f",
    }
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return {
        name
        for name, colour in colours.items()
        if (pixels == tuple(bytes.fromhex(colour))).all(-1).any()
    }
