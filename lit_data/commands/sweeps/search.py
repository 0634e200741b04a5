"""A search: Optuna chooses the values of each job by the results of those before.

All that a search knows stands in a journal in the folder of its sweep. Several controllers, also on
other machines that see the folder, may work on it at once: a job is claimed under a lock, and the
claim holds as long as its controller lives. Each controller holds a lock of its own for that, which
the kernel frees with the process.
"""

import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import optuna
from filelock import Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from lit_data.callbacks.prune_trial import PruneTrial
from lit_data.checks import check_count, check_fraction, is_count
from lit_data.commands.configuration.rows import read_words
from lit_data.commands.configuration.targets import instantiate, read_options
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.result import find_monitor
from lit_data.commands.sweeps.job import JOURNAL, PRUNED, Sweep
from lit_data.commands.sweeps.overrides import (
    Space,
    describe_differences,
    keep_computing,
)
from lit_data.errors import ConfigError, DataError
from lit_data.files import explaining, write_text
from lit_data.io.temp import hold_lock, kernel_lock

log = logging.getLogger(__name__)


_STUDY = "search"
_MOST_BYTES = 2**28  # of a journal, which is read as a whole; 20 trials take some 20 KiB
_TAIL_BYTES = 2**20  # longer than any line of a journal
POLL_S = 2.0
_CONTROLLER = re.compile(r"[0-9a-f]{16}")
_ARRANGED = ("GridSampler", "QMCSampler")
"""Samplers whose seed is the arrangement of the whole search, and not that of one job."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search, the node `hydra.sweeper` of ``hydra/sweeper=search``.

    Args:
        direction: of the metric; it is settled with `sweep.mode` before.
        n_trials: jobs, those of all controllers together.
        n_jobs: jobs that are handed to the launcher at once.
        max_failure_rate: fraction of these that may fail before this controller ends.
        params: values by key.
        sampler: node of a sampler of Optuna.
        pruner: node of a pruner of Optuna; None: each job runs to its end.

    Raises:
        ConfigError: an option is out of its range.
    """

    direction: Literal["minimize", "maximize"] | None = None
    n_trials: int = 20
    n_jobs: int = 1
    max_failure_rate: float = 1.0
    params: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_count("hydra.sweeper.n_trials", self.n_trials, 1)
        check_count("hydra.sweeper.n_jobs", self.n_jobs, 1)
        check_fraction("hydra.sweeper.max_failure_rate", self.max_failure_rate)


class JournalLock(JournalFileOpenLock):
    """Lock of a journal that the kernel frees; Optuna's own outlives a killed holder by 30 s.

    Args:
        journal: its file.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._holding = ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock, and mend the journal's end."""
        self._holding.enter_context(hold_lock(self._journal.with_suffix(".lock")))
        cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        """Free the lock."""
        self._holding.close()


def cut_torn_line(journal: Path) -> None:
    """Cut off the part of a line that a killed writer or a full disk has left at the end."""
    with journal.open("rb+") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - _TAIL_BYTES))
        tail = file.read()
        torn_bytes = len(tail) - (tail.rfind(b"\n") + 1)
        if torn_bytes:
            file.truncate(size_bytes - torn_bytes)


def open_study(folder: Path, **options: Any) -> optuna.Study:  # noqa: ANN401 - of create_study
    """Open the journal of a search, or begin it.

    Args:
        folder: of the sweep; it may be anybody's, and nothing in it is run.
        options: direction, sampler and pruner.

    Raises:
        DataError: the file is no such journal.
        StoreError: it cannot be read or written.
    """
    path = folder / JOURNAL
    # A pipe would never end, and the whole file is read into memory.
    if path.exists() and not (path.is_file() and path.stat().st_size <= _MOST_BYTES):
        raise DataError(f"{path} is no journal of a search: no file below {_MOST_BYTES} bytes")
    with explaining(path):
        try:
            backend = JournalFileBackend(str(path), lock_obj=JournalLock(path))
            storage = JournalStorage(backend)
            study = optuna.create_study(
                storage=storage, study_name=_STUDY, load_if_exists=True, **options
            )
            _ = study.direction, study.get_trials(deepcopy=False)
        except OSError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{path} is no journal of a search: {reason:.200}") from error
    return study


class Claim(NamedTuple):
    """A job that this controller runs."""

    job: int
    trial: int
    params: Mapping[str, Any]


