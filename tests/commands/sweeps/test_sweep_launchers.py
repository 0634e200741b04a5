"""Sweeps of real trainings at toy size, with every launcher and sweeper that the configuration offers."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_data.commands.sweeps.search import open_study
from tests.families import ROOT, run_family
from tests.outputs import NO_TIMELINES, QUICK, STRIPES

LIMIT_S = 280
TOY = ["+experiment=stripe", "trainer=cpu", *QUICK, *NO_TIMELINES, *STRIPES]
TOY += ["logger=none", "hydra.sweep.dir=out"]
KILLER = """
import os, signal
import lightning as L
class Killer(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2 and not os.path.exists("healed"):
            os.kill(os.getpid(), signal.SIGKILL)
"""

SCORES = """
import lightning as L
class Scores(L.Callback):
    def __init__(self, lr):
        self.lr = lr
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/own", self.lr)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))


def fit(*words: str) -> tuple[int, str]:
    program = [sys.executable, "-W", "ignore", "-m", "lit_data", "fit", *words]
    paths = f"{Path.cwd()}{os.pathsep}{ROOT}"
    return run_family(program, limit_s=LIMIT_S, PYTHONPATH=paths, COLUMNS="200")


def read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("launcher", ["parallel", "slurm_local"])
def test_a_launcher_runs_the_jobs(launcher: str) -> None:
    code, out = fit("-m", *TOY, f"hydra/launcher={launcher}", "seed=1,2")
    assert code == 0, out
    summary = read_json("out/sweep.json")
    assert (summary["jobs"], summary["jobs_done"]) == (2, 2)
    assert summary["metric"] == "val/average_precision"
    assert out.endswith(f"{Path.cwd()}/out/sweep.json\n")
    assert [read_json(f"out/{number}/job.json")["status"] for number in (0, 1)] == ["done", "done"]
    assert Path("out/sweep.png").is_file()


@pytest.mark.usefixtures("without_pictures")
def test_optuna_searches_with_the_ready_options() -> None:
    words = ["hydra.sweeper.n_trials=2", "data.synthesis.probability=1.0"]
    words += [word for word in TOY if "batch_size" not in word]
    code, out = fit("-m", "+hparams_search=stripe_optuna", *words)
    assert code == 0, out
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert found["best_params"].keys() == {"model.optimizer.lr", "data.loader.batch_size"}
    summary = read_json("out/sweep.json")
    assert summary["metric"] == "val/average_precision"
    assert summary["best_value"] == found["best_value"]
    assert Path("out/search/journal.log").is_file()


def test_a_training_that_is_worse_than_another_is_given_up() -> None:
    Path("own_scores.py").write_text(SCORES)
    words = ["-m", "--package=own_scores", *TOY[:-1], "trainer.max_epochs=3"]
    words += ["+callbacks.scores._target_=own_scores.Scores"]
    words += ["+callbacks.scores.lr=${model.optimizer.lr}", "sweep.metric=val/own"]
    words += ["sweep.mode=max", "hydra/sweeper=search", "hydra/sweeper/sampler=seeded_random"]
    words += ["hydra.sweeper.sampler.seed=3", "hydra/sweeper/pruner=median"]
    words += ["hydra.sweeper.pruner.n_startup_trials=1", "hydra.sweeper.n_trials=2"]
    words += ["model.optimizer.lr=choice(0.02,1e-9)"]
    code, out = fit(*words, "hydra.sweep.dir=out")
    assert code == 0, out
    summary = read_json("out/sweep.json")
    assert (summary["jobs_done"], summary["jobs_pruned"], summary["best_job"]) == (1, 1, 0)
    assert "│ pruned │" in out
    job, metrics = (read_json(f"out/1/{name}.json") for name in ("job", "summary"))
    assert (job["status"], job["exit_code"], metrics["pruned_after"]) == ("pruned", 0, 1)
    assert metrics["val/own"] == pytest.approx(1e-9)
    assert "test/average_precision" not in metrics
    assert not Path("out/1/predictions.png").exists()
    states = [trial.state.name for trial in open_study(Path("out")).get_trials()]
    assert states == ["COMPLETE", "PRUNED"]
    code, out = fit(*words, "sweep.resume=out")
    assert code == 0, out
    assert not re.search(r"^job \d", out, re.MULTILINE)  # nothing is left to run


@pytest.mark.usefixtures("without_pictures")
def test_a_training_that_was_killed_goes_on_to_the_same_end() -> None:
    Path("own_killer.py").write_text(KILLER)
    words = ["--package=own_killer", "+callbacks.killer._target_=own_killer.Killer", "-m", "seed=1"]
    words += [*TOY[:-1], "trainer.max_epochs=4"]
    code, out = fit(*words, "hydra.sweep.dir=out")
    assert code == 6, out
    assert "killed" in out
    Path("healed").touch()
    code, out = fit(*words, "sweep.resume=out")
    assert code == 0, out
    assert "from " + str(Path.cwd() / "out/0/checkpoints/last.ckpt") in out
    code, out = fit(*words, "hydra.sweep.dir=whole")
    assert code == 0, out
    again, whole = (read_json(f"{folder}/0/summary.json") for folder in ("out", "whole"))
    for key in ("samples_sha256", "test/average_precision", "val/average_precision"):
        assert again[key] == whole[key]
