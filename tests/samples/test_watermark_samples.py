from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.errors import ConfigError
from lit_data.samples.watermarks import WatermarkSampleSpec, ensure_watermark_samples


def test_a_set_has_pages_and_photographs_in_each_size_and_is_made_once(tmp_path: Path) -> None:
    root = ensure_watermark_samples(tmp_path, count=10, size_px=(128, 96))
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
    times = {path: path.stat().st_mtime_ns for path in files.values()}
    assert ensure_watermark_samples(tmp_path, count=10, size_px=(128, 96)) == root
    assert times == {path: path.stat().st_mtime_ns for path in files.values()}


def test_images_depend_on_seed_and_number_alone(tmp_path: Path) -> None:
    sets = [
        ensure_watermark_samples(tmp_path / name, count=count, size_px=(96, 96), seed=seed)
        for name, count, seed in (("a", 3, 0), ("b", 4, 0), ("c", 3, 1))
    ]
    first, longer, other = (next(root.rglob("page_0000.png")).read_bytes() for root in sets)
    assert first == longer
    assert first != other


def test_splits_are_shares_of_the_numbers() -> None:
    spec = WatermarkSampleSpec(60, (96, 96), 0)
    splits = [spec.split_of(number) for number in range(60)]
    assert [splits.count(split) for split in ("train", "val", "test")] == [42, 9, 9]


@pytest.mark.parametrize(
    "options", [{"count": 2}, {"size_px": (95, 200)}, {"size_px": 128}, {"seed": -1}]
)
def test_other_sets_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed:"):
        ensure_watermark_samples(tmp_path, **options)
