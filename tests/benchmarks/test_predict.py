"""`python -m benchmarks predict`: the ways give the same values; a table is written."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import run as measure
from benchmarks.predict import COLUMNS, find_dice
from tests.benchmarks.suites import read_summary, read_table

TOY = [
    "trainer=cpu",
    "data.samples={count: 6, size_px: [96, 96]}",
    "data.patch_px=48",
    "data.progressive=[[0,32]]",
    "data.loader.batch_size=2",
    "data.loader.num_workers=0",
    "model.net.width=2",
    "model.net.depth=1",
    "suite.images=5",
    "suite.tile_px=48",
    "suite.repeats=1",
    "suite.steps=2",
    "suite.device=cpu",
]
WAYS = ["original", "original_bf16", "ours"]

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(tmp_path: Path, cache: Path, *words: str) -> tuple[list[dict[str, str]], dict[str, float]]:
    places = [f"paths.runs={tmp_path}/runs", f"paths.cache={cache}"]
    assert measure(["predict", *TOY, *words, *places]) == 0
    metrics, folder = read_summary(tmp_path / "runs")
    assert not list(folder.glob("images-*")), "they are removed"
    return read_table(folder), metrics


def test_each_way_is_measured_and_written(tmp_path: Path, cache: Path) -> None:
    lines, metrics = run(tmp_path, cache)
    assert tuple(lines[0]) == COLUMNS
    assert [line["way"] for line in lines] == WAYS
    for line in lines:
        ratio = float(line["images_per_s"]) / float(lines[0]["images_per_s"])
        assert float(line["ratio_to_original"]) == pytest.approx(ratio, rel=1e-4)
        assert float(line["peak_mib"]) > 0
    assert metrics["images"] == 5
    assert metrics["ours_ratio_to_original"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "dice"),
    [
        ([0.9, 0.9, 0.1, 0.1], [0.8, 0.2, 0.6, 0.1], 2 * 1 / (2 + 2)),
        ([0.9, 0.5, 0.1, 0.1], [0.9, 0.5, 0.1, 0.1], 1.0),
        ([0.1, 0.1, 0.1, 0.1], [0.1, 0.4, 0.1, 0.1], math.nan),
        ([0.1, 0.1, 0.1, 0.1], [0.1, 0.5, 0.1, 0.1], 0.0),
    ],
)
def test_agreement(one: Sequence[float], other: Sequence[float], dice: float) -> None:
    pairs = [(torch.tensor([a]), torch.tensor([b])) for a, b in zip(one, other, strict=True)]
    assert find_dice(pairs) == pytest.approx(dice, nan_ok=True)
