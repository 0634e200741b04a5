import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lit_data.commands.reports.charts import BOTTOM, LEFT, RIGHT, TOP, ChartLine, draw_chart
from lit_data.commands.reports.curves import Series
from lit_data.commands.reports.markup import find_direction, format_value


def make_line(values: list[float], *, name: str = "val/dice", look: int = 0) -> ChartLine:
    steps = np.arange(len(values))
    return ChartLine(name, "val", Series(steps, np.zeros_like(steps), np.array(values, np.float64)), look)


def read_paths(chart: str, kind: str) -> list[str]:
    tree = ElementTree.fromstring(chart)
    svg = next(part for part in tree if part.tag == "svg")
    return [p.attrib["d"] for p in svg.iter("path") if p.attrib["class"].split()[0] == kind]


def test_curve_fills_the_frame_and_breaks_at_gaps() -> None:
    (path,) = read_paths(draw_chart("dice", [make_line([0.0, 1.0, np.nan, 0.5, np.inf, 0.25])]), "line")
    assert path.count("M") == 3
    assert path.count("L") == 1
    x, y = np.array([pair.split() for pair in re.findall(r"[\d.]+ [\d.]+", path)], np.float64).T
    assert (x.min(), x.max()) == (LEFT, RIGHT)
    assert TOP <= y.min() < y.max() <= BOTTOM
    assert np.argmin(y) == 1  # the largest is the highest


@pytest.mark.parametrize(
    "values",
    [[np.nan, np.nan], [5.0, 5.0], [0.0], [1e308, -1e308], [1e-300, 1e-299], [1e15, 1e15 + 1], [-1e-9, 1e-9, np.inf]],
)
def test_any_numbers_give_a_chart(values: list[float]) -> None:
    chart = draw_chart("dice", [make_line(values)])
    assert not re.search(r"nan|inf", " ".join([*read_paths(chart, "line"), *read_paths(chart, "grid")]))
    assert ("no number" in chart) == (not np.isfinite(values).any())


def test_a_loss_that_ends_in_nan_is_named_so() -> None:
    assert "<b>2.5, then not a number</b>" in draw_chart("loss", [make_line([3.0, 2.5, np.nan])])


def test_a_wide_range_is_logarithmic_and_says_so() -> None:
    chart = draw_chart("loss", [make_line([1000.0, 10.0, 0.1])])
    assert ">logarithmic<" in chart
    (path,) = read_paths(chart, "line")
    y = [float(pair.split()[1]) for pair in re.findall(r"[\d.]+ [\d.]+", path)]
    assert y[1] - y[0] == pytest.approx(y[2] - y[1], abs=0.11)


def test_many_points_are_thinned_to_a_band() -> None:
    chart = draw_chart("loss", [make_line(np.sin(np.arange(10_000)).tolist())], most_points=100)
    (path,), (band,) = read_paths(chart, "line"), read_paths(chart, "band")
    assert path.count("L") == 99
    assert band.endswith("Z")
    assert len(chart) < 8000


def test_parts_of_a_step_lie_on_each_other() -> None:
    lines = [make_line([1.0, 2.0], name="time/forward_s"), make_line([1.0, 1.0], name="time/wait_s", look=1)]
    lower, upper = read_paths(draw_chart("time", lines, stacked=True), "area")
    edges = [path.strip("MZ").split("L") for path in (lower, upper)]
    assert edges[1][:1:-1] == edges[0][:2]  # the lower edge of one is the upper edge of the other
    assert edges[0][0].split()[1] != edges[1][0].split()[1]


def test_chart_says_its_numbers_in_words() -> None:
    chart = draw_chart("memory", [make_line([2**20, np.nan, 3 * 2**20], name="memory/rss_bytes")])
    assert 'aria-label="memory over the steps of training. val: from 1 MiB to 3 MiB"' in chart


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_rss_bytes", 780496896, "744.3 MiB"),
        ("seconds", 46.77, "46.8 s"),
        ("seconds", 7300.0, "2.03 h"),
        ("train/mean_wait_s", 0.00158, "1.58 ms"),
        ("data_wait_fraction", 0.0105, "1.05 %"),
        ("samples_per_s", 72.02, "72 samples/s"),
        ("test/dice", 0.85937, "0.8594"),
        ("inline_us_per_sample", 38.2, "38.2 µs"),
        ("train/samples_hashed", 15840, "15\u202f840"),
        ("x", None, "-"),
        ("x", "text", "text"),
    ],
)
def test_values_have_their_units(name: str, value: object, text: str) -> None:
    assert format_value(name, value) == text


def test_names_tell_what_is_better() -> None:
    better = {name: find_direction(name) for name in ("val/dice", "samples_per_s", "train/loss", "seconds", "x/y")}
    assert better == {"val/dice": 1, "samples_per_s": 1, "train/loss": -1, "seconds": -1, "x/y": 0}
