"""Suite ``learning``: an experiment beside the script that people would write, after equal time of training."""

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from shutil import copy
from statistics import mean, stdev
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.errors import ConfigError, LitDataError

SCORES: Final = ("pixel_ap", "best_f1", "image_auroc")
COLUMNS: Final = ("way", "seconds", "runs", *(f"{name}{end}" for name in SCORES for end in ("", "_spread")))
_TOP_PX: Final = 50
"""An image scores as the mean of so many of its highest pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSuite(Suite):
    """Average precision of the pixels of whole test images, their best F1, and AUROC of the images.

    Both train for the same time (that of validation counts, that of starting does not), on the same split; both write
    maps of 16 bits, which one scorer reads. Mean and standard deviation over the seeds.

    Args:
        root: A folder made by ``python -m benchmarks.learning_sets``.
        seconds: Times of training.
        seeds: One run of each way for each of them.
        overrides: Further words for ``fit``.
        ways: Of `ours` and `plain`.
    """

    root: str
    seconds: Sequence[int] = (150, 300, 900)
    seeds: Sequence[int] = (0, 1, 2)
    overrides: Sequence[str] = ("data.mask_read.threshold=128",)
    ways: Sequence[str] = ("plain", "ours")

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        root, folder = Path(self.root), Path(cfg.paths.run)
        if not (root / "splits.csv").is_file():
            raise ConfigError(
                f"suite.root={self.root} has no splits.csv: make it by python -m benchmarks.learning_sets"
            )
        test_folder = _copy_test_images(root, folder / "test")
        runners = {"plain": self._run_plain, "ours": self._run_ours}
        runs: dict[tuple[int, str], list[dict[str, float]]] = {key: [] for key in product(self.seconds, self.ways)}
        lines: list[dict[str, Any]] = []
        for seed, way in product(self.seeds, self.ways):
            out = folder / f"{way}_{seed}"
            runners[way](root, test_folder, seed, out)
            for seconds in self.seconds:
                runs[seconds, way].append(score_maps(out / str(seconds) / "maps", root))
            done = {key: values for key, values in runs.items() if values}
            lines = [
                {"way": way, "seconds": seconds, "runs": len(values)} | _summarise(values)
                for (seconds, way), values in done.items()
            ]
            report_lines(lines, COLUMNS, folder, f"{root.name}: after equal time of training")
        return collect([line | {"way": f"{line['way']}_{line['seconds']}"} for line in lines], COLUMNS)

    def _run_ours(self, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        words = ["+experiment=inspection", *self.overrides, f"seed={seed}"]
        data = [f"data.root={root}", f"data.splits={root / 'splits.csv'}"]
        for seconds in self.seconds:
            run, length = out / f"{seconds}/fit", [f"trainer.max_time={{seconds:{seconds}}}", "trainer.max_epochs=-1"]
            _call("lit_data", "fit", *words, *data, *length, "report=false", f"hydra.run.dir={run}")
            predict = [f"data.root={test_folder}", f"ckpt={run / 'checkpoints/best.ckpt'}"]
            _call("lit_data", "predict", *words, *predict, f"hydra.run.dir={out / str(seconds)}")

    def _run_plain(self, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        words = [root / "splits.csv", root, seed, out, *self.seconds]
        _call("benchmarks.plain_masks", *map(str, words))


def _call(module: str, *words: str) -> None:
    """Run a module in a process of its own, as a user would.

    Raises:
        LitDataError: It ends with an error; its last lines are quoted.
    """
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LitDataError(f"{module} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def _read_split(root: Path, split: str) -> list[str]:
    with (root / "splits.csv").open(newline="") as file:
        return [row["image"] for row in csv.DictReader(file) if row["split"] == split]


def _copy_test_images(root: Path, target: Path) -> Path:
    """Copy the images alone, as those of a line come: without masks and in one folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _read_split(root, "test"):
        copy(root / name, target / Path(name).name)
    return target


def score_maps(maps: Path, root: Path) -> dict[str, float]:
    """Score maps of the test images of a set.

    Args:
        maps: ``NAME.png`` or ``NAME.jpg.png`` of each, 16 bit.
        root: The set, with masks beside its images.

    Returns:
        A number for each of `SCORES`.
    """
    scores, truths, image_scores, is_defective = [], [], [], []
    for name in _read_split(root, "test"):
        path = Path(name)
        map_path = next(p for p in (maps / f"{path.name}.png", maps / f"{path.stem}.png") if p.is_file())
        probability = np.asarray(cv2.imread(str(map_path), cv2.IMREAD_UNCHANGED), np.float64)
        truth = np.asarray(cv2.imread(str((root / path).with_suffix(".png")), cv2.IMREAD_GRAYSCALE)) >= 128
        scores.append(probability.ravel())
        truths.append(truth.ravel())
        image_scores.append(float(np.sort(probability, axis=None)[-_TOP_PX:].mean()))
        is_defective.append(bool(truth.any()))
    precision, best_f1 = average_precision(np.concatenate(scores), np.concatenate(truths))
    return {
        "pixel_ap": precision,
        "best_f1": best_f1,
        "image_auroc": auroc(np.array(image_scores), np.array(is_defective)),
    }


def average_precision(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> tuple[float, float]:
    """Average precision and the best F1 over all thresholds; equal scores share one threshold.

    Args:
        scores: [N].
        truth: [N].
    """
    order = np.argsort(-scores, kind="stable")
    is_last_of_equal = np.append(np.diff(scores[order]) != 0, True)
    hits = np.cumsum(truth[order])[is_last_of_equal]
    counts = np.flatnonzero(is_last_of_equal) + 1
    recall_steps = np.diff(hits, prepend=0) / max(1, hits[-1])
    return float((recall_steps * hits / counts).sum()), float((2 * hits / (counts + hits[-1])).max())


def auroc(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Part of the pairs of a positive and a negative whose positive scores higher; ties count half."""
    positive, negative = scores[truth][:, None], scores[~truth]
    return float((positive > negative).mean() + (positive == negative).mean() / 2)


def _summarise(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of each score."""
    summary = {}
    for name in SCORES:
        values = [run[name] for run in runs]
        summary[name] = mean(values)
        summary[f"{name}_spread"] = stdev(values) if len(values) > 1 else float("nan")
    return summary
