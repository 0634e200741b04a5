"""Boxes around the connected parts of masks."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.images.masks import MaskOptions
from lit_data.loading import LoaderOptions
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.detection.masks import box_parts
from tests.helpers.reading import first, opened

SIZE = (48, 64)
PARTS = ((4, 4, 12, 14), (30, 20, 40, 24))  # (left, top, right, bottom) px


def _write(folder: Path, *, values: tuple[int, int] = (255, 255), count: int = 8) -> Path:
    """Images with masks of two parts, which are numbers of classes or white; the last has none."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        image = rng.integers(0, 256, (*SIZE, 3), np.uint8)
        cv2.imwrite(str(folder / "images" / f"{number}.png"), image)
        mask = np.zeros(SIZE, np.uint8)
        for (left, top, right, bottom), value in zip(PARTS, values, strict=True):
            mask[top:bottom, left:right] = value
        cv2.imwrite(str(folder / "masks" / f"{number}.png"), mask * (number < count - 1))
    return folder


def _data(root: Path, cache: Path, **options: Any) -> DetectionDataModule:
    loader = LoaderOptions(batch_size=2, worker_kind="inline")
    settings = {"boxes_from": "masks", "size_px": SIZE, "mosaic": None, **options}
    return opened(DetectionDataModule(str(root), cache_dir=str(cache), loader=loader, **settings))


def _corners(boxes: Any) -> list[list[float]]:
    low = boxes[:, 1:3] - boxes[:, 3:] / 2
    high = boxes[:, 1:3] + boxes[:, 3:] / 2
    corners = np.concatenate((low, high), axis=1) * np.tile(SIZE[::-1], 2)
    return corners.round(3).tolist()


def test_each_connected_part_of_a_mask_is_a_box(cache: str, tmp_path: Path) -> None:
    data = _data(_write(tmp_path / "set"), Path(cache))
    labels = data.files.labels
    assert data.classes == ("defect",)
    assert _corners(labels.of(0)) == [list(map(float, part)) for part in PARTS]
    assert len(labels.of(7)) == 0
    assert {split: len(numbers) for split, numbers in data.files.splits.items()} == {
        "train": 6,
        "val": 1,
        "test": 1,
    }
    assert first(data, count=2)["boxes_count"].max() == 2


def test_masks_of_several_classes_give_boxes_of_these(cache: str, tmp_path: Path) -> None:
    root = _write(tmp_path / "set", values=(2, 1))
    options = {"classes": ["pit", "scratch"], "mask_read": MaskOptions(classes=3)}
    data = _data(root, Path(cache), **options)
    assert data.classes == ("pit", "scratch")
    boxes = data.files.labels.of(0)
    assert boxes[:, 0].tolist() == [0, 1]
    assert _corners(boxes) == [list(map(float, part)) for part in PARTS[::-1]]


def test_parts_that_touch_at_a_corner_are_one_and_ignored_pixels_are_regions() -> None:
    numbers = np.zeros((10, 10), np.uint8)
    numbers[1, 1] = numbers[2, 2] = numbers[7, 7] = 1
    numbers[4:6, 0:3] = 255
    boxes = box_parts(numbers, 2, kind=None)
    assert boxes[:, 0].tolist() == [0, 0, -1, -2]
    expected = [[0.2, 0.2, 0.2, 0.2], [0.75, 0.75, 0.1, 0.1], *[[0.15, 0.5, 0.3, 0.2]] * 2]
    assert boxes[:, 1:] == pytest.approx(np.array(expected))


def test_bad_masks_are_listed_together_or_left_out(cache: str, tmp_path: Path) -> None:
    root = _write(tmp_path / "set")
    cv2.imwrite(str(root / "masks" / "1.png"), np.zeros((9, 9), np.uint8))
    (root / "masks" / "2.png").write_bytes((root / "masks" / "2.png").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"(?s)1\.png.*2\.png.*2 images with masks are bad"):
        _data(root, Path(cache))
    data = _data(root, Path(cache), on_bad="skip")
    assert [Path(path).stem for path in data.files.images] == ["0", "3", "4", "5", "6", "7"]


def test_polygons_become_boxes_too(
    cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _write(tmp_path / "set")
    for path in (root / "masks").iterdir():
        path.unlink()
    (root / "masks").rmdir()
    for path in (root / "images").iterdir():
        points = [[10, 10], [20, 10], [20, 30], [10, 30]]
        shape = {"label": "pit", "points": points, "shape_type": "polygon"}
        content = {"imagePath": path.name, "shapes": [shape]}
        content |= {"imageHeight": SIZE[0], "imageWidth": SIZE[1]}
        path.with_suffix(".json").write_text(json.dumps(content))
    caplog.set_level("INFO")
    data = _data(root, Path(cache), classes=["pit"])
    assert "masks drawn from labelme files (pit 8" in caplog.text
    ((left, top, right, bottom),) = _corners(data.files.labels.of(3))
    assert (left, top) == (10, 10)
    assert right in (20, 21)
    assert bottom in (30, 31)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_format": "yolo"}, "reads no labels"),
        ({"boxes_from": "labels", "masks": "masks"}, "is for boxes_from=masks"),
        ({"boxes_from": "mask"}, "boxes_from='mask'"),
    ],
)
def test_options_that_do_not_go_together(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        DetectionDataModule(str(tmp_path), **({"boxes_from": "masks"} | options))


def test_a_part_of_train_validates_where_no_folder_says_val(cache: str, tmp_path: Path) -> None:
    flat = _write(tmp_path / "flat", count=14)
    root = tmp_path / "set"
    rng = np.random.default_rng(1)
    for number in range(0, 14, 2):
        cells = cv2.resize(rng.integers(0, 250, (8, 8, 3), np.uint8), SIZE[::-1])
        split = "test" if number == 0 else "train"
        for brighter in (0, 1):  # pairs of near-duplicates
            name = f"{number + brighter}.png"
            cv2.imwrite(str(flat / "images" / name), cv2.add(cells, 2 * brighter))
            for folder in ("images", "masks"):
                (root / split / folder).mkdir(parents=True, exist_ok=True)
                (flat / folder / name).rename(root / split / folder / name)
    files = _data(root, Path(cache)).files
    assert files.fractions == {"train": 0.85, "val": 0.15}
    stems = {}
    for split, numbers in files.splits.items():
        stems[split] = [int(Path(files.images[number]).stem) for number in numbers]
    assert sorted(stems["test"]) == [0, 1]
    one, other = sorted(stems["val"])
    assert (one % 2, other) == (0, one + 1)
    assert sorted(stems["train"] + stems["val"]) == list(range(2, 14))
