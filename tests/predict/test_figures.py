"""Parts of pictures: outlines, colours, and strips that are cropped to what was found in them."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba

from lit_data.core.types import IGNORED
from lit_data.predict import Defect, find_defects
from lit_data.predict.answers import read_threshold
from lit_data.predict.figures import (
    CLASS_COLOURS,
    TRUE_COLOUR,
    ShownImage,
    crop_strip,
    draw_whole_images,
    new_axes,
    number_classes,
    outline_mask,
    shorten_name,
    show_stored,
)


def make_defect(y: float, x: float, score: float) -> Defect:
    return Defect(y=y, x=x, area_px=4, score=score, height_px=2, width_px=2)


@pytest.mark.parametrize(
    ("shape", "defects", "rows", "columns"),
    [
        ((200, 300), [], (0, 200), (0, 300)),
        ((100, 3000), [make_defect(50, 20, 0.9)], (0, 100), (0, 200)),
        ((100, 3000), [make_defect(50, 1000, 0.5), make_defect(50, 2990, 0.9)], (0, 100), (2800, 3000)),
        ((100, 3000), [make_defect(50, 1000, 0.5)], (0, 100), (900, 1100)),
        ((3000, 100), [], (1400, 1600), (0, 100)),
        ((100, 3000), [make_defect(50, x, 0.5) for x in (100, 1000, 1090)], (0, 100), (900, 1100)),
    ],
)  # fmt: skip
def test_a_long_strip_is_cropped_around_its_defects(
    shape: tuple[int, int], defects: list[Defect], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    part = crop_strip(shape, defects)
    assert (part[0].start, part[0].stop) == rows
    assert (part[1].start, part[1].stop) == columns


def read_lines(mask: torch.Tensor, **options: int) -> dict[str, int]:
    """Points of the lines around a mask, by colour."""
    _, axes = new_axes(1, 1, 2.0)
    axes[0, 0].imshow(mask.numpy())
    outline_mask(axes[0, 0], mask, **options)
    lines = {}
    for contour in axes[0, 0].collections:
        (path,) = contour.get_paths()
        lines[to_hex(contour.get_edgecolor()[0])] = len(path.vertices)
    return lines


def test_masks_are_outlined_each_class_in_its_colour() -> None:
    mask = torch.zeros(10, 10)
    mask[0:4, 0:4] = 1  # at the edge, where the line closes too
    mask[6:8, 6:8] = 2
    mask[9, 9] = IGNORED
    assert set(read_lines(mask, classes=2)) == set(CLASS_COLOURS[:2])
    assert set(read_lines((mask == 1).float())) == {TRUE_COLOUR}
    assert read_lines(torch.zeros(5, 5)) == {}
    assert number_classes(("dent", "scratch")) == ["1 dent", "2 scratch"]


def test_soft_masks_are_outlined_at_half_of_their_largest_value() -> None:
    mask = torch.zeros(9, 9)
    mask[3:6, 3:6] = 0.1
    mask[4, 4] = 0.4
    hard = torch.zeros(9, 9)
    hard[4, 4] = 1
    assert read_lines(mask) == read_lines(hard)


def test_stored_pixels_keep_their_colours() -> None:
    _, axes = new_axes(1, 2, 2.0)
    pixels = np.zeros((3, 8, 8), np.uint16)
    pixels[0, 4:] = 4000
    show_stored(axes[0, 0], pixels)
    shown = axes[0, 0].images[0].get_array()
    assert shown.shape == (8, 8, 3)
    assert tuple(shown[7, 7]) == to_rgba("red")[:3]
    show_stored(axes[0, 1], pixels[:1])
    assert axes[0, 1].images[0].get_array().shape == (8, 8)


@pytest.mark.parametrize("is_wide", [True, False])
def test_whole_images_are_stacked_where_they_are_wide(is_wide: bool, tmp_path: Path) -> None:
    images = []
    for number in range(3):
        probability = np.zeros((40, 800) if is_wide else (800, 40), np.float32)
        probability[10:20, 10:20] = 0.9
        pixels = np.full((3, *probability.shape), 100, np.uint8)
        defects = find_defects(probability)
        images.append(ShownImage(f"{number}.png", pixels, probability, defects))
    draw_whole_images(images, tmp_path / "predictions.png", "images", 0.5)
    height, width = cv2.imread(str(tmp_path / "predictions.png")).shape[:2]
    assert (height < 1.2 * width) == is_wide
    assert max(height, width) < 1200


def test_long_names_are_shortened_to_the_file() -> None:
    assert shorten_name("bad/0001.png") == "bad/0001.png"
    assert shorten_name("a_very_long_folder/image_00000001.png") == "image_00000001.png"
    assert shorten_name("a_name_of_more_than_24_letters.png") == "…ore_than_24_letters.png"


def test_the_threshold_of_a_model_is_half_where_it_has_none() -> None:
    assert read_threshold(torch.nn.Identity()) == 0.5
    model = torch.nn.Identity()
    model.register_buffer("predict_threshold", torch.tensor(0.25))
    assert read_threshold(model) == 0.25
