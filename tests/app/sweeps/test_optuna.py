"""A search: Optuna's sweeper, Hydra's plugin, runs jobs of ours."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.cli import main
from lit_data.core.errors import DataError
from tests.app.sweeps.test_sweep import Install

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs pip install -e '.[sweep]'")

pytestmark = [
    # Of Optuna 2.10, and of its newer releases where the sweeper names distributions of old.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SEARCH = ["show", "+experiment=stripe", "-m", "hydra/sweeper=optuna", "sweep.isolate=none"]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def search(*words: str, folder: str = "out") -> int:
    return main([*SEARCH, f"hydra.sweep.dir={folder}", *words])


def test_a_search_learns_from_the_metric_and_outlives_failed_jobs(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[float] = []

    def run(cfg: Any) -> dict[str, Any]:
        ran.append(cfg.data.loader.timeout_s)
        if len(ran) == 2:
            raise DataError("a.png is empty")
        return {"test/score": -((cfg.data.loader.timeout_s - 40.0) ** 2)}

    install(run)
    space = "data.loader.timeout_s=interval(1.0,99.0)"
    words = ["hydra.sweeper.n_trials=4", "sweep.metric=test/score", "sweep.mode=max", space]
    assert search(*words) == 3
    assert len(set(ran)) == 4
    best_value = max(-((value - 40.0) ** 2) for number, value in enumerate(ran) if number != 1)
    out, err = capfd.readouterr()
    best = re.search(r"Best value: (\S+)", out)
    assert best is not None
    assert float(best[1]) == pytest.approx(best_value)
    assert err.endswith("1 of 4 jobs did not finish; job 1: failed: a.png is empty\n")
    summary = json.loads(Path("out/sweep.json").read_text())
    assert summary["best_value"] == pytest.approx(best_value)
    assert (summary["jobs_done"], summary["jobs_failed"]) == (3, 1)

    first = ran.copy()
    assert search(*words, "seed=0", folder="again") == 0  # the same seed, the same values
    assert ran[4:] == first


def test_a_search_without_a_result_ends_with_one_line(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: {"test/score": 1.0})
    words = ["seed=1,2", "hydra.sweeper.n_trials=1", "sweep.metric=test/gone"]
    assert search(*words, "sweep.mode=max") == 1
    out, err = capfd.readouterr()
    assert "holds no 'test/gone', which sweep.metric names" in out
    assert err.endswith("the search ended with ValueError: No trials are completed yet.\n")


@pytest.mark.slow
def test_starts_with_one_storage_learn_from_each_other(install: Install) -> None:
    install(lambda cfg: {"test/score": cfg.seed})
    words = ["seed=range(1,1000)", "sweep.metric=test/score", "sweep.mode=max"]
    words += ["hydra.sweeper.n_trials=2", "hydra.sweeper.study_name=seeds"]
    words += [f"hydra.sweeper.storage=sqlite:///{Path.cwd()}/seeds.db"]
    assert search(*words, folder="first") == 0
    assert search(*words, folder="second") == 0
    best = [json.loads(Path(f"{name}/sweep.json").read_text()) for name in ("first", "second")]
    text = Path("second/optimization_results.yaml").read_text()
    assert f"best_value: {max(summary['best_value'] for summary in best)}" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "seed=1,2 sweep.mode=max sweep.resume=latest",
            "hydra.sweeper.storage and hydra.sweeper.s",
        ),
        (
            "seed=1,2 sweep.mode=max hydra.sweeper.sampler._target_=optuna.samplers.CmaEsSampler",
            "'optuna.samplers.CmaEsSampler', which is not allowed",
        ),
        (
            "seed=1,2 sweep.mode=min hydra.sweeper.direction=maximize",
            "sweep.mode=min and hydra.sweeper.direction=maximize contradict each other",
        ),
    ],
)
def test_mistakes_end_with_one_line(
    words: str, message: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: pytest.fail("the command ran"))
    assert main([*SEARCH, *words.split()]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
