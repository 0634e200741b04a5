"""Content of the page of `page.html`: one file that loads nothing, and runs nothing but its own script."""

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

import lit_data
from lit_data.commands.reports.charts import Chart, ChartLine, draw_chart
from lit_data.commands.reports.comparison import draw_overlays, find_best, find_differences
from lit_data.commands.reports.curves import Place, Series, cut_final_score, find_place
from lit_data.commands.reports.pictures import Picture
from lit_data.commands.reports.results import list_results, list_tiles, read_number
from lit_data.commands.reports.runs import Run, describe_age
from lit_data.commands.reports.settings import write_yaml
from lit_data.commands.reports.units import find_direction, format_value

_MOST_CHARTS: Final = 40
_POINTS_ALONE: Final = 300
_POINTS_OF_MANY: Final = 100
_STATES: Final = {
    "done": ("good", "done"),
    "failed": ("bad", "failed"),
    "unfinished": ("warn", "not finished"),
}
_STAGES: Final = ("train", "val", "test")
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, those that turn the direction of what follows, and halves of surrogate pairs."""


def make_page(
    runs: Sequence[Run],
    *,
    title: str,
    metrics: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    lost: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return the whole page.

    Args:
        runs: At least one; several are compared before each has its section.
        title: Of the page.
        metrics: Figures to compare.
        pictures: Of the sweep as a whole.
        notes: Sentences below the title.
        lost: Number, status and reason of jobs of a sweep that left no folder.
    """
    several = len(runs) > 1 or bool(lost)
    views = [RunView(run, place, several=several) for place, run in enumerate(runs)]
    style, script = _read("page.css"), _read("page.js")
    # Nothing but this style and this script holds, so that no text of a run can become one.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    facts = [f"{len(runs)} runs"] if several else [*views[0].facts, str(views[0].run.folder)]
    differences = find_differences(runs) if several else {}
    return _read_template().render(
        title=title,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        chips=_count_states(runs, several=several),
        facts=facts,
        notes=notes,
        lost=lost,
        pictures=pictures,
        several=several,
        views=views,
        columns=["run", *differences, "state", *metrics],
        differences=list(differences.values()),
        metrics=metrics,
        best=find_best(runs, metrics),
        overlays=draw_overlays(runs, metrics) if several else [],
        version=lit_data.__version__,
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _count_states(runs: Sequence[Run], *, several: bool) -> list[tuple[str, str]]:
    """Return kind and text of each chip behind the title."""
    states = [_STATES[run.status] for run in runs]
    chips = []
    for kind, word in dict.fromkeys(states):
        text = f"{states.count((kind, word))} {word}" if several else word
        chips.append((kind, text))
    return chips


class RunView:
    """A run as the page shows it.

    Args:
        run: The run.
        place: Among all of the page.
        several: There are others.
    """

    def __init__(self, run: Run, place: int, *, several: bool) -> None:
        self.run = run
        self.level = 3 if several else 2  # of its headings
        self.look = place  # of its line in the charts of all runs
        self.tiles = list_tiles(run)
        self.results = list_results(run)
        most_points = _POINTS_OF_MANY if several else _POINTS_ALONE
        self.charts = draw_curves(run, most_points)
        self.same = ", ".join(_list_idle(run))
        self.loaders = {}
        for stage, entry in run.loaders.items():
            if isinstance(entry, Mapping):
                self.loaders[stage] = entry
        seconds = run.values.get("seconds")
        self.facts = [run.command]
        if run.journal.began:
            self.facts.append(f"began {run.journal.began}")
        if seconds:
            self.facts.append(format_value("seconds", seconds))

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Short name and title of each section that has something to show."""
        run = self.run
        timelines = [picture.is_timeline for picture in run.pictures]
        settings = run.settings.command_line or run.settings.choices or run.settings.config
        sections = [
            ("results", "Results", self.results),
            ("curves", "Curves", self.charts or self.same),
            ("pictures", "Pictures", False in timelines),
            ("timelines", "Memory and throughput", True in timelines),
            ("warnings", "Warnings", run.journal.warnings or run.post_mortems),
            ("loading", "Loading", self.loaders),
            ("settings", "Configuration", settings),
            ("machine", "Machine and figures", True),
        ]
        return [(name, title) for name, title, content in sections if content]


def draw_curves(run: Run, most_points: int) -> list[tuple[str, list[Chart]]]:
    """Draw what was logged during training, the model apart from the machine.

    Scores that were taken once are no curves, and stand in the tables.
    """
    lines: dict[tuple[str, str], list[tuple[Place, str, Series]]] = {}
    for name, series in run.log.series.items():
        place = find_place(name)
        curve = cut_final_score(series)
        is_curve = len(set(curve.steps.tolist())) > 1
        if is_curve and not _is_idle(name, series) and not run.repeats(name):
            lines.setdefault((place.section, place.chart), []).append((place, name, curve))
    sections = []
    for section, title in (("model", "Losses and scores"), ("machine", "Speed and memory")):
        names = sorted((chart for group, chart in lines if group == section), key=_order)
        charts = []
        for name in names[:_MOST_CHARTS]:
            charts.append(_draw_group(name, lines[section, name], run, most_points))
        if charts:
            sections.append((title, charts))
    return sections


def _list_idle(run: Run) -> list[str]:
    texts = []
    for name, series in run.log.series.items():
        if _is_idle(name, series) and not run.repeats(name):
            texts.append(f"{name} {format_value(name, series.last)}")
    return texts


def _is_idle(name: str, series: Series) -> bool:
    return series.is_constant and find_place(name).section == "machine"


def _order(chart: str) -> tuple[int, str]:
    """Sort losses first, then what should rise, then the rest."""
    if "loss" in chart:
        return 0, chart
    return 2 - find_direction(chart), chart


def _draw_group(
    chart: str, curves: list[tuple[Place, str, Series]], run: Run, most_points: int
) -> Chart:
    section = curves[0][0].section
    curves = sorted(curves, key=lambda curve: _rank(curve[0]))
    lines = []
    for number, (place, name, series) in enumerate(curves):
        # A stage has one colour in all charts, and so has its baseline.
        look = _STAGES.index(place.stage) if place.stage else number
        lines.append(ChartLine(name, place.label, series, look, is_dashed=place.is_baseline))
    return draw_chart(
        chart.replace("_", " ") if section == "model" else chart,
        lines,
        epoch_ends=run.log.epoch_ends,
        most_points=most_points,
        has_legend=len(lines) > 1 or lines[0].label != chart,
    )


def _rank(place: Place) -> tuple[int, bool, str]:
    stage = _STAGES.index(place.stage) if place.stage else len(_STAGES)
    return stage, place.is_baseline, place.label


def _read_template() -> jinja2.Template:
    """Return the page, which escapes every value and replaces what cannot be shown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, finalize=_clean)
    environment.filters |= {
        "value": _show_value,
        "number": read_number,
        "age": describe_age,
        "begin": _begin,
        "yaml": write_yaml,
        "without_hydra": _leave_out_hydra,
        "break_name": _break_name,
    }
    environment.globals["states"] = _STATES
    return environment.get_template("page.html")


def _show_value(value: object, name: str) -> str:
    return "-" if isinstance(value, jinja2.Undefined) else format_value(name, value)


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
        return _UNPRINTABLE.sub("\ufffd", value)
    return value


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
