import json
import multiprocessing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from lit_data.datasets.synthetic import stripes as stripe_samples
from lit_data.datasets.synthetic.stripe_drawing import LEAST_CHANGE
from lit_data.datasets.synthetic.stripes import StripeSampleSpec, render_sample
from tests.datasets.synthetic.test_sample_sets import digests

SMALL = {"count": 6, "height_px": 128, "width_px": 112}
SHAPE = (128, 112)


def test_layout_of_a_png_set(tmp_path: Path) -> None:
    root = StripeSampleSpec(**{**SMALL, "count": 12}).ensure(tmp_path)
    assert root == tmp_path / "stripe-12x128x112-uint8-seed0"
    folders = [folder for folder in root.iterdir() if folder.is_dir()]
    stems = {folder.name: sorted(path.stem for path in folder.iterdir()) for folder in folders}
    counts = {split: len(names) for split, names in stems.items()}
    assert counts == {"train": 8, "val": 2, "test": 2, "test_masks": 2}
    assert stems["test"] == stems["test_masks"] == ["stripe_0010", "stripe_0011"]
    for path in root.glob("t*/*.png"):
        pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (SHAPE if path.parent.name == "test_masks" else (*SHAPE, 3))
    assert "CC0" in (root / "README.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("count", "splits", "clean"),
    [(3, (1, 1, 1), 0), (8, (5, 1, 2), 0), (64, (44, 8, 12), 2), (128, (88, 16, 24), 4)],
)
def test_split_and_clean_test_images(count: int, splits: tuple[int, int, int], clean: int) -> None:
    spec = stripe_samples.StripeSampleSpec(count=count)
    names = [spec.split_of(number) for number in range(count)]
    assert names == ["train"] * splits[0] + ["val"] * splits[1] + ["test"] * splits[2]
    assert [spec.has_defects(number) for number in range(count)].count(True) == splits[2] - clean
    assert not any(spec.has_defects(number) for number in range(splits[0] + splits[1]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return StripeSampleSpec(**SMALL).ensure(tmp_path_factory.mktemp("samples"))


def test_stored_red_is_the_target_in_png_and_tiff(small: Path, tmp_path: Path) -> None:
    rendered, png = render_sample(0, 5, SHAPE, with_defects=True), small / "test/stripe_0005.png"
    stored = np.moveaxis(cv2.imread(str(png), cv2.IMREAD_UNCHANGED)[..., ::-1], -1, 0)
    assert_array_equal(stored, np.rint(rendered.image * 255).astype(np.uint8))
    mask = cv2.imread(str(small / "test_masks" / png.name), cv2.IMREAD_UNCHANGED)
    assert_array_equal(mask, rendered.mask * np.uint8(255))
    rows = json.loads((small / "defects.json").read_text(encoding="utf-8"))
    assert rows == [{"image": "test/stripe_0005.png", **row} for row in rendered.defects]
    tiff = StripeSampleSpec(**SMALL, dtype="float32").ensure(tmp_path) / "test" / "stripe_0005.tif"
    floats = tifffile.imread(tiff)
    assert floats.dtype == np.float32
    assert 0 <= floats.min() <= floats.max() <= 1
    assert_array_equal(np.moveaxis(floats, -1, 0), rendered.image)


@pytest.mark.parametrize("number", range(4))
def test_mask_is_exactly_where_true_defects_change_the_target(number: int) -> None:
    shape = (320, 176)
    sample = render_sample(3, number, shape, with_defects=True)
    clean = render_sample(3, number, shape, with_defects=False)
    assert_array_equal(sample.clean, clean.image)
    assert not clean.mask.any()
    assert clean.defects == []
    changed = np.rint(sample.image * 255) != np.rint(clean.image * 255)
    expected = np.zeros((3, *shape), dtype=bool)
    expected[0] = sample.mask
    for defect in sample.defects:
        top, left, bottom, right = defect["box_px"]
        area = np.s_[top:bottom, left:right]
        if defect["role"] == "true":
            assert defect["channels"] == ["target"]
            sides = (
                sample.mask[area][0],
                sample.mask[area][-1],
                sample.mask[area][:, 0],
                sample.mask[area][:, -1],
            )
            assert all(side.any() for side in sides)
            assert not changed[1:][:, *area].any()
        else:
            assert not sample.mask[area].any()
            for channel, name in enumerate(("target", "ref1", "ref2")):
                assert changed[channel][area].any() == (name in defect["channels"])
                expected[channel][area] = changed[channel][area]
    assert_array_equal(changed, expected)
    assert np.abs(sample.image[0] - clean.image[0])[sample.mask].min() > LEAST_CHANGE - 1e-6


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(60)
def test_two_processes_at_once_end_with_one_whole_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, made = context.Barrier(2, timeout=30), context.Queue()
    given = (tmp_path / "both", start, made)
    both = [context.Process(target=make_at_once, args=given) for _ in range(2)]
    try:
        for process in both:
            process.start()
        roots = {made.get(timeout=40) for _ in both}
    finally:
        for process in both:
            process.join(5)
            process.kill()
    assert [digests(root) for root in roots] == [
        digests(StripeSampleSpec(**SMALL).ensure(tmp_path / "alone"))
    ]
    assert {path for path in (tmp_path / "both").iterdir() if path.name != ".lock"} == roots


def make_at_once(folder: Path, start: Any, made: Any) -> None:
    start.wait()
    made.put(StripeSampleSpec(**SMALL).ensure(folder))
