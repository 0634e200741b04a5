"""Suites `loaders` and `collate`: other ways to load give samples of the same form, and are measured."""

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from benchmarks.loaders import find_others
from lit_data.app.benchmarks.compare import build_candidates
from lit_data.app.benchmarks.measure import Candidate
from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.configuration.targets import read_options
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from tests.benchmarks.suites import compose_suite, read_epoch, read_table, run_suite

TOY = [
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
    "data.loader.batch_size=4",
    "data.synthesis.probability=1.0",
]
SHORT = [
    "benchmark.repeats=1",
    "benchmark.seconds_per_row=60",
    "benchmark.samples_per_row=8",
    "benchmark.warmup_batches=1",
    "benchmark.workers=[1]",
    "benchmark.micro_batch_sizes=[2]",
]
OTHERS = ["original", "improved", "textbook"]


@pytest.fixture
def cfg(tmp_path: Path) -> DictConfig:
    places = [f"paths.run={tmp_path}", f"paths.cache={tmp_path}/cache"]
    return compose_suite("loaders", "+experiment=stripe", *TOY, *SHORT, *places)


def _build(cfg: DictConfig, *, defects: bool) -> dict[str, Candidate | str]:
    changed = cfg.copy()
    changed.benchmark.defects = defects
    changed.benchmark.methods = ["inline"]
    options = read_options(BenchmarkOptions, changed.benchmark, "benchmark")
    return build_candidates(cfg, options, find_others=find_others)


def test_other_ways_give_as_many_samples_of_the_same_form(cfg: DictConfig) -> None:
    candidates = _build(cfg, defects=True)
    assert list(candidates) == [*OTHERS, "inline"]
    expected = read_epoch("inline", candidates["inline"])
    assert expected["mask"].any()
    for method in ("original", "improved"):
        batch = read_epoch(method, candidates[method])
        assert batch["image"].shape == expected["image"].shape, method
        assert batch["mask"].shape == expected["mask"].shape, method
        assert batch["mask"].any(), method
    textbook = read_epoch("textbook", candidates["textbook"])
    for key in ("index", "mask", "image"):
        assert torch.equal(textbook[key], expected[key]), key


@pytest.mark.slow
def test_they_are_rows_beside_ours(cfg: DictConfig, tmp_path: Path) -> None:
    cfg.benchmark.methods = ["dataloader", "inline"]
    metrics = run_suite(cfg)
    lines = read_table(tmp_path)
    assert [line["method"] for line in lines] == [*OTHERS, "dataloader", "inline"] * 2
    assert all(line["note"] == "" for line in lines)
    assert [line["micro_batch_size"] for line in lines[:5]] == ["4", "4", "2", "4", "2"]
    best = metrics["benchmark/inline_samples_per_s"]
    ratio = best / metrics["benchmark/original_samples_per_s"]
    assert metrics["benchmark/ratio_to_original"] == pytest.approx(ratio)
    assert metrics["benchmark/host_textbook_samples_per_s"] > 0


def test_other_data_have_no_such_ways(tmp_path: Path) -> None:
    places = [f"paths.run={tmp_path}", f"paths.cache={tmp_path}/cache"]
    words = ["+experiment=watermark", "data.samples={count: 8, size_px: [96, 128], seed: 0}"]
    with pytest.raises(ConfigError, match=r"^suite=loaders needs stripes, boxes or volumes"):
        run_suite(compose_suite("loaders", *words, *places))
    words = ["+experiment=stripe", "synthesis=library", *TOY[:4]]
    with pytest.raises(ConfigError, match=r"stripes with plain spots alone"):
        run_suite(compose_suite("loaders", *words, *places))


def test_collate_measures_samples_in_memory(tmp_path: Path) -> None:
    words = ["suite.sample_shape=[3,8,8]", "suite.samples_in_memory=12", f"paths.run={tmp_path}"]
    sizes = ["benchmark.batch_sizes=[6]", "benchmark.micro_batch_sizes=[3]"]
    metrics = run_suite(compose_suite("collate", *SHORT, *words, *sizes))
    lines = read_table(tmp_path)
    methods = ["dataloader", "inline", "thread", "process", "textbook"]
    assert [line["method"] for line in lines] == methods
    assert all(line["note"] == "" and line["samples"] == "12" for line in lines)
    assert metrics["benchmark/batch_size"] == 6
    assert metrics["benchmark/process_process_cpu_ms_per_1000"] > 0
    assert metrics["benchmark/dataloader_first_batch_ms"] > 0
    assert metrics["benchmark/ratio_to_textbook"] > 0


class Squares(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Batch:
        return {"image": torch.full((2,), index**2), "index": torch.tensor(index)}
