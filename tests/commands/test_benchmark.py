"""`benchmark` as a whole, at toy size."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from omegaconf import DictConfig

from lit_data.cli import main
from lit_data.commands.benchmarks.compare import build_candidates
from lit_data.commands.benchmarks.feeds import Candidate, open_feed
from lit_data.commands.benchmarks.headroom import ReplayLoader
from lit_data.commands.benchmarks.rows import COLUMNS, MEASURED, METHODS, OURS, Row
from lit_data.commands.configuration.compose import compose
from lit_data.errors import ConfigError
from lit_data.types import Batch

TOY = [
    "+experiment=stripe",
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
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
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

Run = Callable[..., tuple[dict[str, Any], list[dict[str, str]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command; gives the metrics of summary.json without their stage, and the lines of the table."""

    def call(*words: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
        assert (
            main(
                [
                    "benchmark",
                    *TOY,
                    *words,
                    f"paths.runs={tmp_path}/runs",
                    f"paths.cache={tmp_path}/cache",
                ]
            )
            == 0
        )
        (path,) = (tmp_path / "runs").rglob("summary.json")
        summary = json.loads(path.read_text())
        metrics = {
            key.removeprefix("benchmark/"): value for key, value in summary.items() if "/" in key
        }
        table = path.with_name("benchmark.csv")
        if not table.is_file():
            return metrics, []
        assert cv2.imread(str(path.with_name("benchmark.png"))).shape[1] > 500
        with table.open(newline="") as file:
            return metrics, list(csv.DictReader(file))

    return call


@pytest.mark.slow
def test_loaders_are_compared_and_a_setting_is_recommended(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, lines = run("benchmark.apply=mine")
    assert tuple(lines[0]) == COLUMNS
    assert [line["method"] for line in lines] == list(METHODS[1:])
    assert all(
        line["note"] == "" and line["samples"] == "8" and line["repeats"] == "1" for line in lines
    )
    speeds = {line["method"]: float(line["samples_per_s"]) for line in lines}
    for line in lines:
        ratio = speeds[line["method"]] / speeds["dataloader"]
        assert float(line["ratio_to_dataloader"]) == pytest.approx(ratio, rel=1e-4)
    best = max(OURS, key=lambda method: speeds[method])
    assert metrics["best_method"] == best
    assert metrics["ratio_to_original"] == pytest.approx(
        speeds[best] / speeds["original"], rel=1e-4
    )
    assert {
        *SPEED_COLUMNS, "cores", "cpu", "memory_bytes", "device", "python", "torch", "numpy", "lightning",
        "batch_size", "best_method", "best_samples_per_s", "ratio_to_original", "ratio_to_improved",
        "ratio_to_dataloader", "ratio_to_textbook", "recommended_worker_kind", "recommended_num_workers",
        "recommended_micro_batch_size",
    } == {key for key in metrics if not key.startswith("host_")}  # fmt: skip
    assert (tmp_path / "benchmark_host.csv").exists() or list(tmp_path.rglob("benchmark_host.csv"))
    assert metrics["host_dataloader_samples_per_s"] > 0
    assert "host_device_samples_per_s" not in metrics, (
        "what the device cuts never stands on the host"
    )
    out = capsys.readouterr().out
    assert "Recommended for batches of 4: worker_kind=" in out
    tuned = compose(
        "fit", ["+experiment=stripe", "+tuned=mine"], config_dir=tmp_path / "runs" / "config"
    )
    assert tuned.data.loader.worker_kind == metrics["recommended_worker_kind"]
    assert tuned.data.loader.num_workers == metrics["recommended_num_workers"]
    assert tuned.data.loader.batch_size == 16


@pytest.mark.slow
def test_without_defects_our_share_of_a_bare_copy_is_told(run: Run) -> None:
    metrics, lines = run(
        "benchmark.defects=false", "benchmark.methods=[original,dataloader,inline,device]"
    )
    notes = {line["method"]: line["note"] for line in lines}
    assert notes["device"].startswith("not available: patches are cut when a batch is finished")
    assert [method for method, note in notes.items() if not note] == [
        "copy",
        "original",
        "dataloader",
        "inline",
    ]
    assert metrics["share_of_copy"] == pytest.approx(
        metrics["inline_samples_per_s"] / metrics["copy_samples_per_s"]
    )
    (device,) = (line for line in lines if line["method"] == "device")
    assert (device["samples_per_s"], device["repeats"]) == ("", "0")


@pytest.mark.slow
def test_ratios_that_were_not_measured_are_left_out(run: Run) -> None:
    metrics, lines = run("benchmark.methods=[original,inline]")
    assert metrics["best_method"] == "inline"
    assert "ratio_to_dataloader" not in metrics
    assert [line["ratio_to_dataloader"] for line in lines] == ["", ""]


def test_collate_measures_samples_in_memory(run: Run) -> None:
    words = [
        "benchmark.sample_shape=[3,8,8]",
        "benchmark.samples_in_memory=12",
        "benchmark.batch_sizes=[6]",
    ]
    metrics, lines = run("+benchmark=collate", *words, "benchmark.micro_batch_sizes=[3]")
    assert [line["method"] for line in lines] == [
        "dataloader",
        "textbook",
        "inline",
        "thread",
        "process",
    ]
    assert all(line["note"] == "" and line["samples"] == "12" for line in lines)
    assert metrics["batch_size"] == 6
    assert metrics["process_process_cpu_ms_per_1000"] > 0
    assert metrics["dataloader_first_batch_ms"] > 0
    assert "recommended_worker_kind" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["detection", "ct"])
@pytest.mark.parametrize("mode", ["loaders", "headroom"])
def test_batches_of_any_kind_are_measured(tmp_path: Path, experiment: str, mode: str) -> None:
    places = [
        f"paths.runs={tmp_path}/runs",
        f"paths.cache={tmp_path}/cache",
        "trainer.enable_progress_bar=false",
    ]
    small = [
        "data.loader.batch_size=4",
        "data.samples={count: 8}",
        "benchmark.steps=2",
        "benchmark.cached_batches=1",
    ]
    words = [
        f"+experiment={experiment}",
        f"+benchmark={mode}",
        *TOY[5:],
        *small,
        *places,
        "trainer.accelerator=cpu",
    ]
    assert main(["benchmark", *words]) == 0
    (path,) = (tmp_path / "runs").rglob("summary.json")
    key = "best_samples_per_s" if mode == "loaders" else "fit_share_of_headroom"
    assert json.loads(path.read_text())[f"benchmark/{key}"] > 0


def test_each_callback_is_measured_and_said_in_a_line(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, _ = run(
        "+benchmark=callbacks", "callbacks=safe", "benchmark.steps=3", "trainer.accelerator=cpu"
    )
    names = {"data_wait", "memory", "adaptive", "amp", "digest", "interrupt", "empty_cache", "all"}
    assert {key.removesuffix("_us") for key in metrics if key.endswith("_us")} - {"step"} == names
    assert metrics["all_share_of_5_ms"] == pytest.approx(metrics["all_us"] / 5000)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split(" ")[0] in names]
    assert sorted(line.split()[0] for line in lines) == sorted(names)
    assert logging.getLogger("lightning.pytorch").level == logging.INFO


def test_headroom_compares_training_with_and_without_loading(run: Run) -> None:
    words = ["benchmark.steps=3", "benchmark.cached_batches=2", "trainer.enable_progress_bar=false"]
    metrics, _ = run("+benchmark=headroom", *words, "trainer.accelerator=cpu")
    assert metrics["batch_size"] == 4
    share = metrics["fit_samples_per_s"] / metrics["headroom_samples_per_s"]
    assert metrics["fit_share_of_headroom"] == pytest.approx(share)


def test_replayed_batches_come_in_turn() -> None:
    assert list(ReplayLoader(["a", "b", "c"], 7)) == list("abcabca")


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    places = [
        f"paths.run={tmp_path}",
        f"paths.cache={tmp_path}/cache",
        "data.synthesis.probability=1.0",
    ]
    return compose("benchmark", [*TOY, *places])


def _read_epoch(method: str, candidate: Candidate | str) -> Batch:
    """One epoch of a row, sorted by sample."""
    assert isinstance(candidate, Candidate)
    row = Row(
        method,
        batch_size=5,
        num_workers=0 if method in ("inline", "device") else 2,
        micro_batch_size=2,
    )
    if method not in ("textbook", *OURS):
        row = Row(method, 5, 2, 5)
    with open_feed(row, candidate, seed=3) as feed:
        finished = (candidate.finish(candidate.plan(dict(batch))) for batch in feed)
        batches = [{key: value.clone() for key, value in batch.items()} for batch in finished]
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    order = joined["index"].argsort()
    return {key: value[order] for key, value in joined.items()}


def test_all_methods_give_the_same_samples(cfg: DictConfig) -> None:
    candidates = build_candidates(cfg, list(METHODS[1:]), defects=True)
    assert list(candidates) == list(METHODS[1:])
    expected = _read_epoch("inline", candidates["inline"])
    assert expected["mask"].any()
    for method, candidate in candidates.items():
        batch = _read_epoch(method, candidate)
        assert torch.equal(batch["index"], expected["index"]), method
        assert torch.equal(batch["mask"], expected["mask"]), method
        assert (batch["image"] - expected["image"]).abs().max() <= 1 / 255, method
    for method in ("dataloader", "textbook", "thread", "process", "device"):
        assert torch.equal(_read_epoch(method, candidates[method])["image"], expected["image"]), (
            method
        )


def test_without_defects_all_methods_give_the_stored_samples(cfg: DictConfig) -> None:
    candidates = build_candidates(cfg, list(METHODS), defects=False)
    expected = _read_epoch("inline", candidates["inline"])
    assert expected["image"].dtype == torch.uint8
    for method in ("original", "improved", "dataloader", "textbook", "thread", "process"):
        assert torch.equal(_read_epoch(method, candidates[method])["image"], expected["image"]), (
            method
        )
    copy = candidates["copy"]
    assert isinstance(copy, Candidate)
    assert torch.equal(copy.dataset, expected["image"])


def test_an_experiment_on_the_device_is_compared_with_loaders_that_read_on_the_host(
    cfg: DictConfig,
) -> None:
    cfg.data.cache = "device"
    candidates = build_candidates(cfg, ["dataloader", "device"], defects=True)
    images = [_read_epoch(method, candidate)["image"] for method, candidate in candidates.items()]
    assert torch.equal(*images)
    del cfg.data.cache
    candidates = build_candidates(cfg, ["device"], defects=True)
    assert candidates == {"device": "the datamodule has no option cache"}


def test_an_empty_train_split_is_refused(cfg: DictConfig) -> None:
    cfg.data.splits, cfg.data.mask_splits = {"train": 0.0, "val": 0.5, "test": 0.5}, []
    with pytest.raises(
        ConfigError, match=r"^the train split holds no images to measure with: check data\.splits$"
    ):
        build_candidates(cfg, ["copy"], defects=False)
