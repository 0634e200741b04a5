"""Run whose checkpoint a command takes where none is named, among folders of all kinds of runs."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_data.app.checkpoints import find_checkpoint
from lit_data.app.configuration.compose import check_run
from lit_data.app.configuration.tree import open_hydra
from lit_data.app.result import KEYS
from lit_data.app.run_choice import choose_unfinished
from lit_data.core.errors import DataError

BEST, LAST = "checkpoints/best.ckpt", "checkpoints/last.ckpt"


class Runs:
    """Run folders below runs/fit/segmentation, each newer than those before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs/fit/segmentation"
        self._time_s = 1_000_000

    def add(
        self,
        name: str,
        score: float | None = None,
        *,
        root: str | None = "parts",
        monitor: str = "val/ap",
        mode: str = "max",
        debug: str | None = None,
        files: dict[str, Any] | None = None,
    ) -> None:
        """Write a run; with a score it has ended."""
        run = self.folder / name
        config = {
            "data": {"root": root},
            "callbacks": {"checkpoint": {"monitor": monitor, "mode": mode}},
        }
        runtime = {"cwd": str(self.folder.parents[2]), "choices": {"debug": debug}}
        texts = {
            BEST: "",
            LAST: "",
            ".hydra/config.yaml": yaml.dump(config),
            ".hydra/hydra.yaml": yaml.dump({"hydra": {"runtime": runtime}}),
        }
        if score is not None:
            texts["summary.json"] = json.dumps(dict.fromkeys(KEYS) | {monitor: score})
        for file, content in (files or {}).items():
            texts[file] = json.dumps(content)
        for file, text in texts.items():
            path = run / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            os.utime(path, (self._time_s, self._time_s))
        self._time_s += 10

    def choose(self, run: str | None = None, ckpt: str | None = None) -> str:
        """Return the name of the run that a command takes."""
        path = find_checkpoint(ckpt, run, self.folder, self.folder)
        assert path.name == f"{ckpt or 'best'}.ckpt"
        return path.parents[1].relative_to(self.folder).as_posix()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_the_best_run_is_taken_and_its_score_is_said(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name, score in (("a", 0.3), ("b", 0.587), ("c", 0.4)):
        runs.add(name, score)
    assert runs.choose() == "b"
    first = caplog.messages[0]
    assert first.startswith("checkpoint of b: the best of 3 runs on its data by val/ap; ")
    assert first.endswith("run=FOLDER selects another")
    assert (runs.choose(ckpt="last"), runs.choose(run="latest")) == ("b", "c")


@pytest.mark.parametrize(
    "flawed",
    [
        {"score": 0.9, "debug": "fast"},
        {"files": {"failure.json": {"status": "failed"}}},
        {"files": {"job.json": {"status": "killed"}}},
    ],
    ids=["debug", "failed", "killed"],
)
def test_a_run_that_came_to_nothing_is_not_taken(flawed: dict[str, Any], runs: Runs) -> None:
    runs.add("flawed", **flawed)
    with pytest.raises(DataError, match=r"is used by default \(1 .*\): run=FOLDER selects one"):
        runs.choose()
    runs.add("real", 0.3)
    runs.add("newer", **flawed)
    assert (runs.choose(), runs.choose(run="latest")) == ("real", "real")
    path = find_checkpoint(None, str(runs.folder / "newer"), runs.folder, runs.folder)
    assert path.parents[1].name == "newer"


def test_of_a_run_without_validation_the_other_checkpoint_is_named(runs: Runs) -> None:
    runs.add("short")
    (runs.folder / "short" / BEST).unlink()
    with pytest.raises(DataError, match=r"no best\.ckpt below .*short: give ckpt=last$"):
        runs.choose(run=str(runs.folder / "short"))


def test_of_a_sweep_its_winner_is_taken(runs: Runs) -> None:
    runs.folder.joinpath("sweep").mkdir(parents=True)
    (runs.folder / "sweep/sweep.json").write_text('{"best_job": 1}')
    for number, score in enumerate((0.9, 0.4, 0.5)):  # by another metric
        runs.add(f"sweep/{number}", score, files={"job.json": {"status": "done", "number": number}})
    assert runs.choose() == "sweep/1"


def test_runs_on_other_data_or_with_another_monitor_are_not_compared(
    runs: Runs, tmp_path: Path
) -> None:
    runs.add("other data", 0.9, root="toys")
    runs.add("other score", 0.9, monitor="val/dice")
    runs.add("best", 0.6, root=f"{tmp_path}/parts")
    runs.add("newest", 0.5)
    assert runs.choose() == "best"


def test_an_interrupted_run_is_taken_where_no_other_has_ended(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runs.add("interrupted")
    assert runs.choose() == "interrupted"
    assert "the only run, which is not finished" in caplog.text
    runs.add("ended", 0.1)
    runs.add("interrupted too")
    assert runs.choose() == "ended"


def test_training_goes_on_with_the_newest_run_that_has_not_ended(runs: Runs) -> None:
    def resume() -> str:
        path = choose_unfinished(runs.folder, ["last.ckpt"])
        assert path is not None
        return path.parents[1].name

    runs.add("ended", 0.1)
    assert resume() == "ended"
    for name in ("first", "second"):
        runs.add(name)
    runs.add("ended too", 0.2)
    assert resume() == "second"


@pytest.mark.parametrize("debug", ["fast", "overfit", "profiler"])
def test_runs_for_debugging_lie_beside_the_others(debug: str) -> None:
    with open_hydra(None) as hydra:
        cfg, _ = check_run(hydra, "fit", ["experiment=stripe", f"debug={debug}"])
    for folder in (cfg.hydra.run.dir, cfg.hydra.sweep.dir):
        assert folder.startswith("runs/debug/stripe/2")
    # By it, and not by a limit, each epoch has the same samples.
    assert cfg.trainer.get("overfit_batches") == (2 if debug == "overfit" else None)
