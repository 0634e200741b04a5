from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.wings.detection.files import find_detection_files
from lit_data.wings.detection.sample_set import CLASSES, DetectionSampleSpec, render_scene

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
