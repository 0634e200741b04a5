"""Several runs beside each other: what differs between them, what came out, and their curves in one chart."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from lit_data.commands.reports.charts import Chart, ChartLine, draw_chart
from lit_data.commands.reports.curves import Series
from lit_data.commands.reports.runs import Run
from lit_data.commands.reports.settings import flatten
from lit_data.commands.reports.units import find_direction
from lit_data.commands.result import is_score, split_stage

_STAGE: Final = re.compile(r"^(train|training|val|valid|validation|test|predict)[/_.](.+)$")
_STAGES: Final = {"training": "train", "valid": "val", "validation": "val"}
_FORKED: Final = re.compile(
    r"^(.+)_(step|epoch)$"
)  # Lightning's names of a metric with on_step and on_epoch
_ORDER: Final = ("train", "val", "test", "predict")
_OTHERS: Final = len(_ORDER)
_LIMITS: Final = ("memory/free_bytes", "memory/limit_bytes")


@dataclass(frozen=True)
class Place:
    """Where a metric is shown.

    Attributes:
        section: Scores of the model, or the machine.
        chart: Title of the chart.
        label: Of the line in it.
        is_baseline: Whether it is what a simple rule scores.
    """

    section: Literal["model", "machine"]
    chart: str
    label: str
    is_baseline: bool = False


def find_place(name: str) -> Place:
    """Where a metric is shown: train and val on one axis, parts of a step in one chart, memory in one."""
    staged = _STAGE.match(name)
    if staged:
        stage, rest = _STAGES.get(staged[1], staged[1]), staged[2]
        is_baseline = rest.endswith("_baseline")
        rest = rest.removesuffix("_baseline")
        forked = _FORKED.match(rest)
        label = f"{stage}, each {forked[2]}" if forked else stage
        return Place(
            "model",
            forked[1] if forked else rest,
            f"{label}, baseline" * is_baseline or label,
            is_baseline,
        )
    group, _, last = name.partition("/")
    if group == "time" and last.endswith("_s"):
        return Place("machine", "time of a step", last.removesuffix("_s"))
    if name in _LIMITS:
        return Place("machine", "memory there is", last.removesuffix("_bytes"))
    if group == "memory" and last.endswith("_bytes"):
        return Place("machine", "memory in use", last.removesuffix("_bytes"))
    machine = group in ("data", "batch", "memory", "time", "cache", "amp") and bool(last)
    return Place("machine" if machine else "model", name, name)


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Train before val before test, each before its baseline."""
    return sorted(labels, key=lambda label: (_rank(label), "baseline" in label, label))


def choose_looks(labels: Iterable[str]) -> list[int]:
    """A colour for each label: of a stage the same everywhere, of others one after the other."""
    others: dict[str, int] = {}
    looks = []
    for label in labels:
        known = _rank(label)
        looks.append(known if known < _OTHERS else others.setdefault(label, len(others)))
    return looks


def _rank(label: str) -> int:
    stage = label.split(",")[0]
    return _ORDER.index(stage) if stage in _ORDER else _OTHERS


_MOST_SCORES: Final = 4
_MOST_COLUMNS: Final = 8
_MACHINE: Final = ("samples_per_s", "data_wait_fraction", "peak_rss_bytes", "batch/ooms", "seconds")
_CURVES: Final = ("data/samples_per_s", "data/wait_fraction", "memory/rss_bytes", "batch/size")
_MOST_POINTS: Final = 120
_MOST_OVERLAYS: Final = 9
_NO_OPTION: Final = ("paths.", "hydra.", "report")


