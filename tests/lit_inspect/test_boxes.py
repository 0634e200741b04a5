"""Files of detectors: their samples, objects and tables are those of `predict`."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from lit_data.app.cli import main as commands
from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.options import ExportRequest
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.detection.model import module
from lit_data.wings.detection.model.net import DetectorNet, Level, Predictions, decode
from lit_data.wings.export.encode import encode_file
from lit_inspect import boxes
from lit_inspect.__main__ import main
from lit_inspect.board import encode_board, read_board
from lit_inspect.errors import BoardError
from lit_inspect.inspector import Inspector
from lit_inspect.regions import round_score
from lit_inspect.rows import ArrayRows
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")

SIZES = {"a.png": (50, 60), "b/c.jpg": (150, 201), "d.bmp": (64, 300), "e.png": (96, 96)}
LIMITS = {"threshold": 0.6, "min_area_px": 20}


def _open(root: Path, cache: Path, **options: Any) -> DetectionDataModule:
    data = DetectionDataModule(
        str(root),
        **{"size_px": 96, "label_format": "none", "classes": ("dot", "bar"), **options},
        cache_dir=str(cache),
        splits={"train": 1.0},
        loader=LoaderOptions(batch_size=2, worker_kind="inline"),
    )
    return opened(data, "predict")


class Tiny(torch.nn.Module):
    """One level of places, which see much of everything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Conv2d(3, 2 + 4, 16, stride=8, padding=4)
        torch.nn.init.normal_(self.layer.weight[:2], std=0.15)

    def forward(self, images: Tensor) -> Predictions:
        maps = self.layer(images - 0.5)
        levels = (Level(8, *maps.shape[2:]),)
        values = maps.flatten(2).transpose(1, 2)
        return Predictions(values[..., :2], decode(values[..., 2:], levels), levels)


class Detector(module.DetectionModule):
    def __init__(self, net: Any = None, **options: Any) -> None:
        super().__init__(net or Tiny(), **options)
        self.eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        pixels = cv2.GaussianBlur(rng.integers(0, 256, (*size, 3), np.uint8), (0, 0), 2)
        (folder / name).parent.mkdir(exist_ok=True)
        cv2.imwrite(str(folder / name), cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX))
    return folder


def _export(data: DetectionDataModule, path: Path, model: Any = None, **options: Any) -> Path:
    request = ExportRequest(
        model=model or Detector(), options=PredictOptions(**LIMITS | options), doubt=None
    )
    path.write_bytes(encode_file(find_task(data).export(request)))
    return path


