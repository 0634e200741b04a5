import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_data.app.cli import main
from lit_data.app.job import noting_failure
from lit_data.app.report import add_report, write_report
from lit_data.app.reports import page
from lit_data.app.reports.charts import Chart, ChartLine, draw_chart
from lit_data.core.errors import BatchMemoryError, DataError
from tests.app.reports.folders import CONFIG, CSV, LOG, SUMMARY, make_run
from tests.helpers.browser import CHROMIUM, Browser

EVIL = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>\"' & \u202e\x00"
VOID = ("meta", "link", "img", "br", "wbr")

Install = Callable[..., None]


class Page(HTMLParser):
    """What a page holds: elements with their attributes, and the text of all but styles and scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements = []
        self.open = []
        self.words = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open, "an element is not closed"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def find(self, tag: str, attribute: str) -> list[str]:
        found = [attributes for name, attributes in self.elements if name == tag]
        return [values[attribute] or "" for values in found if attribute in values]


@pytest.fixture(scope="module", autouse=True)
def _draw_equal_charts_once() -> Iterator[None]:
    """Most runs of these tests have the same curves."""
    charts = {}

    def draw_once(title: str, lines: Sequence[ChartLine], **options: Any) -> Chart:
        key = pickle.dumps((title, lines, options))
        if key not in charts:
            charts[key] = draw_chart(title, lines, **options)
        return charts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw_chart", draw_once)
        yield


def make_sweep(folder: Path) -> Path:
    """Three jobs: one done, one failed, one killed before it had a folder."""
    for number, rate in enumerate((0.1, 0.2)):
        make_run(
            folder / str(number),
            config={**CONFIG, "model": {"lr": rate}},
            overrides=("+experiment=stripe", f"model.lr={rate}", "paths.runs=here"),
            summary={**SUMMARY, "test/dice": 0.7} if number == 0 else None,
        )
    reason = "batch 3: one sample does not fit"
    record = {"status": "out of memory", "reason": reason, "exit_code": 5}
    (folder / "1" / "job.json").write_text(json.dumps(record))
    (folder / "sweep.json").write_text(json.dumps({"metric": "val/dice"}))
    (folder / "sweep.csv").write_text(
        "job,status,reason\n0,done,\n1,out of memory,x\n2,killed,ended by SIGKILL\n"
    )
    return folder


def test_page_of_a_run_says_what_is_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "2026-01-31_12-00-00")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = Page(folder / "report.html").text
    for part in (
        "stripe done",
        "began 2026-01-31 12:00:00 · 46.8 s",
        "Speed and memory The model takes 89% of the time. Details · 72 samples/s · 1.05 % waiting",
        "Dice of the model is 0.7 (baseline 0.3), in test. Results Scores",
        "host memory, peak 744.3 MiB",
        "WARNING batch 3: 16 samples at once ran out of memory; now 8",
        "Scores score val test test baseline dice 0.8 0.7 0.3",
        "train inline 0 - a whole epoch takes 0.03 s",
        "lit-data fit +experiment=stripe",
        "root: runs/images",
        "The same all the time: batch/ooms 0.",
    ):
        assert part in text
    assert "What could not be read" not in text


def test_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = Page(write_report([make_run(tmp_path / "run")]))
    kinds = Counter(source.partition(",")[0] for source in page.find("img", "src"))
    assert kinds.pop("data:image/webp;base64") == 2
    assert kinds.keys() == {"data:image/svg+xml"}
    assert all(page.find("img", "alt"))
    links = page.find("link", "href") + page.find("a", "href")
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not page.find("script", "src")
    allowed = "default-src 'none'; img-src data:; style-src 'sha256-"
    assert [content for content in page.find("meta", "content") if content.startswith(allowed)]
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name == "style" or name.startswith("on")}


def test_sweep_is_compared(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "sweep")
    assert write_report([folder]) == folder / "report.html"
    text = Page(folder / "report.html").text
    assert "1 done 1 failed 2 runs" in text
    assert "run lr state val/ dice test/ dice samples_ per_ s data_ wait_ fraction peak_" in text
    assert "job 0 0.1 done 0.8 0.7 72 samples/s 1.05 % 744.3 MiB 46.8 s job 1 0.2 failed" in text
    assert "job 1 out of memory: batch 3: one sample does not fit job 2 killed: ended by" in text


def test_rows_lead_to_the_pages_of_runs_that_lie_below(tmp_path: Path) -> None:
    names = ("a", "javascript:alert(1)", "b c")
    runs = [make_run(tmp_path / "runs" / name, csv=None) for name in names]
    write_report(runs[1:2])
    write_report(runs[2:])
    page = Page(write_report(runs))
    assert page.find("a", "href") == [
        "./javascript%3Aalert%281%29/report.html",
        "./b%20c/report.html",
    ]
    assert not Page(write_report(runs, output=tmp_path / "runs" / "a" / "x.html")).find("a", "href")


def test_several_folders_give_one_page_where_they_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / "runs" / name / "12-00") for name in ("a", "b")]
    assert main(["report", *map(str, [*runs, runs[0]])]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'runs' / 'report.html'}\n"
    assert "2 runs run state" in Page(tmp_path / "runs" / "report.html").text
    path = tmp_path / "x.html"
    words = ["--output", str(path), "--picture-width", "0"]
    assert main(["report", *map(str, runs), *words]) == 0
    assert not Page(path).find("img", "src")
    words = ["--output", str(tmp_path / "no" / "x.html")]
    assert main(["report", str(runs[0]), *words]) == 4
    assert f"cannot write {tmp_path / 'no' / 'x.html'}" in capsys.readouterr().err


def test_broken_off_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", summary=None, csv=CSV + ",,,2,,4")
    shutil.rmtree(folder / ".hydra")
    (folder / "summary.json").write_text('{"command": "fi')
    (folder / "samples.png").write_bytes(b"\x89PNG cut")
    (folder / "oom-1.txt").write_text("out of memory: step 3")
    text = Page(write_report([folder])).text
    assert "stripe" not in text[:20]
    for part in (
        "This run did not come to its end There is no summary.json: it was killed, or it is",
        "The model takes 89% of the time",
        "Summary.json cannot be read",
        "csv/metrics.csv: 1 line is damaged or truncated",
        "Samples.png cannot be shown",
        "There is no .hydra/config.yaml",
        "oom-1.txt out of memory: step 3",
    ):
        assert part.lower() in text.lower()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("report", 2, "report needs the folder of a run or a sweep, such as runs/fit/stripe/"),
        ("report x --outputt y", 2, "unknown option '--outputt'. Did you mean '--output'? See"),
        ("report x --picture-width -1", 2, "--picture-width -1 is below 0: give pixels, or 0 for"),
        ("report x --picture-width a", 2, "argument --picture-width: invalid int value: 'a'. See"),
        ("report none", 3, "none is not there: a run is a folder that a command of lit_data wrote"),
        ("report file", 3, "file is not a folder: a run is a folder that "),
        ("report .", 3, ". is not a run and holds none: a run is a folder that "),
        ("--package mine report x", 2, "'report' comes first and has no options of a configurat"),
    ],
)
def test_mistakes_are_one_line(
    words: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words.split()) == code
    assert capsys.readouterr().err.startswith(f"lit_data: {message}")
    assert main(["report", "--help"]) == 0
    usage = "usage: lit-data report RUN [RUN ...] [--output FILE]"
    assert capsys.readouterr().out.startswith(usage)


def test_failing_run_leaves_its_reason_and_a_report(tmp_path: Path) -> None:
    folder, cfg = make_run(tmp_path / "run", summary=None), OmegaConf.create({"report": True})
    with pytest.raises(BatchMemoryError), noting_failure(cfg, folder):
        raise BatchMemoryError("one sample of 3x9x9 does not fit")
    assert json.loads((folder / "failure.json").read_text())["exit_code"] == 5
    page = Page(folder / "report.html")
    assert "This run failed out of memory: one sample of 3x9x9 does not fit" in page.text
    assert page.find("details", "open") == [""]  # its warnings
    left_over = folder / "checkpoints/.lit_data-0123456789abcdef.part"
    left_over.parent.mkdir(exist_ok=True)
    for path in (left_over, folder / "summary.json"):
        path.write_text("{}")
    with noting_failure(cfg, folder):
        assert not (folder / "summary.json").exists()  # also if it is killed now
        assert not left_over.exists()
    assert not (folder / "failure.json").exists()


@pytest.mark.parametrize("wanted", [True, False])
def test_fit_writes_its_report_before_it_says_where_the_summary_is(
    wanted: bool, tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: {"test/dice": 0.5}, "fit")
    words = [f"paths.runs={tmp_path}", *([] if wanted else ["report=false"])]
    assert main(["fit", "+experiment=stripe", *words]) == 0
    (summary,) = tmp_path.rglob("summary.json")
    assert capsys.readouterr().out.splitlines()[-1] == str(summary)
    assert summary.with_name("report.html").exists() == wanted
    assert not wanted or "dice 0.5" in Page(summary.with_name("report.html")).text


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folders: list[Path]) -> None:
        raise DataError("no run")

    monkeypatch.setattr("lit_data.app.report.write_report", fail)
    add_report(OmegaConf.create({"report": True}), tmp_path)
    assert f"cannot write a report of {tmp_path}" in caplog.text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
def test_browser_shows_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    summary = {**SUMMARY, "experiment": EVIL, f"test/{EVIL}": 0.5, "train/limited_by": EVIL}
    log = LOG + f"2026-01-31 12:00:08,001 ERROR x: {EVIL}\n"
    csv = CSV.replace("train/loss", "train/<script>window.ran = 3</script>")
    parts = {"config": CONFIG | {EVIL: EVIL}, "overrides": (EVIL,), "csv": csv, "log": log}
    for name in ("good", "b&<i>d"):
        make_run(tmp_path / name, summary=summary, **parts)
    (tmp_path / "good" / "splits.csv").write_text(f"image,split,class\nx,test,{EVIL[:-3]}\n")
    counts = {"classes": [EVIL, "good"], "test": [[3, 1], [1, 3]]}
    (tmp_path / "good" / "confusion.json").write_text(json.dumps(counts))
    pages = (write_report([tmp_path / "good"]), write_report([tmp_path], metrics=["test/dice"]))
    with Browser(tmp_path / "profile") as browser:
        browser.open(pages[0])
        widths = "[...document.querySelectorAll('%s img')].map(image => image.naturalWidth)"
        assert browser.evaluate(widths % ".picture") == [300] * 2
        assert browser.evaluate(f"Math.min(...{widths % '.chart'})") > 300
        assert browser.evaluate("document.querySelectorAll('.chart > img').length") > 4
        for width_px in (1400, 800, 400):
            size = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth") is True
        browser.evaluate("document.querySelector('.picture img').click()")
        assert browser.evaluate("document.querySelector('dialog').open") is True
        assert browser.evaluate("typeof window.ran") == "undefined"
        assert _list_faults(browser) == []
    with Browser(tmp_path / "other") as browser:
        browser.open(pages[1])
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth") is True
        first = "document.querySelector('table.sortable tbody th').textContent"
        assert browser.evaluate(first) == "b&<i>d"
        browser.evaluate("document.querySelector('table.sortable th button').click()")
        browser.evaluate("document.querySelector('table.sortable th button').click()")
        assert browser.evaluate(first) == "good"
        assert browser.evaluate("typeof window.ran") == "undefined"
        assert _list_faults(browser) == []


def _list_faults(browser: Browser) -> list[object]:
    """What the browser complained of, and what it asked for beside the page itself."""
    sent = [more for name, more in browser.events if name == "Network.requestWillBeSent"]
    asked = [more["request"]["url"] for more in sent]
    assert sum(url.startswith("file:") for url in asked) == 1
    messages = ("Log.", "Runtime.console", "Runtime.exc")
    others = [url for url in asked if not url.startswith(("file:", "data:"))]
    return [*others, *(event for event in browser.events if event[0].startswith(messages))]
