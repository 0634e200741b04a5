import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import unquote

import matplotlib
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.app.reports import charts, log
from lit_data.app.reports.charts import (
    COLOURS,
    Chart,
    ChartLine,
    draw_precision_recall,
    draw_scores,
)
from lit_data.app.reports.log import Series
from lit_data.app.result import format_value
from tests.app.reports.folders import CSV, make_run

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"


def make_line(values: list[float], *, name: str = "val/dice") -> ChartLine:
    return ChartLine(name, "val", make_series(values), 0)


def make_series(values: list[float]) -> Series:
    count = len(values)
    return Series(np.arange(count), np.zeros(count, int), np.array(values, np.float64))


def read_svg(chart: Chart) -> ElementTree.Element:
    head, _, svg = chart.uri.partition(",")
    assert head == "data:image/svg+xml"
    return ElementTree.fromstring(unquote(svg))


def read_paths(chart: Chart, colour: int, property_: str = "stroke") -> list[str]:
    """Paths that are drawn in the colour of a line; some are defined first and used by their name."""
    svg, wanted = read_svg(chart), f"{property_}: {COLOURS[colour]}"
    (svg,) = [group for group in svg.iter(f"{SVG}g") if group.get("id") == "axes_1"]
    defined = {path.get("id"): path.get("d", "") for path in svg.iter(f"{SVG}path")}
    paths = [path for path in svg.iter(f"{SVG}path") if wanted in path.get("style", "")]
    uses = [use for use in svg.iter(f"{SVG}use") if wanted in use.get("style", "")]
    names = [use.attrib[f"{LINK}href"][1:] for use in uses]
    return [path.get("d", "") for path in paths] + [defined[name] for name in names]


def read_points(path: str) -> np.ndarray:
    return np.array([pair.split() for pair in re.findall(r"-?[\d.]+ -?[\d.]+", path)], np.float64)


@pytest.mark.parametrize(
    "values",
    [[np.nan, np.nan], [5.0, 5.0], [0.0], [1e308, -1e308], [1e-300, 1e-299], [1e15, 1e15 + 1]],
)
def test_any_numbers_give_a_chart(values: list[float]) -> None:
    chart = charts.draw_chart("dice", [make_line(values)])
    paths = [path for colour in range(len(COLOURS)) for path in read_paths(chart, colour)]
    assert not re.search(r"\b(nan|inf)\b", " ".join(paths))
    texts = " ".join(text.text or "" for text in read_svg(chart).iter(f"{SVG}text"))
    assert ("val no number" in texts) == (not np.isfinite(values).any())


def test_charts_are_the_same_twice_and_leave_pyplot_alone() -> None:
    hostile = "<script>$x^{$ &lt;"
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        settings = dict(matplotlib.rcParams)
        line = ChartLine("a", hostile, make_series([1.0, 2.0]))
        uris = {charts.draw_chart(hostile, [line]).uri for _ in range(2)}
        assert matplotlib.rcParams == settings
    uris.add(charts.draw_chart(hostile, [line]).uri)
    assert len(uris) == 1  # the settings of others change nothing
    assert "<script" not in uris.copy().pop()
    texts = [text.text for text in read_svg(charts.draw_chart("x", [line])).iter(f"{SVG}text")]
    assert f"{hostile} 2" in texts
    assert "matplotlib.pyplot" not in sys.modules or not plt_figures()


def test_a_name_of_any_letters_is_drawn_as_text(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("a\x01\u202eb", "\u4e2d\u6587", "x" * 5000, "a\nb", "_hidden"):
        line = ChartLine(name, name, make_series([1.0, 2.0]))
        texts = [
            text.text or "" for text in read_svg(charts.draw_chart(name, [line])).iter(f"{SVG}text")
        ]
        assert {"1.00", "2.00"} <= set(texts)
        assert not {"\x01", "\u202e"} & set("".join(texts))
    assert [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)] == []


def plt_figures() -> list[int]:
    return sys.modules["matplotlib.pyplot"].get_fignums()


def test_precision_and_scores_of_images_are_drawn_over_their_range() -> None:
    recall, precision = np.array([0.25, 0.5, 1.0]), np.array([1.0, 0.8, 0.4])
    chart = draw_precision_recall({"images": (recall, precision)}, "test")
    (path,) = read_paths(chart, 0)
    x, y = read_points(path).T
    assert x[-1] - x[0] > 280
    assert (np.diff(y) >= 0).all()
    counts = {"good": np.array([3.0, 1.0, 0.0]), "defective": np.array([0.0, 0.0, 2.0])}
    for edges in (np.array([1e-9, 1e-6, 0.5, 1.0]), np.array([0.4, 0.5, 0.6, 0.7])):
        chart = draw_scores(edges, counts, float(edges[2]), "val")
        texts = {text.text for text in read_svg(chart).iter(f"{SVG}text")}
        assert {"good (4)", "defective (2)", "100%", "0.5"} <= texts
        assert f"threshold {edges[2]:g}" in texts
        assert not {"0.001", "0.01"} <= texts, "their labels overlap"


def test_chart_says_its_numbers_in_words() -> None:
    chart = charts.draw_chart(
        "memory", [make_line([2**20, np.nan, 3 * 2**20], name="memory/rss_bytes")]
    )
    assert chart.description == "memory over the steps of training. val: from 1 MiB to 3 MiB"
    assert make_line([3.0, 2.5, np.nan]).text == "val 2.5, then not a number"


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


def read_labels(values: list[float], name: str = "lr") -> list[str]:
    chart = charts.draw_chart("rate", [make_line(values, name=name)])
    return [text.text or "" for text in read_svg(chart).iter(f"{SVG}text")]


def test_labels_keep_the_digits_that_coordinates_lose() -> None:
    assert {"0.0162", "0.0164", "0.0166"} <= set(read_labels([0.0161, 0.0165, 0.0169]))


def test_series_of_a_log_keep_steps_epochs_and_gaps(tmp_path: Path) -> None:
    notes = []
    read = log.read_log(make_run(tmp_path / "run"), notes)
    loss = read.series["train/loss"]
    assert (loss.steps.tolist(), loss.epochs.tolist()) == ([9, 29, 39], [0, 1, 1])
    assert_array_equal(loss.values, [6.5, np.nan, 2.5])
    assert (loss.last, read.epoch_ends, notes) == (2.5, {0: 19, 1: 39, 2: 40}, [])
    assert read.series["batch/ooms"].is_constant
    assert not loss.is_constant


@pytest.mark.parametrize(
    ("tail", "note"),
    [
        (",,,2,,4", "1 line is damaged or truncated, and skipped"),
        ("x,,,2,,41,,,,,\n,,,2,,4\0", "2 lines are damaged or truncated, and skipped"),
    ],
)
def test_cut_lines_are_left_out_and_said(tmp_path: Path, tail: str, note: str) -> None:
    notes = []
    read = log.read_log(make_run(tmp_path / "run", csv=CSV + tail), notes)
    assert read.series["val/dice"].values.tolist() == [0.5, 0.75, 0.8]
    assert notes == [f"csv/metrics.csv: {note}"]
