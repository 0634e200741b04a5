"""A search without its command line: what it claims, tells and keeps in its journal."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution as Choice
from optuna.distributions import FloatDistribution as Float
from optuna.distributions import IntDistribution as Int
from optuna.trial import TrialState

from lit_data.commands.sweeps import search as search_module
from lit_data.commands.sweeps.job import JOURNAL, PRUNED, Sweep, SweepOptions
from lit_data.commands.sweeps.overrides import Space, read_distribution
from lit_data.commands.sweeps.search import Search, open_search, open_study
from lit_data.errors import ConfigError, DataError, StoreError

SPACE = ("lr=tag(log, interval(1e-3, 1.0))", "size=choice(8,16,32)", "seed=3")
Evaluate = Callable[[dict[str, str]], Any]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "POLL_S", 0.01)


def parse(words: Sequence[str]) -> Any:
    return OverridesParser.create().parse_overrides(list(words))


def make_sweep(folder: Path, **changes: Any) -> Sweep:
    sweep = Sweep(
        options=SweepOptions(metric="val/loss", mode="min"),
        folder=folder,
        command="fit",
        experiment="toy",
        flags=(),
        packages=(),
        jobs=None,
        total=4,
    )
    return replace(sweep, **changes)


@contextmanager
def opening(
    folder: Path, *words: str, resume: bool = False, sweep: Sweep | None = None, **node: Any
) -> Iterator[Search]:
    sampler = {"_target_": "optuna.samplers.TPESampler", "seed": 0, "n_startup_trials": 3}
    node = {"n_trials": 4, "sampler": sampler, "params": None, **node}
    config = OmegaConf.create({"hydra": {"sweeper": node}, "callbacks": {}})
    sweep = sweep or make_sweep(folder)
    if resume:
        sweep = replace(sweep, options=replace(sweep.options, resume=str(folder)))
    with open_search(config, sweep, parse(words or SPACE)) as search:
        yield search


class Launcher:
    """Runs jobs by a function of their overrides and remembers them."""

    def __init__(self, evaluate: Evaluate, limit: int = 1000) -> None:
        self.evaluate = evaluate
        self.limit = limit
        self.ran = {}
        self.batches = []

    def __call__(self, jobs: list[list[str]], first: int) -> list[JobReturn]:
        self.batches.append(list(range(first, first + len(jobs))))
        ends = []
        for number, words in enumerate(jobs, start=first):
            values = dict(word.split("=") for word in words)
            self.ran[number] = values
            if len(self.ran) > self.limit:
                raise KeyboardInterrupt
            try:
                ends.append(
                    JobReturn(status=JobStatus.COMPLETED, _return_value=self.evaluate(values))
                )
            except ValueError as error:
                ends.append(JobReturn(status=JobStatus.FAILED, _return_value=error))
        return ends


def loss(values: dict[str, str]) -> float:
    return abs(float(values["lr"]) - 0.1) + 1 / float(values["size"])


def fail(values: dict[str, str]) -> float:
    raise ValueError


def read_study(folder: Path) -> optuna.Study:
    return open_study(folder)


# --- the space


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("interval(1e-3, 1.0)", Float(1e-3, 1.0)),
        ("interval(1, 8)", Float(1.0, 8.0)),
        ("int(interval(1, 8))", Int(1, 8)),
        ("tag(log, interval(2e-3, 1e-1))", Float(2e-3, 1e-1, log=True)),
        ("tag(log, int(interval(1, 1000)))", Int(1, 1000, log=True)),
        ("range(0, 10, 3)", Int(0, 9, step=3)),
        ("range(1, 4)", Int(1, 3)),
        ("range(5, 0, -2)", Int(1, 5, step=2)),
        ("range(0.0, 1.0, 0.25)", Float(0.0, 0.75, step=0.25)),
        ("choice(8, 16, 32)", Choice([8, 16, 32])),
        ("8,16,32", Choice([8, 16, 32])),
        ("adam,'a,b',null,true", Choice(["adam", "'a,b'", "null", True])),
        ("[1,2],[3]", Choice(["[1,2]", "[3]"])),
    ],
)
def test_values_are_spelled_as_hydra_spells_them(text: str, distribution: Any) -> None:
    (override,) = parse([f"k={text}"])
    assert read_distribution(override) == distribution


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tag(lgo, interval(1, 2))", r"has the tags lgo: only log is known"),
        ("tag(log, choice(1, 2))", r"has the tags log: only log is known, of interval and range"),
        ("interval(2.0, 1.0)", r"^'k=interval\(2.0, 1.0\)': "),
        ("tag(log, interval(0.0, 1.0))", r"^'k=tag\(log, interval\(0.0, 1.0\)\)': "),
        ("range(1, 1)", r"^'k=range\(1, 1\)': "),
    ],
)
def test_a_range_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_distribution(*parse([f"k={text}"]))


def test_the_later_of_two_overrides_holds() -> None:
    space = Space.read(parse(["lr=interval(0.0, 1.0)", "size=1,2", "+size=3", "lr=4,5", "~x"]))
    assert space.distributions == {"lr": Choice([4, 5])}
    assert space.shared == ["+size=3", "~x"]
    with pytest.raises(ConfigError, match="a search needs keys with values to choose from"):
        Space.read(parse(["lr=1"]))


@pytest.mark.parametrize(
    "params",
    [
        {"lr": "0.5,model._target_=os.system", "size": 8},
        {"lr": 2.0, "size": 8},
        {"lr": float("nan"), "size": 8},
        {"lr": True, "size": 8},
        {"lr": 0.5, "size": 8.0},
        {"lr": 0.5, "size": 64},
        {"lr": 0.5},
    ],
)
def test_values_of_a_journal_stay_within_the_space(params: dict[str, Any]) -> None:
    space = Space.read(parse(SPACE))
    assert space.write({"lr": 0.5, "size": 8}) == ["seed=3", "lr=0.5", "size=8"]
    with pytest.raises(DataError, match="outside its space"):
        space.write(params)


# --- one controller


def test_a_search_learns_and_writes_the_best(tmp_path: Path) -> None:
    launch = Launcher(loss)
    with opening(tmp_path, n_trials=8) as search:
        search.run(launch)
    values = {number: loss(job) for number, job in launch.ran.items()}
    assert list(values) == list(range(8))
    assert len(set(values.values())) > 5
    text = (tmp_path / "optimization_results.yaml").read_text()
    assert OmegaConf.create(text).best_value == min(values.values())
    study = read_study(tmp_path)
    assert [trial.value for trial in study.get_trials()] == list(values.values())


@pytest.mark.parametrize("target", ["TPESampler", "RandomSampler"])
def test_a_search_that_is_broken_off_after_each_job_proposes_the_same(
    target: str, tmp_path: Path
) -> None:
    sampler = {"_target_": f"optuna.samplers.{target}", "seed": 7}
    undisturbed = Launcher(loss)
    with opening(tmp_path / "a", n_trials=6, sampler=sampler) as search:
        search.run(undisturbed)
    ran = {}
    for start in range(6):
        launch = Launcher(loss, limit=1)
        with opening(tmp_path / "b", resume=start > 0, n_trials=6, sampler=sampler) as search:
            if start < 5:
                with pytest.raises(KeyboardInterrupt):  # in the middle of the second job
                    search.run(launch)
            else:
                search.run(launch)
        for number, values in launch.ran.items():
            assert ran.setdefault(number, values) == values
    assert ran == undisturbed.ran
    other = Launcher(loss)
    with opening(tmp_path / "c", n_trials=6, sampler={**sampler, "seed": 8}) as search:
        search.run(other)
    assert other.ran != undisturbed.ran


def test_a_batch_is_numbered_in_a_row(tmp_path: Path) -> None:
    launch = Launcher(loss)
    with opening(tmp_path, n_trials=7, n_jobs=3) as search:
        search.run(launch)
    assert launch.batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_failures_are_told_and_run_again_by_the_next_start(tmp_path: Path) -> None:
    def evaluate(values: dict[str, str]) -> float:
        if len(launch.ran) in (2, 4):
            raise ValueError
        return loss(values)

    launch = Launcher(evaluate)
    with opening(tmp_path) as search:
        search.run(launch)
    states = [trial.state for trial in read_study(tmp_path).get_trials()]
    good, bad = TrialState.COMPLETE, TrialState.FAIL
    assert states == [good, bad, good, bad]
    again = Launcher(loss)
    with opening(tmp_path, resume=True) as search:
        search.run(again)
    assert again.ran == {number: launch.ran[number] for number in (1, 3)}
    assert again.batches == [[1], [3]]
    states = [trial.state for trial in read_study(tmp_path).get_trials()]
    assert states == [good, bad, good, bad, good, good]
    with opening(tmp_path, resume=True) as search:
        search.run(Launcher(fail))  # nothing is left


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (0.5, TrialState.COMPLETE),
        (PRUNED, TrialState.PRUNED),
        (float("nan"), TrialState.FAIL),
        (None, TrialState.FAIL),
    ],
)
def test_the_end_of_a_job_is_told(value: Any, state: TrialState, tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=1) as search:
        search.run(Launcher(lambda values: value))
    assert [trial.state for trial in read_study(tmp_path).get_trials()] == [state]
    assert (tmp_path / "optimization_results.yaml").exists() == (state is TrialState.COMPLETE)


def test_too_many_failures_end_the_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launcher(fail)
    with opening(tmp_path, max_failure_rate=0.5, n_jobs=2) as search:
        search.run(launch)
    assert launch.batches == [[0, 1]]
    assert "2 of 2 jobs failed, more than hydra.sweeper.max_failure_rate=0.5" in caplog.text


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"n_trials": 0}, r"hydra\.sweeper\.n_trials=0 is not usable: choose a whole number of at"),
        ({"n_jobs": 0}, r"hydra\.sweeper\.n_jobs=0 is not usable"),
        ({"max_failure_rate": 2}, r"hydra\.sweeper\.max_failure_rate=2 must lie between 0 and 1"),
        ({"sampler": None}, r"'hydra\.sweeper\.sampler' is None: give names"),
        ({"n_trails": 3}, r"'hydra\.sweeper\.n_trails'.* Did you mean 'hydra\.sweeper\.n_trials'"),
        (
            {"direction": ["minimize"]},
            r"'hydra\.sweeper\.direction' is \['minimize'\]: give one of",
        ),
    ],
)
def test_options_are_checked(node: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message), opening(tmp_path, **node):
        pytest.fail("opened")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "changes", "difference"),
    [
        (("lr=interval(1e-3, 1.0)", *SPACE[1:]), {}, r"lr: tag\(log, .* then, interval\(1e-3"),
        (SPACE[:2], {}, r"seed: 3 then, nothing now"),
        (SPACE, {"command": "test"}, r"the command: fit then, test now"),
        (SPACE, {"options": SweepOptions(metric="val/loss", mode="max")}, r"direction: minimize"),
        (SPACE, {"options": SweepOptions(metric="val/iou", mode="min")}, r"metric: val/loss then"),
    ],
)
def test_another_search_is_not_gone_on_with(
    words: tuple[str, ...], changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    with opening(tmp_path, n_trials=1) as search:
        search.run(Launcher(loss))
    sweep = make_sweep(tmp_path, **changes)
    with (
        pytest.raises(ConfigError, match=rf"began otherwise \(.*{difference}"),
        opening(tmp_path, *words, resume=True, sweep=sweep),
    ):
        pytest.fail("opened")
    with opening(tmp_path, *SPACE, "paths.cache=c", resume=True, n_trials=2) as search:
        search.run(Launcher(loss))


# --- several controllers


def test_two_controllers_run_each_job_once(tmp_path: Path) -> None:
    def evaluate(values: dict[str, str]) -> float:
        time.sleep(0.01)
        return loss(values)

    launchers = [Launcher(evaluate), Launcher(evaluate)]

    def work(launch: Launcher) -> None:
        with opening(tmp_path, n_trials=12) as search:
            both.wait()
            search.run(launch)

    both = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(launch,)) for launch in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (set(launch.ran) for launch in launchers)
    assert first | second == set(range(12))
    assert not first & second
    assert min(len(first), len(second)) > 1
    trials = read_study(tmp_path).get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 12


def test_a_controller_takes_over_from_one_that_died_and_leaves_one_that_lives(
    tmp_path: Path,
) -> None:
    mine = Launcher(loss)

    def join(values: dict[str, str]) -> float:
        with opening(tmp_path, resume=True, n_trials=2) as other:
            with pytest.raises(KeyboardInterrupt):
                other.run(Launcher(loss, limit=0))  # its job is left running
            assert search.list_elsewhere() == {1}
            assert other.list_elsewhere() == {0}
        assert search.list_elsewhere() == set()
        return loss(values)

    mine.evaluate = lambda values: join(values) if len(mine.ran) == 1 else loss(values)
    with opening(tmp_path, n_trials=2) as search:
        search.run(mine)
    assert list(mine.ran) == [0, 1]
    assert len(read_study(tmp_path).get_trials()) == 2
    names = {path.name for path in (tmp_path / JOURNAL).parent.iterdir()}
    assert names == {"claim.lock", "journal.lock", "journal.log"}


def test_who_joins_leaves_failed_jobs_alone(tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=1) as search:
        search.run(Launcher(fail))
        with opening(tmp_path, resume=True, n_trials=1) as joined:
            launch = Launcher(loss)
            joined.run(launch)
    assert launch.ran == {}


def test_a_claim_that_was_broken_off_is_no_job(tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=2) as search:
        search.run(Launcher(loss))
    half = read_study(tmp_path).ask()
    launch = Launcher(loss)
    with opening(tmp_path, resume=True, n_trials=3) as search:
        search.run(launch)
    assert list(launch.ran) == [2]
    assert read_study(tmp_path).get_trials()[half.number].state is TrialState.FAIL


# --- what can happen to a journal


def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=1) as search:
        search.run(Launcher(loss))
    path = (tmp_path / JOURNAL).with_suffix(".lock")
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code, str(path)], stdout=-1) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        threading.Timer(0.1, holder.kill).start()
        with opening(tmp_path, resume=True, n_trials=2) as search:
            search.run(Launcher(loss))
        assert holder.wait(timeout=10) < 0
    assert len(read_study(tmp_path).get_trials()) == 2


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=2) as search:
        search.run(Launcher(loss))
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    launch = Launcher(loss)
    with opening(tmp_path, resume=True, n_trials=3) as search:
        search.run(launch)
    assert list(launch.ran) == [1, 2]  # the end of job 1 was on the torn line
    assert [json.loads(line) for line in path.read_text().splitlines()]


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    with opening(tmp_path, n_trials=1) as search:
        search.run(Launcher(loss))
    path = tmp_path / JOURNAL
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    launch = Launcher(loss)
    with opening(tmp_path, resume=True, n_trials=3) as search:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, before[1]))
        try:
            with pytest.raises(StoreError, match=r"cannot write .*journal\.log: File too large"):
                search.run(launch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.read_bytes().endswith(b"\n")
    with opening(tmp_path, resume=True, n_trials=3) as search:
        search.run(launch)
    assert list(launch.ran) == [1, 2]
    assert json.loads(path.read_text().splitlines()[-1])


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 50 + b"\n" + b"{}\n",
        b"[" * 100_000 + b"\n{}\n",
        b"{}\n",
        b'{"op_code": 99}\n',
        b"[]\n",
    ],
)
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    path.parent.mkdir()
    path.write_bytes(content)
    with (
        pytest.raises(DataError, match=r"journal\.log is no journal of a search: "),
        opening(tmp_path, resume=True),
    ):
        pytest.fail("opened")


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_a_file_without_an_end_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(DataError, match="no file below"), opening(tmp_path, resume=True):
        pytest.fail("opened")


def test_a_journal_of_another_program_or_one_that_lies_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).parent.mkdir()
    read_study(tmp_path).add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(DataError, match="is the journal of another program"), opening(tmp_path):
        pytest.fail("opened")
    lying = tmp_path / "lying"
    with opening(lying, n_trials=1) as search:
        search.run(Launcher(loss))
    evil = optuna.trial.create_trial(
        state=TrialState.RUNNING,
        params={"lr": "0.5,model._target_=os.system"},
        distributions={"lr": Choice(["0.5,model._target_=os.system"])},
        user_attrs={"job": 1, "controller": "../../evil"},
    )
    read_study(lying).add_trial(evil)
    with (
        pytest.raises(DataError, match="does not hold the search that it names"),
        opening(lying, resume=True),
    ):
        pytest.fail("opened")


def test_a_folder_without_a_journal_is_not_gone_on_with(tmp_path: Path) -> None:
    message = r"is not the folder of a search: no search/journal\.log"
    with pytest.raises(DataError, match=message), opening(tmp_path, resume=True):
        pytest.fail("opened")


# --- pruning


def test_a_pruner_needs_a_training_and_a_metric(tmp_path: Path) -> None:
    pruner = {"_target_": "optuna.pruners.MedianPruner"}
    other_command = make_sweep(tmp_path, command="show", prunes=True)
    no_metric = make_sweep(tmp_path, prunes=True, options=SweepOptions(mode="min"))
    for sweep in (other_command, no_metric):
        with (
            pytest.raises(ConfigError, match="ends trainings by a metric"),
            opening(tmp_path, sweep=sweep, pruner=pruner),
        ):
            pytest.fail("opened")
