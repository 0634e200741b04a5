from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.datasets.detection.files import find_detection_files
from lit_data.samples.detection import CLASSES, DetectionSampleSpec, render_scene

SMALL = {"count": 14, "size_px": (64, 80)}


def test_the_set_reads_back_as_it_was_drawn(tmp_path: Path) -> None:
    root = DetectionSampleSpec(**SMALL).ensure(tmp_path)
    assert root == tmp_path / "detection-14x64x80-seed0"
    files = find_detection_files(root)
    assert files.labels.classes == CLASSES
    counts = {split: len(part) for split, part in files.splits.items()}
    assert counts == {"train": 10, "val": 2, "test": 2}
    spec = DetectionSampleSpec(count=14, size_px=(64, 80))
    assert set(map(tuple, files.sizes_px.tolist())) == {(64, 80), (64, 32), (32, 64)}
    for image, path in enumerate(files.images):
        number = int(Path(path).stem[-4:])
        scene = render_scene(0, number, spec.size_of(number), empty=spec.is_empty(number))
        stored = cv2.imread(path, cv2.IMREAD_UNCHANGED)[..., ::-1]
        np.testing.assert_array_equal(np.moveaxis(stored, -1, 0), scene.image)
        kind, cx, cy, w, h = files.labels.of(image).T.astype(np.float64)
        height, width = spec.size_of(number)
        edges = [
            kind,
            (cy - h / 2) * height,
            (cx - w / 2) * width,
            (cy + h / 2) * height,
            (cx + w / 2) * width,
        ]
        np.testing.assert_allclose(np.stack(edges, axis=1), scene.boxes, atol=1e-3)
        assert (len(scene.boxes) == 0) or not spec.is_empty(number)
    assert "CC0" in (root / "README.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("count", "splits"),
    [(3, (1, 1, 1)), (14, (10, 2, 2)), (160, (112, 24, 24)), (200, (140, 30, 30))],
)
def test_splits(count: int, splits: tuple[int, int, int]) -> None:
    spec = DetectionSampleSpec(count=count)
    names = [spec.split_of(number) for number in range(count)]
    assert names == ["train"] * splits[0] + ["val"] * splits[1] + ["test"] * splits[2]


def test_defects_are_of_all_classes_and_many_sizes() -> None:
    scenes = [render_scene(0, number, (240, 320)) for number in range(40)]
    boxes = np.concatenate([scene.boxes for scene in scenes])
    assert (np.bincount(boxes[:, 0]) > 15).all()
    assert boxes[:, 1:].min() >= 0
    assert (boxes[:, 3:] <= (240, 320)).all()
    sides = boxes[:, 3:] - boxes[:, 1:3]
    assert sides.min() >= 2
    assert sides.max() > 70
    assert np.median(sides) < 50
    assert max(len(scene.boxes) for scene in scenes) >= 7


@pytest.mark.parametrize("number", range(8))
def test_boxes_hold_what_defects_change(number: int) -> None:
    bare = render_scene(5, number, (120, 160), empty=True)
    scene = render_scene(5, number, (120, 160))
    assert len(bare.boxes) == 0
    changed = np.abs(scene.image.astype(int) - bare.image).max(0)
    in_boxes = np.zeros_like(changed, np.bool_)
    for _, top, left, bottom, right in scene.boxes:
        in_boxes[top:bottom, left:right] = True
        assert changed[top:bottom, left:right].max() > 40, "a defect can be seen"
    assert changed[~in_boxes].max() < 0.08 * 255 + 1
