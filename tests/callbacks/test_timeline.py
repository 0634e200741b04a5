import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_data.callbacks.timeline import (
    MARK_STYLES,
    SERIES,
    Timeline,
    add_rows,
    draw_memory,
    widen_rows,
)
from lit_data.core.types import Doubles


def _range(value: float, other: float = math.nan) -> Doubles:
    return np.array([[value, other]] * 2)


@pytest.mark.parametrize("samples", [5, 8, 9, 4321])
def test_thinning_keeps_the_extremes_and_the_order(samples: int) -> None:
    timeline, stride = Timeline(widen_rows, most_rows=4), 1
    values = np.random.default_rng(samples).normal(size=samples)
    for step, value in enumerate(values):
        timeline.add(float(step), _range(value, value if step % 7 == 0 else math.nan))
    while samples > 4 * stride:
        stride *= 2
    times_s, rows = timeline.read()
    # Each point stands for `stride` samples one after another, the last one for what is left.
    runs = [values[start : start + stride] for start in range(0, samples, stride)]
    assert times_s.tolist() == list(range(0, samples, stride))
    assert rows[:, 0, 0].tolist() == [run.min() for run in runs]
    assert rows[:, 1, 0].tolist() == [run.max() for run in runs]
    assert np.nanmax(rows[:, 1, 1]) == values[::7].max()


GIB = 2.0**30


def _row(allocated: float, **others: float) -> Doubles:
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
        device_memory = {"reserved_bytes": 8 * GIB, "batch_size": 64, "peak_bytes": 7 * GIB}
        timeline.add(60.0 * step, _row(step * GIB, **device_memory, **host))
    for kind in MARK_STYLES:
        timeline.marks[kind].add(30.0, 90.0 if kind == "validation" else None)
    draw_memory(timeline, tmp_path / "memory.png", device=device, limit_bytes=int(10 * GIB))
    with Image.open(tmp_path / "memory.png") as picture:
        assert (picture.format, picture.size) == ("PNG", size)
    assert _find_colours(tmp_path / "memory.png") == {"oom", "release", "validation", "rss", "pss"}


COLOURS = {"oom": "d62728", "release": "2ca02c", "validation": "dfe3ea"}
COLOURS |= {"rss": "f2a65a", "pss": "b5460f"}


def _find_colours(path: Path) -> set[str]:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    found = {tuple(pixel) for pixel in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    return {name for name, colour in COLOURS.items() if tuple(bytes.fromhex(colour)) in found}


@pytest.mark.parametrize(("count", "most_rows"), [(3, 4), (4, 4), (5, 4), (19, 5), (59, 5)])
def test_a_long_timeline_is_added_up_and_loses_nothing(most_rows: int, count: int) -> None:
    timeline = Timeline(add_rows, most_rows=most_rows)
    for step in range(count):
        timeline.add(step, (1, step))
        assert len(timeline) <= most_rows
    steps, rows = timeline.read()
    assert rows.sum(axis=0).tolist() == [count, sum(range(count))]
    assert len(set(rows[:-1, 0])) <= 1  # all but the last are of equally many steps
    assert steps.tolist() == [0, *np.cumsum(rows[:-1, 0])]


def test_marks_are_thinned_evenly_and_all_counted() -> None:
    marks = Timeline(add_rows, most_marks=4).marks["release"]
    for step in range(17):
        marks.add(float(step))
    marks.add(17.0, 19.0)
    assert marks.count == 18
    assert marks.spans == [(0.0, 0.0), (8.0, 8.0), (16.0, 16.0)]
