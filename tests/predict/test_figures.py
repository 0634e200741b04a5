"""Parts of pictures: outlines, colours, and strips that are cropped to what was found in them."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from lit_data.core.types import IGNORED
from lit_data.predict import Defect
from lit_data.predict.answers import read_threshold
from lit_data.predict.cells import CLASS_COLOURS, number_classes, outline_mask, show_stored
from lit_data.predict.defects import drop_small
from lit_data.predict.figures import (
    FALSE_COLOUR,
    FOUND_COLOUR,
    OTHER_COLOUR,
    TRUE_COLOUR,
    ShownImage,
    crop_strip,
    draw_whole_images,
    list_outcomes,
    new_axes,
    open_figure,
    paint,
    save_figure,
    shorten_name,
    shorten_names,
    sort_regions,
    write_overlay,
)
from lit_data.predict.task import choose_strata


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
    assert shown[7, 7].tolist() == [255, 0, 0]
    show_stored(axes[0, 1], pixels[:1])
    grey = axes[0, 1].images[0].get_array()
    assert grey.shape == (8, 8, 3)
    assert grey[7, 7].tolist() == [255, 255, 255]


def make_shown(shape: tuple[int, int], *, text: str = "defect, score 0.90") -> ShownImage:
    """An image with a defect that is found, one that is missed, and a false alarm."""
    probability = np.zeros(shape, np.float32)
    probability[10:20, 10:20] = probability[10:20, 26:30] = 0.9
    truth = np.zeros(shape, np.uint8)
    truth[12:18, 12:18] = truth[30:36, 4:10] = 1
    pixels = np.full((1, *shape), 100, np.uint8)
    predicted = (probability >= 0.5).astype(np.uint8)
    return ShownImage("a.png", text, pixels, probability, predicted, truth, least=0.5)


def is_near(picture: np.ndarray, colour: str) -> np.ndarray:
    """True for pixels of about a colour."""
    return (np.abs(picture - 255 * np.array(to_rgb(colour))) < 60).all(-1)


@pytest.mark.parametrize("is_wide", [True, False])
def test_whole_images_are_drawn_with_their_results(is_wide: bool, tmp_path: Path) -> None:
    shape = (40, 800) if is_wide else (800, 40)
    draw_whole_images([make_shown(shape)] * 3, tmp_path / "predictions.png", "images")
    picture = cv2.imread(str(tmp_path / "predictions.png"))[..., ::-1]
    assert max(picture.shape) < 1600
    for colour in (FOUND_COLOUR, TRUE_COLOUR, FALSE_COLOUR):
        assert is_near(picture, colour).sum() > 20


def test_a_region_that_covers_the_image_has_its_line_inside() -> None:
    everywhere = np.ones((60, 90), np.uint8)
    pixels = np.full((1, 60, 90), 100, np.uint8)
    shown = ShownImage("a.png", "", pixels, everywhere, everywhere, None, least=0.5)
    result = is_near(paint(shown, 90)[2], FOUND_COLOUR)
    for turns in range(4):
        assert np.rot90(result, turns)[3, 3:-3].all()
    assert not result[6:-6, 6:-6].any()


def test_regions_are_found_missed_false_or_of_another_class() -> None:
    predicted, truth = np.zeros((2, 40, 60), np.uint8)
    predicted[2:6, 2:6], truth[4:8, 4:8] = 1, 1  # a pixel in common is enough
    predicted[20:24, 2:6], truth[20:24, 2:6] = 2, 1
    predicted[2:6, 30:34], truth[30:34, 40:44] = 1, 2
    predicted[30:34, 2:6], truth[30:34, 2:6] = 1, IGNORED
    lines, fills = sort_regions(predicted, truth)
    words, colours = list_outcomes(has_classes=True)
    assert words == ["found", "of another class", "missed", "false alarm"]
    assert [lines[3, 3], lines[21, 3], fills[31, 41], lines[3, 31]] == [1, 2, 3, 4]
    assert fills[5, 5] == 1
    assert fills[21, 3] == 2
    assert lines[31, 3] == fills[31, 3] == 0
    assert colours[1] == OTHER_COLOUR
    lines, fills = sort_regions(predicted, None)  # nobody knows what is there
    assert set(lines[predicted > 0]) == {1}
    assert not fills.any()
    assert list_outcomes(knows_truth=False)[0] == ["predicted"]
    assert drop_small(predicted, 17).max() == 0


def test_pictures_have_the_size_that_is_asked_for_and_small_images_whole_pixels() -> None:
    for shape, expected in (
        ((1000, 500), (480, 240)),
        ((40, 60), (320, 480)),
        ((1, 900), (1, 480)),
    ):
        shown = ShownImage(
            "a", "", np.zeros((3, *shape), np.uint8), np.zeros(shape, np.float32),
            np.zeros(shape, np.uint8), None, least=0.5,
        )  # fmt: skip
        for picture in paint(shown, 480):
            assert picture.shape == (*expected, 3)


def test_a_defect_of_a_pixel_is_seen_in_a_picture_of_a_large_image() -> None:
    shape = (3000, 4000)
    truth = np.zeros(shape, np.uint8)
    truth[1500, 2000] = 1
    nothing = np.zeros(shape, np.float32)
    pixels = np.zeros((1, *shape), np.uint8)
    shown = ShownImage("a", "", pixels, nothing, nothing.astype(np.uint8), truth, least=0.5)
    assert is_near(paint(shown, 480)[2], TRUE_COLOUR).sum() > 5


def test_an_overlay_has_its_verdict_above(tmp_path: Path) -> None:
    for number, (shape, text) in enumerate((((64, 64), "good"), ((20, 300), "Kratzer ü, found"))):
        path = tmp_path / "ä" / f"{number}.jpg"
        write_overlay(make_shown((shape[0] + 40, shape[1]), text=text), path)
        picture = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
        assert (picture[:24] < 100).sum() > 50
        assert is_near(picture[..., ::-1], FOUND_COLOUR).sum() > 20
        assert path.stat().st_size < 100_000


def test_samples_of_all_classes_and_sizes_are_chosen() -> None:
    strata = ["good"] * 30 + ["crack"] * 25 + ["dent"] * 5 + ["hole"]
    sizes = [0.0] * 30 + list(range(1, 26)) + list(range(100, 105)) + [3.0]
    rows = choose_strata(strata, sizes, 8, good="good")
    assert [strata[row] for row in rows] == ["crack"] * 2 + ["dent"] * 1 + ["hole"] + ["good"] * 4
    cracks = [sizes[row] for row in rows if strata[row] == "crack"]
    assert max(cracks) > 15 > 10 > min(cracks)
    assert choose_strata(["good"] * 3, [0.0] * 3, 8, good="good") == [0, 1, 2]
    assert sorted(choose_strata(["a", "b"], [1, 1], 8, good="good")) == [0, 1]
    assert choose_strata([], [], 8) == []
    common = choose_strata(["a"] + ["b"] * 9, [1.0] * 10, 1)
    assert common != [0]


def test_long_names_are_shortened_to_the_file() -> None:
    assert shorten_name("bad/0001.png") == "bad/0001.png"
    assert shorten_name("a_very_long_folder/image_00000001.png") == "image_00000001.png"
    assert shorten_names(["test/bent/0.png", "test/good/0.png"]) == ["bent/0.png", "good/0.png"]
    assert shorten_names(["images/0.png", "images/a_name_of_24_letters.png"])[0] == "0.png"
    assert shorten_names(["images/0.png"]) == ["0.png"]
    assert shorten_name("a_name_of_more_than_24_letters.png") == "…ore_than_24_letters.png"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["\udcff\udcfe.png", "$^$.png", "a\nb.png", "a\t\x1b[2Jb.png"])
def test_any_name_of_a_file_can_be_a_title(name: str, tmp_path: Path) -> None:
    figure, cells = open_figure(1, ["image", name])
    cells[0][0].set_title(name)
    save_figure(figure, tmp_path / "a.png", name, [name])
    assert cv2.imread(str(tmp_path / "a.png")).std() > 0


def test_the_threshold_of_a_model_is_half_where_it_has_none() -> None:
    assert read_threshold(torch.nn.Identity()) == 0.5
    model = torch.nn.Identity()
    model.register_buffer("predict_threshold", torch.tensor(0.25))
    assert read_threshold(model) == 0.25
