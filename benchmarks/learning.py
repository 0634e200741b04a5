"""Suites ``learning``, ``learning_boxes`` and ``learning_labels``: experiments beside the scripts of others."""

import csv
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_precision_recall_curve
from typing_extensions import override

from benchmarks.learning_detection import list_images, read_detections, read_truth, score_boxes
from benchmarks.learning_sets import copy_images, read_split
from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, LitDataError

MASK_SCORES = ("pixel_ap", "best_f1", "image_auroc")
BOX_SCORES = ("map50",)
LABEL_SCORES = ("accuracy", "mean_f1")
_TOP_PX = 50
"""An image scores as the mean of so many of its highest pixels."""
_RECALL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSuite(Suite):
    """Scores of the test images after equal time of training, of an experiment and of scripts.

    All train for the same time (that of validation counts, that of starting does not) on the same
    split, and one scorer reads what they write. Mean and standard deviation over the seeds.

    Args:
        root: A folder made by ``python -m benchmarks.learning_sets``.
        seconds: Times of training; 0 for ways that end by themselves.
        seeds: One run of each way for each of them.
        overrides: Further words for ``fit``.
        ways: `ours`, and those of the suite.
        python: The interpreter of the scripts, such as one that has torchvision; that of this
            process by default.

    Raises:
        ConfigError: The folder holds no fixed split, or the suite has no such way.
    """

    root: str
    seconds: Sequence[int] = (150, 300, 900)
    seeds: Sequence[int] = (0, 1, 2)
    overrides: Sequence[str] = ()
    ways: Sequence[str] = ("plain", "ours")
    python: str | None = None

    scores: ClassVar[tuple[str, ...]]
    scripts: ClassVar[tuple[str, ...]]
    split_file: ClassVar[str]
    predict_words: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str] = "after equal time of training"

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        root, folder = Path(self.root), Path(cfg.paths.run)
        for way in self.ways:
            check_choice("suite.ways", way, tuple(self.list_ways()))
        if not (root / self.split_file).is_file():
            raise ConfigError(
                f"suite.root={self.root} has no {self.split_file}: make it by "
                "python -m benchmarks.learning_sets"
            )
        self.copy_test_images(root, folder / "test")
        columns = ["way", "seconds", "runs"]
        for name in self.scores:
            columns += [name, f"{name}_spread"]
        runs: dict[tuple[int, str, str], list[dict[str, float]]] = {
            key: [] for key in product(self.seconds, self.ways, self.list_variants())
        }
        lines: list[dict[str, Any]] = []
        for seed, way in product(self.seeds, self.ways):
            out = folder / f"{way}_{seed}"
            self.run_way(way, root, folder / "test", seed, out)
            for seconds, variant in product(self.seconds, self.list_variants()):
                scores = self.score(out / str(seconds) / variant, root)
                runs[seconds, way, variant].append(scores)
            # after each run, so that a suite that is broken off leaves a table
            lines = _make_lines(runs)
            report_lines(lines, columns, folder, f"{root.name}: {self.title}")
        for line in lines:
            line["way"] = f"{line['way']}_{line['seconds']}"
        return collect(lines, columns)

    def list_ways(self) -> Sequence[str]:
        """List the ways that there are."""
        return [*self.scripts, "ours"]

    def list_variants(self) -> Sequence[str]:
        """List folders of test images of which each gives lines; "" is the images as they are."""
        return [""]

    def copy_test_images(self, root: Path, folder: Path) -> None:
        """Copy what is scored, as images of a line come."""
        copy_images(self.list_test_images(root), folder)

    def run_way(self, way: str, root: Path, test_folder: Path, seed: int, out: Path) -> None:
        """Train for each time, and write predictions of the test images to ``OUT/SECONDS``."""
        if way == "ours":
            words = self.list_words(root)
            self.run_ours(
                words, lambda folder: [words[0], f"data.root={folder}"], test_folder, seed, out
            )
        else:
            self.run_script(way, root, seed, out)

    def list_test_images(self, root: Path) -> list[Path]:
        """List the images that are scored."""
        raise NotImplementedError

    def run_script(self, way: str, root: Path, seed: int, out: Path) -> None:
        """Train a script for each time, and write its predictions of the test images.

        Those of a time go to ``OUT/SECONDS``.
        """
        raise NotImplementedError

    def list_words(self, root: Path) -> list[str]:
        """List the words of ``fit`` that name the experiment and its data, the experiment first."""
        raise NotImplementedError

    @abstractmethod
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        """Score the predictions for one time: a number for each of `scores`."""

    def call_script(self, module: str, *words: object) -> None:
        """Run a module of this package with the interpreter of the scripts."""
        run_module(self.python or sys.executable, f"benchmarks.{module}", *map(str, words))

    def call_for_each_time(self, module: str, way: str, root: Path, seed: int, out: Path) -> None:
        """Run a module that trains for one time, once for each of them."""
        for seconds in self.seconds:
            self.call_script(module, way, root, seed, seconds, out / str(seconds))

    def run_ours(
        self,
        fit: Sequence[str],
        predict: Callable[[Path], Sequence[str]],
        test_folder: Path,
        seed: int,
        out: Path,
    ) -> None:
        """Run ``fit`` for each time, and ``predict`` with what it learned.

        Args:
            fit: Words that name the experiment, its data and its model.
            predict: Gives those that name a folder of test images.
            test_folder: The test images, and below it their variants.
            seed: Of the run.
            out: Of which ``OUT/SECONDS`` takes the predictions, and below it those of variants.
        """
        for seconds in self.seconds:
            folder = out / str(seconds)
            length = [f"trainer.max_time={{seconds:{seconds}}}", "trainer.max_epochs=-1"]
            words = [*fit, *self.overrides, f"seed={seed}", *length, "report=false"]
            run_module(sys.executable, "lit_data", "fit", *words, f"hydra.run.dir={folder / 'fit'}")
            checkpoint = f"ckpt={folder / 'fit' / 'checkpoints/best.ckpt'}"
            for variant in self.list_variants():
                words = [*predict(test_folder / variant), *self.predict_words, checkpoint]
                place = f"hydra.run.dir={folder / variant}"
                run_module(sys.executable, "lit_data", "predict", *words, place)


