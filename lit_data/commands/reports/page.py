"""What stands in the page of `page.html`: one file that loads nothing, and runs nothing but its own script."""

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

import lit_data
from lit_data.commands.reports.charts import Chart, ChartLine, draw_chart
from lit_data.commands.reports.comparison import (
    Place,
    choose_looks,
    draw_overlays,
    find_best,
    find_differences,
    find_place,
    find_scores,
    make_line,
    read_number,
    sort_labels,
)
from lit_data.commands.reports.curves import Series
from lit_data.commands.reports.pictures import Picture
from lit_data.commands.reports.runs import Run, describe_age
from lit_data.commands.reports.settings import write_yaml
from lit_data.commands.reports.units import find_direction, format_value
from lit_data.commands.result import split_stage

_MOST_CHARTS: Final = 40
_MOST_TILES: Final = 4
_MOST_EVENTS: Final = 100
_POINTS_ALONE: Final = 300
_POINTS_OF_MANY: Final = 100
_STATES: Final = {
    "done": ("good", "done"),
    "failed": ("bad", "failed"),
    "unfinished": ("warn", "not finished"),
}
_LEVELS: Final = {"ERROR": "bad", "CRITICAL": "bad", "WARNING": "warn"}
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, those that turn the direction of what follows, and halves of surrogate pairs."""
_MACHINE_TILES: Final = (
    ("seconds", "time", "from start to end"),
    ("samples_per_s", "speed", "while training"),
    ("data_wait_fraction", "waiting for data", "of the training time"),
    ("memory/peak_allocated_bytes", "device memory", "peak"),
    ("peak_rss_bytes", "host memory", "peak"),
    ("batch/ooms", "out of memory", "errors, recovered from"),
)
_PARTS: Final[tuple[str, ...]] = (
    "forward",
    "backward",
    "optimizer",
    "augment",
    "transfer",
    "assemble",
    "wait",
    "other",
)
"""Of a step, from the bottom of the chart: first what the device should do."""
_TITLES: Final = {
    "curves": "Curves",
    "pictures": "Pictures",
    "timelines": "Memory and throughput",
    "events": "Events",
    "loading": "Loading",
    "settings": "Configuration",
    "machine": "Machine and figures",
}


def make_page(
    runs: Sequence[Run],
    *,
    title: str,
    metrics: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    lost: Sequence[tuple[str, str, str]] = (),
) -> str:
    """The whole page.

    Args:
        runs: At least one; several are compared before each has its section.
        title: Of the page.
        metrics: Figures to compare.
        pictures: Of the sweep as a whole.
        notes: Sentences below the title.
        lost: Number, status and reason of jobs of a sweep that left no folder.
    """
    several = len(runs) > 1 or bool(lost)
    views = [_RunView(run, place, several=several) for place, run in enumerate(runs)]
    style, script = (
        (Path(__file__).parent / name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    states = [_STATES[run.status] for run in runs]
    chips = [
        (k, f"{states.count((k, word))} {word}" if several else word)
        for k, word in dict.fromkeys(states)
    ]
    first, differences = views[0], find_differences(runs) if several else {}
    return _read_template().render(
        **{
            "title": title,
            "notes": notes,
            "lost": lost,
            "pictures": pictures,
            "several": several,
            "views": views,
        },
        **{"chips": chips, "policy": policy, "style": Markup(style), "script": Markup(script)},
        facts=[f"{len(runs)} runs"] if several else [*first.facts, str(first.run.folder)],
        columns=["run", *differences, "state", *metrics],
        differences=list(differences.values()),
        metrics=metrics,
        best=find_best(runs, metrics),
        overlays=draw_overlays(runs, metrics) if several else [],
        version=lit_data.__version__,
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


@dataclass(frozen=True)
class Tile:
    """A headline figure.

    Attributes:
        title: What it is.
        number: Of it.
        unit: Of the number, if it has one.
        below: What it is of.
    """

    title: str
    number: str
    unit: str
    below: str


def list_tiles(run: Run) -> list[Tile]:
    """The headline figures of a run: its scores, then what the machine did."""
    values, tiles = run.values, []
    for name in find_scores(run)[:_MOST_TILES]:
        baseline = values.get(f"{name}_baseline")
        stage, metric = split_stage(name)
        below = (
            f"{stage}; a simple rule: {format_value(name, baseline)}"
            if baseline is not None
            else stage
        )
        tiles.append(_make_tile(metric.replace("_", " "), format_value(name, values[name]), below))
    on_host = (
        values.get("memory/peak_allocated_bytes") == values.get("memory/peak_rss_bytes")
        or (run.machine or {}).get("device") == "cpu"
    )
    for name, title, below in _MACHINE_TILES:
        if values.get(name) is not None and not (name == "memory/peak_allocated_bytes" and on_host):
            tiles.append(_make_tile(title, format_value(name, values[name]), below))
    return tiles


class _RunView:
    """What is shown of a run.

    Args:
        run: The run.
        place: Among all of the page.
        several: Whether there are others.
    """

    most_events = _MOST_EVENTS

    def __init__(self, run: Run, place: int, *, several: bool) -> None:
        self.run, self.level = run, 3 if several else 2
        self.line, self.tiles = make_line(run, place), list_tiles(run)
        self.charts = list(_draw_curves(run, _POINTS_OF_MANY if several else _POINTS_ALONE))
        self.same = ", ".join(
            f"{name} {format_value(name, found.last)}"
            for name, found in run.log.series.items()
            if _is_idle(name, found)
        )
        self.loaders = {
            stage: entry for stage, entry in run.loaders.items() if isinstance(entry, Mapping)
        }
        began, seconds = run.journal.began, run.values.get("seconds")
        times = [
            f"began {began}" if began else "",
            format_value("seconds", seconds) if seconds else "",
        ]
        self.facts = [run.command, *filter(None, times)]

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Short name and title of each section that has something to show."""
        run, timelines = self.run, [picture.is_timeline for picture in self.run.pictures]
        there = {
            "curves": self.charts or self.same,
            "pictures": False in timelines,
            "timelines": True in timelines,
            "loading": self.loaders,
            "settings": run.settings.command_line or run.settings.choices or run.settings.config,
        }
        return [(name, title) for name, title in _TITLES.items() if there.get(name, True)]


