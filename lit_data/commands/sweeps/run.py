"""A sweep: Hydra's multirun, which any job may leave without ending the others, and go on with."""

import functools
import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.configuration.rows import read_words
from lit_data.commands.configuration.words import show_override, write_override
from lit_data.commands.launcher import is_named_by_time
from lit_data.commands.result import Status
from lit_data.commands.run_folder import claim_new, claim_typed
from lit_data.commands.sweeps.job import (
    JOURNAL,
    JobRecord,
    Sweep,
    SweepOptions,
    make_error,
    read_record,
    read_records,
    run_sweep_job,
)
from lit_data.commands.sweeps.overrides import (
    describe_differences,
    keep_computing,
)
from lit_data.commands.sweeps.process import (
    count_gpus,
    end_descendants,
    list_gpus,
    names_gpus,
    uses_gpus,
)
from lit_data.commands.sweeps.report import ReportedJob, collect_jobs, report
from lit_data.errors import ConfigError, DataError, LitDataError
from lit_data.files import refuse_links

if TYPE_CHECKING:
    from lit_data.commands.sweeps.search import Search

log = logging.getLogger(__name__)


_POLL_S = 2.0
_NO_FAILURES = ("done", "pruned", "not run", "running")
_BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
_BASIC_LAUNCHER = f"{BasicLauncher.__module__}.{BasicLauncher.__qualname__}"


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
    overrides: Sequence[str],
    *,
    options: SweepOptions,
    flags: Sequence[str],
    packages: Sequence[str],
) -> Path:
    """Run every job, then print a table and write sweep.csv, sweep.png and sweep.json.

    Args:
        hydra: the engine.
        cfg: the checked configuration of the first job, with Hydra's node.
        overrides: as Hydra gets them.
        options: of the sweep.
        flags: options of the command line that are not overrides.
        packages: packages whose targets are allowed too.

    Returns:
        The folder of the sweep.

    Raises:
        LitDataError: a job failed, with the exit code of the first one; or nothing was run, for the
            sweep to go on with is another one.
        KeyboardInterrupt, SystemExit: the sweep was told to stop; no process of it is left.
    """
    jobs = _list_jobs(hydra, cfg, overrides)
    gpus = _find_shared_gpus(cfg, options)
    sweep = Sweep(
        options=options,
        folder=_choose_folder(cfg, options),
        command=cfg.command,
        experiment=cfg.name,
        flags=tuple(flags),
        packages=tuple(packages),
        jobs=jobs,
        total=len(jobs) if jobs is not None else _count_trials(cfg),
        prunes=_is_search(cfg) and cfg.hydra.sweeper.get("pruner") is not None,
        gpus=gpus,
    )
    if options.resume is not None:
        _check_same(sweep)
    placed = [override for override in overrides if not override.startswith("hydra.sweep.dir=")]
    placed += [write_override("hydra.sweep.dir", sweep.folder), "hydra.mode=MULTIRUN"]
    search: Search | None = None
    with ExitStack() as stack:
        if _is_search(cfg):
            search, start = stack.enter_context(_opening_search(hydra, sweep, placed))
        else:
            task = functools.partial(run_sweep_job, sweep=sweep)
            start = functools.partial(hydra.multirun, sweep.command, task, placed)
        stack.enter_context(_reporting(cfg, sweep, overrides, search))
        if "submitit" in str(cfg.hydra.launcher._target_):
            stack.enter_context(watching_jobs(sweep.folder, sweep.total))
        start()
    return sweep.folder


def _count_trials(cfg: DictConfig) -> int:
    """Return how many jobs a sweeper says that it starts; 0 if it does not say."""
    count = cfg.hydra.sweeper.get("n_trials")
    return count if isinstance(count, int) else 0


def _is_search(cfg: DictConfig) -> bool:
    """Return True for our own search, whose node names no class as plugins of Hydra do."""
    return cfg.hydra.sweeper.get("_target_") is None


@contextmanager
def _opening_search(
    hydra: Hydra, sweep: Sweep, overrides: Sequence[str]
) -> Iterator[tuple["Search", Callable[[], None]]]:
    """Open a search as Hydra would set up a sweeper, and give what runs it."""
    from lit_data.commands.sweeps.search import open_search  # with Optuna

    config = hydra.compose_config(
        config_name=sweep.command,
        overrides=list(overrides),
        run_mode=RunMode.MULTIRUN,
        with_log_configuration=True,
    )
    callbacks = Callbacks(config)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    launcher = Plugins.instance().instantiate_launcher(
        context, functools.partial(run_sweep_job, sweep=sweep), config
    )
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(typed, list)
    parsed = _parse_all(hydra, config, list(map(str, typed)))
    with open_search(config, sweep, parsed) as search:

        def start() -> None:
            callbacks.on_multirun_start(config=config, config_name=sweep.command)
            search.run(lambda jobs, first: launcher.launch(jobs, initial_job_idx=first))
            callbacks.on_multirun_end(config=config, config_name=sweep.command)

        yield search, start


