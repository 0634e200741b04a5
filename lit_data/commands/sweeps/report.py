"""End of a sweep: a table on the console, sweep.csv, sweep.png and sweep.json."""

import csv
import io
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_data.commands.report import add_report
from lit_data.commands.reports.comparison import shorten_keys
from lit_data.commands.result import KEYS
from lit_data.commands.sweeps.job import JobRecord, Sweep, read_records, read_summary
from lit_data.commands.sweeps.options import (
    Direction,
    choose_direction,
    choose_metric,
    explain_metric,
    find_monitor,
    is_number,
    split_overrides,
)
from lit_data.errors import WorkerDiedError
from lit_data.files import plain_cell, write_json, write_text

log = logging.getLogger(__name__)


_STATUSES: Final = ("done", "failed", "out_of_memory", "killed", "interrupted", "not_run")
_COLOURS: Final = {
    "done": "green",
    "not run": "dim",
    "interrupted": "yellow",
    "running": "yellow",
}
"""Of statuses in the table; the rest is red."""
_MOST_ROWS: Final = 60  # of the picture: more jobs have no labels in it
_LONGEST_LABEL: Final = 40


@dataclass(frozen=True, kw_only=True)
class ReportedJob:
    """A job of a sweep with its figures, and its overrides that other jobs do not share."""

    record: JobRecord
    metrics: Mapping[str, Any]
    swept: Mapping[str, str]


def collect_jobs(sweep: Sweep, *, is_stopped: bool = False) -> list[ReportedJob]:
    """Return all jobs of a sweep by their numbers, as the files in its folder say.

    Args:
        sweep: that ends.
        is_stopped: the sweep was told to stop, and its launcher has ended the jobs that ran.
    """
    records: dict[int, JobRecord] = {}
    metrics: dict[int, Mapping[str, Any]] = {}
    for folder, record in read_records(sweep.folder):
        records[record.number] = _settle(record, is_stopped=is_stopped)
        metrics[record.number] = {}
        if record.status == "done":
            metrics[record.number] = read_summary(folder) or {}
    for number, overrides in enumerate(sweep.jobs or ()):
        if number not in records:
            records[number] = JobRecord(
                number=number, command=sweep.command, overrides=overrides, status="not run"
            )
    overrides_of = {number: split_overrides(record.overrides) for number, record in records.items()}
    keys = _find_swept(list(overrides_of.values()))
    jobs = []
    for number, record in sorted(records.items()):
        swept = {key: overrides_of[number].get(key, "") for key in keys}
        job = ReportedJob(record=record, metrics=metrics.get(number, {}), swept=swept)
        jobs.append(job)
    return jobs


def _settle(record: JobRecord, *, is_stopped: bool) -> JobRecord:
    """Return the record of a job, which runs no more: its launcher has gone, or lost it."""
    if record.status != "running":
        return record
    if is_stopped:
        return replace(record, status="interrupted", reason="the sweep was told to stop")
    return replace(
        record,
        status="killed",
        exit_code=WorkerDiedError.exit_code,
        reason="it ended without a word",
    )


