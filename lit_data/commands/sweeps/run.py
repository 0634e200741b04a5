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

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from lit_data.commands.configuration.explain import explain
from lit_data.commands.sweeps.job import Sweep, begin_record, make_error, quote, run_sweep_job
from lit_data.commands.sweeps.options import SweepOptions
from lit_data.commands.sweeps.plan import (
    Plan,
    Status,
    check_same,
    choose_folder,
    is_free,
    make_plan,
    read_record,
    write_plan,
)
from lit_data.commands.sweeps.process import end_descendants
from lit_data.commands.sweeps.report import ReportedJob, collect_jobs, report
from lit_data.errors import ConfigError, LitDataError

log = logging.getLogger(__name__)


_POLL_S = 2.0


class JobWatch(threading.Thread):
    """Says when the record of a job in a sweep's folder changes.

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
        """Say what is new."""
        for path in sorted(self._folder.rglob("job.json")):
            record = read_record(path.parent)
            if record is None or self._seen.get(path) == record.status:
                continue
            self._seen[path] = record.status
            if not quiet:
                label = f"job {record.number} ({record.number + 1} of {self._total})"
                told = f": {record.reason}" if record.reason else f": {' '.join(record.overrides)}"
                log.info("%s: %s%s", label, record.status, told)


@contextmanager
def watching_jobs(folder: Path, total: int) -> Iterator[None]:
    """Say what becomes of the jobs of a sweep while its launcher waits for them."""
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
    plan = make_plan(hydra, cfg, words)
    folder = choose_folder(cfg, plan, options)
    own = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    own += [f"hydra.sweep.dir={quote(folder)}", "hydra.mode=MULTIRUN"]
    if options.resume is not None and plan.jobs is not None:
        _check_jobs(hydra, plan, own)
    write_plan(folder, plan)
    sweep = Sweep(
        options=options,
        folder=folder,
        flags=tuple(flags),
        packages=tuple(packages),
        total=plan.total,
        fixed=plan.jobs is not None,
        shared=tuple(set.intersection(*map(set, plan.jobs))) if plan.jobs else (),
    )
    elsewhere = "submitit" in str(cfg.hydra.launcher._target_)
    with (
        _reporting(cfg, plan, sweep),
        watching_jobs(folder, plan.total) if elsewhere else nullcontext(),
    ):
        hydra.multirun(plan.command, functools.partial(run_sweep_job, sweep=sweep), own)


@contextmanager
def _reporting(cfg: DictConfig, plan: Plan, sweep: Sweep) -> Iterator[None]:
    """Report however the sweep ends, and end with the failure of its first job that failed."""
    started_s = time.perf_counter()
    error: Exception | None = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        end_descendants()
        report(
            collect_jobs(plan, sweep.folder, stopped=True),
            cfg,
            plan,
            sweep,
            seconds=time.perf_counter() - started_s,
        )
        print(
            f"the sweep is not done: go on with\n{_command_to_go_on(plan, sweep)}", file=sys.stderr
        )
        raise
    except Exception as caught:  # a job's own failure, or what a sweeper or launcher makes of it
        error = caught
    jobs = collect_jobs(plan, sweep.folder)
    failed = [job for job in jobs if job.record.status not in ("done", "not run")]
    report(jobs, cfg, plan, sweep, seconds=time.perf_counter() - started_s)
    if failed:
        raise _describe_end(jobs, failed) from error
    if error is not None:
        raise error


def _describe_end(jobs: Sequence[ReportedJob], failed: Sequence[ReportedJob]) -> LitDataError:
    first = failed[0].record
    text = f"{len(failed)} of {len(jobs)} jobs did not end well; job {first.number}: {first.status}: {first.reason}"
    return make_error(first.exit_code or 1, text)


def _command_to_go_on(plan: Plan, sweep: Sweep) -> str:
    words = [
        word
        for word in plan.words
        if not (is_free(word) and word.startswith(("sweep.resume", "hydra.sweep.dir")))
    ]
    return shlex.join(
        [
            "python",
            "-m",
            "lit_data",
            plan.command,
            "-m",
            *sweep.flags,
            *words,
            f"sweep.resume={sweep.folder}",
        ]
    )


def _check_jobs(hydra: Hydra, plan: Plan, words: Sequence[str]) -> None:
    """Compare each job that has run with what it would be now, before anything runs."""
    with _setting_back(HydraConfig.instance()):
        master = hydra.compose_config(
            plan.command, list(words), RunMode.MULTIRUN, with_log_configuration=False
        )
        for number, overrides in enumerate(plan.jobs or ()):
            cfg, folder = _compose_job(hydra, master, overrides, number)
            before = read_record(folder)
            if before is not None:
                check_same(before, begin_record(cfg))


def _compose_job(
    hydra: Hydra, master: DictConfig, overrides: Sequence[str], number: int
) -> tuple[DictConfig, Path]:
    """A job's configuration as a launcher would make it, and its folder."""
    try:
        cfg = hydra.config_loader.load_sweep_config(master, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.id = cfg.hydra.job.num = number
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_readonly(cfg.hydra, False)
        folder = Path(cfg.hydra.sweep.dir) / str(cfg.hydra.sweep.subdir)
        cfg.hydra.runtime.output_dir = str(folder.absolute())
    HydraConfig.instance().set_config(cfg)
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), folder


@contextmanager
def _setting_back(config: HydraConfig) -> Iterator[None]:
    before = config.cfg
    try:
        yield
    finally:
        config.cfg = before
