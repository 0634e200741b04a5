"""What a sweep found: a table on the console, sweep.csv, sweep.png, and sweep.json, whose path is printed last."""

import csv
import io
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_data.commands.report import add_report
from lit_data.commands.result import KEYS
from lit_data.commands.sweeps.job import Sweep
from lit_data.commands.sweeps.options import (
    Direction,
    choose_direction,
    choose_metric,
    explain_metric,
    find_monitor,
    is_number,
    split_overrides,
)
from lit_data.commands.sweeps.plan import JobRecord, Plan, read_record, read_summary
from lit_data.errors import WorkerDiedError
from lit_data.files import plain_cell, write_json, write_text

log = logging.getLogger(__name__)


Points = Sequence[tuple[str, float | None]]
"""The parameter's value as typed, and the metric; None for a job that did not end well."""

_COLUMNS: Final = 3
_MOST_PLACES: Final = 12  # numbers of more different values get an axis of numbers
_LONGEST_LABEL: Final = 24
_LOGARITHMIC_FROM: Final = 50.0  # ratio of the largest to the least value


def draw_sweep(path: Path, parameters: Mapping[str, Points], metric: str, *, title: str) -> None:
    """Write a picture with one panel for each parameter.

    Each point is a job, a short line the mean of the jobs with one value, a cross on the lower edge
    a job that did not end well. Few numbers and all texts stand at equal distances; many numbers on
    an axis of numbers.

    Args:
        path: of the picture.
        parameters: the points by the parameter's key; at least one with a metric.
        metric: name of the metric.
        title: over the picture.
    """
    columns = 2 if len(parameters) == 4 else min(_COLUMNS, len(parameters))
    rows = math.ceil(len(parameters) / columns)
    figure = Figure(
        figsize=(max(4.6 * columns, 6.0), 3.6 * rows + 0.8), dpi=110, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(parameters) :]:
        axis.set_visible(False)
    for place, (axis, (key, points)) in enumerate(zip(axes.flat, parameters.items(), strict=False)):
        _draw_panel(axis, points)
        axis.set_xlabel(key, fontsize=9)
        axis.tick_params(labelleft=True, labelsize=8)
        if place % columns == 0:
            axis.set_ylabel(metric, fontsize=9)
    failed = any(metric is None for points in parameters.values() for _, metric in points)
    figure.suptitle(f"{title} (x: no result)" if failed else title, fontsize=11)
    figure.savefig(path)


def _draw_panel(axis: Axes, points: Points) -> None:
    labels = sort_values([value for value, _ in points])
    numbers = [to_number(label) for label in labels]
    if len(labels) > _MOST_PLACES and None not in numbers:
        places = {label: float(number or 0) for label, number in zip(labels, numbers, strict=True)}
        if (
            min(places.values()) > 0
            and max(places.values()) / min(places.values()) >= _LOGARITHMIC_FROM
        ):
            axis.set_xscale("log")
    else:
        places = {label: float(place) for place, label in enumerate(labels)}
        texts = [_shorten(label) for label in labels]
        slanted = sum(map(len, texts)) > 36  # characters that fit below one panel
        axis.set_xticks(
            list(places.values()),
            texts,
            rotation=30 if slanted else 0,
            ha="right" if slanted else "center",
        )
        axis.set_xlim(-0.5, len(labels) - 0.5)
        _draw_means(axis, points, places)
    done = [(places[value], metric) for value, metric in points if metric is not None]
    axis.plot(
        *zip(*done, strict=True), "o", color="#0a6cbd", alpha=0.7, markersize=6, markeredgewidth=0
    )
    failed = [places[value] for value, metric in points if metric is None]
    at_the_edge = blended_transform_factory(axis.transData, axis.transAxes)
    if failed:
        axis.plot(
            failed,
            [0.0] * len(failed),
            "x",
            color="#c62828",
            transform=at_the_edge,
            clip_on=False,
            zorder=3,
        )
    axis.grid(axis="y", alpha=0.3)
    axis.margins(y=0.12)


def _draw_means(axis: Axes, points: Points, places: Mapping[str, float]) -> None:
    for label, place in places.items():
        values = [metric for value, metric in points if value == label and metric is not None]
        if len(values) > 1:
            axis.hlines(fmean(values), place - 0.22, place + 0.22, color="#444444", linewidth=1.2)


def sort_values(values: Sequence[str]) -> list[str]:
    """Different values: numbers by their size, texts after them as they came."""
    different = list(dict.fromkeys(values))
    order = {value: place for place, value in enumerate(different)}
    numbers = {value: to_number(value) for value in different}
    return sorted(
        different, key=lambda value: (numbers[value] is None, numbers[value] or 0.0, order[value])
    )