def _draw_curves(run: Run, most_points: int) -> Iterator[tuple[str, list[Chart]]]:
    """All logged metrics, those of the model apart from those of the machine; what never changed is left out there."""
    charts: dict[tuple[str, str], list[tuple[Place, str, Series]]] = {}
    for name, series in run.log.series.items():
        place = find_place(name)
        if not _is_idle(name, series):
            charts.setdefault((place.section, place.chart), []).append((place, name, series))
    for section, title in (("model", "Losses and scores"), ("machine", "Speed and memory")):
        drawn = [
            _draw_group(chart, lines, run, most_points)
            for (group, chart), lines in sorted(charts.items(), key=lambda item: _order(item[0][1]))
            if group == section and any(len(set(series.steps)) > 1 for _, _, series in lines)
        ][:_MOST_CHARTS]
        if drawn:
            yield title, drawn


def _is_idle(name: str, series: Series) -> bool:
    return series.is_constant and find_place(name).section == "machine"


def _order(chart: str) -> tuple[int, str]:
    return (0 if "loss" in chart else -find_direction(chart) + 2, chart)


def _draw_group(
    chart: str, found: Sequence[tuple[Place, str, Series]], run: Run, most_points: int
) -> Chart:
    stacked = chart == "time of a step"
    labels = [place.label for place, _, _ in found]
    order = [part for part in _PARTS if part in labels] if stacked else []
    order += [label for label in sort_labels(labels) if label not in order]
    ordered = sorted(found, key=lambda entry: order.index(entry[0].label))
    looks = choose_looks(place.label for place, _, _ in ordered)
    lines = [
        ChartLine(name, place.label, series, look, is_dashed=place.is_baseline)
        for (place, name, series), look in zip(ordered, looks, strict=True)
    ]
    alike = len({tuple(line.series.steps) for line in lines}) == 1
    return draw_chart(
        chart.replace("_", " ") if found[0][0].section == "model" else chart,
        lines,
        epoch_ends=run.log.epoch_ends,
        most_points=most_points,
        legend=len(lines) > 1 or lines[0].label != chart,
        stacked=stacked and alike,
    )


def _make_tile(title: str, value: str, below: str) -> Tile:
    number, _, unit = (
        value.rpartition(" ") if value[-1:].isalpha() or value.endswith("%") else (value, "", "")
    )
    return Tile(title, number or value, unit if number else "", below)


def _read_template() -> jinja2.Template:
    """The page with every value escaped, and what cannot be shown replaced."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=_clean
    )
    environment.filters |= {
        "value": lambda value, name: format_value(
            name, value or None if isinstance(value, jinja2.Undefined) else value
        ),
        "number": read_number,
        "age": describe_age,
        "begin": lambda sentence: sentence[:1].upper() + sentence[1:],
        "yaml": lambda config: write_yaml(dict(config)),
        "without_hydra": lambda found: {
            key: value for key, value in found.items() if not key.startswith("hydra")
        },
        "break_name": lambda name: Markup("<wbr>").join(re.split(r"(?<=[./_=])", _clean(name))),
        "status_class": lambda status: _STATES[status][0],
        "status_word": lambda status: _STATES[status][1],
        "level_class": lambda level: _LEVELS.get(level, "plain"),
    }
    return environment.get_template("page.html")


def _clean(value: Any) -> Any:  # noqa: ANN401 - whatever a template shows
    return (
        _UNPRINTABLE.sub("\ufffd", value)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
