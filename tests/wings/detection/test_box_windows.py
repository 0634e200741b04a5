"""``predict`` on windows of large images: files as for whole ones, each object once."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.wings.detection import DetectionDataModule
from tests.helpers.reading import assert_resumes, first, opened
from tests.predict.running import predict
from tests.wings.detection.test_box_predictions import Fails, Oracle, _read

pytestmark = pytest.mark.usefixtures("few_pictures")

SIZES = ((150, 220), (90, 300), (40, 50), (100, 100))
BOXES = (
    # On seams, in a corner of four windows, at the edge, and touching nothing.
    ((0, 50, 30, 68, 46), (1, 84, 84, 96, 98), (0, 200, 130, 220, 150), (1, 5, 5, 15, 15)),
    ((1, 60, 60, 76, 72), (0, 150, 20, 160, 30)),
    ((0, 10, 10, 30, 26),),
    (),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("boards")
    for folder in ("images", "labels"):
        (root / folder).mkdir()
    (root / "classes.txt").write_text("dot\ncross\n")
    for number, ((height, width), boxes) in enumerate(zip(SIZES, BOXES, strict=True)):
        rng = np.random.default_rng(number)
        image = rng.integers(90, 130, (height, width, 3), np.uint8)
        lines = []
        for kind, left, top, right, bottom in boxes:
            image[top:bottom, left:right] = (0, 255 * kind, 255)
            centre = (left + right) / 2 / width, (top + bottom) / 2 / height
            numbers = (*centre, (right - left) / width, (bottom - top) / height)
            lines.append(f"{kind} {' '.join(f'{value:.8f}' for value in numbers)}\n")
        cv2.imwrite(str(root / "images" / f"{number}.png"), image)
        (root / "labels" / f"{number}.txt").write_text("".join(lines))
    return root


def _data(root: Path, cache: Path, stage: str = "predict", **options: Any) -> DetectionDataModule:
    values = {
        "patch_px": 64,
        "splits": {"train": 1.0},
        "loader": LoaderOptions(batch_size=4, worker_kind="inline", seed=3),
    }
    return opened(DetectionDataModule(root, cache_dir=cache, **(values | options)), stage)


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> DetectionDataModule:
    return _data(root, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def unbroken(data: DetectionDataModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    metrics = predict(data, Oracle(), folder, threshold=0.0).metrics
    assert metrics.pop("predict/image_auroc_dot") == 1
    assert metrics.pop("predict/image_auroc_several") == 1
    assert metrics == {
        "predict/images": 4,
        "predict/images_with_objects": 3,
        "predict/objects": 7,
        "predict/missed_objects": 0,
        "predict/false_objects": 0,
        "predict/images_with_defects": 3,
        "predict/missed": 0,
        "predict/false_alarms": 0,
        "predict/image_auroc": 1.0,
        "predict/images_kept": 0,
        "predict/images_bad": 0,
    }
    return folder


def _written(folder: Path) -> list[list[list[float]]]:
    """(class, left, top, right, bottom) px of the objects of each image, sorted."""
    table = json.loads((folder / "detections.json").read_text())
    objects = [[] for _ in table["images"]]
    for row in table["annotations"]:
        left, top, width, height = row["bbox"]
        corners = (left, top, left + width, top + height)
        number = row["image_id"] - 1
        objects[number].append([row["category_id"] - 1, *(round(edge, 2) for edge in corners)])
    return [sorted(boxes) for boxes in objects]


def test_an_object_in_several_windows_is_written_once_in_px_of_the_file(
    data: DetectionDataModule, unbroken: Path
) -> None:
    assert data.windows is not None
    assert data.chosen_options == {"stride_px": [64 - 20, 64 - 20]}
    assert len(data.dataset("predict")) == len(data.windows.bank) == 3 * 5 + 2 * 7 + 1 + 2 * 2
    assert len(data.windows.labels.boxes) > 7
    expected = [sorted([list(map(float, box)) for box in boxes]) for boxes in BOXES]
    assert _written(unbroken) == expected
    table = json.loads((unbroken / "detections.json").read_text())
    assert [(image["height"], image["width"]) for image in table["images"]] == list(SIZES)
    for number, size in enumerate(SIZES):
        picture = cv2.imread(str(unbroken / "pictures" / "images" / f"{number}.jpg"))
        assert picture.shape[:2] == size
        assert (unbroken / "labels" / "images" / f"{number}.txt").exists()
    assert cv2.imread(str(unbroken / "predictions.png")) is not None


def test_a_run_goes_on_image_by_image(
    data: DetectionDataModule, unbroken: Path, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="the machine stops"):
        predict(data, Fails(20), tmp_path, threshold=0.0)  # in the windows of the second image
    second = Fails()
    summary = predict(data, second, tmp_path, threshold=0.0, resume=True).metrics
    assert summary["predict/images_kept"] == 1
    assert sum(second.sizes) == 14 + 1 + 4
    assert _read(tmp_path) == _read(unbroken)


def test_windows_may_share_more_or_less(
    root: Path, data: DetectionDataModule, unbroken: Path, tmp_path: Path
) -> None:
    other = _data(root, tmp_path / "cache")
    predict(other, Oracle(), tmp_path / "found", threshold=0.0, overlap_px=32)
    assert len(other.dataset("predict")) > len(data.dataset("predict"))
    assert _written(tmp_path / "found") == _written(unbroken)
    for overlap_px in (64, -1):
        with pytest.raises(ConfigError, match="less than a window of 64 x 64 px"):
            predict(other, Oracle(), tmp_path / "refused", overlap_px=overlap_px)


def test_training_takes_windows_by_chance_and_names_their_images(
    root: Path, data: DetectionDataModule, tmp_path: Path
) -> None:
    train = _data(root, tmp_path, "fit")
    batch = first(train, count=34)
    assert batch.keys() == set(train.batch_keys)
    for row in range(34):
        number, (top, left) = int(batch["image_index"][row]), batch["window"][row].tolist()
        image = cv2.imread(train.files.images[number])[..., ::-1]
        assert batch["shape"][row].tolist() == list(image.shape[:2])
        assert batch["path"][row] == train.files.images[number]
        part = image[top : top + 64, left : left + 64].transpose(2, 0, 1) / np.float32(255)
        shown = batch["image"][row, :, : part.shape[1], : part.shape[2]].numpy()
        np.testing.assert_allclose(shown, part, atol=1e-6)
    counts = torch.cat([first(train, count=34, epoch=epoch)["boxes_count"] for epoch in range(6)])
    assert (counts > 0).float().mean() == pytest.approx(0.5, abs=0.1)
    assert first(data, "predict", 34)["index"].tolist() == list(range(34))


def test_a_run_over_windows_resumes_where_it_was(root: Path, tmp_path: Path) -> None:
    def make() -> DetectionDataModule:
        return _data(root, tmp_path / "cache", "fit", splits={"train": 0.75, "val": 0.25})

    assert_resumes(make(), make, tmp_path, (3, 7))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size_px": 64}, "size_px=64 scales whole images and patch_px=64 cuts windows"),
        ({"stride_px": 65}, "leaves gaps between windows of"),
        ({"patch_px": None, "stride_px": 8}, "is the distance of windows: set patch_px"),
        ({"patch_px": 0}, "patch_px=0 is not usable"),
        ({"min_visible": 1.5}, "min_visible=1.5"),
    ],
)
def test_options_that_contradict_are_refused(
    root: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        _data(root, tmp_path, **options)


def test_boxes_are_no_larger_than_their_image(data: DetectionDataModule) -> None:
    corners = torch.tensor([[0.0, 0.0, 64.0, 64.0]]).double().numpy()
    found = data.dataset("predict").find_originals(corners, np.array([29]))
    assert found.tolist() == [[0, 0, 50, 40]]  # of a window that is larger than it


class Misses(Oracle):
    """Finds no object of the first class, and one that is none in each window."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        answers = []
        for objects in super().predict_step(batch, batch_idx):
            others = objects["classes"] == 1
            kept = {name: values[others] for name, values in objects.items()}
            extra = {"boxes": torch.tensor([[20.0, 20.0, 30.0, 24.0]]), "scores": torch.ones(1)}
            extra["classes"] = torch.zeros(1, dtype=torch.int64)
            answers.append({name: torch.cat((extra[name], kept[name])) for name in extra})
        return answers


def test_the_worst_misses_and_false_alarms_are_counted_and_drawn(
    data: DetectionDataModule, tmp_path: Path
) -> None:
    metrics = predict(data, Misses(), tmp_path, threshold=0.5).metrics
    assert metrics["predict/missed_objects"] == 4
    assert metrics["predict/false_objects"] == metrics["predict/objects"] - 3
    assert (metrics["predict/missed"], metrics["predict/false_alarms"]) == (0, 1)
    picture = cv2.imread(str(tmp_path / "worst.png"))
    assert picture is not None
    assert (picture == (48, 59, 255)).all(2).any()  # the outline of a missed object
