"""Masks that are black and white but for their edges, and folders that hold such."""

import logging
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.core.errors import ConfigError, DataError
from lit_data.datasets.layouts import find_inspection_set
from lit_data.images.decoders import ImageSource, MaskDecoder
from lit_data.images.mask_choice import choose_mask_options, has_grey_edges
from lit_data.images.masks import MaskOptions, read_mask


def _disc(value: int = 255) -> np.ndarray:
    mask = np.zeros((60, 80), np.uint8)
    cv2.circle(mask, (30, 30), 12, value, -1)
    return mask


def _write(folder: Path, suffix: str, *masks: np.ndarray) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}{suffix}" for number in range(len(masks))]
    for path, mask in zip(paths, masks, strict=True):
        assert cv2.imwrite(str(path), mask)
    return paths


SOFT = cv2.GaussianBlur(_disc(), (0, 0), 0.8)
PICTURES = np.random.default_rng(0).integers(0, 255, (4, 60, 80), np.uint8)


def test_smooth_edges_get_a_threshold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    masks = _write(tmp_path, ".png", np.zeros((60, 80), np.uint8), SOFT)
    assert choose_mask_options(masks, MaskOptions()) == MaskOptions(threshold=128)
    line = "pixels of 2 masks): values from 128 on are the defect (data.mask_read.threshold=128)"
    assert line in caplog.text
    jpegs = _write(tmp_path, ".jpg", _disc(), _disc())
    assert choose_mask_options(jpegs, MaskOptions()).threshold == 128


def _colour(*colour: int) -> np.ndarray:
    """A disc of a colour, as OpenCV writes it."""
    return np.where(_disc()[..., None] > 0, np.array(colour[::-1], np.uint8), np.uint8(0))


COLOURS = ((0, 0, 0), (128, 0, 0), (0, 128, 0))


def test_few_colours_are_those_of_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    masks = _write(
        tmp_path, ".png", _colour(128, 0, 0), _colour(0, 0, 0), _colour(0, 128, 0), _disc(0)
    )
    found = choose_mask_options(masks, MaskOptions())
    assert found == MaskOptions(colors=COLOURS)
    line = "data.mask_read.colors=[[0,0,0],[128,0,0],[0,128,0]]; data.classes=[name1,name2]"
    assert line in caplog.text
    for path, is_marked in zip(masks, (True, False, True, False), strict=True):
        assert_array_equal(read_mask(path, found)[0], (_disc() > 0) & is_marked)
    three = choose_mask_options(masks, MaskOptions(classes=3), ["dent", "pit"])
    assert "classes are dent [128, 0, 0], pit [0, 128, 0]" in caplog.text
    assert [int(read_mask(path, three).max()) for path in masks] == [1, 0, 2, 0]
    assert MaskDecoder(three).header(ImageSource((str(masks[0]),)))[:3] == (1, 60, 80)
    with pytest.raises(DataError, match="masks hold 3 colors, including the background"):
        choose_mask_options(masks, MaskOptions(classes=5))
    (unnamed,) = _write(tmp_path, ".png", _colour(7, 8, 9))
    with pytest.raises(DataError, match=re.escape("[7, 8, 9]; add them to data.mask_read.colors")):
        read_mask(unnamed, MaskOptions(colors=COLOURS))


@pytest.mark.parametrize(
    "options",
    [
        {"colors": [[0, 0, 0]]},
        {"colors": [[0, 0, 0], [0, 0, 0]]},
        {"colors": [[0, 0, 0], [0, 0, 256]]},
        {"colors": [[0, 0, 0], [0, 0]]},
        {"colors": [[0, 0, 0], [0, 0, True]]},
        {"colors": COLOURS, "classes": 4},
        {"colors": COLOURS, "threshold": 1},
    ],
)
def test_wrong_colours_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"colou?rs"):
        MaskOptions(**options)


@pytest.mark.parametrize(
    ("masks", "options", "chosen"),
    [
        ([_disc(38), _disc(38)], {}, {"threshold": 1}),  # two values
        ([_disc(2), _disc(1), _disc(3)], {}, {"threshold": 1}),  # numbers of classes
        ([_disc(2), _disc(1), _disc(3)], {"classes": 4}, {}),
        ([np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)], {}, {}),  # a picture
        ([_disc(255), _disc(1)], {}, {}),  # each file says by itself what it means
        (
            [np.where(_disc() > 0, 255, np.arange(80, dtype=np.uint8) % 20)],
            {},
            {},
        ),  # 255 is ignored
        ([SOFT], {"threshold": 90}, {}),
        ([SOFT], {"classes": 200}, {}),
        ([np.tile(np.arange(0, 240, 3, dtype=np.uint8), (60, 1))], {}, {}),  # a picture
    ],
)
def test_all_but_black_is_the_defect_or_options_stay_as_they_are(
    tmp_path: Path, masks: list[np.ndarray], options: dict[str, Any], chosen: dict[str, Any]
) -> None:
    found = choose_mask_options(_write(tmp_path, ".png", *masks), MaskOptions(**options))
    assert found == MaskOptions(**options | chosen)


def test_a_mask_that_cannot_be_read_is_left_to_those_who_read_all(tmp_path: Path) -> None:
    masks = _write(tmp_path, ".png", _disc(), SOFT)
    masks[0].write_bytes(b"no image")
    assert choose_mask_options(masks, MaskOptions()).threshold == 128
    assert choose_mask_options(masks[:1], MaskOptions()) == MaskOptions()
    assert not has_grey_edges(np.zeros(256, np.int64))


