"""A sweep: Hydra's multirun, which any job may leave without ending the others, and go on with."""

import functools
import logging
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from lit_data.commands.result import Status
from lit_data.commands.sweeps.job import (
    JobRecord,
    Sweep,
    SweepOptions,
    keep_computing,
    make_error,
    quote,
    read_record,
    read_records,
    run_sweep_job,
    split_overrides,
)
from lit_data.commands.sweeps.process import end_descendants
from lit_data.commands.sweeps.report import ReportedJob, collect_jobs, report
from lit_data.errors import ConfigError, DataError, LitDataError
from lit_data.files import refuse_links

log = logging.getLogger(__name__)


_POLL_S: Final = 2.0
_BASIC: Final = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


class JobWatch(threading.Thread):
    """Logs when the record of a job in a sweep's folder changes, for jobs on other machines.

    Args:
        folder: of the sweep.
        total: how many jobs there are.
    """

    def __init__(self, folder: Path, total: int) -> None:
        super().__init__(name="job-watch", daemon=True)
        self._folder, self._total = folder, total
        self._seen: dict[Path, Status] = {}
        self._done = threading.Event()
        self.look(quiet=True)  # what an earlier start left is no news

    def run(self) -> None:
        """Look until it is enough."""
        while not self._done.wait(_POLL_S):
            self.look()

    def stop(self) -> None:
        """Look a last time."""
        self._done.set()
        self.join()
        self.look()

    def look(self, *, quiet: bool = False) -> None:
        """Log what is new."""
        for path in sorted(self._folder.rglob("job.json")):
            record = read_record(path.parent)
            if record is None or self._seen.get(path) == record.status:
                continue
            self._seen[path] = record.status
            if not quiet:
                label = f"job {record.number} ({record.number + 1} of {self._total})"
                more = record.reason or " ".join(record.overrides)
                log.info("%s: %s: %s", label, record.status, more)


@contextmanager
def watching_jobs(folder: Path, total: int) -> Iterator[None]:
    """Log what becomes of the jobs of a sweep while its launcher waits for them."""
    watch = JobWatch(folder, total)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def run_sweep(
    hydra: Hydra,
    cfg: DictConfig,
    words: Sequence[str],
    *,
    options: SweepOptions,
    flags: Sequence[str],
    packages: Sequence[str],
) -> None:
    """Run every job, then print a table and write sweep.csv, sweep.png and sweep.json.

    Args:
        hydra: the engine.
        cfg: the checked configuration of the first job, with Hydra's node.
        words: overrides, as Hydra gets them.
        options: of the sweep.
        flags: options of the command line that are not overrides.
        packages: packages whose targets are allowed too.

    Raises:
        LitDataError: a job failed, with the exit code of the first one; or nothing was run, for the
            sweep to go on with is another one.
        KeyboardInterrupt, SystemExit: the sweep was told to stop; no process of it is left.
    """
    jobs = _list_jobs(hydra, cfg, words)
    sweep = Sweep(
        options=options,
        folder=_choose_folder(cfg, options),
        command=cfg.command,
        experiment=cfg.name,
        flags=tuple(flags),
        packages=tuple(packages),
        jobs=jobs,
        total=len(jobs) if jobs is not None else int(cfg.hydra.sweeper.get("n_trials") or 0),
    )
    if options.resume is not None:
        _check_same(sweep)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    placed = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    placed += [f"hydra.sweep.dir={quote(sweep.folder)}", "hydra.mode=MULTIRUN"]
    runs_elsewhere = "submitit" in str(cfg.hydra.launcher._target_)
    watch = watching_jobs(sweep.folder, sweep.total) if runs_elsewhere else nullcontext()
    task = functools.partial(run_sweep_job, sweep=sweep)
    with _reporting(cfg, sweep, words), watch:
        hydra.multirun(sweep.command, task, placed)


