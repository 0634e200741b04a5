"""Composing and running a suite of `benchmarks`, and reading what a loader gives, for tests."""

import csv
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from omegaconf import DictConfig

import benchmarks
from benchmarks.learning_sets import write_splits
from lit_data.app.benchmark import run
from lit_data.app.benchmarks.measure import Candidate, open_feed
from lit_data.app.benchmarks.table import MICRO_BATCHED, Row
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.names import allow_packages
from lit_data.core.types import Batch

CONF = Path(benchmarks.__path__[0]) / "conf"
GPU_TOY = (
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=32",
    "data.loader.batch_size=8",
    "model.net.width=4",
    "suite.batch_size=8",
    "suite.repeats=1",
    "suite.steps=2",
    "suite.plain_steps=2",
    "suite.warmup_batches=1",
    "suite.gan_px=16",
    "suite.tile_px=64",
    "suite.images=3",
)
"""The suite ``gpu`` at toy size."""


def compose_suite(name: str, *words: str) -> DictConfig:
    return compose(
        "benchmark", [f"+suite={name}", *words], config_dir=CONF, packages=["benchmarks"]
    )


def run_suite(cfg: DictConfig) -> dict[str, Any]:
    with allow_packages(["benchmarks"]):
        return run(cfg)


def read_epoch(method: str, candidate: Candidate | str) -> Batch:
    """One epoch of a row, finished and sorted by sample."""
    assert isinstance(candidate, Candidate)
    has_micro_batches = method in MICRO_BATCHED or candidate.has_micro_batches
    workers = 0 if method in ("inline", "device") else 2
    row = Row(method, 5, workers, 2 if has_micro_batches else 5)
    batches = []
    with open_feed(row, candidate, seed=3) as feed:
        for batch in feed:
            finished = candidate.finish(candidate.plan(dict(batch)))
            batches.append({key: value.clone() for key, value in finished.items()})
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    if "index" not in joined:  # of samples that others make
        return joined
    order = joined["index"].argsort()
    return {key: value[order] for key, value in joined.items()}


def write_masked(folder: Path, images: int, side_px: int) -> Path:
    """Write a set of masks: noise, with a bright square in every second image."""
    rng = np.random.default_rng(0)
    for number in range(images):
        kind = ("good", "pit")[number % 2]
        image = cv2.GaussianBlur(
            rng.integers(60, 180, (side_px, side_px)).astype(np.uint8), (0, 0), 3
        )
        mask = np.zeros_like(image)
        if kind == "pit":
            top = int(rng.integers(side_px - 16))
            mask[top : top + 12, 20:32] = 255
            image[mask > 0] = 230
        (folder / kind).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / kind / f"{number:03}.jpg"), image)
        cv2.imwrite(str(folder / kind / f"{number:03}.png"), mask)
    write_splits(folder)
    return folder


def read_table(folder: Path) -> list[dict[str, str]]:
    """Rows of the table that a suite wrote into its run folder."""
    with (folder / "benchmark.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_summary(runs: Path) -> tuple[dict[str, Any], Path]:
    """Metrics of the one run below a folder, without ``benchmark/``, and its folder."""
    (path,) = runs.rglob("summary.json")
    metrics = json.loads(path.read_text())
    return {name.removeprefix("benchmark/"): value for name, value in metrics.items()}, path.parent