def to_number(text: str) -> float | None:
    """The number a text stands for, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..."


_COLOURS = {
    "done": "green",
    "not run": "dim",
    "interrupted": "yellow",
    "running": "yellow",
}  # the rest is red
_GONE: dict[bool, dict[str, Any]] = {
    True: {"status": "interrupted", "exit_code": None, "reason": "the sweep was told to stop"},
    False: {
        "status": "killed",
        "exit_code": WorkerDiedError.exit_code,
        "reason": "it ended without a word",
    },
}


@dataclass(frozen=True, kw_only=True)
class ReportedJob:
    """A job of a sweep with what it measured, and its overrides that other jobs do not share."""

    record: JobRecord
    metrics: Mapping[str, Any]
    swept: Mapping[str, str]


def collect_jobs(plan: Plan, folder: Path, *, stopped: bool = False) -> list[ReportedJob]:
    """All jobs of a sweep by their numbers, as the files in its folder say.

    Args:
        plan: of the sweep.
        folder: of the sweep.
        stopped: the sweep was told to stop, and its launcher has ended the jobs that ran.
    """
    found: dict[int, tuple[JobRecord, Mapping[str, Any]]] = {}
    for path in folder.rglob("job.json"):
        record = (
            read_record(path.parent) if "replaced" not in path.relative_to(folder).parts else None
        )
        if record is not None:
            if record.status == "running":  # its launcher has gone, or lost it
                record = replace(record, **_GONE[stopped])
            found[record.number] = (
                record,
                (read_summary(path.parent) or {}) if record.status == "done" else {},
            )
    for number, overrides in enumerate(plan.jobs or ()):
        missing = JobRecord(number=number, overrides=overrides, config={}, status="not run")
        found.setdefault(number, (missing, {}))
    given = {number: split_overrides(record.overrides) for number, (record, _) in found.items()}
    keys = _find_swept(list(given.values()))
    return [
        ReportedJob(
            record=record, metrics=metrics, swept={key: given[number].get(key, "") for key in keys}
        )
        for number, (record, metrics) in sorted(found.items())
    ]


def report(
    jobs: Sequence[ReportedJob], cfg: DictConfig, plan: Plan, sweep: Sweep, *, seconds: float
) -> None:
    """Print the table, write sweep.csv, sweep.png, sweep.json and report.html, and print the path
    of sweep.json.

    Args:
        jobs: of the sweep, at least one.
        cfg: the configuration of the first job.
        plan: of the sweep.
        sweep: options and folder.
        seconds: that this start of the sweep took.
    """
    if not jobs:
        return
    monitored = find_monitor(cfg)
    metric = next(
        (key for job in jobs if (key := choose_metric(sweep.options, monitored[0], job.metrics))),
        None,
    )
    done = [job for job in jobs if job.record.status == "done"]
    if metric is not None and done and not any(is_number(job.metrics.get(metric)) for job in done):
        log.warning("%s", explain_metric(metric, done[0].metrics))
    best = _find_best(jobs, metric, choose_direction(sweep.options, metric, monitored))
    _print_table(jobs, plan, [key for key in (metric, *(sweep.options.columns or ())) if key], best)
    _write_csv(sweep.folder / "sweep.csv", jobs)
    _draw(jobs, sweep.folder / "sweep.png", metric, plan)
    summary = {**_summarise(jobs, plan, metric, best), "seconds": round(seconds, 3)}
    write_json(sweep.folder / "sweep.json", summary)
    add_report(cfg, sweep.folder)
    print(sweep.folder / "sweep.json", flush=True)


def _summarise(
    jobs: Sequence[ReportedJob], plan: Plan, metric: str | None, best: ReportedJob | None
) -> dict[str, Any]:
    """The content of sweep.json: one flat object.

    - ``command``, ``experiment``: as in summary.json
    - ``jobs``: how many there are; ``jobs_STATUS``: of each status
    - ``job_seconds``: of all jobs together, each in the start that it ended in
    - ``metric``: what jobs are compared by; ``best_job``, ``best_value``, ``best_overrides``: null
      where nothing says whether small or large values are good
    - ``seconds``: that this start of the sweep took
    """
    counts = Counter(job.record.status.replace(" ", "_") for job in jobs)
    names = ("done", "failed", "out_of_memory", "killed", "interrupted", "not_run")
    return {
        "command": plan.command,
        "experiment": plan.experiment,
        "jobs": len(jobs),
        **{f"jobs_{name}": counts[name] for name in names},
        "job_seconds": round(sum(job.record.seconds for job in jobs), 3),
        "metric": metric,
        "best_job": best and best.record.number,
        "best_value": best and best.metrics[metric or ""],
        "best_overrides": best and " ".join(best.record.overrides),
    }


def _find_swept(jobs: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for overrides in jobs for key in overrides)
    return [key for key in keys if len({overrides.get(key) for overrides in jobs}) > 1]


def _find_best(
    jobs: Sequence[ReportedJob], metric: str | None, direction: Direction | None
) -> ReportedJob | None:
    able = [job for job in jobs if metric is not None and is_number(job.metrics.get(metric))]
    if direction is None or metric is None or not able:
        return None
    return (min if direction == "min" else max)(able, key=lambda job: float(job.metrics[metric]))


def _print_table(
    jobs: Sequence[ReportedJob], plan: Plan, columns: Sequence[str], best: ReportedJob | None
) -> None:
    table = Table(title=f"{plan.command} {plan.experiment}: {len(jobs)} jobs", title_justify="left")
    failed = any(job.record.exit_code or job.record.reason for job in jobs)
    headings = ["job", "overrides", "status", "seconds", *shorten_keys(columns).values()]
    for heading in headings + ["exit", "reason"] * failed:
        words = heading in ("overrides", "status", "reason")
        table.add_column(heading, justify="left" if words else "right", overflow="fold")
    names = shorten_keys(list(jobs[0].swept))
    for job in jobs:
        record, mark = job.record, " *" if job is best else ""
        swept = " ".join(f"{names[key]}={value}" for key, value in job.swept.items()) or " ".join(
            record.overrides
        )
        colour = _COLOURS.get(record.status, "red")
        cells = [
            f"{record.number}{mark}",
            escape(swept),
            f"[{colour}]{record.status}[/]",
            f"{record.seconds:.1f}",
        ]
        cells += [format_value(job.metrics.get(key)) for key in columns]
        code = "" if record.exit_code is None else str(record.exit_code)
        table.add_row(*cells, *[code, escape(record.reason)] * failed)
    if best is not None:
        table.caption, table.caption_justify = f"* best {escape(columns[0])}", "left"
    Console().print(table)


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """For each key its end that no other key has: ``lr`` for ``model.optimizer.lr``; names of metrics stay whole."""
    parts = {key: key.split(".") for key in keys}
    found = {}
    for key, own in parts.items():
        ends = (own[-length:] for length in range(1, len(own)))
        unique = (
            end
            for end in ends
            if all(other[-len(end) :] != end for name, other in parts.items() if name != key)
        )
        found[key] = ".".join(next(unique, own))
    return found


def format_value(value: object) -> str:
    """A value of summary.json for reading."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else escape(str(value))


