"""Names of classes that are easily confused, in every reader."""

import json
import logging
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.core.names import warn_of_names
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.wings.detection.datamodule import DetectionDataModule

TWINS = (
    "classes differ only in case, spaces, .0 or Unicode form: 'Scratch', 'scratch'; if they are one"
)


def write_images(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(count)]
    for name in names:
        cv2.imwrite(str(folder / name), rng.integers(0, 255, (32, 32, 3), np.uint8))
    return names


def test_names_that_mean_one_class_are_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_names(
        ["dent", "sp\u00e4ne", "spa\u0308ne", "a b", "a\u00a0 b", "nan", "", "dent", "1", "1.0"]
    )
    assert caplog.messages == [
        "classes differ only in case, spaces, .0 or Unicode form: '1', '1.0'; 'a b', 'a\\xa0 b'; 'spa\\u0308ne', "
        "'sp\\xe4ne'; if they are one class, give it one name",
        "labels that often mean an empty cell are classes like any other: 'nan'; leave the cell "
        "empty for an image without a label",
    ]
    caplog.clear()
    warn_of_names(["dent", "good", "dents", "", "1.01", "v1.10", "v1.1"])
    assert not caplog.messages


@pytest.mark.parametrize("form", ["folders", "table", "pattern"])
def test_labels_of_images(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, rows = tmp_path / "set", ["image,label"]
    options = {"class_pattern": "/([A-Za-z]+)-"} if form == "pattern" else {}
    for label in ("good", "Scratch", "scratch"):
        folder = {"table": f"{label}_images", "pattern": f"lot/{label}-x"}.get(form, label)
        rows += [f"{folder}/{name},{label}" for name in write_images(root / folder, 4)]
    if form == "table":
        (root / "labels.csv").write_text("\n".join(rows))
    LabelledImageDataModule(root, cache_dir=tmp_path / "cache", **options).setup("fit")
    assert caplog.text.count(TWINS) == 1


def write_coco(root: Path) -> None:
    images, marks = [], []
    for number, name in enumerate(write_images(root, 12)):
        images.append({"id": number, "file_name": name, "width": 32, "height": 32})
        mark = {"bbox": [2, 2, 8, 8], "segmentation": [[2, 2, 10, 2, 10, 10, 2, 10]]}
        marks.append({"id": number, "image_id": number, "category_id": 1 + number % 2, **mark})
    names = [{"id": 1, "name": "Scratch"}, {"id": 2, "name": "scratch"}]
    content = {"images": images, "annotations": marks, "categories": names}
    (root / "instances.json").write_text(json.dumps(content))


def test_categories_of_outlines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_coco(tmp_path / "set")
    data = InspectionDataModule(tmp_path / "set", cache_dir=tmp_path / "cache", patch_px=32)
    data.setup("fit")
    assert TWINS in caplog.text


@pytest.mark.parametrize("form", ["COCO", "YOLO"])
def test_categories_of_boxes(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "set"
    if form == "COCO":
        write_coco(root)
    else:
        (root / "labels").mkdir(parents=True)
        for number, name in enumerate(write_images(root / "images", 12)):
            label = f"{number % 2} 0.5 0.5 0.5 0.5"
            (root / "labels" / name).with_suffix(".txt").write_text(label)
        (root / "data.yaml").write_text("names: [Scratch, scratch]")
    caplog.set_level(logging.INFO)
    DetectionDataModule(root, cache_dir=tmp_path / "cache").setup("fit")
    assert caplog.text.count(TWINS) == 1
