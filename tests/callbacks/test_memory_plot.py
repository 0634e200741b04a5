import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_data.callbacks.memory.plot import MARKS, SERIES, Timeline, draw_timeline

GIB = 2.0**30


def _values(allocated: float, **others: float) -> list[float]:
    return [{"allocated_bytes": allocated, **others}.get(name, math.nan) for name in SERIES]


def test_a_short_run_is_kept_as_it_is() -> None:
    timeline = Timeline(most_points=4)
    for step in range(4):
        timeline.add(10.0 * step, _values(step))
    times_s, low, high = timeline.read()
    assert times_s.tolist() == [0, 10, 20, 30]
    assert low[:, 0].tolist() == high[:, 0].tolist() == [0, 1, 2, 3]
    assert np.isnan(low[:, 1:]).all()


@pytest.mark.parametrize("samples", [5, 6, 8, 9, 17, 1000, 4321])
def test_thinning_keeps_the_extremes_and_the_order(samples: int) -> None:
    timeline, stride = Timeline(most_points=4), 1
    values = np.random.default_rng(samples).normal(size=samples)
    for step, value in enumerate(values):
        timeline.add(float(step), _values(value, pss_bytes=value if step % 7 == 0 else math.nan))
    while samples > 4 * stride:
        stride *= 2
    times_s, low, high = timeline.read()
    # Each point stands for `stride` samples one after another, the last one for what is left.
    pieces = [values[start : start + stride] for start in range(0, samples, stride)]
    assert times_s.tolist() == list(range(0, samples, stride))
    assert low[:, 0].tolist() == [piece.min() for piece in pieces]
    assert high[:, 0].tolist() == [piece.max() for piece in pieces]
    assert np.nanmax(high[:, SERIES.index("pss_bytes")]) == values[::7].max()


def test_days_of_samples_stay_small() -> None:
    timeline = Timeline()
    for step in range(20_000):
        timeline.add(float(step), _values(1e9 if step == 777 else 1.0))
    times_s, low, high = timeline.read()
    assert len(times_s) == len(timeline) == 1250
    assert (low[:, 0].min(), high[:, 0].max()) == (1.0, 1e9)


def test_marks_are_thinned_evenly_and_all_counted() -> None:
    marks = Timeline(most_marks=4).marks["release"]
    for step in range(17):
        marks.add(float(step))
    assert marks.count == 17
    assert marks.spans_s == [(0.0, 0.0), (8.0, 8.0), (16.0, 16.0)]


@pytest.mark.parametrize(("device", "size"), [("cuda:0", (1210, 770)), ("cpu", (1210, 484))])
def test_the_picture_is_a_png_of_the_stated_size(
    device: str, size: tuple[int, int], tmp_path: Path
) -> None:
    timeline = Timeline()
    for step in range(5):
        host = {"rss_bytes": 2 * GIB, "pss_bytes": math.nan if step % 2 else 3 * GIB}
        timeline.add(
            60.0 * step,
            _values(step * GIB, reserved_bytes=8 * GIB, batch_size=64, peak_bytes=7 * GIB, **host),
        )
    for kind in MARKS:
        timeline.marks[kind].add(30.0, 90.0 if kind == "validation" else None)
    draw_timeline(timeline, tmp_path / "memory.png", device=device, limit_bytes=int(10 * GIB))
    with Image.open(tmp_path / "memory.png") as picture:
        assert (picture.format, picture.size) == ("PNG", size)
    assert _find_colours(tmp_path / "memory.png") == {"oom", "release", "validation", "rss", "pss"}


def test_a_picture_of_a_quiet_run_has_no_marks_and_no_lines_of_what_is_not_known(
    tmp_path: Path,
) -> None:
    timeline = Timeline()
    for step in range(2):
        timeline.add(float(step), _values(1.0, rss_bytes=5e6))
    draw_timeline(timeline, tmp_path / "memory.png", device="cpu", limit_bytes=0)
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
