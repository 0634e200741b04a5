"""Runs and sweeps that start at one moment, and folders that a user has named twice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from lit_data.app import api
from lit_data.app.cli import main
from lit_data.app.run import run
from lit_data.app.run_folder import claim_new, claim_typed
from lit_data.core.errors import ConfigError

Install = Callable[..., None]
NOON = "hydra.{kind}.dir=${{paths.runs}}/${{now:%Y}}"  # as if all started in one second
RUN, SWEEP = NOON.format(kind="run"), NOON.format(kind="sweep")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folders(install: Install) -> list[str]:
    """Run folders of the commands that are started, none of which does anything."""
    names: list[str] = []

    def note(cfg: DictConfig) -> dict[str, Any]:
        names.append(Path(cfg.paths.run).name)
        return {}

    for name in ("show", "fit", "predict", "prepare"):
        install(note, name)
    return names


def test_of_many_claims_of_one_folder_each_gets_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_new(tmp_path / "runs/noon"), range(24)))
        is_first = list(pool.map(lambda _: claim_typed(tmp_path / "mine"), range(24)))
    assert {path.name for path in claimed} == {"noon", *(f"noon-{n}" for n in range(2, 25))}
    assert is_first.count(True) == 1


def test_runs_of_one_second_write_into_folders_of_their_own(folders: list[str]) -> None:
    for command in ("show", "show", "fit", "predict"):
        assert main([command, "+experiment=stripe", RUN]) == 0
    year = folders[0]
    assert folders == [year, f"{year}-2", f"{year}-3", f"{year}-4"]
    started = api.start("show", "+experiment=stripe", RUN)
    assert started.folder.name == f"{year}-5"


def _start(line: str) -> Path:
    *flags, command = line.partition(" seed")[0].split()
    folder = f"hydra.{'sweep' if flags else 'run'}.dir=out"
    words = ["+experiment=stripe", folder, "sweep.isolate=none", *line.split()[len(flags) + 1 :]]
    return run(command, words, multirun=bool(flags))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("fit", "fit", "out already holds another run: choose another folder, or resume it"),
        ("fit", "predict", "or resume it with predict.resume=true"),
        ("fit", "show", "out already holds another run: choose another folder$"),
        ("show", "show seed=2", "out already holds another run"),
        ("-m fit seed=1", "fit", "out already holds another run"),
        ("fit", "-m fit seed=1", "hydra.sweep.dir=.*/out already holds a run"),
    ],
)
def test_a_folder_of_another_run_is_refused(
    first: str, second: str, message: str, folders: list[str]
) -> None:
    _start(first)
    with pytest.raises(ConfigError, match=message):
        _start(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fit", "fit resume=auto"),
        ("fit", "fit ckpt=out/checkpoints/last.ckpt"),
        ("fit", "predict predict.resume=true"),
        ("prepare seed=2", "prepare seed=2"),
    ],
)
def test_a_run_that_goes_on_takes_its_folder(first: str, second: str, folders: list[str]) -> None:
    for words in (first, second):
        command, *overrides = words.split()
        assert main([command, "+experiment=stripe", "hydra.run.dir=out", *overrides]) == 0
    assert folders == ["out", "out"]


def test_a_folder_whose_run_failed_before_it_trained_is_taken_again(install: Install) -> None:
    def fail(cfg: DictConfig) -> dict[str, Any]:
        raise ConfigError("no such data")

    install(fail, "fit")
    (Path("out") / "notes").mkdir(parents=True)  # so that the folder stays
    words = ["fit", "+experiment=stripe", "hydra.run.dir=out"]
    assert [main(words), main([*words, "seed=1"])] == [2, 2]
