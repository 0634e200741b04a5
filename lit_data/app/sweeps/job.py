"""One job of a sweep, as the launcher of Hydra calls it: skip it, go on with it or run it."""

import gc
import logging
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lit_data.app.configuration.words import write_override
from lit_data.app.job import list_job_arguments, run_job
from lit_data.app.launcher import RESUMED, STOPPED, is_first_rank
from lit_data.app.result import Outcome, describe_failure, find_summary, read_number
from lit_data.app.sweeps.gpus import count_gpus, holding_gpus
from lit_data.app.sweeps.options import SweepOptions, choose_metric, explain_metric
from lit_data.app.sweeps.process import run_process
from lit_data.app.sweeps.records import JobRecord, read_record, write_record
from lit_data.core.errors import (
    BatchMemoryError,
    ConfigError,
    DataError,
    LitDataError,
    StoreError,
    WorkerDiedError,
)

log = logging.getLogger(__name__)

_ERRORS = {
    error.exit_code: error
    for error in (ConfigError, DataError, StoreError, BatchMemoryError, WorkerDiedError)
}
_FREE = ("hydra.", "hydra/", "sweep.", "paths.runs", "paths.cache")
"""Beginnings of overrides that change nothing of what a job computes."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep as all of its jobs see it; it travels to other processes and machines.

    Args:
        options: of the sweep.
        flags: options of the command line that are not overrides.
        packages: packages whose targets are allowed too.
        jobs: overrides of each job; None where the sweeper chooses them by the results so far.
        gpus: of this machine, handed out to jobs side by side; none: each job sees all.
    """

    options: SweepOptions
    flags: tuple[str, ...]
    packages: tuple[str, ...]
    jobs: list[list[str]] | None
    gpus: tuple[str, ...] = ()


def keep_computing(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change what a job computes, and not where it runs."""
    return [word for word in overrides if not word.lstrip("+~").startswith(_FREE)]


def make_error(record: JobRecord, text: str) -> LitDataError:
    """Return an error with the exit code of a job, with 1 if no class of lit_data stands for it."""
    return _ERRORS.get(record.exit_code or 1, LitDataError)(text)


def run_sweep_job(cfg: DictConfig, *, sweep: Sweep) -> float | None:
    """Run a job, or skip it if it is done in the folder of a sweep that goes on.

    Args:
        cfg: the configuration without Hydra's node.
        sweep: what all jobs have in common.

    Returns:
        The metric `sweep.metric` for sweepers that learn from it; None for a job without it, and
        for a failed one of a sweep whose jobs are known.

    Raises:
        LitDataError: the job failed, and the sweeper has to know.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = keep_computing(list(hydra.overrides.task))
    record = JobRecord(number=int(hydra.job.num), command=cfg.command, overrides=overrides)
    label = f"job {record.number}"
    before = read_record(folder) if sweep.options.resume is not None else None
    if before is not None and before.status == "done" and find_summary(folder) is not None:
        log.info("%s: done before", label)
        return _answer(cfg, before, folder, sweep)
    if before is not None and cfg.command == "fit":
        record = replace(record, ckpt=find_last_checkpoint(folder))
    start = f", from {record.ckpt}" if record.ckpt else ""
    log.info("%s: %s%s", label, " ".join(overrides), start)
    ended = _run(cfg, record, folder, sweep)
    reason = f": {ended.reason}" if ended.reason else ""
    log.info("%s: %s in %.1f s%s", label, ended.status, ended.seconds, reason)
    return _answer(cfg, ended, folder, sweep)


def find_last_checkpoint(folder: Path) -> str | None:
    """Return the newest whole checkpoint from which `fit` can go on; None without one."""
    paths = [folder / "checkpoints" / name for name in RESUMED]
    existing = [path for path in paths if path.is_file()]
    for path in sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:  # otherwise it was being written when the job was killed
                return str(path)
    return None


def _run(cfg: DictConfig, record: JobRecord, folder: Path, sweep: Sweep) -> JobRecord:
    if is_first_rank():
        (folder / "summary.json").unlink(missing_ok=True)
        write_record(folder, record)
    run = _run_in_process if sweep.options.isolate == "process" else _run_here
    started_s = time.perf_counter()
    try:
        outcome = run(cfg, record, folder, sweep)
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
        record = record.end(outcome, time.perf_counter() - started_s)
        if is_first_rank():
            write_record(folder, record)
    # After the except block, whose error holds everything that was alive where it was raised.
    _give_back_memory()
    return record


def _run_in_process(cfg: DictConfig, record: JobRecord, folder: Path, sweep: Sweep) -> Outcome:
    hydra = HydraConfig.get()
    places = {
        "hydra.run.dir": folder,
        "hydra.sweep.dir": hydra.sweep.dir,
        "hydra.job.id": hydra.job.id,
    }
    arguments = list_job_arguments(cfg.command, sweep.flags)
    arguments += [write_override(key, value) for key, value in places.items()]
    arguments += [f"hydra.job.num={record.number}", "hydra.mode=RUN"]
    if record.ckpt:
        arguments.append(write_override("ckpt", record.ckpt))
    locks = Path(hydra.sweep.dir)
    with holding_gpus(locks, sweep.gpus, count_gpus(cfg, sweep.gpus)) as variables:
        return run_process(arguments, folder, variables)


def _run_here(cfg: DictConfig, record: JobRecord, folder: Path, sweep: Sweep) -> Outcome:
    if record.ckpt:
        cfg.ckpt = record.ckpt
    try:
        run_job(cfg, flags=sweep.flags, packages=sweep.packages)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        # Lightning turns Ctrl-C into an exit with 1.
        if code in STOPPED or isinstance(stop.__context__, KeyboardInterrupt):
            raise
        reason = f"it called sys.exit({stop.code!r})"
        return Outcome(status="failed" if code else "done", exit_code=code, reason=reason)
    return Outcome(status="done")


def _give_back_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from lit_data.core.heap import trim_heap

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def _answer(cfg: DictConfig, record: JobRecord, folder: Path, sweep: Sweep) -> float | None:
    """Return what a sweeper learns from: of one that needs no results nothing is asked."""
    if sweep.jobs is not None or not is_first_rank():
        return None
    if record.status != "done":
        raise make_error(record, record.reason)
    summary = find_summary(folder) or {}
    metric = choose_metric(cfg, summary)
    value = read_number(summary, metric)
    if metric is not None and value is None:
        raise ConfigError(explain_metric(metric, summary))
    return value
