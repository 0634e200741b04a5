"""Options of a sweep, and one job of it as the launcher of Hydra calls it: skip it, go on with it or run it."""

import gc
import logging
import math
import os
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lit_data.checks import is_count
from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.commands.configuration.words import write_override
from lit_data.commands.job import list_job_arguments, run_job
from lit_data.commands.launcher import RESUMED, STOPPED, is_first_rank
from lit_data.commands.reports.untrusted import read_text
from lit_data.commands.result import (
    TRIAL_VARIABLE,
    Outcome,
    Status,
    describe_failure,
    find_monitor,
    find_summary,
    read_number,
)
from lit_data.commands.sweeps.overrides import keep_computing
from lit_data.commands.sweeps.process import count_gpus, holding_gpus, run_process
from lit_data.errors import (
    BatchMemoryError,
    ConfigError,
    DataError,
    LitDataError,
    StoreError,
    WorkerDiedError,
    show_path,
)
from lit_data.files import is_there, write_json
from lit_data.io.plain import parse_json

log = logging.getLogger(__name__)


Direction = Literal["min", "max"]

_DIRECTIONS: dict[str, Direction] = {"minimize": "min", "maximize": "max"}

_ERRORS = {
    error.exit_code: error
    for error in (ConfigError, DataError, StoreError, BatchMemoryError, WorkerDiedError)
}
JOURNAL = "search/journal.log"
"""Journal of a search, in the folder of its sweep."""
PRUNED: Final = "pruned"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of how the jobs of a sweep run and are compared.

    Args:
        metric: key of summary.json that table, plot and sweeper look at; None: what the checkpoint
            callback monitors, else the first metric of the test split.
        mode: ``min`` if the least value is the best, ``max`` if the largest is; ``auto``: as the
            checkpoint callback says, where it monitors this metric.
        columns: further keys of summary.json in the table.
        isolate: ``process``: each job in a process of its own; ``none``: one after the other in
            this one.
        resume: folder of a sweep to go on with, or ``latest``.

    Raises:
        ConfigError: an option is out of its range.
    """

    metric: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"
    columns: Sequence[str] | None = ()
    isolate: Literal["process", "none"] = "process"
    resume: str | None = None

    def __post_init__(self) -> None:
        if "" in (self.metric, self.resume):
            options = f"sweep.metric={self.metric!r}, sweep.resume={self.resume!r}"
            raise ConfigError(f"{options}: give text or null")


def choose_metric(
    options: SweepOptions, monitor: str | None, metrics: Mapping[str, Any]
) -> str | None:
    """Return the key of summary.json to compare jobs by, or None where a job has none."""
    if options.metric is not None:
        return options.metric
    if monitor in metrics:  # also where it is no number, or a search would compare unlike metrics
        return monitor
    test_metrics = [key for key in metrics if key.startswith(("test/", "test_"))]
    for name in test_metrics:
        if read_number(metrics, name) is not None:
            return name
    return None


def choose_direction(
    options: SweepOptions, metric: str | None, monitored: tuple[str | None, Direction | None]
) -> Direction | None:
    """Return which values of the metric are good, or None where nothing says so."""
    if options.mode != "auto":
        return options.mode
    return monitored[1] if metric is not None and metric == monitored[0] else None


def settle_direction(cfg: DictConfig, options: SweepOptions) -> tuple[SweepOptions, list[str]]:
    """Settle one direction for the sweeper and for the table.

    Of `hydra.sweeper.direction` and `sweep.mode`, either decides.

    Args:
        cfg: The configuration of the first job, with Hydra's node.
        options: Of the sweep.

    Returns:
        The options, and the override that tells the sweeper; none where it asks for no direction,
        or for several.

    Raises:
        ConfigError: The two contradict each other, or nothing says which values are good.
    """
    sweeper = cfg.hydra.sweeper
    typed = sweeper.get("direction")
    if "direction" not in sweeper or not (typed is None or isinstance(typed, str)):
        return options, []
    direction = _DIRECTIONS.get(str(typed))
    if typed is not None and direction is None:
        raise ConfigError(
            f"hydra.sweeper.direction={typed} is unknown: choose minimize or maximize, or leave it "
            "out"
        )
    if direction is not None and options.mode not in ("auto", direction):
        raise ConfigError(
            f"sweep.mode={options.mode} and hydra.sweeper.direction={typed} contradict each other: "
            "leave out one"
        )
    monitored = find_monitor(cfg.get("callbacks") or {})
    metric = options.metric or monitored[0]
    mode = direction or choose_direction(options, metric, monitored)
    if mode is None:
        name = options.metric or "the metric"
        raise ConfigError(f"which values of {name} are good? Say sweep.mode=min or sweep.mode=max")
    word = "minimize" if mode == "min" else "maximize"
    return replace(options, mode=mode), [f"hydra.sweeper.direction={word}"]


def optimized_metric(
    options: SweepOptions, monitor: str | None, metrics: Mapping[str, Any]
) -> float | None:
    """Return the value that a sweeper such as Optuna's learns from.

    Args:
        options: name the metric.
        monitor: what the checkpoint callback monitors.
        metrics: of the job's summary.json.

    Returns:
        The value; None where no metric was asked for and the job has none to choose.

    Raises:
        ConfigError: the job has no such metric, or its value is not a number.
    """
    name = choose_metric(options, monitor, metrics)
    if name is None:
        return None
    value = read_number(metrics, name)
    if value is None:
        raise ConfigError(explain_metric(name, metrics))
    return value


def explain_metric(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the message on a metric that a job does not have."""
    if name in metrics:
        value = f"sweep.metric={name} is {metrics[name]!r}"
        return f"{value} in the job's summary.json, which is not a number"
    known = [key for key in metrics if read_number(metrics, key) is not None]
    suggestion = did_you_mean(nearest(name, known))
    return f"the job's summary.json holds no {name!r}, which sweep.metric names.{suggestion}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep as all of its jobs see it; it travels to other processes and machines.

    Args:
        options: of the sweep.
        folder: of the sweep, absolute.
        command: the word on the command line.
        experiment: the configuration's ``name``.
        flags: options of the command line that are not overrides.
        packages: packages whose targets are allowed too.
        jobs: overrides of each job; None where the sweeper chooses them by the results so far.
        total: how many jobs there are.
        prunes: the search may end trainings early.
        gpus: of this machine, handed out to jobs side by side; none: each job sees all.
    """

    options: SweepOptions
    folder: Path
    command: str
    experiment: str
    flags: tuple[str, ...]
    packages: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...] | None
    total: int
    prunes: bool = False
    gpus: tuple[str, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Return True if the jobs are known from the start."""
        return self.jobs is not None

    @property
    def shared(self) -> set[str]:
        """Overrides that all jobs have, which need not be said of each."""
        return set.intersection(*map(set, self.jobs)) if self.jobs else set()


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job of a sweep, as job.json in its folder keeps it.

    Args:
        number: from 0, in the order of the sweep.
        command: the word on the command line.
        overrides: of the job, those that all jobs share included.
        status: ``running`` until it ends.
        exit_code: as the command line gives it; None while it runs.
        reason: one line that says why it did not end well.
        seconds: from its start to its end.
        ckpt: the checkpoint that it went on from.
    """

    number: int
    command: str
    overrides: tuple[str, ...]
    status: Status = "running"
    exit_code: int | None = None
    reason: str = ""
    seconds: float = 0.0
    ckpt: str | None = None

    def __post_init__(self) -> None:
        """Check types, as the file may be anybody's."""
        texts = (self.command, *self.overrides, self.reason, self.ckpt or "")
        is_right = (
            self.status in get_args(Status)
            and all(isinstance(text, str) for text in texts)
            and is_count(self.number, 0)
            and isinstance(self.exit_code, int | None)
            and isinstance(self.seconds, int | float)
            and math.isfinite(self.seconds)
        )
        if not is_right:
            raise TypeError("no record of a job")

    def end(self, outcome: Outcome, seconds: float) -> "JobRecord":
        """Return the record of a job that has ended; its reason is cut to one line."""
        return replace(
            self,
            status=outcome.status,
            exit_code=outcome.exit_code,
            reason=outcome.reason.strip().partition("\n")[0].strip(),
            seconds=round(seconds, 3),
        )


