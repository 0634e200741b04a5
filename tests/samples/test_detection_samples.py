from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.datasets.detection.files import find_detection_files
from lit_data.samples import detection as detection_scene
from lit_data.samples.detection import (
    CLASSES,
    DetectionSampleSpec,
    render_scene,
)
from lit_data.types import Bools

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


def test_boxes_are_the_extents_of_objects_of_all_classes_and_many_sizes() -> None:
    scenes = [render_scene(0, number, (240, 320)) for number in range(40)]
    boxes = np.concatenate([scene.boxes for scene in scenes])
    assert set(boxes[:, 0].tolist()) == {0, 1, 2}
    assert boxes[:, 1:].min() >= 0
    assert (boxes[:, 3:] <= (240, 320)).all()
    sides = boxes[:, 3:] - boxes[:, 1:3]
    assert sides.min() >= 3
    assert sides.max() > 90
    assert np.median(sides) < 50
    assert any(len(scene.boxes) >= 7 for scene in scenes)


@pytest.mark.parametrize("number", range(8))
def test_boxes_are_what_objects_change(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(
            detection_scene,
            "paint",
            lambda image, thing, mask, rng: drawn.append((thing.kind, mask)),
        )
        bare = render_scene(5, number, (120, 160))
    scene = render_scene(5, number, (120, 160))
    changed = (scene.image != bare.image).any(0)
    covered = np.any([mask for _, mask in drawn], axis=0)
    assert not changed[~covered].any()
    assert changed[covered].mean() > 0.95
    expected = [(kind, *_extents(mask)) for kind, mask in drawn if kind < len(CLASSES)]
    assert scene.boxes.tolist() == [list(box) for box in expected]
    for place, (_, mask) in enumerate(drawn):
        later = (
            np.any([other for _, other in drawn[place + 1 :]], axis=0)
            if place + 1 < len(drawn)
            else ~mask
        )
        assert (mask & ~later).sum() >= 0.5 * mask.sum()


def _extents(mask: Bools) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(mask)
    return int(rows.min()), int(columns.min()), int(rows.max()) + 1, int(columns.max()) + 1