@contextmanager
def open_search(
    config: DictConfig, sweep: Sweep, overrides: Sequence[Override]
) -> Iterator["Search"]:
    """Begin a search, go on with it, or join one that others work on.

    Args:
        config: composed for several runs, with Hydra's node.
        sweep: its options are settled: `mode` says what is good.
        overrides: those of the files and of the command line.

    Raises:
        ConfigError: the search began with another space or other options.
        DataError: the folder holds no search.
        StoreError: its disk is full, or has no locks.
    """
    node = config.hydra.sweeper
    options = read_options(SearchOptions, node, "hydra.sweeper")
    space = Space.read(overrides)
    begun = _describe_begin(config, sweep, overrides)
    make_sampler(node.sampler, 0)  # wrong options are refused before anything is written
    pruner = instantiate(node.pruner) if sweep.prunes else None
    path = sweep.folder / JOURNAL
    if sweep.options.resume is not None and not path.exists():
        raise DataError(f"{sweep.folder} is not the folder of a search: no {JOURNAL} is in it")
    name = secrets.token_hex(8)
    lock_path = path.with_name(f"{name}.lock")
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = kernel_lock(lock_path)
        lock.acquire()
    try:
        with explaining(path), hold_lock(path.with_name("claim.lock")):
            study = open_study(sweep.folder, direction=begun["direction"], pruner=pruner)
            search = Search(study, sweep.folder, options, node.sampler, space, name)
            search.check_begun(begun)
            if sweep.options.resume is not None:
                search.revive_failed()
        yield search
    finally:
        lock.release()
        lock_path.unlink(missing_ok=True)


def _describe_begin(
    config: DictConfig, sweep: Sweep, overrides: Sequence[Override]
) -> dict[str, str]:
    """Return what has to be the same in each start of a search."""
    metric = sweep.options.metric or find_monitor(config.get("callbacks") or {})[0]
    if sweep.prunes and (sweep.command != "fit" or metric is None):
        raise ConfigError(
            "hydra/sweeper/pruner ends trainings by a metric of theirs: use it with fit, and name "
            "one with sweep.metric"
        )
    lines = [str(override.input_line) for override in overrides]
    return {
        "the command": sweep.command,
        "sweep.metric": str(metric),
        "direction": "minimize" if sweep.options.mode == "min" else "maximize",
        **read_words(keep_computing(lines)),
    }


def make_sampler(node: DictConfig, job: int) -> optuna.samplers.BaseSampler:
    """Build the sampler of a job.

    Its seed follows from that of the search and the job's number, so that a search that was broken
    off, or another controller, does not propose the values of the first jobs again.

    Raises:
        ConfigError: Optuna refuses its options.
    """
    seed = node.get("seed")
    seeds = {}
    if seed is not None and not str(node._target_).endswith(_ARRANGED):
        check_count("hydra.sweeper.sampler.seed", seed, 0)
        seeds["seed"] = int(np.random.SeedSequence((seed, job)).generate_state(1)[0])
    sampler: optuna.samplers.BaseSampler = instantiate(node, **seeds)
    return sampler


