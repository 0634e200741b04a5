"""Content of `page.html`: one file that loads nothing, and runs nothing but its own script."""

import base64
import hashlib
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import yaml
from markupsafe import Markup

import lit_data
from lit_data.app.reports.charts import (
    UNPRINTABLE,
    Chart,
    ChartLine,
    ChartOf,
    draw_chart,
    find_chart,
)
from lit_data.app.reports.comparison import (
    find_best,
    find_differences,
    find_unlike,
    shorten_keys,
)
from lit_data.app.reports.log import Series, cut_final_score
from lit_data.app.reports.pictures import Picture
from lit_data.app.reports.results import draw_results, list_results, order_scores
from lit_data.app.reports.runs import Run, describe_age
from lit_data.app.result import format_value, read_number, split_stage
from lit_inspect.counts import counted

FILE = "report.html"
_MOST_CHARTS = 40
_STATES = {
    "done": ("good", "done"),
    "failed": ("bad", "failed"),
    "unfinished": ("warn", "not finished"),
}
_STAGES = ("train", "val", "test")
_SPEED = {
    "samples_per_s": "speed",
    "data_wait_fraction": "waiting for data",
    "memory/peak_allocated_bytes": "device memory, peak",
    "peak_rss_bytes": "host memory, peak",
    "batch/ooms": "out-of-memory errors, recovered",
}


def make_page(run: Run, *, title: str) -> str:
    """Return the page of a run."""
    view = RunView(run)
    facts = [*view.facts, str(run.folder)]
    return _render(title=title, chips=[_STATES[run.status]], facts=facts, view=view)


