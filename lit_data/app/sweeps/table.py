"""End of a sweep: a table on the console, sweep.csv, sweep.png, sweep.json and report.html."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.text import Text

from lit_data.app.configuration.rows import read_words
from lit_data.app.report import add_report
from lit_data.app.reports.comparison import find_differing, shorten_keys
from lit_data.app.result import KEYS, find_summary, is_score, print_table, read_number
from lit_data.app.sweeps.options import choose_direction, choose_metric, explain_metric
from lit_data.app.sweeps.records import JobRecord, read_records, settle
from lit_data.core.errors import escape
from lit_data.core.files import write_json, write_table
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_STATUSES = ("done", "failed", "out_of_memory", "killed", "interrupted")
_COLOURS = {"done": "green", "interrupted": "yellow"}
"""Of statuses in the table; the rest is red."""
_MOST_ROWS = 60  # of the picture: more jobs have no labels in it
_LONGEST_LABEL = 40
_FOLD_COLUMNS = ("overrides", "metric", "folds", "mean", "deviation")


@dataclass(frozen=True, kw_only=True)
class ReportedJob:
    """A job of a sweep with its figures, and its overrides that other jobs do not share."""

    record: JobRecord
    metrics: Mapping[str, Any]
    swept: Mapping[str, str]


def report_sweep(cfg: DictConfig, folder: Path) -> None:
    """Print the table of a sweep, write sweep.csv, sweep.png, sweep.json and report.html.

    The last line is the path of sweep.json.

    Args:
        cfg: the configuration of the sweep, with Hydra's node.
        folder: of the sweep; nothing is written if it holds no job.
    """
    jobs = collect_jobs(folder)
    if not jobs:
        return
    done = [job for job in jobs if job.record.status == "done"]
    # The metric is that of the first job that has one.
    metrics = [choose_metric(cfg, job.metrics) for job in jobs]
    metric = next(filter(None, metrics), None)
    measured = [job for job in done if read_number(job.metrics, metric) is not None]
    if metric is not None and done and not measured:
        log.warning("%s", explain_metric(metric, done[0].metrics))
    best = _find_best(cfg, measured, metric)
    columns = [metric] if metric else []
    title = f"{cfg.command} {cfg.name}"
    print_jobs(jobs, title, [*columns, *(cfg.sweep.columns or ())], best)
    _write_csv(folder / "sweep.csv", jobs)
    report_folds(jobs, folder / "folds.csv")
    picture = folder / "sweep.png"
    picture.unlink(missing_ok=True)  # one of an earlier start would be wrong by now
    if metric is not None and measured:
        draw_sweep(picture, jobs, metric, title=title)
    write_json(folder / "sweep.json", _summarise(cfg, jobs, metric, best))
    add_report(cfg, folder)
    print(folder / "sweep.json", flush=True)


def collect_jobs(folder: Path) -> list[ReportedJob]:
    """Return all jobs of a sweep that has ended, by their numbers, as the files in its folder say."""
    entries = [(path, settle(record)) for path, record in read_records(folder)]
    differing = find_differing([read_words(record.overrides) for _, record in entries], missing="")
    jobs = []
    for row, (path, record) in enumerate(entries):
        swept = {key: values[row] for key, values in differing.items()}
        metrics = (find_summary(path) or {}) if record.status == "done" else {}
        jobs.append(ReportedJob(record=record, metrics=metrics, swept=swept))
    return jobs


def _find_best(
    cfg: DictConfig, measured: Sequence[ReportedJob], metric: str | None
) -> ReportedJob | None:
    """Return the best job; None where nothing is measured, or nothing says what is good."""
    direction = choose_direction(cfg, metric) if measured else None
    if direction is None:
        return None
    choose = min if direction == "min" else max
    return choose(measured, key=lambda job: read_number(job.metrics, metric) or 0.0)


def _summarise(
    cfg: DictConfig, jobs: Sequence[ReportedJob], metric: str | None, best: ReportedJob | None
) -> dict[str, Any]:
    """Return the content of sweep.json: one flat object.

    - ``command``, ``experiment``: as in summary.json
    - ``jobs``: how many there are; ``jobs_STATUS``: of each status
    - ``job_seconds``: of all jobs together, each in the start that it ended in
    - ``metric``: what jobs are compared by; ``best_job``, ``best_value``, ``best_overrides``: null
      where nothing says whether small or large values are good
    """
    counts = Counter(job.record.status.replace(" ", "_") for job in jobs)
    return {
        "command": cfg.command,
        "experiment": cfg.name,
        "jobs": len(jobs),
        **{f"jobs_{name}": counts[name] for name in _STATUSES},
        "job_seconds": round(sum(job.record.seconds for job in jobs), 3),
        "metric": metric,
        "best_job": best and best.record.number,
        "best_value": best and best.metrics[metric or ""],
        "best_overrides": best and " ".join(best.record.overrides),
    }


def print_jobs(
    jobs: Sequence[ReportedJob], title: str, columns: Sequence[str], best: ReportedJob | None
) -> None:
    """Print a row for each job; exit codes and reasons where any job did not end well.

    Args:
        jobs: at least one.
        title: command and experiment.
        columns: keys of summary.json.
        best: the job that gets a mark.
    """
    has_failures = any(job.record.exit_code or job.record.reason for job in jobs)
    headings = ["job", "overrides", "status", "seconds", *shorten_keys(columns).values()]
    if has_failures:
        headings += ["exit", "reason"]
    rows = []
    for job, label in zip(jobs, _label_jobs(jobs), strict=True):
        record = job.record
        cells: list[object] = [f"{record.number} *" if job is best else record.number, label]
        cells.append(Text(record.status, style=_COLOURS.get(record.status, "red")))
        cells.append(f"{record.seconds:.1f}")
        cells += [_format_value(job.metrics.get(key)) for key in columns]
        if has_failures:
            cells += [_format_value(record.exit_code), record.reason]
        rows.append(cells)
    print_table(
        headings,
        rows,
        texts=["overrides", "status", "reason"],
        title=f"{title}: {counted(len(jobs), 'job')}",
        caption=f"* best {columns[0]}" if best is not None else None,
    )


def average_folds(jobs: Sequence[ReportedJob]) -> list[dict[str, Any]]:
    """Return mean and standard deviation of each score over the folds that are done.

    Args:
        jobs: at least one.

    Returns:
        A row for each score of each combination of the other overrides; none without swept folds.
        The deviation is that of a sample (n - 1), and None of a single fold.
    """
    if not any(_is_fold(key) for key in jobs[0].swept):
        return []
    groups: dict[str, list[ReportedJob]] = {}
    for job in jobs:
        if job.record.status == "done":
            others = {key: value for key, value in job.swept.items() if not _is_fold(key)}
            label = " ".join(f"{key}={value}" for key, value in others.items())
            groups.setdefault(label, []).append(job)
    rows = []
    for label, folds in groups.items():
        # A fold may lack some, such as the score of a class that it does not show.
        names = dict.fromkeys(name for job in folds for name in job.metrics)
        for name in names:
            numbers = [read_number(job.metrics, name) for job in folds]
            values = [number for number in numbers if number is not None]
            if values and is_score(name, values[0]):
                spread = stdev(values) if len(values) > 1 else None
                cells = (label, name, len(values), fmean(values), spread)
                rows.append(dict(zip(_FOLD_COLUMNS, cells, strict=True)))
    return rows


def report_folds(jobs: Sequence[ReportedJob], path: Path) -> None:
    """Print mean and standard deviation of the scores over folds, and write them; nothing without folds."""
    path.unlink(missing_ok=True)  # one of an earlier start would be wrong by now
    rows = average_folds(jobs)
    if not rows:
        return
    write_table(path, _FOLD_COLUMNS, rows)
    cells = [[_format_value(value) for value in row.values()] for row in rows]
    print_table(_FOLD_COLUMNS, cells, texts=["overrides", "metric"], title="over the folds")


def _is_fold(key: str) -> bool:
    return key.rpartition(".")[2] == "fold"


def _label_jobs(jobs: Sequence[ReportedJob]) -> list[str]:
    """Return the overrides that tell each job from the others, by short keys."""
    names = shorten_keys(list(jobs[0].swept))
    labels = []
    for job in jobs:
        swept = " ".join(f"{names[key]}={value}" for key, value in job.swept.items())
        labels.append(swept or " ".join(job.record.overrides))
    return labels


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _write_csv(path: Path, jobs: Sequence[ReportedJob]) -> None:
    """Write a row for each job: its record, its swept overrides, and all its metrics."""
    metrics = dict.fromkeys(KEYS[2:])  # without command and experiment
    metrics |= dict.fromkeys(sorted(key for job in jobs for key in job.metrics if key not in KEYS))
    columns = ["job", "status", "exit_code", "seconds", "reason", *jobs[0].swept, *metrics]
    rows = []
    for job in jobs:
        record = job.record
        row = {**job.metrics, **job.swept, "job": record.number, "status": record.status}
        row |= {"exit_code": record.exit_code, "seconds": record.seconds, "reason": record.reason}
        rows.append(row)
    write_table(path, list(dict.fromkeys(columns)), rows)


@rc_context({"text.parse_math": False})  # values that are swept may hold dollar signs
def draw_sweep(path: Path, jobs: Sequence[ReportedJob], metric: str, *, title: str) -> None:
    """Draw the metric of each job: a row for each, a cross at the edge for one without a result.

    Args:
        path: of the picture.
        jobs: at least one with a metric.
        metric: a key of summary.json.
        title: over the picture.
    """
    height_inches = 0.25 * min(len(jobs), _MOST_ROWS) + 1.4
    figure = Figure(figsize=(8.0, height_inches), dpi=110, layout="constrained")
    axis = figure.subplots()
    measured = 0
    for row, job in enumerate(jobs):
        value = read_number(job.metrics, metric)
        if value is not None:
            axis.plot(value, row, "o", color="#0a6cbd", markersize=6)
            measured += 1
        else:
            # On the left edge, whatever the range of the values.
            transform = axis.get_yaxis_transform()
            axis.plot(0, row, "x", color="#c62828", transform=transform, clip_on=False, zorder=3)
    if len(jobs) <= _MOST_ROWS:
        labels = [_shorten(escape(label)) for label in _label_jobs(jobs)]
        axis.set_yticks(range(len(jobs)), labels, fontsize=8)
    axis.set_ylim(len(jobs) - 0.5, -0.5)
    axis.set_xlabel(metric, fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="both", alpha=0.3)
    remark = " (x: no result)" if measured < len(jobs) else ""
    figure.suptitle(f"{title}: {measured} of {counted(len(jobs), 'job')}{remark}", fontsize=11)
    figure.savefig(path)
    log.info("picture: %s", path)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..."
