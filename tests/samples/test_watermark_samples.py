from pathlib import Path

import cv2
import numpy as np

from lit_data.samples.watermarks import WatermarkSampleSpec


def test_a_set_has_pages_and_photographs_in_each_size(tmp_path: Path) -> None:
    root = WatermarkSampleSpec(count=10, size_px=(128, 96)).ensure(tmp_path)
    files = {path.name: path for path in root.rglob("*.*g")}
    assert len(files) == 10
    assert sorted(name.split("_")[0] for name in files) == ["page"] * 5 + ["photo"] * 4 + [
        "texture"
    ]
    shapes = {
        name.split("_")[0]: cv2.imread(str(path), cv2.IMREAD_UNCHANGED).shape
        for name, path in files.items()
    }
    assert shapes == {"page": (128, 96), "photo": (96, 128, 3), "texture": (128, 96)}
    page = cv2.imread(str(files["page_0000.png"]), cv2.IMREAD_UNCHANGED)
    assert np.median(page) > 160, "paper"
    assert np.quantile(page, 0.02) < 120, "ink"
