"""Predictions as labels of other tools: read back by ours, and by the tools' own libraries where they are installed."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from PIL import Image
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Bools
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule
from lit_data.images.read_options import DEFAULT_READ, ReadOptions
from lit_data.loading import LoaderOptions
from lit_data.predict.label_files import check_form
from lit_data.predict.options import PredictOptions
from lit_data.wings.detection import DetectionDataModule
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows
from tests.predict.test_labels import Greyer

pytestmark = pytest.mark.usefixtures("few_pictures")

LOADER = LoaderOptions(batch_size=2, worker_kind="inline")
SURE, UNSURE, GOOD = "b/sure.png", "a/unsure é.png", "good.png"
LEVELS = {SURE: 250, UNSURE: 150, GOOD: 20}
RING = (slice(10, 30), slice(20, 44)), (slice(16, 24), slice(28, 36))
SPOT = slice(40, 43), slice(3, 9)
BOX = [20.0, 10.0, 24.0, 20.0]


class Bright(LightningModule):
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"probability": batch["image"][:, :1]}


class Finder(LightningModule):
    """Finds one box, with the highest value of an image as its score."""

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Tensor]]:
        corners = torch.tensor([[20.0, 10.0, 44.0, 30.0]])
        found = []
        for score in batch["image"].amax((1, 2, 3)):
            keep = score > 0.1
            boxes = corners if keep else corners[:0]
            classes = torch.ones(len(boxes), dtype=torch.int64)
            found.append({"boxes": boxes, "classes": classes, "scores": score.expand(len(boxes))})
        return found


def _mark(level: int) -> np.ndarray:
    pixels = np.zeros((48, 64), np.uint8)
    pixels[RING[0]] = level
    pixels[RING[1]] = 0
    pixels[SPOT] = level
    return pixels


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "images"
    for name, level in LEVELS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), np.repeat(_mark(level)[..., None], 3, 2))
    return folder


def _open(root: Path, cache: Path, **options: Any) -> InspectionDataModule:
    options = {"splits": {"train": 1.0}, "near_duplicates": "apart", **options}
    return opened(
        InspectionDataModule(str(root), cache_dir=str(cache), loader=LOADER, **options), "predict"
    )


def _predict(
    images: Path, folder: Path, to: str, read: ReadOptions = DEFAULT_READ, **options: Any
) -> Path:
    data = _open(images, folder / "cache", read=read)
    predict(data, Bright(), folder / "out", to=to, image_threshold=0.5, **options)
    return folder / "out" / to


def _open_boxes(images: Path, folder: Path) -> DetectionDataModule:
    options = {"size_px": (48, 64), "label_format": "none", "classes": ("dot", "bar")}
    options |= {"splits": {"train": 1.0}, "cache_dir": str(folder / "cache"), "loader": LOADER}
    return opened(DetectionDataModule(str(images), **options), "predict")


def _open_classes(folder: Path, greys: dict[str, int]) -> LabelledImageDataModule:
    for name, grey in greys.items():
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((16, 16, 3), grey, np.uint8))
    options = {"size_px": 16, "splits": {"train": 1.0}, "near_duplicates": "apart"}
    options |= {"cache_dir": str(folder / "cache"), "loader": LOADER}
    return opened(LabelledImageDataModule(str(folder / "images"), **options), "predict")


def _read_masks(root: Path, cache: Path) -> dict[str, Bools]:
    data = _open(root, cache)
    masks = {}
    for number, name in enumerate(data.source.names(data.bank)):
        mask = data.read_mask(number)
        shape = data.bank[number].shape[1:]
        masks[name] = np.zeros(shape, np.bool_) if mask is None else np.squeeze(mask) > 0
    return masks


def _check_exactly(masks: Mapping[str, Bools]) -> None:
    assert masks.keys() == LEVELS.keys()
    for name, mask in masks.items():
        assert np.array_equal(mask, _mark(LEVELS[name]) > 127), name


@pytest.mark.parametrize("form", ["coco", "cvat"])
def test_pixels_come_back_exactly(form: str, images: Path, tmp_path: Path) -> None:
    written = _predict(images, tmp_path, form)
    root = tmp_path / "back"
    shutil.copytree(images, root)
    shutil.copytree(written, root, dirs_exist_ok=True)
    _check_exactly(_read_masks(root, tmp_path / "cache"))


def test_masks_lie_beside_the_images(images: Path, tmp_path: Path) -> None:
    root = tmp_path / "back"
    shutil.copytree(images, root / "images")
    shutil.copytree(_predict(images, tmp_path, "masks"), root / "masks")
    masks = _read_masks(root, tmp_path / "cache")
    _check_exactly({name.removeprefix("images/"): mask for name, mask in masks.items()})


def test_labelme_opens_copies_of_the_images_the_least_sure_first(
    images: Path, tmp_path: Path
) -> None:
    written = _predict(images, tmp_path, "labelme")
    order = [UNSURE, GOOD, SURE]
    names = [f"{number:05d}-{Path(name).name}" for number, name in enumerate(order, 1)]
    assert sorted(path.name for path in written.glob("*.png")) == names
    for copy, name in zip(names, order, strict=True):
        assert (written / copy).read_bytes() == (images / name).read_bytes()
    _check_outlines(_read_masks(written, tmp_path / "cache"))


def test_images_that_labelme_turns_are_counted(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "images"
    root.mkdir()
    pixels = Image.fromarray(_mark(250)).convert("RGB")
    tag = Image.Exif()
    tag[274] = 6  # a quarter turn
    pixels.save(root / "turned.jpg", exif=tag, quality=95)
    pixels.save(root / "upright.jpg", quality=95)
    _predict(root, tmp_path, "labelme")
    assert "LabelMe refuses the labels of 1 image, such as turned.jpg" in caplog.text
    caplog.clear()
    _predict(root, tmp_path / "applied", "labelme", read=ReadOptions(exif="apply"))
    assert "refuses" not in caplog.text


def _check_outlines(masks: Mapping[str, Bools]) -> None:
    """Compare masks of copies that LabelMe opens with what was predicted, but for half a pixel."""
    assert len(masks) == len(LEVELS)
    for copy, mask in masks.items():
        [name] = [name for name in LEVELS if copy.endswith(f"-{Path(name).name}")]
        expected = _mark(LEVELS[name])
        if name != GOOD:
            expected[RING[0]] = LEVELS[name]  # an outline fills its hole
        overlap = (mask & (expected > 127)).sum(), (mask | (expected > 127)).sum()
        assert overlap[0] >= 0.95 * overlap[1]


def test_the_first_images_are_those_nearest_to_the_threshold(images: Path, tmp_path: Path) -> None:
    written = _predict(images, tmp_path, "coco", first=2)
    content = json.loads((written / "annotations/instances_default.json").read_text())
    assert [image["file_name"] for image in content["images"]] == [UNSURE, GOOD]
    rows = read_rows(tmp_path / "out/order.csv")
    assert [row["image"] for row in rows] == [UNSURE, GOOD]
    assert [float(row["margin"]) for row in rows] == pytest.approx([0.0882, 0.4216], abs=1e-3)
    assert len(list((tmp_path / "out/maps").rglob("*.png"))) == 3


def test_labels_are_not_replaced_and_come_without_another_prediction(
    images: Path, tmp_path: Path
) -> None:
    written = _predict(images, tmp_path, "cvat")
    (written / "annotations.xml").write_text("corrected")
    with pytest.raises(ConfigError, match="may hold corrected labels: move it"):
        _predict(images, tmp_path, "cvat", resume=True)
    assert (written / "annotations.xml").read_text() == "corrected"
    data = _open(images, tmp_path / "cache")
    options = {"to": "fiftyone", "image_threshold": 0.5, "resume": True}
    metrics = predict(data, Bright(), tmp_path / "out", **options).metrics
    assert metrics["predict/images_kept"] == 3
    assert (tmp_path / "out/fiftyone/samples.json").exists()


def test_boxes_come_back(images: Path, tmp_path: Path) -> None:
    data = _open_boxes(images, tmp_path)
    for form in ("coco", "labelme", "cvat"):
        predict(data, Finder(), tmp_path / form, to=form, threshold=0.2)
    root = tmp_path / "back"
    shutil.copytree(images, root)
    shutil.copyfile(
        tmp_path / "coco/coco/annotations/instances_default.json", root / "annotations.json"
    )
    labelled = DetectionDataModule(
        str(root), size_px=(48, 64), cache_dir=str(tmp_path / "cache"), loader=LOADER
    )
    labels = opened(labelled, "predict").files.labels
    assert labelled.classes == ("dot", "bar")
    assert labels.object_count == 2
    [path] = (tmp_path / "labelme/labelme").glob("*-unsure é.json")
    [shape] = json.loads(path.read_text())["shapes"]
    corners = np.array([[20, 10], [44, 30]])
    assert (shape["label"], shape["shape_type"]) == ("bar", "rectangle")
    np.testing.assert_allclose(shape["points"], corners, atol=1e-3)
    box = ElementTree.parse(tmp_path / "cvat/cvat/annotations.xml").find("image/box")
    assert box is not None
    assert [box.get(key) for key in ("label", "xtl", "ybr")] == ["bar", "20.00", "30.00"]


def test_what_has_no_place_is_refused_before_anything_is_predicted(
    images: Path, tmp_path: Path
) -> None:
    data = _open_boxes(images, tmp_path)
    with pytest.raises(ConfigError, match="masks cannot store predicted boxes: choose one of"):
        predict(data, Finder(), tmp_path / "out", to="masks")
    classes = _open_classes(tmp_path, {"ok/1.png": 20, "dent/2.png": 200})
    with pytest.raises(ConfigError, match=r"coco cannot store .*: choose one of cvat, fiftyone"):
        predict(classes, Greyer(), tmp_path / "out", to="coco")
    with pytest.raises(ConfigError, match="cannot store these predictions: remove it"):
        check_form(None, tmp_path, PredictOptions(to="coco"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"predict\.first=2 counts the images of label files"):
        PredictOptions(first=2)
    with pytest.raises(ConfigError, match=r"predict\.to='voc' is unknown: choose one of coco"):
        PredictOptions(to="voc")


def _open_all(images: Path, folder: Path) -> dict[str, tuple[Any, LightningModule, dict[str, Any]]]:
    """Datamodule, model and options of each kind of label."""
    greys = {"ok/1.png": 20, "ok/2.png": 120, "dent/3.png": 220}
    return {
        "regions": (_open(images, folder / "cache"), Bright(), {"image_threshold": 0.5}),
        "boxes": (_open_boxes(images, folder), Finder(), {"threshold": 0.2}),
        "classes": (_open_classes(folder / "classes", greys), Greyer(), {}),
    }


KINDS = pytest.mark.parametrize("kind", ["regions", "boxes", "classes"])


@pytest.mark.strangers
@KINDS
def test_label_studio_reads_its_tasks(kind: str, images: Path, tmp_path: Path) -> None:
    data, model, options = _open_all(images, tmp_path)[kind]
    predict(data, model, tmp_path / "out", to="labelstudio", **options)
    folder = tmp_path / "out/labelstudio"
    tasks = json.loads((folder / "tasks.json").read_text())
    assert len(tasks) == 3
    scores = [task["predictions"][0]["score"] for task in tasks]
    assert scores == sorted(scores)
    assert all(task["data"]["image"].startswith("/data/local-files/?d=") for task in tasks)
    interfaces = pytest.importorskip("label_studio_sdk.label_interface", reason="label-studio-sdk")
    interface = interfaces.LabelInterface((folder / "config.xml").read_text())
    for task in tasks:
        for prediction in task["predictions"]:
            assert interface.validate_prediction(prediction) is True


@pytest.mark.strangers
@KINDS
def test_fiftyone_reads_its_samples(kind: str, images: Path, tmp_path: Path) -> None:
    data, model, options = _open_all(images, tmp_path)[kind]
    predict(data, model, tmp_path / "out", to="fiftyone", **options)
    content = json.loads((tmp_path / "out/fiftyone/samples.json").read_text())
    assert all(Path(sample["filepath"]).is_file() for sample in content["samples"])
    fiftyone = pytest.importorskip("fiftyone", reason="needs pip install fiftyone")
    samples = [fiftyone.Sample.from_dict(sample) for sample in content["samples"]]
    margins = [sample.margin for sample in samples]
    assert margins == sorted(margins)
    first = samples[1 if kind == "boxes" else 0].predictions  # without a box comes first
    found: Callable[[Any], Any] = {
        "regions": lambda said: {
            tuple(np.shape(said.polylines[0].points))[::2],
            said.polylines[0].closed,
        },
        "boxes": lambda said: np.round(said.detections[0].bounding_box, 4).tolist(),
        "classes": lambda said: said.label,
    }[kind]
    expected = {
        "regions": {(1, 2), True},
        "boxes": [round(value, 4) for value in (20 / 64, 10 / 48, 24 / 64, 20 / 48)],
        "classes": "ok",
    }[kind]
    assert found(first) == expected


OF_PYCOCOTOOLS = "ignore:__array__ implementation:DeprecationWarning"


@pytest.mark.filterwarnings(OF_PYCOCOTOOLS)
@pytest.mark.parametrize("library", ["faster_coco_eval", "pycocotools.coco"])
def test_coco_reads_runs_and_boxes(library: str, images: Path, tmp_path: Path) -> None:
    coco = pytest.importorskip(library, reason="needs pip install pycocotools").COCO
    file = coco(str(_predict(images, tmp_path, "coco") / "annotations/instances_default.json"))
    [number] = [key for key, image in file.imgs.items() if image["file_name"] == SURE]
    annotations = file.loadAnns(file.getAnnIds(imgIds=[number]))
    mask = np.any([file.annToMask(each) for each in annotations], axis=0)
    assert np.array_equal(mask, _mark(250) > 127)
    assert sorted(each["area"] for each in annotations) == [18, 24 * 20 - 64]
    assert [each["bbox"] for each in annotations if each["area"] > 18] == [BOX]


@pytest.mark.strangers
def test_labelme_reads_its_shapes_and_what_labelme_saves_is_read(
    images: Path, tmp_path: Path
) -> None:
    labelme = pytest.importorskip("labelme", "6.3", reason="needs pip install labelme")
    written = _predict(images, tmp_path, "labelme")
    for path in written.glob("*.json"):
        file = labelme.LabelFile(str(path))
        assert {shape["label"] for shape in file.shapes} <= {"defect"}
        corrected = [shape | {"label": "scratch"} for shape in file.shapes]
        file.save(str(path), corrected, file.image_path, 48, 64, file.image_data)
    _check_outlines(_read_masks(written, tmp_path / "cache"))
    data = _open(written, tmp_path / "cache", classes=("scratch",))
    assert data.classes == ("scratch",)


DATUMARO = {
    "cvat": ("cvat", "annotations.xml"),
    "coco": ("coco_instances", "annotations/instances_default.json"),
}


@pytest.mark.strangers
@pytest.mark.filterwarnings(OF_PYCOCOTOOLS)
@pytest.mark.parametrize("form", DATUMARO)
def test_datumaro_reads_them(form: str, images: Path, tmp_path: Path) -> None:
    datumaro = pytest.importorskip("datumaro", reason="needs pip install datumaro")
    name, file = DATUMARO[form]
    written = _predict(images, tmp_path, form)
    shutil.copytree(images, written / "images")  # which it wants to see beside them
    items = list(datumaro.Dataset.import_from(str(written / file), name))
    assert {Path(item.id).name for item in items} == {Path(each).stem for each in LEVELS}
    [item] = [item for item in items if item.id.endswith("sure") and "unsure" not in item.id]
    masks = [each for each in item.annotations if each.type == datumaro.AnnotationType.mask]
    assert len(masks) == 2
    assert np.array_equal(np.any([each.image for each in masks], axis=0), _mark(250) > 127)
