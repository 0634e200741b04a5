"""Masks of any depth, and of files that store white as 0, mark what they show."""

import logging
from pathlib import Path

import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.images.mask_choice import choose_mask_options
from lit_data.images.masks import MaskOptions, read_mask

SHOWN = np.zeros((12, 16), bool)
SHOWN[2:5, 3:9] = True


def _write(path: Path, pixels: np.ndarray, *, white_is_zero: bool = False) -> Path:
    if path.suffix == ".npy":
        np.save(path, pixels)
    elif white_is_zero:
        tifffile.imwrite(path, pixels, photometric="miniswhite")
    elif path.suffix == ".tif":
        tifffile.imwrite(path, pixels, photometric="minisblack")
    else:
        Image.fromarray(pixels).save(path)
    return path


def _choose(*paths: Path, **options: object) -> MaskOptions:
    return choose_mask_options(paths, MaskOptions(**options))


DEPTHS = {
    "bits.tif": SHOWN,
    "bits.npy": SHOWN,
    "wide.png": SHOWN * np.uint16(65535),
    "wide_ones.png": SHOWN.astype(np.uint16),
    "wide_bytes.png": SHOWN * np.uint16(255),
    "wide_numbers.png": SHOWN * np.uint16(2),
    "ints.tif": SHOWN.astype(np.int32),
    "longs.npy": SHOWN.astype(np.int64),
    "floats.tif": SHOWN.astype(np.float32),
    "float_bytes.tif": SHOWN * np.float32(255),
    "doubles.npy": SHOWN.astype(np.float64),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_masks_of_any_depth_are_numbers(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, DEPTHS[name])
    assert_array_equal(read_mask(path, _choose(path))[0], SHOWN)


def test_numbers_of_instances_are_refused_with_a_cure_that_can_be_typed(tmp_path: Path) -> None:
    kitti = SHOWN * np.uint16(6913)
    kitti[0, :3] = 768
    path = _write(tmp_path / "a.png", kitti)
    with pytest.raises(
        DataError, match=r"768, 6913; .* data\.mask_read.threshold=1 if every value but 0"
    ):
        read_mask(path, _choose(path))
    assert_array_equal(read_mask(path, _choose(path, threshold=1))[0], kitti > 0)


@pytest.mark.parametrize("value", [0.5, np.nan, 1e30])
def test_floats_that_are_no_numbers_of_classes_are_refused(tmp_path: Path, value: float) -> None:
    path = _write(tmp_path / "a.npy", np.full((3, 4), value))
    with pytest.raises(DataError, match="masks are whole numbers"):
        read_mask(path, _choose(path))


WHITES = {
    "bits": (SHOWN, True),
    "bytes": (SHOWN * np.uint8(255), 255),
    "wide": (SHOWN * np.uint16(65535), 65535),
}


@pytest.mark.parametrize("name", WHITES)
def test_masks_that_store_white_as_0_are_taken_as_they_look(tmp_path: Path, name: str) -> None:
    mask, white = WHITES[name]
    stored = ~mask if mask.dtype == bool else mask.dtype.type(white) - mask
    inverted = _write(tmp_path / "a.tif", stored, white_is_zero=True)
    plain = _write(tmp_path / "b.tif", mask)
    options = _choose(inverted, plain, plain)
    for path in (inverted, plain):
        assert_array_equal(read_mask(path, options)[0], SHOWN)
    assert_array_equal(read_mask(inverted, MaskOptions(invert=False))[0], ~SHOWN)
    if mask.dtype != np.uint16:  # colours that are typed are those that are stored
        typed = _choose(inverted, colors=[[255, 255, 255], [0, 0, 0]])
        assert_array_equal(read_mask(inverted, typed)[0], SHOWN)


def test_numbers_beside_a_tag_that_says_white_is_0_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, mask in enumerate((SHOWN, SHOWN.astype(np.uint8), SHOWN * np.uint8(2), 0 * SHOWN)):
        path = _write(tmp_path / f"{number}.tif", mask, white_is_zero=True)
        with caplog.at_level(logging.INFO):
            assert_array_equal(read_mask(path, _choose(path))[0], mask > 0)
        assert "data.mask_read.invert=false" in caplog.text
        caplog.clear()


COLOURS = np.array([[255, 255, 255], [200, 0, 0], [0, 200, 0], [0, 0, 200]], np.uint8)
TURNED = {
    "bits.tif": ~SHOWN,
    "ones.png": (~SHOWN).astype(np.uint8),
    "bytes.png": (~SHOWN) * np.uint8(255),
    "wide.png": (~SHOWN) * np.uint16(65535),
    "numbers.png": np.where(SHOWN, 0, np.arange(16) % 3 + 1).astype(np.uint8),
    "colours.png": np.where(SHOWN[..., None], 0, COLOURS[np.arange(16) % 4]).astype(np.uint8),
}


@pytest.mark.parametrize("name", TURNED)
def test_the_remedy_for_masks_of_what_is_good_works_for_all(tmp_path: Path, name: str) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        picture = np.random.default_rng(number).integers(0, 255, (12, 16), np.uint8)
        _write(tmp_path / "images" / f"{number}.png", picture)
        _write((tmp_path / "masks" / str(number)).with_suffix(Path(name).suffix), TURNED[name])
    files = InspectionFiles(root=str(tmp_path), mask_read=MaskOptions(invert=True))
    masks = [source.paths[0] for source in files.list_masks()]
    assert len(masks) == 3
    for mask in masks:
        assert_array_equal(read_mask(mask, files.mask_options)[0], SHOWN)


def test_ignored_pixels_stay_ignored_when_masks_are_turned_round(tmp_path: Path) -> None:
    mask = SHOWN.astype(np.uint8)
    mask[0, 0] = 9
    numbers = read_mask(_write(tmp_path / "a.png", mask), MaskOptions(ignore=9, invert=True))[0]
    assert numbers[0, 0] == 255
    assert_array_equal(numbers[1:], ~SHOWN[1:])


def test_classes_are_not_turned_round() -> None:
    with pytest.raises(ConfigError, match="invert=true swaps defect and background"):
        MaskOptions(classes=3, invert=True)
