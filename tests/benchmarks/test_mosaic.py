"""`python -m benchmarks mosaic`: the ways make batches of one kind; a table is written."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import cv2
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.__main__ import run as measure
from benchmarks.mosaic import COLUMNS, LABELS, list_ways, open_feeds
from lit_data.errors import ConfigError
from lit_data.mosaic import MosaicSpec
from tests.benchmarks.suites import build_suite, compose_suite, read_summary, read_table, run_suite

TOY = [
    *("trainer=cpu", "data.samples={count: 8, size_px: [64, 80]}", "data.size_px=64"),
    *("data.mosaic.close_epochs=0", "model.net.width=8", "suite.device=cpu"),
    *("suite.batch_size=6", "suite.micro_batch_size=4"),
    *("suite.repeats=1", "suite.steps=2", "suite.warmup_batches=1"),
]
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

Toy = Callable[..., DictConfig]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def composed(cache: Path) -> DictConfig:
    return compose_suite("mosaic", *TOY, f"paths.cache={cache}")


@pytest.fixture
def toy(tmp_path: Path, composed: DictConfig) -> Toy:
    def call(*words: str) -> DictConfig:
        changes = OmegaConf.from_dotlist([*words, f"paths.run={tmp_path}"])
        return cast(DictConfig, OmegaConf.merge(composed, changes))

    return call


def test_each_way_is_measured_and_written(tmp_path: Path, cache: Path) -> None:
    assert measure(["mosaic", *TOY, f"paths.runs={tmp_path}/runs", f"paths.cache={cache}"]) == 0
    metrics, folder = read_summary(tmp_path / "runs")
    assert cv2.imread(str(folder / "benchmark.png")).shape[1] > 500
    lines = read_table(folder)
    assert tuple(lines[0]) == COLUMNS
    assert [line["way"] for line in lines] == [*LABELS]
    for line in lines:
        way, us = line["way"], float(line["us"])
        assert float(line["images_per_s"]) == pytest.approx(1e6 / us, rel=1e-4)
        assert metrics[f"{way}_us"] == pytest.approx(us, rel=1e-5)
        ratio = metrics["original_us"] / us
        assert metrics[f"{way}_ratio_to_original"] == pytest.approx(ratio, rel=1e-4)
    assert metrics["batch_size"] == 6
    for_cuda = ("train_", "finish")
    assert not [key for key in metrics if key.startswith(for_cuda)]


def test_training_tells_what_waits(toy: Toy) -> None:
    cfg = toy("suite.train=true")
    metrics = run_suite(cfg)
    assert metrics["benchmark/finish_ms"] > 0
    assert 0 < metrics["benchmark/train_wait_fraction"] < 1
    assert metrics["benchmark/train_step_ms"] > 0
    assert metrics["benchmark/train_samples_per_s"] > 0


def test_all_ways_make_whole_batches_of_mosaics_although_the_set_is_small(toy: Toy) -> None:
    cfg = toy("suite.batch_size=20")
    options = build_suite(cfg)
    feeds = open_feeds(cfg, options)
    batches = {way: work() for way, work in list_ways(feeds, MosaicSpec()).items()}
    for way, batch in batches.items():
        assert batch["image"].shape == (4 if way == "worker_finished" else 20, 3, 64, 64)
        assert batch["image"].dtype == (torch.float32 if way == "worker_finished" else torch.uint8)
    # Mosaics are drawn when the batch is finished.
    drawn = feeds["device"].finish(batches["device"])["image"]
    assert drawn.dtype == torch.float32
    assert (drawn * 255 - batches["device"]["image"]).abs().mean() > 5


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("data.mosaic=null", r"^suite=mosaic needs images with boxes and data\.mosaic"),
        ("data.mosaic.tiles=9", r"makes mosaics of 9 with probability 1\.0: the original way"),
        ("data.mosaic.probability=0.5", r"probability 0\.5: the original way makes them of 4"),
        ("data.splits={train: 0, val: 0.5, test: 0.5}", "^the train split holds no images to draw"),
        ("suite.train=maybe", "train='maybe' is unknown: choose one of true, false, auto$"),
    ],
)
def test_what_cannot_be_compared_is_refused(word: str, match: str, toy: Toy) -> None:
    cfg = toy(word)
    with pytest.raises(ConfigError, match=match):
        run_suite(cfg)
