"""`python -m benchmarks learning_anomaly`: all ways learn the same good images, and one scorer reads all."""

import csv
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import anomaly_ways
from benchmarks.__main__ import run as measure
from benchmarks.learning_anomaly import COSTS, IMAGE_SCORES, PIXEL_SCORES, score_anomalies
from benchmarks.learning_sets import (
    list_tiles,
    prepare_good_parts,
    read_split,
)
from tests.benchmarks.suites import read_table


def _write(path: Path, *, has_defect: bool = False, side_px: int = 64) -> None:
    """Write a smooth grey image, with a bright square where it has a defect."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(str(path))).integers(60, 120, (side_px, side_px))
    image = cv2.GaussianBlur(noise.astype(np.uint8), (0, 0), 3)
    if has_defect:
        image[20:34, 20:34] = 255
    cv2.imwrite(str(path), image)


def _write_mask(path: Path, *, has_defect: bool, side_px: int = 64) -> None:
    mask = np.zeros((side_px, side_px), np.uint8)
    if has_defect:
        mask[20:34, 20:34] = 255
    cv2.imwrite(str(path), mask)


def _write_tiles(folder: Path, good: int = 20, cracks: int = 4) -> Path:
    for kind, count in (("Free", good), ("Crack", cracks)):
        for number in range(count):
            image = folder / f"MT_{kind}" / "Imgs" / f"{number:02}.jpg"
            _write(image, has_defect=kind == "Crack")
            _write_mask(image.with_suffix(".png"), has_defect=kind == "Crack")
    return folder


def test_good_images_alone_train_and_all_defective_ones_are_tested(tmp_path: Path) -> None:
    root = tmp_path / "set"
    prepare_good_parts(_write_tiles(tmp_path / "source"), root, list_tiles)
    kinds = {}
    for split in ("train", "val", "test"):
        kinds[split] = Counter(name.split("/")[0] for name in read_split(root, split))
    assert kinds["train"] == {"good": 14}
    assert kinds["val"] == {"good": 2}
    assert kinds["test"] == {"good": 4, "Crack": 4}
    assert (root / "Crack/Crack_0003.png").is_file()


def _write_answers(folder: Path, root: Path, *, is_right: bool) -> None:
    """Write what a way writes that is right everywhere, or everywhere the contrary of it."""
    (folder / "maps").mkdir(parents=True)
    scores = {}
    for name in read_split(root, "test"):
        image = root / name
        mask = np.asarray(cv2.imread(str(image.with_suffix(".png")), cv2.IMREAD_GRAYSCALE))
        values = (mask if is_right else 255 - mask).astype(np.float32)
        np.save(folder / "maps" / f"{image.stem}.npy", values)
        scores[image.name] = float(("Crack" in name) == is_right)
    anomaly_ways.write_scores(scores, folder)


def test_a_map_that_is_the_mask_is_perfect_and_its_contrary_the_worst(tmp_path: Path) -> None:
    root = tmp_path / "set"
    prepare_good_parts(_write_tiles(tmp_path / "source"), root, list_tiles)
    _write_answers(tmp_path / "right", root, is_right=True)
    _write_answers(tmp_path / "wrong", root, is_right=False)
    assert set(score_anomalies(tmp_path / "right", root).values()) == {1.0}
    wrong = score_anomalies(tmp_path / "wrong", root)
    assert wrong["image_auroc"] == wrong["pixel_auroc"] == 0


class _Model(nn.Module):
    """Keeps the options of a model of anomalib."""

    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        _Model.options = options
        self.model = SimpleNamespace(feature_extractor=nn.Module())


class _Engine:
    """Knows the images that it was given, and finds each as bad as its number."""

    def __init__(self, **options: Any) -> None:
        assert options["accelerator"] == "cpu"

    def fit(self, model: object, datamodule: SimpleNamespace) -> None:
        self.good = sorted((datamodule.root / datamodule.normal_dir).iterdir())

    def predict(self, model: object, dataset: SimpleNamespace) -> list[SimpleNamespace]:
        paths = sorted(dataset.path.iterdir())
        scores = torch.arange(len(paths)).float()
        maps = scores.view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
        images = [str(path) for path in paths]
        return [SimpleNamespace(image_path=images, pred_score=scores, anomaly_map=maps)]


def _skip(*_: object, **__: object) -> None:
    """Stand for a step of preprocessing."""


def _pretend_anomalib(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "anomalib": {},
        "anomalib.models": {"Patchcore": _Model},
        "anomalib.engine": {"Engine": _Engine},
        "anomalib.data": {"Folder": SimpleNamespace, "PredictDataset": SimpleNamespace},
        "anomalib.pre_processing": {"PreProcessor": SimpleNamespace},
        "torchvision.transforms.v2": {"Resize": _skip, "Normalize": _skip, "Compose": _skip},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


def test_anomalib_gets_the_good_images_and_gives_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "set"
    prepare_good_parts(_write_tiles(tmp_path / "source"), root, list_tiles)
    _pretend_anomalib(monkeypatch)
    anomaly_ways.main("patchcore", root, 0, tmp_path / "out")
    assert _Model.options["coreset_sampling_ratio"] == anomaly_ways.CORESET_FRACTION
    with (tmp_path / "out/images.csv").open(newline="") as file:
        score_of = {row["image"]: float(row["score"]) for row in csv.DictReader(file)}
    names = sorted(Path(name).name for name in read_split(root, "test"))
    assert score_of == {name: float(number) for number, name in enumerate(names)}
    assert np.load(tmp_path / "out/maps/Crack_0003.npy").shape == (64, 64)


def test_all_ways_are_run_and_scored(tmp_path: Path) -> None:
    root = tmp_path / "set"
    prepare_good_parts(_write_tiles(tmp_path / "source"), root, list_tiles)
    words = [f"suite.root={root}", "suite.seeds=[0]", f"hydra.run.dir={tmp_path}"]
    assert measure(["learning_anomaly", *words]) == 0
    rows = read_table(tmp_path)
    assert [row["way"] for row in rows] == ["ours", "plain"]
    for row in rows:
        assert all(0 < float(row[name]) <= 1 for name in (*IMAGE_SCORES, *PIXEL_SCORES))
        assert all(float(row[name]) > 0 for name in COSTS)