def _list_jobs(
    hydra: Hydra, cfg: DictConfig, words: Sequence[str]
) -> tuple[tuple[str, ...], ...] | None:
    """Return the overrides of each job; None where a sweeper other than Hydra's own chooses them.

    Raises:
        ConfigError: Hydra's own sweeper cannot make jobs of a range without steps.
    """
    sweeper = cfg.hydra.sweeper
    if sweeper._target_ != _BASIC:
        return None
    params = [f"{key!s}={value}" for key, value in (sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    parsed = parser.parse_overrides([*params, *words])
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"'{override.input_line}' is a range without steps, which needs a sweeper that "
                "chooses values: hydra/sweeper=search"
            )
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return tuple(keep_computing(job) for job in jobs)


def _choose_folder(cfg: DictConfig, options: SweepOptions) -> Path:
    """Return the folder of a sweep, absolute.

    Raises:
        ConfigError: there is a sweep already and nothing says to go on with it; or the one to go
            on with holds links.
        DataError: there is no sweep to go on with.
    """
    folder = Path(cfg.hydra.sweep.dir).absolute()
    if options.resume is None:
        if read_records(folder):
            raise ConfigError(
                f"{folder} holds a sweep already: go on with sweep.resume={folder}, or give "
                "another folder"
            )
        return folder
    if options.resume == "latest":
        folder = _find_latest(folder.parent, cfg)
    else:
        folder = Path(options.resume).absolute()
        if not read_records(folder):
            raise DataError(f"{folder} is not the folder of a sweep: no job.json is in it")
    refuse_links(folder, "sweep.resume")
    return folder


def _find_latest(parent: Path, cfg: DictConfig) -> Path:
    """Return the sweep below a folder whose job was written last."""
    jobs = list(parent.glob("*/*/job.json"))
    if not jobs:
        raise DataError(
            f"sweep.resume=latest: no sweep of {cfg.command} {cfg.name} below {parent}; give its "
            "folder"
        )
    return max(jobs, key=lambda path: path.stat().st_mtime_ns).parents[1]


def _check_same(sweep: Sweep) -> None:
    """Refuse to take the results of some overrides for those of others, before anything runs.

    Raises:
        ConfigError: names the first job that differs.
    """
    for _, record in read_records(sweep.folder):
        difference = _name_difference(record, sweep)
        if difference:
            raise ConfigError(
                f"the sweep in {sweep.folder} began otherwise ({difference}): start a new one, or "
                "give the same overrides"
            )


def _name_difference(record: JobRecord, sweep: Sweep) -> str:
    if record.command != sweep.command:
        return f"the command was {record.command}, now it is {sweep.command}"
    if sweep.jobs is None:  # a search chooses again
        return ""
    if record.number >= len(sweep.jobs):
        return f"it had a job {record.number}, now there are {len(sweep.jobs)} jobs"
    old, new = split_overrides(record.overrides), split_overrides(sweep.jobs[record.number])
    texts = []
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            texts.append(f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now")
    return f"job {record.number}: {'; '.join(texts)}" if texts else ""


@contextmanager
def _reporting(cfg: DictConfig, sweep: Sweep, words: Sequence[str]) -> Iterator[None]:
    """Report however the sweep ends, and end with the failure of its first job that failed."""
    started_s = time.perf_counter()
    error: Exception | None = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        end_descendants()
        jobs = collect_jobs(sweep, is_stopped=True)
        report(jobs, cfg, sweep, seconds=time.perf_counter() - started_s)
        command = _command_to_go_on(sweep, words)
        print(f"the sweep is not done: go on with\n{command}", file=sys.stderr)
        raise
    except Exception as caught:  # a job's own failure, or what a sweeper or launcher makes of it
        error = caught
    jobs = collect_jobs(sweep)
    report(jobs, cfg, sweep, seconds=time.perf_counter() - started_s)
    failed = [job for job in jobs if job.record.status not in ("done", "not run")]
    if failed:
        raise _describe_end(jobs, failed) from error
    if error is not None:
        raise error


def _describe_end(jobs: Sequence[ReportedJob], failed: Sequence[ReportedJob]) -> LitDataError:
    first = failed[0].record
    counts = f"{len(failed)} of {len(jobs)} jobs did not end well"
    text = f"{counts}; job {first.number}: {first.status}: {first.reason}"
    return make_error(first.exit_code or 1, text)


def _command_to_go_on(sweep: Sweep, words: Sequence[str]) -> str:
    replaced = ("sweep.resume", "hydra.sweep.dir")
    kept_words = [word for word in words if not word.startswith(replaced)]
    start = ["python", "-m", "lit_data", sweep.command, "-m"]
    return shlex.join([*start, *sweep.flags, *kept_words, f"sweep.resume={sweep.folder}"])