class MapLearningSuite(LearningSuite):
    """Maps of the test images of ``splits.csv``, beside what their masks mark."""

    @override
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        images = read_split(root, "test")
        truths = [self.read_truth(root, image) for image in images]
        maps = [read_map(folder / "maps", Path(image)) for image in images]
        scores = score_maps(maps, truths)
        return {name: scores[name] for name in self.scores}

    @abstractmethod
    def read_truth(self, root: Path, image: str) -> NDArray[np.bool_]:
        """Read what the mask of an image marks, [H, W]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLearningSuite(LearningSuite):
    """Images of which ``splits.csv`` says which train, and one script that takes several nets."""

    split_file: ClassVar[str] = "splits.csv"
    experiment: ClassVar[str]
    script: ClassVar[str]
    nets: ClassVar[Mapping[str, str]]

    @override
    def list_test_images(self, root: Path) -> list[Path]:
        return [root / name for name in read_split(root, "test")]

    @override
    def run_script(self, way: str, root: Path, seed: int, out: Path) -> None:
        if way not in self.nets:
            self.call_for_each_time("learning_peers", way, root, seed, out)
            return
        self.call_script(self.script, self.nets[way], root, seed, out, *self.seconds)

    @override
    def list_words(self, root: Path) -> list[str]:
        splits = root / self.split_file
        return [f"+experiment={self.experiment}", f"data.root={root}", f"data.splits={splits}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLearningSuite(SplitLearningSuite, MapLearningSuite):
    """Average precision and best F1 of the pixels of whole test images, and AUROC of the images."""

    overrides: Sequence[str] = ("data.mask_read.threshold=128",)

    scores: ClassVar[tuple[str, ...]] = MASK_SCORES
    experiment: ClassVar[str] = "segmentation"
    script: ClassVar[str] = "plain_masks"
    nets: ClassVar[Mapping[str, str]] = {"plain": "unet", "smp": "smp"}
    scripts: ClassVar[tuple[str, ...]] = (*nets, "torchgeo")

    @override
    def read_truth(self, root: Path, image: str) -> NDArray[np.bool_]:
        return read_mask((root / image).with_suffix(".png"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLearningSuite(LearningSuite):
    """Mean over the classes of the average precision of boxes at IoU 0.5, in the test images."""

    seconds: Sequence[int] = (260,)

    scores: ClassVar[tuple[str, ...]] = BOX_SCORES
    scripts: ClassVar[tuple[str, ...]] = ("plain", "ultralytics")
    split_file: ClassVar[str] = "test.txt"
    # Average precision is over all scores, of which `predict` keeps those above the threshold.
    predict_words: ClassVar[tuple[str, ...]] = ("predict.threshold=0.01",)

    @override
    def list_test_images(self, root: Path) -> list[Path]:
        return list_images(root, "test")

    @override
    def run_script(self, way: str, root: Path, seed: int, out: Path) -> None:
        module = "learning_peers" if way == "ultralytics" else "learning_detection"
        self.call_for_each_time(module, way, root, seed, out)

    @override
    def list_words(self, root: Path) -> list[str]:
        return ["+experiment=detection", f"data.root={root}"]

    @override
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        detections = read_detections(folder / "detections.json")
        return {"map50": score_boxes(detections, read_truth(root, "test"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelLearningSuite(SplitLearningSuite):
    """Accuracy, and the mean over the classes of F1, of the labels of whole test images."""

    seconds: Sequence[int] = (30, 60, 150)

    scores: ClassVar[tuple[str, ...]] = LABEL_SCORES
    experiment: ClassVar[str] = "classification"
    script: ClassVar[str] = "plain_labels"
    nets: ClassVar[Mapping[str, str]] = {"plain": "conv", "timm": "timm"}
    scripts: ClassVar[tuple[str, ...]] = tuple(nets)

    @override
    def score(self, folder: Path, root: Path) -> dict[str, float]:
        return score_labels(folder / "labels.csv", read_split(root, "test"))


def run_module(python: str, module: str, *words: str) -> None:
    """Run a module in a process of its own, as a user would.

    Raises:
        LitDataError: It ends with an error; its last lines are quoted.
    """
    command = [python, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_lines = (done.stdout + done.stderr)[-2000:]
        raise LitDataError(f"{module} ended with {done.returncode}: {last_lines}")


def read_map(maps: Path, image: Path) -> NDArray[np.float64]:
    """Read the map [H, W] of an image: ``NAME.npy``, or 16 bit ``NAME.png`` or ``NAME.jpg.png``."""
    path = next(maps.rglob(f"{image.stem}.*"), None)
    if path is None:
        raise ConfigError(f"{maps} has no map of {image.name}")
    is_array = path.suffix == ".npy"
    values = np.load(path) if is_array else cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    return np.asarray(values, np.float64)


def read_mask(path: Path) -> NDArray[np.bool_]:
    """Read what a mask marks, [H, W]."""
    return np.asarray(cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)) >= 128


def score_maps(
    maps: Sequence[NDArray[np.float64]], truths: Sequence[NDArray[np.bool_]]
) -> dict[str, float]:
    """Score the pixels of maps, and images by the mean of their 50 highest ones.

    Args:
        maps: [H, W] of each image.
        truths: What the masks of these images mark.

    Returns:
        ``pixel_ap``, ``best_f1``, ``pixel_auroc``, ``image_auroc``, and ``false_alarms``, the fraction
        of good images that score as high as 95 % of the defective ones.
    """
    scores = np.concatenate([values.ravel() for values in maps])
    truth = np.concatenate([mask.ravel() for mask in truths])
    precision, best_f1 = average_precision(scores, truth)
    images = np.array([np.sort(values, axis=None)[-_TOP_PX:].mean() for values in maps])
    is_defective = np.array([bool(mask.any()) for mask in truths])
    found = np.sort(images[is_defective])[::-1][: int(np.ceil(_RECALL * is_defective.sum()))]
    return {
        "pixel_ap": precision,
        "best_f1": best_f1,
        "pixel_auroc": auroc(scores, truth),
        "image_auroc": auroc(images, is_defective),
        "false_alarms": float((images[~is_defective] >= found[-1]).mean()),
    }


def score_labels(table: Path, images: Sequence[str]) -> dict[str, float]:
    """Score the labels of images.

    Args:
        table: A CSV with the columns ``image`` and ``label``.
        images: ``CLASS/NAME`` of each image that counts.

    Returns:
        A number for each of `LABEL_SCORES`; the mean of F1 is that of the classes of `images`.
    """
    with table.open(newline="") as file:
        label_of = {Path(row["image"]).name: row["label"] for row in csv.DictReader(file)}
    pairs = [(Path(image).parent.name, label_of[Path(image).name]) for image in images]
    f1 = []
    for name in sorted({truth for truth, _ in pairs}):
        hits = sum(truth == name == label for truth, label in pairs)
        misses = sum((truth == name) != (label == name) for truth, label in pairs)
        f1.append(2 * hits / (2 * hits + misses))
    accuracy = mean(truth == label for truth, label in pairs)
    return {"accuracy": accuracy, "mean_f1": mean(f1)}


def average_precision(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> tuple[float, float]:
    """Find average precision and the best F1 of all thresholds; equal scores share one.

    Args:
        scores: [N], at least 0.
        truth: [N].
    """
    precision, recall, _ = binary_precision_recall_curve(*_as_tensors(scores, truth))
    f1 = 2 * precision * recall / (precision + recall)
    return -float((recall.diff() * precision[:-1]).sum()), float(f1.nan_to_num().max())


def auroc(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Find the fraction of pairs whose positive scores above the negative; ties count half."""
    return float(binary_auroc(*_as_tensors(scores, truth)))


def _as_tensors(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return scores in 0..1, as torchmetrics takes others for logits, and truth."""
    highest = max(float(scores.max()), 1e-12)
    return torch.from_numpy(scores / highest), torch.from_numpy(truth).long()


def _make_lines(
    runs: Mapping[tuple[int, str, str], Sequence[Mapping[str, float]]],
) -> list[dict[str, Any]]:
    """Make a line for each time, way and variant of the test images that was run."""
    lines = []
    for (seconds, way, variant), scores in runs.items():
        if scores:
            line = {"way": f"{way} {variant}".strip(), "seconds": seconds, "runs": len(scores)}
            lines.append(line | summarise(scores))
    return lines


def summarise(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Find the mean and the standard deviation of each score."""
    summary = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        summary[name] = mean(values)
        summary[f"{name}_spread"] = stdev(values) if len(values) > 1 else float("nan")
    return summary