def _find_swept(overrides: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys that are not the same in all jobs."""
    all_keys: dict[str, None] = {}  # in the order of the command line
    for of_job in overrides:
        all_keys |= dict.fromkeys(of_job)
    swept = []
    for key in all_keys:
        different_values = {of_job.get(key) for of_job in overrides}
        if len(different_values) > 1:
            swept.append(key)
    return swept


def report(jobs: Sequence[ReportedJob], cfg: DictConfig, sweep: Sweep, *, seconds: float) -> None:
    """Print the table, write sweep.csv, sweep.png, sweep.json and report.html.

    The last line is the path of sweep.json.

    Args:
        jobs: of the sweep, at least one.
        cfg: the configuration of the first job.
        sweep: options and folder.
        seconds: that this start of the sweep took.
    """
    if not jobs:
        return
    monitored = find_monitor(cfg)
    metric = _find_metric(jobs, sweep, monitored[0])
    done = [job for job in jobs if job.record.status == "done"]
    measured = [job for job in jobs if _value(job, metric) is not None]
    if metric is not None and done and not measured:
        log.warning("%s", explain_metric(metric, done[0].metrics))
    best = _find_best(measured, metric, choose_direction(sweep.options, metric, monitored))
    columns = [metric] if metric else []
    columns += sweep.options.columns or ()
    title = f"{sweep.command} {sweep.experiment}"
    print_table(jobs, title, columns, best)
    _write_csv(sweep.folder / "sweep.csv", jobs)
    picture = sweep.folder / "sweep.png"
    picture.unlink(missing_ok=True)  # one of an earlier start would be wrong by now
    if metric is not None and measured:
        draw_sweep(picture, jobs, metric, title=title)
    summary = {**_summarise(jobs, sweep, metric, best), "seconds": round(seconds, 3)}
    write_json(sweep.folder / "sweep.json", summary)
    add_report(cfg, sweep.folder)
    print(sweep.folder / "sweep.json", flush=True)


def _find_metric(jobs: Sequence[ReportedJob], sweep: Sweep, monitor: str | None) -> str | None:
    """Return the metric that jobs are compared by: that of the first job that has one."""
    for job in jobs:
        metric = choose_metric(sweep.options, monitor, job.metrics)
        if metric:
            return metric
    return None


def _find_best(
    measured: Sequence[ReportedJob], metric: str | None, direction: Direction | None
) -> ReportedJob | None:
    if direction is None or metric is None or not measured:
        return None
    choose = min if direction == "min" else max
    return choose(measured, key=lambda job: _value(job, metric) or 0.0)


def _value(job: ReportedJob, metric: str | None) -> float | None:
    value: Any = job.metrics.get(metric or "")
    return float(value) if is_number(value) else None


def _summarise(
    jobs: Sequence[ReportedJob], sweep: Sweep, metric: str | None, best: ReportedJob | None
) -> dict[str, Any]:
    """Return the content of sweep.json: one flat object.

    - ``command``, ``experiment``: as in summary.json
    - ``jobs``: how many there are; ``jobs_STATUS``: of each status
    - ``job_seconds``: of all jobs together, each in the start that it ended in
    - ``metric``: what jobs are compared by; ``best_job``, ``best_value``, ``best_overrides``: null
      where nothing says whether small or large values are good
    - ``seconds``: that this start of the sweep took
    """
    counts = Counter(job.record.status.replace(" ", "_") for job in jobs)
    summary: dict[str, Any] = {
        "command": sweep.command,
        "experiment": sweep.experiment,
        "jobs": len(jobs),
    }
    summary |= {f"jobs_{name}": counts[name] for name in _STATUSES}
    summary["job_seconds"] = round(sum(job.record.seconds for job in jobs), 3)
    summary["metric"] = metric
    summary["best_job"] = best and best.record.number
    summary["best_value"] = best and best.metrics[metric or ""]
    summary["best_overrides"] = best and " ".join(best.record.overrides)
    return summary


def print_table(
    jobs: Sequence[ReportedJob], title: str, columns: Sequence[str], best: ReportedJob | None
) -> None:
    """Print a row for each job; exit codes and reasons where any job did not end well.

    Args:
        jobs: at least one.
        title: command and experiment.
        columns: keys of summary.json.
        best: the job that gets a mark.
    """
    table = Table(title=f"{title}: {len(jobs)} jobs", title_justify="left")
    has_failures = any(job.record.exit_code or job.record.reason for job in jobs)
    headings = ["job", "overrides", "status", "seconds", *shorten_keys(columns).values()]
    if has_failures:
        headings += ["exit", "reason"]
    for heading in headings:
        is_text = heading in ("overrides", "status", "reason")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for job, label in zip(jobs, _label_jobs(jobs), strict=True):
        record = job.record
        colour = _COLOURS.get(record.status, "red")
        cells = [
            f"{record.number} *" if job is best else f"{record.number}",
            escape(label),
            f"[{colour}]{record.status}[/]",
            f"{record.seconds:.1f}",
        ]
        cells += [format_value(job.metrics.get(key)) for key in columns]
        if has_failures:
            code = "" if record.exit_code is None else str(record.exit_code)
            cells += [code, escape(record.reason)]
        table.add_row(*cells)
    if best is not None:
        table.caption, table.caption_justify = f"* best {escape(columns[0])}", "left"
    Console().print(table)


def _label_jobs(jobs: Sequence[ReportedJob]) -> list[str]:
    """Return the overrides that tell each job from the others, by short keys."""
    names = shorten_keys(list(jobs[0].swept))
    labels = []
    for job in jobs:
        swept = " ".join(f"{names[key]}={value}" for key, value in job.swept.items())
        labels.append(swept or " ".join(job.record.overrides))
    return labels


def format_value(value: object) -> str:
    """Return a value of summary.json for reading."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else escape(str(value))


def _write_csv(path: Path, jobs: Sequence[ReportedJob]) -> None:
    swept = list(jobs[0].swept)
    known = KEYS[2:]  # without command and experiment
    all_keys: set[str] = set()
    for job in jobs:
        all_keys |= job.metrics.keys()
    more = sorted(all_keys - set(KEYS))
    metrics = [key for key in (*known, *more) if key != "seconds"]
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["job", "status", "exit_code", "seconds", "reason", *swept, *metrics])
    for job in jobs:
        record = job.record
        cells = [record.number, record.status, record.exit_code, record.seconds, record.reason]
        cells += job.swept.values()
        cells += [job.metrics.get(key) for key in metrics]
        rows.writerow(map(plain_cell, cells))
    write_text(path, text.getvalue())


def draw_sweep(path: Path, jobs: Sequence[ReportedJob], metric: str, *, title: str) -> None:
    """Draw the metric of each job: a row for each, a cross at the edge for one without a result.

    Args:
        path: of the picture.
        jobs: at least one with a metric.
        metric: a key of summary.json.
        title: over the picture.
    """
    labels = [_shorten(label) for label in _label_jobs(jobs)]
    height_inches = 0.25 * min(len(jobs), _MOST_ROWS) + 1.4
    figure = Figure(figsize=(8.0, height_inches), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    measured = 0
    for row, job in enumerate(jobs):
        value = _value(job, metric)
        if value is not None:
            axis.plot(value, row, "o", color="#0a6cbd", markersize=6)
            measured += 1
        elif job.record.status != "not run":
            # On the left edge, whatever the range of the values.
            transform = axis.get_yaxis_transform()
            axis.plot(0, row, "x", color="#c62828", transform=transform, clip_on=False, zorder=3)
    if len(jobs) <= _MOST_ROWS:
        axis.set_yticks(range(len(jobs)), labels, fontsize=8)
    axis.set_ylim(len(jobs) - 0.5, -0.5)
    axis.set_xlabel(metric, fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="both", alpha=0.3)
    counts = f"{measured} of {len(jobs)} jobs"
    remark = " (x: no result)" if measured < len(jobs) else ""
    figure.suptitle(f"{title}: {counts}{remark}", fontsize=11)
    figure.savefig(path)
    log.info("picture: %s", path)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..."
