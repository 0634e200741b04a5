"""`benchmark` as a whole, at toy size."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from lit_data.app.benchmarks.compare import build_candidates
from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.benchmarks.table import COLUMNS, MEASURED, METHODS, OURS
from lit_data.app.benchmarks.training import ReplayLoader
from lit_data.app.cli import main
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import read_options
from lit_data.core.errors import ConfigError
from tests.outputs import STRIPES, VOLUMES

TOY = [
    "+experiment=stripe",
    *STRIPES,
    "data.loader.batch_size=4",
    "benchmark.repeats=1",
    "benchmark.seconds_per_row=60",
    "benchmark.samples_per_row=8",
    "benchmark.warmup_batches=1",
    "benchmark.workers=[1]",
    "benchmark.micro_batch_sizes=[2]",
]
SPEED_COLUMNS = [f"{method}_{column}" for method in METHODS[1:] for column in MEASURED]

pytestmark = [
    pytest.mark.timeout(120),
    # Whether a toy run on this machine could be faster is not the question here.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

Run = Callable[..., tuple[dict[str, Any], list[dict[str, str]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command; gives the metrics of summary.json, and the lines of the table."""

    def call(*words: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
        places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
        assert main(["benchmark", *TOY, *words, *places]) == 0
        (path,) = (tmp_path / "runs").rglob("summary.json")
        figures = [item for item in json.loads(path.read_text()).items() if "/" in item[0]]
        metrics = {key.removeprefix("benchmark/"): value for key, value in figures}
        with path.with_name("benchmark.csv").open(newline="") as file:
            return metrics, list(csv.DictReader(file))

    return call


@pytest.mark.slow
def test_loaders_are_compared_and_a_setting_is_recommended(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, lines = run()
    assert tuple(lines[0]) == COLUMNS
    on_device = [line for line in lines if line["until"] == "device"]
    on_host = [line for line in lines if line["until"] == "host"]
    assert [line["method"] for line in on_device] == list(METHODS[1:])
    # what the device cuts never stands on the host
    assert [line["method"] for line in on_host] == list(METHODS[1:-1])
    assert lines == on_device + on_host
    for line in lines:
        assert (line["note"], line["samples"], line["repeats"]) == ("", "8", "1")
    for part in (on_device, on_host):
        speeds = {line["method"]: float(line["samples_per_s"]) for line in part}
        for line in part:
            ratio = speeds[line["method"]] / speeds["dataloader"]
            assert float(line["ratio_to_dataloader"]) == pytest.approx(ratio, rel=1e-4)
    speeds = {line["method"]: float(line["samples_per_s"]) for line in on_device}
    best = max(OURS, key=lambda method: speeds[method])
    assert metrics["best_method"] == best
    ratio = speeds[best] / speeds["dataloader"]
    assert metrics["ratio_to_dataloader"] == pytest.approx(ratio, rel=1e-4)
    assert {
        *SPEED_COLUMNS, "cores", "cpu", "memory_bytes", "device", "python", "torch", "numpy",
        "lightning", "batch_size", "best_method", "best_samples_per_s", "ratio_to_dataloader",
        "recommended_worker_kind", "recommended_num_workers", "recommended_micro_batch_size",
    } == {key for key in metrics if not key.startswith("host_")}  # fmt: skip
    assert metrics["host_dataloader_samples_per_s"] > 0
    assert "host_device_samples_per_s" not in metrics
    assert "Recommended for batches of 4: worker_kind=" in capsys.readouterr().out


@pytest.mark.slow
def test_ratios_that_were_not_measured_are_left_out(run: Run) -> None:
    metrics, lines = run("benchmark.methods=[thread,inline]")
    assert metrics["best_method"] in ("inline", "thread")
    assert "ratio_to_dataloader" not in metrics
    assert [line["ratio_to_dataloader"] for line in lines] == [""] * 4


@pytest.mark.slow
def test_headroom_of_batches_of_volumes_is_measured(tmp_path: Path) -> None:
    words = ["+experiment=ct", "+benchmark=headroom", "trainer.accelerator=cpu"]
    words += ["data.loader.batch_size=4", *VOLUMES, *TOY[5:]]
    words += ["benchmark.steps=2", "benchmark.cached_batches=1"]
    words += ["trainer.enable_progress_bar=false", f"paths.runs={tmp_path}/runs"]
    assert main(["benchmark", *words, f"paths.cache={tmp_path}/cache"]) == 0
    (path,) = (tmp_path / "runs").rglob("summary.json")
    assert json.loads(path.read_text())["benchmark/fit_share_of_headroom"] > 0


def test_headroom_compares_training_with_and_without_loading(run: Run) -> None:
    words = ["benchmark.steps=3", "benchmark.cached_batches=2", "trainer.enable_progress_bar=false"]
    metrics, lines = run("+benchmark=headroom", *words, "trainer.accelerator=cpu")
    assert metrics["batch_size"] == 4
    share = metrics["fit_samples_per_s"] / metrics["headroom_samples_per_s"]
    assert metrics["fit_share_of_headroom"] == pytest.approx(share)
    assert [line["batches"] for line in lines] == ["fit", "headroom"]
    assert float(lines[0]["share"]) == pytest.approx(share, rel=1e-4)


def test_replayed_batches_come_in_turn() -> None:
    assert list(ReplayLoader(["a", "b", "c"], 7)) == list("abcabca")


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    words = [f"paths.run={tmp_path}", f"paths.cache={tmp_path}/cache"]
    return compose("benchmark", [*TOY, *words, "data.synthesis.probability=1.0"])


def _options(cfg: DictConfig, *methods: str, defects: bool = True) -> BenchmarkOptions:
    changed = cfg.copy()
    changed.benchmark.methods = list(methods)
    changed.benchmark.defects = defects
    return read_options(BenchmarkOptions, changed.benchmark, "benchmark")


def test_an_empty_train_split_is_refused(cfg: DictConfig) -> None:
    cfg.data.splits, cfg.data.mask_splits = {"train": 0.0, "val": 0.5, "test": 0.5}, []
    text = r"^the train split holds no images to measure with: check data\.splits$"
    with pytest.raises(ConfigError, match=text):
        build_candidates(cfg, _options(cfg, "copy", defects=False))
