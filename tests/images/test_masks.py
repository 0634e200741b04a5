"""Masks hold class numbers: anything else is shown with its values and a hint that fits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.masks import MaskOptions, read_mask
from tests.helpers.files import save_picture

BINARY = (np.arange(48).reshape(6, 8) % 3 == 0).astype(np.uint8)
CLASSES = np.arange(48, dtype=np.uint8).reshape(6, 8) % 4


@pytest.mark.parametrize("scale", ["auto", "0_1", "0_255"])
@pytest.mark.parametrize("factor", [1, 255])
def test_two_classes_in_both_scales(tmp_path: Path, scale: Any, factor: int) -> None:
    path, options = (
        save_picture(tmp_path / "a.png", BINARY * np.uint8(factor)),
        MaskOptions(scale=scale),
    )
    if scale in ("auto", f"0_{factor}"):
        mask = read_mask(path, options)
        assert_array_equal(mask, BINARY[None])
        assert mask.dtype == np.uint8
    else:  # row 46
        message = f"values 0, {factor}; allowed are 0 and {256 - factor}; .*scale=0_{factor}"
        with pytest.raises(DataError, match=message):
            read_mask(path, options)


# row 18
@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif"])
def test_a_palette_gives_its_indices(tmp_path: Path, name: str) -> None:
    image = Image.fromarray(CLASSES)
    image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0])
    image.save(tmp_path / name)
    assert_array_equal(read_mask(tmp_path / name, MaskOptions(classes=4)), CLASSES[None])


def test_black_and_white_in_a_palette_are_read_by_color_on_request(tmp_path: Path) -> None:
    path, expand = tmp_path / "a.png", MaskOptions(palette="expand")
    image = Image.fromarray(BINARY * np.uint8(215))
    image.putpalette(bytes(645) + b"\xff" * 3)
    image.save(path)
    hint = "threshold=1 if every value but 0 is a defect, or data.mask_read.palette=expand"
    with pytest.raises(DataError, match=f"values 0, 215; .*; set data.mask_read.{hint}"):
        read_mask(path)
    assert_array_equal(read_mask(path, expand), BINARY[None])
    image.putpalette(bytes(645) + b"\xff\0\0")
    image.save(path)
    with pytest.raises(DataError, match="3 channels that differ"):
        read_mask(path, expand)


# row 44
def test_equal_channels_count_as_one_and_alpha_is_no_class(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert_array_equal(read_mask(save_picture(path, np.stack([BINARY] * 3, -1))), BINARY[None])
    colors = np.stack([BINARY, BINARY, 1 - BINARY], -1)
    with pytest.raises(DataError, match=r"a.png: 3 channels that differ, first at row 0, column 0"):
        read_mask(save_picture(path, colors))
    save_picture(path, np.stack([BINARY] * 4, -1))
    message = "not opaque everywhere; set data.mask_read.alpha=drop to read it without, or =only"
    with pytest.raises(DataError, match=message):
        read_mask(path)
    assert_array_equal(read_mask(path, MaskOptions(alpha="drop")), BINARY[None])


# rows 45 and 46
@pytest.mark.parametrize(
    ("values", "classes", "message"),
    [
        ([0, 1, 2], 2, "values 0, 1, 2; allowed are 0 and 1 or 0 and 255; .*mask_read.classes=3"),
        ([0, 1, 255], 2, "values 0, 1, 255; .*in between come from JPEG or from smooth scaling"),
        ([0, 4, 7], 4, r"values 0, 4, 7; allowed are 0 to 3 \(classes=4\); .*mask_read.classes=8"),
        ([0, 255], 4, "values 0, 255; allowed are 0 to 3 .*; set data.mask_read.classes=2"),
        (list(range(12)), 2, "values 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... 2 more up to 11;"),
        ([0, 100, 246], 4, "values 0, 100, 246; allowed are 0 to 3 .*without gaps"),
        ([0, 300], 256, "values 0, 300; allowed are 0 to 255"),
        ([-1, 1], 5, "values -1, 1; allowed are 0 to 4"),
        ([0, -1], 2, "values -1, 0; allowed are 0 and 1"),
    ],
)
def test_wrong_values_are_shown(
    tmp_path: Path, values: list[int], classes: int, message: str
) -> None:
    np.save(tmp_path / "a.npy", np.array([values] * 20, np.int16))
    with pytest.raises(DataError, match=f"a.npy: mask with the {message}"):
        read_mask(tmp_path / "a.npy", MaskOptions(classes=classes))


# row 48
def test_a_jpeg_mask_with_values_in_between_is_refused(tmp_path: Path) -> None:
    mask, path = np.zeros((32, 32), np.uint8), tmp_path / "a.jpg"
    mask[5:20, 7:23] = 255
    message = "mask with the values 0, 1, 2, .* more up to 255; .*data.mask_read.threshold=128"
    with pytest.raises(DataError, match=f"a.jpg: {message}"):
        read_mask(save_picture(path, mask))
    mask[:] = 0
    mask[8:16, 8:24] = 255  # whole blocks survive
    assert_array_equal(read_mask(save_picture(path, mask)), mask[None] // 255)


# row 20: one rule for image and mask
def test_a_mask_is_turned_as_its_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    path = save_picture(tmp_path / "a.png", BINARY, exif=exif)
    assert_array_equal(read_mask(path), BINARY[None])
    turned = read_mask(path, MaskOptions(exif="apply"))
    assert_array_equal(turned, np.rot90(BINARY, -1)[None])


def test_numbers_of_instances_are_asked_about(tmp_path: Path) -> None:
    path = save_picture(tmp_path / "a.png", np.array([[0, 17, 34]], np.uint8))
    hint = "threshold=1 if every value but 0 is a defect"
    with pytest.raises(DataError, match=rf"mask with the values 0, 17, 34; .*{hint}"):
        read_mask(path)
