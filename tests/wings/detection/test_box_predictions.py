"""What ``predict`` and the pictures say about images with boxes."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.testing import assert_allclose
from torch import Tensor

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.core.types import Batch, Stage
from lit_data.loading import LoaderOptions
from lit_data.predict import Predicted, find_task
from lit_data.predict.figures import write_jpeg
from lit_data.wings.detection import DetectionDataModule, predictions
from lit_data.wings.detection.box_figures import (
    FOUND_LABELS,
    NO_BOXES,
    Boxes,
    find_true,
    show_found,
)
from lit_data.wings.detection.box_truth import BoxTruth
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")

Answer = Any


class Oracle(LightningModule):
    """Finds the boxes of the set, with scores that fall from 0.9; or says what it is told to say."""

    def __init__(self, says: Answer = None) -> None:
        super().__init__()
        self.says = says
        self.seen = []

    def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
        if self.says is not None:
            return self.says
        self.seen += batch["image_index"].tolist()
        true = [find_true(batch, row) for row in range(len(batch["image"]))]
        return [answer(each.corners, each.classes) for each in true]


def answer(corners: Tensor, classes: Tensor) -> dict[str, Tensor]:
    scores = 0.9 - 0.1 * torch.arange(len(classes))
    return {"boxes": corners, "classes": classes, "scores": scores}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DetectionDataModule:
    data = DetectionDataModule(
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        samples={"count": 14, "size_px": [64, 90]},
        size_px=(96, 96),
        loader=LoaderOptions(batch_size=4, worker_kind="inline"),
    )
    return opened(data, "predict")


def _predict(
    data: DetectionDataModule, folder: Path, model: LightningModule | None = None, **options: Any
) -> Predicted:
    limits = {"threshold": 0.0, "min_area_px": 0}
    return predict(data, model or Oracle(), folder, **(limits | options))


@pytest.fixture(scope="module")
def unbroken(data: DetectionDataModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a prediction that nothing interrupted."""
    folder = tmp_path_factory.mktemp("unbroken")
    labels, counts = data.files.labels, np.diff(data.files.labels.ends, prepend=0)
    metrics = _predict(data, folder).metrics
    by_kind = {name: metrics.pop(name) for name in list(metrics) if "image_auroc_" in name}
    assert set(by_kind.values()) == {1.0}
    assert metrics == {
        "predict/images": 14,
        "predict/images_with_objects": int((counts > 0).sum()),
        "predict/objects": len(labels.boxes),
        "predict/missed_objects": 0,
        "predict/false_objects": 0,
        "predict/images_with_defects": int((counts > 0).sum()),
        "predict/missed": 0,
        "predict/false_alarms": 0,
        "predict/image_auroc": 1.0,
        "predict/images_kept": 0,
        "predict/images_bad": 0,
    }
    return folder