def find_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The options that were given on a command line and are not the same in all runs.

    Where no such option differs, those of the configuration that do.

    Returns:
        By key, the value in each run; ``-`` where a run has no such key.
    """
    leaves = [flatten(run.settings.config) for run in runs]
    keys = dict.fromkeys(_read_key(word) for run in runs for word in run.settings.overrides)
    found = {
        key: [_look_up(run, own, key) for run, own in zip(runs, leaves, strict=True)]
        for key in keys
    }
    differing = {key: values for key, values in found.items() if _differs(key, values)}
    if not differing:
        every = dict.fromkeys(key for own in leaves for key in own)
        found = {key: [_format(own[key]) if key in own else "-" for own in leaves] for key in every}
        differing = {key: values for key, values in found.items() if _differs(key, values)}
    return dict(list(differing.items())[:_MOST_COLUMNS])


def find_scores(run: Run) -> list[str]:
    """Metrics of the model in the summary: of the test, without one of the validation; the monitored one first."""
    scores = [
        name
        for name, value in run.values.items()
        if is_score(name, value) and not name.endswith("_baseline")
    ]
    monitored = split_stage(run.monitor[0])[1]
    for stage in ("test", "val", ""):
        found = [name for name in scores if split_stage(name)[0] == stage]
        if found:
            return sorted(found, key=lambda name: split_stage(name)[1] != monitored)
    return []


def choose_metrics(runs: Sequence[Run], wanted: Sequence[str], *, first: str = "") -> list[str]:
    """The columns of figures: those that were asked for, or scores and what the machine did.

    Args:
        runs: That are compared.
        wanted: What was asked for.
        first: What the sweep compares by.
    """
    if wanted:
        return list(wanted)
    scores = dict.fromkeys(name for run in runs for name in find_scores(run)[:_MOST_SCORES])
    machine = [name for name in _MACHINE if any(run.values.get(name) for run in runs)]
    return list(dict.fromkeys([*filter(None, [first]), *list(scores)[:_MOST_SCORES], *machine]))


def rank(runs: Sequence[Run], name: str) -> list[int]:
    """Places of the runs with a number for this metric, the best first; empty where no direction is known."""
    direction = next(
        (sign for key, sign in (run.monitor for run in runs) if key == name), 0
    ) or find_direction(name)
    numbered = [
        (value, place)
        for place, run in enumerate(runs)
        if (value := read_number(run, name)) is not None
    ]
    return (
        [place for _, place in sorted(numbered, key=lambda entry: -direction * entry[0])]
        if direction
        else []
    )


def find_best(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, int]:
    """The place of the best run for each metric by which several differ."""
    return {
        name: places[0]
        for name in metrics
        if len(places := rank(runs, name)) > 1 and not _all_same(runs, name)
    }


def draw_overlays(runs: Sequence[Run], metrics: Sequence[str]) -> list[Chart]:
    """One chart for each curve that several runs have, with one line for each run."""
    names = [
        name
        for name in _choose_curves(runs, metrics)
        if sum(name in run.log.series for run in runs) > 1
    ]
    charts = []
    for name in names[:_MOST_OVERLAYS]:
        lines = [
            make_line(run, place, name) for place, run in enumerate(runs) if name in run.log.series
        ]
        charts.append(draw_chart(name, lines, most_points=_MOST_POINTS, legend=False))
    return charts


def make_line(run: Run, place: int, name: str = "") -> ChartLine:
    """The line of a run in the charts of all runs."""
    return ChartLine(name, run.label, run.log.series.get(name, _EMPTY), place)


_EMPTY: Final = Series(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, np.nan))


def _choose_curves(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Losses and scores of training and validation, then what the machine did, as far as it changed."""
    every = dict.fromkeys(name for run in runs for name in run.log.series)
    model = [
        name
        for name in every
        if find_place(name).section == "model" and not find_place(name).is_baseline
    ]
    model = sorted(
        (n for n in model if not n.startswith("test")),
        key=lambda n: ("loss" not in n, n not in metrics),
    )
    machine = [
        name
        for name in _CURVES
        if any(name in run.log.series and not run.log.series[name].is_constant for run in runs)
    ]
    longest = {
        name: max(len(run.log.series[name].values) for run in runs if name in run.log.series)
        for name in every
    }
    return [name for name in [*model, *machine] if longest[name] > 1]


def read_number(run: Run, name: str) -> float | None:
    """A figure of a run's summary; None where it is no number."""
    value = run.values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _all_same(runs: Sequence[Run], name: str) -> bool:
    return len({read_number(run, name) for run in runs} - {None}) < 2


def _read_key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _look_up(run: Run, leaves: Mapping[str, Any], key: str) -> str:
    """The value of an option in a run: of a group the chosen option, else what the configuration says."""
    if key in run.settings.choices:
        return run.settings.choices[key]
    if key in leaves:
        return _format(leaves[key])
    below = {
        name.removeprefix(f"{key}."): value
        for name, value in leaves.items()
        if name.startswith(f"{key}.")
    }
    return _format(below) if below else "-"


def _format(value: Any) -> str:  # noqa: ANN401 - what YAML may hold
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _differs(key: str, values: Sequence[str]) -> bool:
    return not key.startswith(_NO_OPTION) and len(set(values)) > 1