def _parse_all(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> list[Override]:
    """Parse the values of the sweeper's files, and then overrides."""
    params = [f"{key!s}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    return parser.parse_overrides([*params, *overrides])


def _find_shared_gpus(cfg: DictConfig, options: SweepOptions) -> tuple[str, ...]:
    """Return the GPUs to hand out to jobs that run side by side on this machine; mostly none.

    Raises:
        ConfigError: Jobs name their GPUs, or would stay in processes that cannot change them.
    """
    launcher = cfg.hydra.launcher
    is_parallel = "joblib" in str(launcher._target_) and launcher.n_jobs != 1
    # Controllers of one search may stand side by side.
    is_shared = launcher._target_ == _BASIC_LAUNCHER and _is_search(cfg) and not names_gpus(cfg)
    if not (is_parallel or (is_shared and options.isolate == "process")) or not uses_gpus(cfg):
        return ()
    gpus = list_gpus()
    count_gpus(cfg, gpus)  # what it refuses, it refuses before anything runs
    if gpus and options.isolate == "none":
        raise ConfigError(
            "sweep.isolate=none keeps jobs in processes that stay on their first GPU: leave it out "
            "where jobs run side by side"
        )
    return gpus


def _list_jobs(
    hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]
) -> tuple[tuple[str, ...], ...] | None:
    """Return the overrides of each job; None where a sweeper other than Hydra's own chooses them.

    Raises:
        ConfigError: Hydra's own sweeper cannot make jobs of a range without steps.
    """
    if cfg.hydra.sweeper.get("_target_") != _BASIC:
        return None
    parsed = _parse_all(hydra, cfg, overrides)
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"'{override.input_line}' is a range without steps, which needs a sweeper that "
                "chooses values: hydra/sweeper=search"
            )
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return tuple(keep_computing(job) for job in jobs)


def _choose_folder(cfg: DictConfig, options: SweepOptions) -> Path:
    """Return the folder of a sweep, absolute: a new one is claimed.

    Raises:
        ConfigError: there is a sweep already and nothing says to go on with it; or the one to go
            on with holds links.
        DataError: there is no sweep to go on with.
    """
    folder = Path(cfg.hydra.sweep.dir).absolute()
    if options.resume is None and is_named_by_time(cfg.hydra.sweep):
        return claim_new(folder)
    if options.resume is None:
        _claim(folder)
        return folder
    if options.resume == "latest":
        folder = _find_latest(folder.parent, cfg)
    else:
        folder = Path(options.resume).absolute()
        if not _holds_sweep(folder):
            raise DataError(f"{folder} is not the folder of a sweep: no job.json is in it")
    refuse_links(folder, "sweep.resume")
    return folder


def _claim(folder: Path) -> None:
    if _holds_sweep(folder):
        resume = show_override("sweep.resume", folder)
        raise ConfigError(
            f"{folder} holds a sweep already: go on with {resume}, or give another folder"
        )
    if not claim_typed(folder):
        raise ConfigError(f"hydra.sweep.dir={folder} holds a run already: give another folder")


def _holds_sweep(folder: Path) -> bool:
    return (folder / JOURNAL).exists() or bool(read_records(folder))


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
    old, new = read_words(record.overrides), read_words(sweep.jobs[record.number])
    differences = describe_differences(old, new)
    return f"job {record.number}: {differences}" if differences else ""


@contextmanager
def _reporting(
    cfg: DictConfig, sweep: Sweep, overrides: Sequence[str], search: "Search | None"
) -> Iterator[None]:
    """Report however the sweep ends, and end with the failure of its first job that failed."""
    started_s = time.perf_counter()
    error: Exception | None = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        end_descendants()
        jobs = collect_jobs(sweep, is_stopped=True, elsewhere=_list_elsewhere(search))
        report(jobs, cfg, sweep, seconds=time.perf_counter() - started_s)
        command = _command_to_go_on(sweep, overrides)
        print(f"the sweep is not done: go on with\n{command}", file=sys.stderr)
        raise
    except Exception as caught:  # a job's own failure, or what a sweeper or launcher makes of it
        error = caught
    jobs = collect_jobs(sweep, elsewhere=_list_elsewhere(search))
    report(jobs, cfg, sweep, seconds=time.perf_counter() - started_s)
    failed = [job for job in jobs if job.record.status not in _NO_FAILURES]
    if failed:
        raise _describe_end(jobs, failed) from error
    if error is not None:
        raise error


def _list_elsewhere(search: "Search | None") -> set[int]:
    """Return the jobs that other controllers run, as far as the journal can be read."""
    elsewhere: set[int] = set()
    if search is not None:
        with suppress(OSError, ValueError):
            elsewhere = search.list_elsewhere()
    return elsewhere


def _describe_end(jobs: Sequence[ReportedJob], failed: Sequence[ReportedJob]) -> LitDataError:
    first = failed[0].record
    counts = f"{len(failed)} of {len(jobs)} jobs did not end well"
    text = f"{counts}; job {first.number}: {first.status}: {first.reason}"
    return make_error(first.exit_code or 1, text)


def _command_to_go_on(sweep: Sweep, overrides: Sequence[str]) -> str:
    replaced = ("sweep.resume", "hydra.sweep.dir")
    remaining = [override for override in overrides if not override.startswith(replaced)]
    start = ["python", "-m", "lit_data", sweep.command, "-m"]
    resume = show_override("sweep.resume", sweep.folder)
    return f"{shlex.join([*start, *sweep.flags, *remaining])} {resume}"