def write_record(folder: Path, record: JobRecord) -> None:
    """Write `folder`/job.json, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    write_json(folder / "job.json", asdict(record))


def read_record(folder: Path) -> JobRecord | None:
    """Return the record of a job's folder; None where there is none or it is damaged."""
    try:
        plain = parse_json(read_text(folder, folder / "job.json"))
        return JobRecord(**{**plain, "overrides": tuple(plain["overrides"])})
    except (OSError, DataError, ValueError, TypeError, KeyError):
        return None


def read_records(folder: Path) -> list[tuple[Path, JobRecord]]:
    """Return folder and record of each job of a sweep, by their numbers."""
    records = []
    for path in folder.rglob("job.json"):
        record = read_record(path.parent)
        if record is not None:
            records.append((path.parent, record))
    return sorted(records, key=lambda entry: entry[1].number)


def make_error(exit_code: int, message: str) -> LitDataError:
    """Return an error with an exit code, with 1 if no class of lit_data stands for it."""
    return _ERRORS.get(exit_code, LitDataError)(message)


def run_sweep_job(cfg: DictConfig, *, sweep: Sweep) -> float | str | None:
    """Run a job, or skip it if it has the same overrides as before and a whole summary.json.

    Args:
        cfg: the configuration without Hydra's node.
        sweep: what all jobs have in common.

    Returns:
        The metric `sweep.metric` for sweepers that learn from it; `PRUNED` for a job that its
        search gave up; None for a failed job of a sweep that is fixed.

    Raises:
        LitDataError: the job failed, and the sweeper has to know.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = keep_computing(hydra.overrides.task)
    record = JobRecord(number=int(hydra.job.num), command=cfg.command, overrides=overrides)
    label = f"job {record.number} ({record.number + 1} of {sweep.total})"
    described = _describe(record, sweep)
    before = _find_earlier(folder, record, sweep)
    has_ended = before is not None and before.status in ("done", PRUNED)
    if before is not None and has_ended and find_summary(folder) is not None:
        log.info("%s: %s before: %s", label, before.status, described)
        return _answer(cfg, before, sweep, folder)
    if before is not None and cfg.command == "fit":
        checkpoint = find_last_checkpoint(folder)
        record = replace(record, ckpt=str(checkpoint) if checkpoint else None)
    start = f", from {record.ckpt}" if record.ckpt else ""
    log.info("%s: %s%s", label, described, start)
    ended = _run(cfg, record, sweep, folder)
    reason = f": {ended.reason}" if ended.reason else ""
    log.info("%s: %s in %.1f s%s", label, ended.status, ended.seconds, reason)
    return _answer(cfg, ended, sweep, folder)


def find_last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint from which `fit` can go on; None without one."""
    paths = [folder / "checkpoints" / name for name in RESUMED]
    existing = [path for path in paths if path.is_file()]
    for path in sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:  # otherwise it was being written when the job was killed
                return path
    return None