@pytest.fixture(scope="module")
def board(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    return _export(_open(images, folder), folder / "a.inspect")


def _change(board: Path, path: Path, **changes: Any) -> Path:
    """Write a file again with other entries of its manifest."""
    contents = read_board(board)
    path.write_bytes(encode_board({**contents.manifest, **changes}, contents.parts))
    return path


def _compare(one: Path, other: Path) -> int:
    """Compare the tables of two folders; return how many objects there are."""
    tables = [json.loads((folder / "detections.json").read_text()) for folder in (one, other)]
    for name in ("images", "categories"):
        assert tables[0][name] == tables[1][name]
    columns = []
    for table in tables:
        rows = [(row["id"], row["image_id"], row["category_id"]) for row in table["annotations"]]
        numbers = [[*row["bbox"], row["area"] / 100] for row in table["annotations"]]
        columns.append((rows, numbers, [row["score"] for row in table["annotations"]]))
    assert columns[0][0] == columns[1][0]
    assert_allclose(columns[0][1], columns[1][1], atol=3e-3)
    assert_allclose(columns[0][2], columns[1][2], atol=2e-6)
    for name in sorted(path.relative_to(one) for path in (one / "labels").rglob("*.txt")):
        lines = [(folder / name).read_text().split("\n") for folder in (one, other)]
        values = [np.array(" ".join(part).split(), float) for part in lines]
        assert_allclose(*values, atol=1e-5)
    assert (one / "bad.csv").read_bytes() == (other / "bad.csv").read_bytes()
    rows = [read_rows(folder / "images.csv") for folder in (one, other)]
    words = [[(row["image"], row["defects"], row["verdict"]) for row in part] for part in rows]
    assert words[0] == words[1]
    scores = [[float(row["score"]) for row in part] for part in rows]
    assert_allclose(*scores, atol=2e-4)
    return len(columns[0][0])


@pytest.mark.parametrize("stride_px", [None, [64, 48]])
def test_boxes_are_those_of_predict(
    stride_px: list[int] | None, images: Path, board: Path, tmp_path: Path
) -> None:
    windows = {"size_px": None, "patch_px": 96, "stride_px": stride_px}
    data = _open(images, tmp_path, **(windows if stride_px else {}))
    predict(data, Detector(), tmp_path / "one", **LIMITS)
    path = board
    if stride_px:
        rules = {**read_board(board).manifest["boxes"], "stride_px": stride_px}
        path = _change(board, tmp_path / "a.inspect", boxes=rules, golden=0)
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    assert _compare(tmp_path / "one", tmp_path / "other") > 50


def test_verdicts_go_by_the_score_of_the_image_as_those_of_predict(
    images: Path, board: Path, tmp_path: Path
) -> None:
    """The threshold of boxes is so high that none is written."""
    limits = {"threshold": 0.95, "image_threshold": 0.74}
    predict(_open(images, tmp_path), Detector(), tmp_path / "one", **LIMITS | limits)
    path = _change(board, tmp_path / "a.inspect", **limits)
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    assert _compare(tmp_path / "one", tmp_path / "other") == 0
    verdicts = {row["verdict"] for row in read_rows(tmp_path / "other/images.csv")}
    assert "defect" in verdicts


def test_a_camera_gets_the_boxes_of_its_file(images: Path, board: Path, tmp_path: Path) -> None:
    inspector = Inspector(board, threads=1)
    of_file = inspector.inspect(inspector.open(images / "e.png"))
    pixels = cv2.imread(str(images / "e.png"))[..., ::-1]
    verdict = inspector(pixels)
    assert (verdict.verdict, verdict.boxes) == ("defect", of_file.boxes)
    highest = max(box.score for box in verdict.boxes)
    assert verdict.boxes[0].score == highest
    assert verdict.score == round_score(highest)
    assert {(box.kind, box.name) for box in verdict.boxes} == {(0, "dot"), (1, "bar")}
    assert len(verdict.boxes) > 5
    assert verdict.probability.size == 0
    cases = {"good": {"threshold": 1.0}, "unsure": {"doubt": "untrained"}}
    for expected, change in cases.items():
        changed = Inspector(_change(board, tmp_path / "a.inspect", **change))
        assert changed(pixels).verdict == expected


@pytest.mark.parametrize(
    "rules", [None, {}, {"sample_px": 3}, {"sample_px": [64, 64]}, {"stride_px": [0, 0]}]
)
def test_rules_that_do_not_fit_are_refused(rules: Any, board: Path, tmp_path: Path) -> None:
    if rules:
        rules = {**read_board(board).manifest["boxes"], **rules}
    with pytest.raises(BoardError, match=r"not a usable|cannot be inspected"):
        Inspector(_change(board, tmp_path / "a.inspect", boxes=rules))
    with pytest.raises(BoardError, match=r"cannot be inspected \(the net gives \[1, 144, 6\]"):
        Inspector(_change(board, tmp_path / "a.inspect", classes=["dot"]))


class Changed(Detector):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return super().predict_step(batch, batch_idx)[::-1]


class Lists(torch.nn.Module):
    def forward(self, images: Tensor) -> Any:
        return [{}]


def test_models_that_the_runtime_would_not_repeat_are_refused(images: Path, tmp_path: Path) -> None:
    data, path = _open(images, tmp_path), tmp_path / "a.inspect"
    cases = {
        "Changed cannot be exported": Changed(),
        "model.nms=soft cannot be used in an .inspect file": Detector(nms="soft"),
        "Detector must give Predictions of 2 classes": Detector(DetectorNet(3, width=4)),
        "must give Predictions": Detector(Lists()),
    }
    for message, model in cases.items():
        with pytest.raises(ConfigError, match=message):
            _export(data, path, model)
    with pytest.raises(ConfigError, match=r"predict\.overlap_px=8 has no effect"):
        _export(data, path, overlap_px=8)
    with pytest.raises(ConfigError, match=r"predict\.batch_size=3 has no effect on an \.inspect"):
        _export(data, path, batch_size=3)


@pytest.mark.parametrize("options", [{"size_px": (96, 80)}, {"patch_px": (70, 90)}])
def test_samples_are_those_of_the_dataset(options: Any, images: Path, tmp_path: Path) -> None:
    data = _open(images, tmp_path, **{"size_px": None, "value_range": (10, 200), **options})
    dataset = data.dataset("predict")
    stride_px = data.chosen_options.get("stride_px")
    rules = boxes.BoxRules(
        sample_px=data.source.size_px, stride_px=stride_px, fill=data.fill, iou_threshold=0.6
    )
    number = 0
    corners = 70 * np.random.default_rng(0).random((7, 4), np.float32)
    objects = boxes.Objects(corners, np.zeros(7, np.int64), np.zeros(7, np.float32))
    for path in data.files.images:
        pixels = np.ascontiguousarray(np.moveaxis(cv2.imread(path)[..., ::-1], -1, 0))
        image = ArrayRows(pixels)
        for sample in rules.sample(image):
            assert np.array_equal(sample.pixels, dataset[number]["image"].numpy())
            originals = dataset.find_originals(corners.astype(np.float64), np.full(7, number))
            assert np.array_equal(rules.find_originals(objects, sample, image), originals)
            number += 1
    assert number == len(dataset) >= len(SIZES)


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_trained_run_goes_all_the_way(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", f"paths.cache={tmp_path}/cache"
    words = ["+experiment=detection", "trainer=cpu", "trainer.enable_progress_bar=false", cache]
    words += ["+trainer.enable_model_summary=false", "data.loader.num_workers=0"]
    words += ["data.patch_px=96", "data.samples={count: 8, size_px: [130, 170]}"]
    words += ["model.net.width=4"]
    assert (
        commands(
            ["fit", *words, "trainer.max_epochs=12", f"paths.run={run}", f"hydra.run.dir={run}"]
        )
        == 0
    )
    path = tmp_path / "a.inspect"
    assert commands(["export", str(run), str(path), "predict.threshold=0.02"]) == 0
    images = next((tmp_path / "cache").rglob("*.png")).parents[1]
    predicted = tmp_path / "predicted"
    words += [f"ckpt={run}/checkpoints/best.ckpt", f"data.root={images}", "data.label_format=none"]
    words += ["predict.threshold=0.02", f"paths.run={predicted}", f"hydra.run.dir={predicted}"]
    assert commands(["predict", *words]) == 0
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    assert _compare(predicted, tmp_path / "other") >= 2