def make_comparison(
    runs: Sequence[Run],
    *,
    title: str,
    folder: Path,
    metrics: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    lost: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return the page of several runs: a table, whose rows lead to the pages of the runs.

    Args:
        runs: At least one.
        title: Of the page.
        folder: Of the page, which leads to those below it.
        metrics: Figures to compare.
        pictures: Of the sweep as a whole.
        notes: Sentences below the title.
        lost: Number, status and reason of jobs of a sweep that left no folder.
    """
    differences = find_differences(runs)
    counts = Counter(_STATES[run.status] for run in runs)
    unlike = find_unlike(runs, metrics)
    if unlike:
        notes = (*notes, "The runs were scored on different images, so no score is marked as best.")
    return _render(
        title=title,
        chips=[(kind, f"{count} {word}") for (kind, word), count in counts.items()],
        facts=[counted(len(runs), "run")],
        notes=notes,
        lost=lost,
        pictures=pictures,
        runs=runs,
        links={run.label: _find_link(run, folder) for run in runs},
        columns=["run", *shorten_keys(list(differences)).values(), "state", *metrics],
        differences=list(differences.values()),
        metrics=metrics,
        best=find_best(runs, [name for name in metrics if name not in unlike]),
    )


def _render(**content: object) -> str:
    style, script = _read("page.css"), _read("page.js")
    # Nothing but this style and this script holds, so that no text of a run can become one.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    return _read_template().render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        version=lit_data.__version__,
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
        **content,
    )


def _find_link(run: Run, folder: Path) -> str:
    """Return the address of the page of a run from a folder; empty of one that lies elsewhere."""
    page, top = run.folder.resolve() / FILE, folder.resolve()
    if not page.is_file() or not page.is_relative_to(top):
        return ""
    return f"./{quote(page.relative_to(top).as_posix())}"


class RunView:
    """A run as the page shows it.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tables = list_results(run)
        self.charts = draw_results(run)
        self.curves = {part: draw_curves(run, part) for part in ("model", "machine")}
        self.same = ", ".join(_list_idle(run))
        # loader.json may be anybody's: entries of another form are left out.
        self.loaders = {}
        for stage, entry in run.loaders.items():
            if isinstance(entry, Mapping):
                self.loaders[stage] = entry
        self.facts = [run.command]
        if run.journal.began:
            self.facts.append(f"began {run.journal.began}")
        if seconds := run.values.get("seconds"):
            self.facts.append(format_value("seconds", seconds))

    def find_pictures(self, part: str) -> list[Picture]:
        """Return the pictures of a part of the page."""
        return [picture for picture in self.run.pictures if picture.part == part]

    @property
    def speed(self) -> dict[str, str]:
        """Figures of the machine with their units, by their titles."""
        values = self.run.values
        speed = {}
        for name, title in _SPEED.items():
            if values.get(name) is not None:
                speed[title] = format_value(name, values[name])
        return speed

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Short name and title of each section that has something to show."""
        run = self.run
        settings = run.settings.command_line or run.settings.choices or run.settings.config
        results = self.find_pictures("results") or self.charts or self.tables
        machine = self.curves["machine"] or self.speed or self.loaders or run.machine
        sections = [
            ("results", "Results", results),
            ("curves", "Losses and scores", self.curves["model"]),
            ("data", "Samples", self.find_pictures("data")),
            ("warnings", "Warnings", run.journal.warnings or run.post_mortems),
            ("machine", "Speed and memory", machine or self.find_pictures("machine") or self.same),
            ("settings", "Configuration", settings),
            ("figures", "All figures", run.values),
        ]
        return [(name, title) for name, title, content in sections if content]


def draw_curves(run: Run, section: str) -> list[Chart]:
    """Draw what was logged during training, of the model or of the machine.

    Scores that were taken once are no curves, and stand in the tables.
    """
    groups: dict[str, list[_Curve]] = {}
    for name, series in run.log.series.items():
        chart = find_chart(name)
        curve = cut_final_score(series)
        is_curve = len(set(curve.steps.tolist())) > 1
        is_shown = is_curve and not _is_idle(name, series) and not run.repeats(name)
        if chart.section == section and is_shown:
            groups.setdefault(chart.title, []).append(_Curve(chart, name, curve))
    monitored = split_stage(run.monitor[0])[1]
    titles = sorted(groups, key=lambda title: _order(title, monitored))[:_MOST_CHARTS]
    return [_draw_group(groups[title], run) for title in titles]


class _Curve(NamedTuple):
    chart: ChartOf
    name: str
    series: Series


def _list_idle(run: Run) -> list[str]:
    """Return the figures of the machine that never changed, with their values."""
    texts = []
    for name, series in run.log.series.items():
        if _is_idle(name, series) and not run.repeats(name):
            texts.append(f"{name} {format_value(name, series.last)}")
    return texts


def _is_idle(name: str, series: Series) -> bool:
    return series.is_constant and find_chart(name).section == "machine"


def _order(title: str, monitored: str) -> tuple[object, ...]:
    """Sort losses first, then scores as in their table, and thresholds last."""
    is_threshold = title.endswith("threshold")
    return "loss" not in title, is_threshold, order_scores(title, monitored), title


def _draw_group(curves: list[_Curve], run: Run) -> Chart:
    lines = []
    for number, (chart, name, series) in enumerate(sorted(curves, key=_rank)):
        # A stage has one colour in all charts, and so has its baseline.
        look = _STAGES.index(chart.stage) if chart.stage else number
        lines.append(ChartLine(name, chart.label, series, look, is_dashed=chart.is_baseline))
    chart = curves[0].chart
    return draw_chart(
        chart.title.replace("_", " ") if chart.section == "model" else chart.title,
        lines,
        epoch_ends=run.log.epoch_ends,
        has_legend=len(lines) > 1 or lines[0].label != chart.title,
    )


def _rank(curve: _Curve) -> tuple[int, bool, str]:
    """Sort train before val before test, each before its baseline."""
    chart = curve.chart
    stage = _STAGES.index(chart.stage) if chart.stage else len(_STAGES)
    return stage, chart.is_baseline, chart.label


def _read_template() -> jinja2.Template:
    """Return the page, which escapes every value and replaces what cannot be shown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # Names and texts of a run may be anybody's: no value reaches the page as it is.
    environment = jinja2.Environment(loader=loader, autoescape=True, finalize=_clean)
    environment.filters |= {
        "value": _show_value,
        "number": read_number,
        "age": describe_age,
        "begin": _begin,
        "yaml": _write_yaml,
        "without_hydra": _leave_out_hydra,
        "break_name": _break_name,
    }
    environment.globals["states"] = _STATES
    return environment.get_template("page.html")


def _show_value(value: object, name: str) -> str:
    return "-" if isinstance(value, jinja2.Undefined) else format_value(name, value)


def _write_yaml(tree: object) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100) if tree else ""


def _begin(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _leave_out_hydra(choices: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in choices.items() if not key.startswith("hydra")}


def _break_name(name: str) -> str:
    """Return a name that may be broken behind its dots, slashes and underscores."""
    parts = re.split(r"(?<=[./_=])", _clean(name))
    return Markup("<wbr>").join(parts)


def _clean(value: Any) -> Any:  # noqa: ANN401 - whatever a template shows
    if isinstance(value, str) and not isinstance(value, Markup):
        return UNPRINTABLE.sub("\ufffd", value)
    return value


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