def _describe(record: JobRecord, sweep: Sweep) -> str:
    distinct = [override for override in record.overrides if override not in sweep.shared]
    overrides = distinct or record.overrides
    return " ".join(override.lstrip("+") for override in overrides) or "no overrides"


def _find_earlier(folder: Path, record: JobRecord, sweep: Sweep) -> JobRecord | None:
    """Return the record of an earlier start in the job's folder.

    Raises:
        ConfigError: it had other overrides, as a sweeper of others may choose.
    """
    # A search may take over a job of another controller, whose folder is there.
    may_go_on = sweep.options.resume is not None or not sweep.is_fixed
    before = read_record(folder) if may_go_on else None
    if may_go_on and before is None and is_there(folder / "job.json"):
        path = show_path(folder / "job.json")
        log.warning("%s is damaged, or no regular file: its job begins anew", path)
    if before is None or set(before.overrides) == set(record.overrides):
        return before
    text = f"job {record.number} in {folder} had other overrides: give the sweep another folder"
    raise ConfigError(text)


def _run(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> JobRecord:
    if is_first_rank():
        (folder / "summary.json").unlink(missing_ok=True)
        write_record(folder, record)
    run = _run_in_process if sweep.options.isolate == "process" else _run_here
    started_s = time.perf_counter()
    if sweep.prunes:
        os.environ[TRIAL_VARIABLE] = str(record.number)
    try:
        outcome = run(cfg, record, sweep, folder)
        is_done = outcome.status == "done"
        if sweep.prunes and is_done and "pruned_after" in (find_summary(folder) or {}):
            outcome = Outcome(status=PRUNED)
    except (KeyboardInterrupt, SystemExit) as stop:
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        reason = "the sweep was told to stop"
        outcome = Outcome(status="interrupted", exit_code=128 + number, reason=reason)
        raise
    except Exception as error:
        outcome = describe_failure(error)
        if not isinstance(error, LitDataError):
            traceback.print_exception(error)
    finally:
        os.environ.pop(TRIAL_VARIABLE, None)
        record = record.end(outcome, time.perf_counter() - started_s)
        if is_first_rank():
            write_record(folder, record)
    # After the except block, whose error holds everything that was alive where it was raised.
    _give_back_memory()
    return record


def _run_in_process(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> Outcome:
    places = {
        "hydra.run.dir": folder,
        "hydra.sweep.dir": sweep.folder,
        "hydra.job.id": HydraConfig.get().job.id,
    }
    arguments = list_job_arguments(cfg.command, sweep.flags)
    arguments += [write_override(key, value) for key, value in places.items()]
    arguments += [f"hydra.job.num={record.number}", "hydra.mode=RUN"]
    if record.ckpt:
        arguments.append(write_override("ckpt", record.ckpt))
    with holding_gpus(sweep.folder, sweep.gpus, count_gpus(cfg, sweep.gpus)) as variables:
        return run_process(arguments, folder, variables)


def _run_here(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> Outcome:
    if record.ckpt:
        cfg.ckpt = record.ckpt
    try:
        run_job(cfg, flags=sweep.flags, packages=sweep.packages)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        # Lightning turns Ctrl-C into an exit with 1.
        if code in STOPPED or isinstance(stop.__context__, KeyboardInterrupt):
            raise
        status: Status = "failed" if code else "done"
        return Outcome(status=status, exit_code=code, reason=f"it called sys.exit({stop.code!r})")
    return Outcome(status="done")


def _give_back_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from lit_data.callbacks.device_memory import trim_heap

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def _answer(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> float | str | None:
    if record.status == PRUNED:
        return PRUNED
    if record.status != "done":
        # Hydra's own sweeper would leave out later batches of jobs; the end of the sweep fails.
        if sweep.is_fixed:
            return None
        raise make_error(record.exit_code or 1, record.reason)
    if not is_first_rank():
        return None
    summary = find_summary(folder) or {}
    try:
        return optimized_metric(sweep.options, find_monitor(cfg.get("callbacks") or {})[0], summary)
    except ConfigError as error:
        if sweep.is_fixed:  # the table says it once
            return None
        log.warning("%s", error)
        raise