def test_a_folder_of_black_and_white_twins_holds_masks_whatever_its_name(tmp_path: Path) -> None:
    _write(tmp_path / "a", ".png", *PICTURES)
    _write(tmp_path / "b", ".png", *[_disc()] * 4)
    found = find_inspection_set(tmp_path)
    assert [path.parent.name for path in found.images] == ["a"] * 4
    assert all(mask is not None and mask.parent.name == "b" for mask in found.masks)


def _paint(*, opacity: np.ndarray) -> np.ndarray:
    """Red strokes on nothing, as programs for drawing save them: B, G, R, opacity."""
    painted = np.zeros((*opacity.shape, 4), np.uint8)
    painted[..., 2] = 200
    painted[..., 3] = opacity
    return painted


def test_transparent_masks_are_read_by_alpha(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    masks = _write(tmp_path, ".png", _paint(opacity=_disc()), _paint(opacity=SOFT))
    options = choose_mask_options(masks, MaskOptions())
    assert options == MaskOptions(alpha="only", threshold=128)
    assert caplog.text.count("data.mask_read.alpha=only") == 1
    assert_array_equal(read_mask(masks[0], options)[0], _disc() > 0)
    assert choose_mask_options(masks, MaskOptions(alpha="drop")).alpha == "drop"
    opaque = _paint(opacity=np.full((60, 80), 255, np.uint8))
    opaque[..., :3] = _disc()[..., None]
    masks = _write(tmp_path, ".png", opaque, _paint(opacity=_disc()))
    assert choose_mask_options(masks, MaskOptions()).alpha == "opaque"  # it is not all defect


def test_alpha_alone_is_read_from_tiff_and_palettes_and_must_be_there(tmp_path: Path) -> None:
    alone = MaskOptions(alpha="only")
    painted = _paint(opacity=_disc())
    tifffile.imwrite(tmp_path / "a.tif", painted, photometric="rgb", extrasamples=["unassalpha"])
    image = Image.fromarray(_disc(1))
    image.putpalette([255, 255, 255, 200, 0, 0])
    image.save(tmp_path / "a.png", transparency=bytes([0, 255]))
    for name in ("a.tif", "a.png"):
        assert_array_equal(read_mask(tmp_path / name, alone)[0], _disc() > 0)
    (mask,) = _write(tmp_path, ".png", _disc())
    with pytest.raises(DataError, match=r"0.png: no alpha channel.*data.mask_read.alpha=only"):
        read_mask(mask, alone)


def test_soft_colours_on_black_are_the_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disc = cv2.GaussianBlur(_colour(255, 20, 60), (0, 0), 1.0)
    masks = _write(tmp_path, ".png", disc, np.zeros_like(disc), disc[::-1])
    options = choose_mask_options(masks, MaskOptions())
    assert options == MaskOptions(channels="brightest", threshold=128)
    assert caplog.text.count("data.mask_read.channels=brightest") == 1
    assert_array_equal(read_mask(masks[0], options)[0], disc.max(-1) >= 128)


def test_photographs_are_no_masks_of_colours(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 60, 80, 3), dtype=np.uint8)
    masks = _write(tmp_path, ".png", *noise)
    assert choose_mask_options(masks, MaskOptions()) == MaskOptions()
    with pytest.raises(DataError, match=r"differ.*set data.mask_read.channels=brightest"):
        read_mask(masks[0])


@pytest.mark.parametrize("options", [{"alpha": "only"}, {"channels": "brightest"}])
def test_what_tells_two_classes_apart_is_refused_with_more(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="name the colors of the classes"):
        MaskOptions(classes=3, **options)
    with pytest.raises(ConfigError, match="colors replaces channels=brightest"):
        MaskOptions(colors=COLOURS[:2], **options)
    with pytest.raises(ConfigError, match="'any' is unknown: choose one of equal, brightest"):
        MaskOptions(channels="any")


def test_masks_of_voc_ignore_255(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disc = _disc(15)
    disc[:5] = 255
    masks = _write(tmp_path / "SegmentationClass", ".png", disc, _disc(2), _disc(6))
    assert choose_mask_options(masks, MaskOptions()) == MaskOptions(threshold=1, ignore=255)
    assert (
        "masks in the style of VOC, where 255 is ignored (data.mask_read.ignore=255)" in caplog.text
    )


def test_label_maps_of_cvat_name_colours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = "# label:color_rgb:parts:actions\nbackground:0,0,0::\nscratch:128,0,0::\n"
    (tmp_path / "labelmap.txt").write_text(text + "dent:0,128,0::\nx:1,2::")
    masks = _write(tmp_path / "SegmentationClass", ".png", _colour(128, 0, 0), _colour(0, 128, 0))
    found = choose_mask_options(masks, MaskOptions())
    assert found.colors == ((0, 0, 0), (128, 0, 0), (0, 128, 0))
    assert "data.classes=[scratch,dent] tells them apart" in caplog.text
    named = choose_mask_options(masks, MaskOptions(classes=3), ["dent", "scratch"])
    assert named.colors == ((0, 0, 0), (0, 128, 0), (128, 0, 0))


@pytest.mark.parametrize("mark", [(128, 0, 0), (255, 255, 255)])
def test_palettes_that_number_colours_differently_are_read_as_colours(
    mark: tuple[int, int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = []
    for number, is_swapped in enumerate((False, True, False)):
        image = Image.fromarray(((_disc(1) > 0) ^ is_swapped).astype(np.uint8), "P")
        image.putpalette([*mark, 0, 0, 0] if is_swapped else [0, 0, 0, *mark])
        paths.append(tmp_path / f"{number}.png")
        image.save(paths[-1])
    options = choose_mask_options(paths, MaskOptions())
    assert "palettes of masks number the same colors differently" in caplog.text
    for path in paths:
        assert_array_equal(read_mask(path, options)[0], _disc(1) > 0)
    assert choose_mask_options(paths[::2], MaskOptions()) == MaskOptions()