@dataclass(frozen=True)
class Search:
    """A controller's view of a search.

    Args:
        study: of Optuna, in the journal.
        folder: of the sweep.
        options: of the search.
        sampler: its node in the configuration.
        space: of the values.
        name: of this controller, which holds the lock of that name.
    """

    study: optuna.Study
    folder: Path
    options: SearchOptions
    sampler: DictConfig
    space: Space
    name: str

    @property
    def _journal(self) -> Path:
        return self.folder / JOURNAL

    def check_begun(self, begun: Mapping[str, str]) -> None:
        """Refuse to go on with another search than the one of the journal.

        Args:
            begun: command, metric, direction and overrides.

        Raises:
            ConfigError: names what differs.
            DataError: the journal contradicts itself.
        """
        before = self.study.user_attrs.get("begun")
        trials = self.study.get_trials(deepcopy=False)
        if before is None and not trials:
            self.study.set_user_attr("begun", dict(begun))
            return
        if not isinstance(before, dict):
            raise DataError(f"{self._journal} is the journal of another program")
        differences = describe_differences(before, begun)
        if differences:
            raise ConfigError(
                f"the search in {self.folder} began otherwise ({differences:.400}): start a new one, "
                "or give the same overrides"
            )
        has_direction = self.study.direction.name.lower() == begun["direction"]
        for trial in trials:
            for key, distribution in trial.distributions.items():
                if self.space.distributions.get(key) != distribution or not has_direction:
                    raise DataError(f"{self._journal} does not hold the search that it names")

    def revive_failed(self) -> None:
        """Give failed jobs to whoever claims them next, unless other controllers are at work."""
        for path in self._journal.parent.glob("*.lock"):
            if path.stem != self.name and self._lives(path.stem):
                return
        for number, trial in self._list_jobs().items():
            if trial.state is TrialState.FAIL:
                again = optuna.trial.create_trial(
                    state=TrialState.RUNNING,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs={"job": number},
                )
                self.study.add_trial(again)

    def run(self, launch: Callable[[list[list[str]], int], Sequence[JobReturn]]) -> None:
        """Run jobs until all are done, those of other controllers too.

        Args:
            launch: Runs jobs: their overrides, and the number of the first.
        """
        while claims := self._claim():
            overrides = [self.space.write(claim.params) for claim in claims]
            ends = launch(overrides, claims[0].job)
            failures = 0
            for claim, end in zip(claims, ends, strict=True):
                failures += self._tell(claim, end) is TrialState.FAIL
            if failures > self.options.max_failure_rate * len(claims):
                log.error(
                    "%d of %d jobs failed, more than hydra.sweeper.max_failure_rate=%g: no more "
                    "are started",
                    failures,
                    len(claims),
                    self.options.max_failure_rate,
                )
                break
        self._write_best()

    def list_elsewhere(self) -> set[int]:
        """Return the jobs that other living controllers run."""
        jobs = self._list_jobs()
        return {number for number, trial in jobs.items() if self._is_anothers(trial)}

    def _claim(self) -> list[Claim]:
        """Claim jobs in a row; wait while there are none, but others are at work that may die."""
        is_waiting = False
        while True:
            with explaining(self._journal), hold_lock(self._journal.with_name("claim.lock")):
                self._end_halves()
                jobs = self._list_jobs()
                claims = self._take_over(jobs) or self._ask(jobs)
            running = [job for job in jobs.values() if job.state is TrialState.RUNNING]
            if claims or not running:
                return claims
            if not is_waiting:
                log.info("waiting for %d jobs of other controllers", len(running))
                is_waiting = True
            time.sleep(POLL_S)

    def _end_halves(self) -> None:
        """End trials whose controller was killed while it claimed them, before they were a job."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state is TrialState.RUNNING and "job" not in trial.user_attrs:
                self.study.tell(trial.number, state=TrialState.FAIL)

    def _list_jobs(self) -> dict[int, FrozenTrial]:
        """Return the trial of each job, the last one where it was started again."""
        jobs = {}
        for trial in self.study.get_trials(deepcopy=False):
            if is_count(trial.user_attrs.get("job"), 0):
                jobs[trial.user_attrs["job"]] = trial
        return dict(sorted(jobs.items()))

    def _take_over(self, jobs: Mapping[int, FrozenTrial]) -> list[Claim]:
        """Claim jobs whose controller lives no more; a launcher numbers its jobs in a row."""
        claims: list[Claim] = []
        for number, trial in jobs.items():
            if trial.state is not TrialState.RUNNING or self._is_anothers(trial):
                continue
            is_next = not claims or number == claims[-1].job + 1
            if not is_next or len(claims) == self.options.n_jobs:
                break
            again = optuna.Trial(self.study, trial._trial_id)
            again.set_user_attr("controller", self.name)
            claims.append(Claim(number, trial.number, trial.params))
        return claims

    def _ask(self, jobs: Mapping[int, FrozenTrial]) -> list[Claim]:
        """Claim jobs with new values, as many as there are left."""
        claims = []
        first = max(jobs, default=-1) + 1
        last = min(first + self.options.n_jobs, self.options.n_trials)
        for number in range(first, last):
            self.study.sampler = make_sampler(self.sampler, number)
            trial = self.study.ask(self.space.distributions)
            trial.set_user_attr("controller", self.name)
            trial.set_user_attr("job", number)  # last: without it there is no job
            claims.append(Claim(number, trial.number, trial.params))
        return claims

    def _tell(self, claim: Claim, end: JobReturn) -> TrialState:
        value = end.return_value if end.status is JobStatus.COMPLETED else None
        state = TrialState.FAIL
        if value == PRUNED:
            state = TrialState.PRUNED
        elif isinstance(value, float) and not math.isnan(value):
            state = TrialState.COMPLETE
        elif end.status is JobStatus.COMPLETED:
            log.warning("job %d: its metric is %s, which counts as a failure", claim.job, value)
        values = value if state is TrialState.COMPLETE else None
        with explaining(self._journal):
            self.study.tell(claim.trial, values, state=state, skip_if_finished=True)
        return state

    def _is_anothers(self, trial: FrozenTrial) -> bool:
        """Return True if another living controller runs a trial."""
        controller = trial.user_attrs.get("controller")
        is_running = trial.state is TrialState.RUNNING
        return is_running and controller != self.name and self._lives(controller)

    def _lives(self, controller: object) -> bool:
        """Return True if a controller of this name holds its lock."""
        if not isinstance(controller, str) or not _CONTROLLER.fullmatch(controller):
            return False
        path = self._journal.with_name(f"{controller}.lock")
        if not path.is_file():
            return False
        try:
            with kernel_lock(path).acquire(blocking=False):
                return False
        except Timeout:
            return True

    def _write_best(self) -> None:
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not done:
            return
        best = self.study.best_trial
        log.info("Best parameters: %s", best.params)
        log.info("Best value: %s", best.value)
        results = {"name": "optuna", "best_params": best.params, "best_value": best.value}
        text = OmegaConf.to_yaml(OmegaConf.create(results))
        write_text(self.folder / "optimization_results.yaml", text)


def make_pruning(job: int) -> PruneTrial:
    """Return the callback of a job's training that reports to its search.

    Args:
        job: its number.

    Raises:
        DataError: the search has no such job.
    """
    if not is_first_rank():
        return PruneTrial(None)
    hydra = HydraConfig.get()
    pruner = instantiate(hydra.sweeper.pruner)
    study = open_study(Path(hydra.sweep.dir), pruner=pruner)
    metric = dict(study.user_attrs.get("begun", {})).get("sweep.metric")
    for trial in reversed(study.get_trials(deepcopy=False)):
        if trial.user_attrs.get("job") == job:
            return PruneTrial(optuna.Trial(study, trial._trial_id), metric)
    raise DataError(f"{hydra.sweep.dir} holds no search with a job {job}")