def test_a_picture_says_verdict_score_and_objects_of_each_image(
    data: DetectionDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(predictions, "save_figure", lambda figure, *_: figures.append(figure))
    _predict(data, tmp_path)
    titles = [cell.get_title() for cell in figures[0].axes if cell.get_title()]
    assert all(re.search(r"\.png\n.+, score 0\.90, \d objects?$", title) for title in titles)
    assert not any(title.endswith(", 1 objects") for title in titles)


def test_what_is_found_is_written_in_the_coordinates_of_the_files(
    data: DetectionDataModule, unbroken: Path
) -> None:
    labels = data.files.labels
    table = json.loads((unbroken / "detections.json").read_text())
    assert [kind["name"] for kind in table["categories"]] == list(data.classes)
    for number, path in enumerate(data.files.images):
        name = Path(path).relative_to(data.source.folder)
        text = (unbroken / "labels" / name.with_suffix(".txt")).read_text()
        rows = np.array([line.split() for line in text.splitlines()], float).reshape(-1, 6)
        assert_allclose(rows[:, :5], labels.of(number), atol=2e-6)
        assert_allclose(rows[:, 5], 0.9 - 0.1 * np.arange(len(rows)), atol=1e-6)
        image = table["images"][number]
        size = cv2.imread(path).shape[:2]
        assert (image["file_name"], image["height"], image["width"]) == (name.as_posix(), *size)
        mine = [row for row in table["annotations"] if row["image_id"] == image["id"]]
        assert [row["category_id"] - 1 for row in mine] == rows[:, 0].tolist()
        _, cx, cy, w, h = labels.of(number).T.astype(np.float64)
        boxes = np.stack((cx - w / 2, cy - h / 2, w, h), axis=1) * np.tile(size[::-1], 2)
        written = np.reshape([row["bbox"] for row in mine], (-1, 4))
        assert_allclose(written, boxes, atol=2e-3)
        picture = cv2.imread(str((unbroken / "pictures" / name).with_suffix(".jpg")))
        assert picture.shape == (*data.bank[number].shape[1:], 3)
    assert len({row["id"] for row in table["annotations"]}) == len(labels.boxes)
    assert cv2.imread(str(unbroken / "predictions.png")) is not None


def test_unsure_and_small_objects_are_left_out(data: DetectionDataModule, tmp_path: Path) -> None:
    _predict(data, tmp_path, threshold=0.75, min_area_px=60)
    rows = json.loads((tmp_path / "detections.json").read_text())["annotations"]
    assert rows
    assert {row["score"] for row in rows} <= {0.9, 0.8}
    assert min(row["area"] for row in rows) >= 60


def test_an_image_scores_by_its_surest_box_whatever_is_written(
    data: DetectionDataModule, tmp_path: Path
) -> None:
    """Boxes below the threshold are in no file, and still decide about their image."""

    class Unsure(Oracle):
        def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
            found = super().predict_step(batch, batch_idx)
            return [{**each, "scores": each["scores"] / 3} for each in found]

    metrics = _predict(data, tmp_path, Unsure(), threshold=0.5, image_threshold=0.2).metrics
    rows = read_rows(tmp_path / "images.csv")
    assert metrics["predict/objects"] == 0
    assert (metrics["predict/missed"], metrics["predict/false_alarms"]) == (0, 0)
    assert metrics["predict/image_auroc"] == 1
    assert {(row["truth"], row["verdict"], row["score"]) for row in rows} == {
        ("good", "good", "0.0"),
        ("defect", "defect", "0.3"),
    }
    assert {row["defects"] for row in rows} == {"0"}
    assert {row["kind"] for row in rows} <= {"good", "several", *data.classes}
    assert cv2.imread(str(tmp_path / "worst_images.png")) is not None
    # Without a threshold of images it is what is written that counts.
    metrics = _predict(data, tmp_path / "plain", Unsure(), threshold=0.5).metrics
    assert metrics["predict/missed"] == sum(row["truth"] == "defect" for row in rows)


def test_images_with_ignored_regions_alone_may_show_a_defect_or_not() -> None:
    row = [0.5, 0.5, 0.1, 0.1]
    boxes = np.array([[0, *row], [-1, *row], [0, *row], [1, *row]], np.float32)
    truth = BoxTruth(LabelTable(("a", "b"), boxes, np.array([1, 2, 4, 4])))
    assert [truth.has_defect(number) for number in range(4)] == [True, None, True, False]
    assert truth.image_kinds == ["a", "", "several", "good"]
    nothing = BoxTruth(LabelTable(("a",), boxes[:0], np.zeros(2, np.int64)))
    assert nothing.has_defect(0) is None
    assert nothing.describe_doubt().startswith("no image has a box")


def test_the_rectangle_of_a_picture_lies_at_the_edge_of_its_box(
    data: DetectionDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures: dict[str, Any] = {}

    def write(picture: Any, path: Path) -> None:
        pictures[path.stem] = picture
        write_jpeg(picture, path)

    monkeypatch.setattr(predictions, "write_jpeg", write)
    found = answer(torch.tensor([[10.0, 40.0, 50.0, 60.0]]), torch.tensor([1]))
    nothing = {name: value[:0] for name, value in found.items()}

    class First(Oracle):
        def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
            answers = [nothing] * len(batch["image"])
            return [found, *answers[1:]] if batch_idx == 0 else answers

    _predict(data, tmp_path, First())
    height, width = data.bank[0].shape[1:]
    assert width == 96
    margin = round((96 - height) / 2)
    painted = pictures[Path(data.files.images[0]).stem]
    colour = painted[40 - margin, 10]
    assert (painted[40 - margin, 12:50] == colour).all()
    assert (painted[59 - margin, 10:50] == colour).all()
    assert (painted[45 - margin : 60 - margin, 49] == colour).all()


@pytest.mark.parametrize(
    ("says", "match"),
    [
        ({"probability": 1}, "must return a list with a dict for each image: boxes"),
        ([{"boxes": 1}], "must return a list"),
        (
            [answer(torch.ones(1, 4), torch.tensor([3]))],
            r"finds class 3, but the dataset has 3, from 0: set model\.net\.classes",
        ),
        (
            [answer(torch.ones(1, 4), torch.tensor([1]))] * 3,
            "predict_step of Oracle returned 3 answers for 4 samples",
        ),
    ],
)
def test_answers_of_another_kind_are_refused(
    data: DetectionDataModule, tmp_path: Path, says: Answer, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        _predict(data, tmp_path, Oracle(says))
    with pytest.raises(ConfigError, match="tile_px=64 has no effect on images with boxes"):
        _predict(data, tmp_path, tile_px=64)


def test_pictures_need_objects(data: DetectionDataModule, tmp_path: Path) -> None:
    batch = data.transform(data.make_loader("predict").read(np.arange(5), 0), "predict")
    path, draw = tmp_path / "found.png", find_task(data).draw_predictions
    assert not draw(Oracle([{"no": "boxes"}]), batch, path, "title", count=3)
    assert not path.exists()
    oracle = Oracle()
    assert draw(oracle, batch, path, "title", count=3)
    assert oracle.seen == [0, 2, 4]  # spread over all five
    assert cv2.imread(str(path)).shape[1] > 1000
    unknown = [answer(torch.ones(1, 4), torch.tensor([9]))]  # its class is named by its number
    one = data.transform(data.make_loader("predict").read(np.arange(1), 0), "predict")
    assert draw(Oracle(unknown), one, path, "title", count=1)


class Fails(Oracle):
    """Runs out of memory where a batch has more than two images, and stops for good behind a number of images."""

    def __init__(self, behind: int = 10**6) -> None:
        super().__init__()
        self.left, self.sizes = behind, list[int]()

    def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
        count = len(batch["image"])
        if count > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        self.left -= count
        if self.left < 0:
            raise RuntimeError("the machine stops")
        self.sizes.append(count)
        return super().predict_step(batch, batch_idx)


def _read(folder: Path) -> dict[str, bytes]:
    names = ("fingerprint.json", "images.jsonl")
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*.*")
        if p.name not in names
    }


def test_a_run_that_was_interrupted_goes_on_also_in_smaller_batches(
    data: DetectionDataModule, unbroken: Path, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="the machine stops"):
        _predict(data, tmp_path, Fails(9))
    second, third = Fails(), Fails()
    summary = _predict(data, tmp_path, second, resume=True).metrics
    assert summary["predict/images_kept"] == 8
    assert (sum(second.sizes), max(second.sizes)) == (14 - 8, 2)
    assert _read(tmp_path) == _read(unbroken)
    summary = _predict(data, tmp_path, third, resume=True).metrics
    assert (summary["predict/images_kept"], third.sizes) == (14, [])


def test_a_batch_without_room_on_the_device_goes_there_in_parts(
    data: DetectionDataModule, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = data.finish_batch
    finished = []

    def finish_few(batch: Batch, stage: Stage) -> Batch:
        finished.append(len(batch["image"]))
        if finished[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return finish(batch, stage)

    monkeypatch.setattr(data, "finish_batch", finish_few)
    _predict(data, tmp_path, Oracle(), batch_size=6)
    assert _read(tmp_path) == _read(unbroken)
    assert finished == [6, 6, 3, 2, 2, 2, 2, 2, 2, 2]  # whole, then in parts; the size is kept
    with pytest.raises(BatchMemoryError, match=r"batch of 3 samples of image 3x\S+ .*does not fit"):
        _predict(data, tmp_path / "least", Oracle(), batch_size=6, min_batch_size=3)


def test_batches_are_predicted_in_threads(
    data: DetectionDataModule, unbroken: Path, tmp_path: Path
) -> None:
    threads, both = set[str](), threading.Barrier(2)

    class Watched(Oracle):
        def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
            assert torch.is_inference_mode_enabled()
            if (name := threading.current_thread().name) not in threads:
                threads.add(name)
                both.wait(60)  # else one thread may be done before the other begins
            return super().predict_step(batch, batch_idx)

    _predict(data, tmp_path, Watched(), threads=2, batch_size=6)
    assert len(threads) == 2
    assert all(name.startswith("lit_data_inference") for name in threads)
    assert _read(tmp_path) == _read(unbroken)


def test_answers_of_threads_that_cannot_be_joined_are_refused(
    data: DetectionDataModule, tmp_path: Path
) -> None:
    class Transposed(Oracle):
        def predict_step(self, batch: Batch, batch_idx: int) -> Any:
            return torch.rand(7, len(batch["image"]))

    with pytest.raises(ConfigError, match=r"cannot be joined .* predict with threads=1"):
        _predict(data, tmp_path, Transposed(), threads=2, batch_size=6)


def test_found_missed_and_false_boxes_have_their_colours() -> None:
    def boxes(*corners: tuple[int, ...], scores: tuple[float, ...] = ()) -> Boxes:
        classes = torch.zeros(len(corners), dtype=torch.int64)
        return Boxes(torch.tensor(corners).float(), classes, torch.tensor(scores))

    first, second, apart, ignored = (2, 2, 12, 12), (20, 20, 28, 28), (2, 20, 8, 26), (20, 2, 28, 8)
    predicted = boxes(apart, first, ignored, scores=(0.5, 0.9, 0.7))
    regions = boxes(ignored)
    for known, expected in (
        (regions, ["missed", "found", "found", "false alarm"]),
        (NO_BOXES, ["missed", "found", "false alarm", "false alarm"]),
    ):
        cell = Figure().subplots()
        show_found(cell, torch.zeros(3, 32, 32), predicted, boxes(first, second), known, ["pit"])
        drawn = [to_hex(patch.get_edgecolor()) for patch in cell.patches]
        assert drawn == [FOUND_LABELS[name] for name in expected]
        assert [text.get_text() for text in cell.texts] == [
            "pit",
            "pit 0.90",
            "pit 0.70",
            "pit 0.50",
        ]
