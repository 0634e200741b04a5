"""Suite ``learning_anomaly``: anomalies from good parts alone, beside the models of others."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.learning import auroc, average_precision, run_module, summarise
from benchmarks.learning_sets import GOOD, read_split
from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError

WAYS = ("ours", "plain", "patchcore", "padim")
IMAGE_SCORES = ("image_auroc", "image_ap")
PIXEL_SCORES = ("pixel_auroc", "pixel_ap")
COSTS = ("fit_s", "images_per_s", "memory_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySuite(Suite):
    """Scores of the test images, and costs, of ways that learn the good images of one split.

    Time is that of all threads of a way's process, without its imports. Mean and standard deviation
    over the seeds.

    Args:
        root: A folder made by ``python -m benchmarks.learning_sets good_...``.
        seeds: One run of each way for each of them.
        ways: Of `WAYS`.
        python: The interpreter of all ways but `ours`, such as one that has anomalib and timm; that
            of this process by default.

    Raises:
        ConfigError: The folder holds no fixed split, or there is no such way.
    """

    root: str
    seeds: Sequence[int] = (0, 1, 2)
    ways: Sequence[str] = ("ours", "plain")
    python: str | None = None

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        root, folder = Path(self.root), Path(cfg.paths.run)
        for way in self.ways:
            check_choice("suite.ways", way, WAYS)
        if not (root / "splits.csv").is_file():
            raise ConfigError(
                f"suite.root={self.root} has no splits.csv: make it by "
                "python -m benchmarks.learning_sets"
            )
        names = [*IMAGE_SCORES, *COSTS]
        if has_masks(root):
            names[2:2] = PIXEL_SCORES
        columns = ["way", "runs"]
        for name in names:
            columns += [name, f"{name}_spread"]
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in self.ways}
        lines: list[dict[str, Any]] = []
        for seed, way in product(self.seeds, self.ways):
            out = folder / f"{way}_{seed}"
            python = sys.executable if way == "ours" else self.python or sys.executable
            run_module(python, "benchmarks.anomaly_ways", way, str(root), str(seed), str(out))
            costs = json.loads((out / "costs.json").read_text())
            runs[way].append(score_anomalies(out, root) | costs)
            # after each run, so that a suite that is broken off leaves a table
            lines = _make_lines(runs)
            report_lines(lines, columns, folder, f"{root.name}: learned from good images alone")
        return collect(lines, columns)


def _make_lines(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Make a line for each way that was run."""
    lines = []
    for way, scores in runs.items():
        if scores:
            lines.append({"way": way, "runs": len(scores)} | summarise(scores))
    return lines


def find_mask(image: Path) -> Path | None:
    """Return the mask that lies beside an image, if there is one."""
    mask = image.with_suffix(".png")
    return mask if mask != image and mask.is_file() else None


def has_masks(root: Path) -> bool:
    """Tell whether the test images have masks."""
    return any(find_mask(root / name) for name in read_split(root, "test"))


def score_anomalies(folder: Path, root: Path) -> dict[str, float]:
    """Score what a way wrote of the test images.

    Args:
        folder: Has ``images.csv`` with a score of each, and ``maps``.
        root: The set, whose folder names tell what is good.

    Returns:
        A number for each of `IMAGE_SCORES`; where there are masks, also for each of `PIXEL_SCORES`.
    """
    names = read_split(root, "test")
    with (folder / "images.csv").open(newline="") as file:
        score_of = {Path(row["image"]).name: float(row["score"]) for row in csv.DictReader(file)}
    scores = np.array([score_of[Path(name).name] for name in names])
    is_defective = np.array([Path(name).parent.name != GOOD for name in names])
    image_ap, _ = average_precision(scores, is_defective)
    scored = {"image_auroc": auroc(scores, is_defective), "image_ap": image_ap}
    if has_masks(root):
        scored |= _score_pixels(folder / "maps", [root / name for name in names])
    return scored


def _score_pixels(maps: Path, images: Sequence[Path]) -> dict[str, float]:
    scores, truths = [], []
    for image in images:
        values = read_map(maps, image)
        mask = find_mask(image)
        truth = np.zeros(values.shape, bool)
        if mask is not None:
            truth = np.asarray(cv2.imread(str(mask), cv2.IMREAD_GRAYSCALE)) >= 128
        scores.append(values.ravel())
        truths.append(truth.ravel())
    all_scores, all_truths = np.concatenate(scores), np.concatenate(truths)
    precision, _ = average_precision(all_scores, all_truths)
    return {"pixel_auroc": auroc(all_scores, all_truths), "pixel_ap": precision}


def read_map(maps: Path, image: Path) -> NDArray[Any]:
    """Read the map [H, W] of an image: ``NAME.npy``, or 16 bit ``NAME.png`` or ``NAME.jpg.png``."""
    array = maps / f"{image.stem}.npy"
    if array.is_file():
        return np.asarray(np.load(array))
    for name in (f"{image.name}.png", f"{image.stem}.png"):
        values = cv2.imread(str(maps / name), cv2.IMREAD_UNCHANGED)
        if values is not None:
            return np.asarray(values)
    raise ConfigError(f"{maps} has no map of {image.name}")
