"""One job of a sweep, as Hydra's launcher calls it: skip it, go on with it or run it, and note what became of it."""

import gc
import logging
import signal
import sys
import time
import traceback
import zipfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.job import list_job_words, run_job
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.sweeps.options import SweepOptions, find_monitor, optimized_metric
from lit_data.commands.sweeps.plan import (
    JobRecord,
    check_same,
    digest_config,
    read_record,
    read_summary,
    write_record,
)
from lit_data.commands.sweeps.process import Outcome, describe_failure, run_process
from lit_data.errors import (
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
_TOLD_TO_STOP = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_CHECKPOINTS = (
    "last.ckpt",
    "interrupted.ckpt",
    "step.ckpt",
)  # those that hold the whole state of a training


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What the jobs of a sweep have in common; it travels to other processes and machines.

    Args:
        options: of the sweep.
        folder: of the sweep, absolute.
        flags: options of the command line that are not overrides.
        packages: packages whose targets are allowed too.
        total: how many jobs there are.
        fixed: the jobs are known from the start; otherwise the sweeper decides on each one by the
            results so far.
        shared: overrides that all jobs have, which need not be said of each.
    """

    options: SweepOptions
    folder: Path
    flags: tuple[str, ...]
    packages: tuple[str, ...]
    total: int
    fixed: bool
    shared: tuple[str, ...] = ()


def make_error(exit_code: int, message: str) -> LitDataError:
    """An error that gives the command line this exit code, or 1 if no class of lit_data stands for it."""
    return _ERRORS.get(exit_code, LitDataError)(message)


def quote(value: object) -> str:
    """A value as Hydra's override grammar reads it back."""
    return "'{}'".format(str(value).replace("'", "\\'"))


def run_sweep_job(cfg: DictConfig, *, sweep: Sweep) -> float | None:
    """The task of each job.

    Args:
        cfg: the configuration without Hydra's node.
        sweep: what all jobs have in common.

    Returns:
        The metric `sweep.metric` for sweepers that learn from it; None for a failed job of a sweep
        that is fixed.

    Raises:
        LitDataError: the job failed, and the sweeper has to know.
    """
    folder, record = Path(HydraConfig.get().runtime.output_dir), begin_record(cfg)
    label = f"job {record.number} ({record.number + 1} of {sweep.total})"
    before = _find_earlier(folder, record, sweep)
    if before is not None and before.status == "done" and read_summary(folder) is not None:
        log.info("%s: done before: %s", label, _describe(record, sweep))
        return _answer(cfg, before, sweep=sweep, folder=folder)
    checkpoint = (
        find_last_checkpoint(folder) if before is not None and cfg.command == "fit" else None
    )
    record = replace(record, ckpt=str(checkpoint) if checkpoint else None)
    log.info(
        "%s: %s%s", label, _describe(record, sweep), f", from {checkpoint}" if checkpoint else ""
    )
    ended = _run(cfg, record, sweep, folder)
    log.info(
        "%s: %s in %.1f s%s",
        label,
        ended.status,
        ended.seconds,
        f": {ended.reason}" if ended.reason else "",
    )
    return _answer(cfg, ended, sweep=sweep, folder=folder)


def begin_record(cfg: DictConfig) -> JobRecord:
    """The record of the job that Hydra has set up, whose configuration this is.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    hydra = HydraConfig.get()
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    words = cast(list[str], overrides)
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    own = tuple(word for word in words if not word.startswith("sweep."))
    return JobRecord(
        number=int(hydra.job.num), overrides=own, digest=digest_config(cfg), config=config
    )


def find_last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run's folder from which `fit` can go on; None without one."""
    found = [folder / "checkpoints" / name for name in _CHECKPOINTS]
    newest_first = sorted(
        (path for path in found if path.is_file()), key=lambda path: -path.stat().st_mtime_ns
    )
    return next((path for path in newest_first if _is_whole(path)), None)


def _describe(record: JobRecord, sweep: Sweep) -> str:
    own = [word for word in record.overrides if word not in sweep.shared]
    return " ".join(word.lstrip("+") for word in own or record.overrides) or "no overrides"


def _find_earlier(folder: Path, record: JobRecord, sweep: Sweep) -> JobRecord | None:
    """What an earlier start left in the job's folder, if it is of the same configuration."""
    before = read_record(folder) if sweep.options.resume is not None else None
    if before is None or before.digest == record.digest:
        return before
    if sweep.fixed:
        check_same(before, record)
    aside = sweep.folder / "replaced" / f"{record.number}-{time.time_ns()}"
    aside.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name != ".hydra" and path.suffix != ".log":  # which are this job's already
            path.rename(aside / path.name)
    log.info(
        "job %d: the sweeper chose other values than before; the earlier job is now %s",
        record.number,
        aside,
    )
    return None


def _run(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> JobRecord:
    if is_first_rank():
        (folder / "summary.json").unlink(missing_ok=True)
        write_record(folder, record)
    started_s, run = (
        time.perf_counter(),
        _run_in_process if sweep.options.isolate == "process" else _run_here,
    )
    try:
        outcome = run(cfg, record, sweep, folder)
    except (KeyboardInterrupt, SystemExit) as stop:
        code = 128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else 128 + signal.SIGTERM
        outcome = Outcome(status="interrupted", exit_code=code, reason="the sweep was told to stop")
        raise
    except Exception as error:
        outcome = describe_failure(error)
        if not isinstance(error, LitDataError):
            traceback.print_exception(error)
    finally:
        record = record.end(
            outcome.status, outcome.exit_code, outcome.reason, time.perf_counter() - started_s
        )
        if is_first_rank():
            write_record(folder, record)
    _give_back_memory()  # after the except block, whose error holds everything that was alive where it was raised
    return record


def _run_in_process(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> Outcome:
    hydra = HydraConfig.get()
    words = list_job_words(cfg.command, sweep.flags)
    places = {
        "hydra.run.dir": folder,
        "hydra.sweep.dir": sweep.folder,
        "hydra.job.id": hydra.job.id,
    }
    own = [f"{key}={quote(value)}" for key, value in places.items()]
    own += [f"hydra.job.num={record.number}", "hydra.mode=RUN"]
    own += [f"ckpt={quote(record.ckpt)}"] if record.ckpt else []
    return run_process([*words, *own], folder)


def _run_here(cfg: DictConfig, record: JobRecord, sweep: Sweep, folder: Path) -> Outcome:
    if record.ckpt:
        cfg.ckpt = record.ckpt
    try:
        run_job(cfg, flags=sweep.flags, packages=sweep.packages)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code in _TOLD_TO_STOP or isinstance(
            stop.__context__, KeyboardInterrupt
        ):  # Lightning makes 1 of Ctrl-C
            raise
        return Outcome(
            status="failed" if code else "done",
            exit_code=code,
            reason=f"it called sys.exit({stop.code!r})",
        )
    return Outcome(status="done")


def _give_back_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from lit_data.callbacks.memory.record import HeapCache

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    HeapCache().empty()


def _answer(cfg: DictConfig, record: JobRecord, *, sweep: Sweep, folder: Path) -> float | None:
    if record.status != "done":
        if (
            sweep.fixed
        ):  # the end of the sweep tells; Hydra's own sweeper would leave out later batches of jobs
            return None
        raise make_error(record.exit_code or 1, record.reason)
    if not is_first_rank():
        return None
    summary = read_summary(folder) or {}
    try:
        return optimized_metric(sweep.options, find_monitor(cfg)[0], summary)
    except ConfigError:
        if sweep.fixed:  # the table says it once
            return None
        raise


def _is_whole(path: Path) -> bool:
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return archive.testzip() is None
    return False
