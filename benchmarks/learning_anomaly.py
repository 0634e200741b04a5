"""Suite ``learning_anomaly``: anomalies from good parts alone, beside the models of others."""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks.learning import (
    LearningSuite,
    auroc,
    average_precision,
    read_map,
    read_mask,
    run_module,
    score_maps,
)
from benchmarks.learning_sets import GOOD, read_split

IMAGE_SCORES = ("image_auroc", "image_ap")
PIXEL_SCORES = ("pixel_auroc", "pixel_ap")
COSTS = ("fit_s", "images_per_s", "memory_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySuite(LearningSuite):
    """Scores of the test images, and costs, of ways that learn the good images of one split.

    Time is that of all threads of a way's process, without its imports. Mean and standard deviation
    over the seeds. ``suite.python`` is the interpreter of all ways but `ours`, such as one that has
    anomalib and timm.
    """

    seconds: Sequence[int] = (0,)
    ways: Sequence[str] = ("ours", "plain")

    scores: ClassVar[tuple[str, ...]] = (*IMAGE_SCORES, *PIXEL_SCORES, *COSTS)
    scripts: ClassVar[tuple[str, ...]] = ("exported", "plain", "patchcore", "padim")
    split_file: ClassVar[str] = "splits.csv"
    title: ClassVar[str] = "learned from good images alone"

    @override
    def copy_test_images(self, root: Path, folder: Path) -> None:
        """Leave that to the ways, whose costs begin with it."""

    @override
    def run_way(self, way: str, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        python = sys.executable if way == "ours" else self.python or sys.executable
        words = way, str(root), str(seed), str(out / str(self.seconds[0]))
        run_module(python, "benchmarks.anomaly_ways", *words)

    @override
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        costs: dict[str, float] = json.loads((folder / "costs.json").read_text())
        return score_anomalies(folder, root) | costs


def score_anomalies(folder: Path, root: Path) -> dict[str, float]:
    """Score what a way wrote of the test images.

    Args:
        folder: Has ``images.csv`` with a score of each, and ``maps``.
        root: The set, whose folder names tell what is good.

    Returns:
        A number for each of `IMAGE_SCORES` and `PIXEL_SCORES`; of pixels NaN where there are no masks.
    """
    names = read_split(root, "test")
    with (folder / "images.csv").open(newline="") as file:
        score_of = {Path(row["image"]).name: float(row["score"]) for row in csv.DictReader(file)}
    scores = np.array([score_of[Path(name).name] for name in names])
    is_defective = np.array([Path(name).parent.name != GOOD for name in names])
    image_ap, _ = average_precision(scores, is_defective)
    scored = {"image_auroc": auroc(scores, is_defective), "image_ap": image_ap}
    if not any(_find_mask(root / name) for name in names):
        return scored | dict.fromkeys(PIXEL_SCORES, float("nan"))
    maps = [read_map(folder / "maps", Path(name)) for name in names]
    truths = [_read_truth(root / name, values) for name, values in zip(names, maps, strict=True)]
    of_pixels = score_maps(maps, truths)
    return scored | {name: of_pixels[name] for name in PIXEL_SCORES}


def _read_truth(image: Path, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Read what the mask of an image marks; nothing where it has none."""
    mask = _find_mask(image)
    return np.zeros(values.shape, bool) if mask is None else read_mask(mask)


def _find_mask(image: Path) -> Path | None:
    """Return the mask that lies beside an image, if there is one."""
    mask = image.with_suffix(".png")
    return mask if mask != image and mask.is_file() else None
