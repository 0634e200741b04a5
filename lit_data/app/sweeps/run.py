"""A sweep: Hydra's multirun, which any job may leave without ending the others, and go on with."""

import functools
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from lit_data.app.configuration.tree import Engine
from lit_data.app.configuration.words import show_override, write_override
from lit_data.app.launcher import is_named_by_time
from lit_data.app.run_folder import claim_new, claim_typed
from lit_data.app.sweeps.gpus import share_gpus
from lit_data.app.sweeps.job import Sweep, keep_computing, make_error, run_sweep_job
from lit_data.app.sweeps.options import SweepOptions, complete_sweeper
from lit_data.app.sweeps.process import end_descendants
from lit_data.app.sweeps.records import read_records, settle
from lit_data.core.errors import ConfigError, DataError, LitDataError
from lit_data.core.files import refuse_links
from lit_inspect.counts import counted


def run_sweep(
    hydra: Engine,
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
    overrides = [*overrides, *complete_sweeper(cfg, overrides)]
    jobs = list_jobs(hydra, cfg, overrides)
    if jobs is None and options.resume is not None:
        raise ConfigError(
            "sweep.resume resumes jobs that are known in advance: start a search again with its "
            "hydra.sweeper.storage and hydra.sweeper.study_name instead"
        )
    sweep = Sweep(
        options=options,
        flags=tuple(flags),
        packages=tuple(packages),
        jobs=jobs,
        gpus=share_gpus(cfg, isolate=options.isolate),
    )
    folder = _choose_folder(cfg, options)
    if jobs is not None:
        _check_same(cfg.command, jobs, folder)
    placed = [override for override in overrides if not override.startswith("hydra.sweep.dir=")]
    placed += [write_override("hydra.sweep.dir", folder), "hydra.mode=MULTIRUN"]
    task = functools.partial(run_sweep_job, sweep=sweep)
    error: Exception | None = None
    try:
        hydra.multirun(cfg.command, task, placed)
    except (KeyboardInterrupt, SystemExit):
        end_descendants()
        _report(cfg, folder)
        print(_describe_next(cfg.command, overrides, sweep, folder), file=sys.stderr)
        raise
    except Exception as caught:  # a job's own failure, or what a sweeper or launcher makes of it
        _report(cfg, folder)
        error = caught
        if jobs is None and not isinstance(caught, LitDataError):
            error = LitDataError(f"the search ended with {type(caught).__name__}: {caught}")
    _raise_failure(folder, error)
    return folder


def list_jobs(hydra: Engine, cfg: DictConfig, overrides: Sequence[str]) -> list[list[str]] | None:
    """Return the overrides of each job; None where a sweeper other than Hydra's own chooses them.

    Raises:
        ConfigError: Hydra's own sweeper cannot make jobs of a range without steps.
    """
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return None
    params = [f"{key!s}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    words = {}  # of two overrides for one key the later one holds
    for override in parser.parse_overrides([*params, *overrides]):
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"'{override.input_line}' is a range without steps, which needs a sweeper that "
                "chooses values: hydra/sweeper=optuna"
            )
        if override.is_sweep_override():
            values = list(override.sweep_string_iterator())
        else:
            values = [override.get_value_element_as_str()]
        key = override.get_key_element()
        words[key] = [f"{key}={value}" for value in values]
    return [keep_computing(job) for job in itertools.product(*words.values())]


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
    if not read_records(folder):
        raise DataError(f"{folder} is not the folder of a sweep: no job.json is in it")
    refuse_links(folder, "sweep.resume")
    return folder


def _claim(folder: Path) -> None:
    if read_records(folder):
        resume = show_override("sweep.resume", folder)
        raise ConfigError(
            f"{folder} already holds a sweep: resume it with {resume}, or choose another folder"
        )
    if not claim_typed(folder):
        raise ConfigError(f"hydra.sweep.dir={folder} already holds a run: choose another folder")


def _find_latest(parent: Path, cfg: DictConfig) -> Path:
    """Return the sweep below a folder whose job was written last."""
    jobs = list(parent.glob("*/*/job.json"))
    if not jobs:
        raise DataError(
            f"sweep.resume=latest: no sweep of {cfg.command} {cfg.name} below {parent}; give its "
            "folder"
        )
    return max(jobs, key=lambda path: path.stat().st_mtime_ns).parents[1]


def _check_same(command: str, jobs: list[list[str]], folder: Path) -> None:
    """Refuse to take the results of some overrides for those of others, before anything runs.

    Raises:
        ConfigError: names the first job that differs.
    """
    for _, record in read_records(folder):
        now = jobs[record.number] if record.number < len(jobs) else None
        if record.command != command or record.overrides != now:
            before = " ".join([record.command, *record.overrides])
            after = "no job" if now is None else " ".join([command, *now])
            raise ConfigError(
                f"the sweep in {folder} has other jobs (job {record.number} was {before}, now it "
                f"is {after}): start a new one, or give the same overrides"
            )


def _report(cfg: DictConfig, folder: Path) -> None:
    """Report a sweep that broke off, of whose end Hydra tells no callback."""
    from lit_data.app.sweeps.table import report_sweep  # with Matplotlib

    report_sweep(cfg, folder)


def _raise_failure(folder: Path, error: Exception | None) -> None:
    """End as the first job that failed, else with what a sweeper or launcher raised."""
    records = [settle(record) for _, record in read_records(folder)]
    failed = [record for record in records if record.status != "done"]
    if failed:
        first = failed[0]
        counts = f"{len(failed)} of {counted(len(records), 'job')} did not finish"
        text = f"{counts}; job {first.number}: {first.status}: {first.reason}"
        raise make_error(first, text) from error
    if error is not None:
        raise error


def _describe_next(command: str, overrides: Sequence[str], sweep: Sweep, folder: Path) -> str:
    """Return how to go on with a sweep that was stopped, with the line to type."""
    replaced = ("sweep.resume", "hydra.sweep.dir")
    remaining = [override for override in overrides if not override.startswith(replaced)]
    line = shlex.join(["lit-data", command, "-m", *sweep.flags, *remaining])
    if sweep.jobs is None:
        return (
            "the search is not finished: it resumes from its storage, or starts again, "
            f"with\n{line}"
        )
    resume = show_override("sweep.resume", folder)
    return f"the sweep is not finished: resume it with\n{line} {resume}"