def _write_csv(path: Path, jobs: Sequence[ReportedJob]) -> None:
    swept = list(jobs[0].swept)
    measured = dict.fromkeys(KEYS[2:]) | dict.fromkeys(
        sorted({key for job in jobs for key in job.metrics})
    )
    metrics = [key for key in measured if key not in ("command", "experiment", "seconds")]
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["job", "status", "exit_code", "seconds", "reason", *swept, *metrics])
    for job in jobs:
        record = job.record
        head = [record.number, record.status, record.exit_code, record.seconds, record.reason]
        rows.writerow(
            map(
                plain_cell, [*head, *job.swept.values(), *(job.metrics.get(key) for key in metrics)]
            )
        )
    write_text(path, text.getvalue())


def _draw(jobs: Sequence[ReportedJob], path: Path, metric: str | None, plan: Plan) -> None:
    """The picture, where there is something to draw; one of an earlier start would be wrong by now."""
    path.unlink(missing_ok=True)
    measured = [job for job in jobs if metric is not None and is_number(job.metrics.get(metric))]
    if metric is None or not measured or not jobs[0].swept:
        return
    from lit_data.commands.sweeps.report import draw_sweep  # matplotlib takes a second to import

    parameters = {
        key: [
            (job.swept[key], _value(job, metric)) for job in jobs if job.record.status != "not run"
        ]
        for key in jobs[0].swept
    }
    draw_sweep(
        path,
        parameters,
        metric,
        title=f"{plan.command} {plan.experiment}: {len(measured)} of {len(jobs)} jobs",
    )
    log.info("picture: %s", path)


def _value(job: ReportedJob, metric: str) -> float | None:
    return float(job.metrics[metric]) if is_number(job.metrics.get(metric)) else None
