"""Every reader of annotations fills one record, and what holds for one of them holds for all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.annotations.mark_files import read_annotations
from lit_data.core.errors import DataError
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.images.read_options import ReadOptions
from lit_data.wings.detection.masks import find_mask_boxes

SQUARE = [20.0, 20.0, 60.0, 20.0, 60.0, 60.0, 20.0, 60.0]
INNER = [30.0, 30.0, 50.0, 30.0, 50.0, 50.0, 30.0, 50.0]


def coco(folder: Path, side: int | None = 96) -> None:
    size = {} if side is None else {"height": side, "width": side}
    content = {
        "images": [{"id": 0, "file_name": "0.jpg", **size}],
        "categories": [{"id": 1, "name": "crack"}],
        "annotations": [{"image_id": 0, "category_id": 1, "segmentation": [SQUARE]}],
    }
    (folder / "annotations.json").write_text(json.dumps(content))


def labelme(folder: Path, side: int | None = 96, shapes: object = None) -> None:
    shapes = shapes or [("crack", SQUARE)]
    content = {
        "shapes": [
            {"label": name, "points": np.reshape(p, (-1, 2)).tolist()} for name, p in shapes
        ],
        "imagePath": "0.jpg",
        "imageHeight": side,
        "imageWidth": side,
    }
    (folder / "0.json").write_text(json.dumps(content))


def write_json(path: Path, named: str) -> None:
    """Write a file of LabelMe of any name, which names an image."""
    path.parent.mkdir(exist_ok=True, parents=True)
    shape = {"label": "crack", "points": np.reshape(SQUARE, (-1, 2)).tolist()}
    path.write_text(json.dumps({"shapes": [shape], "imagePath": named}))


def cvat(folder: Path, side: int | None = 96, shape: str = "") -> None:
    points = ";".join(f"{x},{y}" for x, y in np.reshape(SQUARE, (-1, 2)))
    shape = shape or f'<polygon label="crack" points="{points}"/>'
    size = "" if side is None else f'width="{side}" height="{side}"'
    text = f'<annotations><image name="0.jpg" {size}>{shape}</image></annotations>'
    (folder / "annotations.xml").write_text(text)


def yolo(folder: Path, side: int | None = None) -> None:
    del side  # fractions of any size
    (folder / "0.txt").write_text("0 " + " ".join(str(value / 96) for value in SQUARE))


READERS = [coco, labelme, cvat, yolo]


def save(folder: Path, side: int = 96, orientation: int = 1, name: str = "0.jpg") -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("L", (side, side), 100).save(folder / name, exif=exif)


def draw(
    folder: Path, classes: list[str] | None = None, exif: str = "ignore", images: str = "*.jpg"
) -> list[np.ndarray]:
    paths = sorted(folder.rglob(images))
    annotated = read_annotations(folder, paths)
    masks = [image.mask for image in annotated.draw(paths, ReadOptions(exif=exif), classes)]
    annotated.problems.raise_if_any("annotations are bad")
    return masks


@pytest.mark.parametrize("write", [coco, labelme, cvat])
def test_images_scaled_after_annotation_are_refused(
    write: Callable[..., None], tmp_path: Path
) -> None:
    save(tmp_path, side=192)
    write(tmp_path, 96)
    with pytest.raises(DataError, match=r"for 96 x 96 px .* has 192 x 192: scale it back"):
        draw(tmp_path)
    write(tmp_path, 0)  # as some programs write what they do not know
    assert (draw(tmp_path)[0] > 0).sum() in (1600, 6400)


@pytest.mark.parametrize("write", READERS)
@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_marks_of_pictures_that_exif_turns_need_the_key(
    write: Callable[..., None], orientation: int, tmp_path: Path
) -> None:
    save(tmp_path, orientation=orientation)
    write(tmp_path, None)
    with pytest.raises(DataError, match=r"set data.read.exif=apply"):
        draw(tmp_path)
    assert (draw(tmp_path, exif="apply")[0] > 0).sum() in (1521, 1600)


@pytest.mark.parametrize("write", READERS)
def test_the_nearest_of_images_of_one_name_is_meant(
    write: Callable[..., None], tmp_path: Path
) -> None:
    for part in ("a", "b"):
        (tmp_path / part / "img").mkdir(parents=True)
        save(tmp_path / part / "img")
    write(tmp_path / "b")
    paths = sorted(tmp_path.rglob("*.jpg"))
    assert [*read_annotations(tmp_path, paths).marks] == [1]


def test_a_stated_size_tells_which_way_a_picture_was_marked(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (96, 70), 100).save(tmp_path / "0.jpg", exif=exif)
    labelme(tmp_path)
    path = tmp_path / "0.json"
    content = json.loads(path.read_text())
    for height, width, fitting in ((70, 96, "ignore"), (96, 70, "apply")):
        path.write_text(json.dumps(content | {"imageHeight": height, "imageWidth": width}))
        assert draw(tmp_path, exif=fitting)[0].shape == (height, width)
        other = {"ignore": "apply", "apply": "ignore"}[fitting]
        with pytest.raises(DataError, match=f"set data.read.exif={fitting}"):
            draw(tmp_path, exif=other)


def test_a_box_of_cvat_is_drawn_turned(tmp_path: Path) -> None:
    save(tmp_path)
    cvat(tmp_path, shape='<box label="x" xtl="18" ytl="44" xbr="78" ybr="52" rotation="90"/>')
    rows, columns = np.nonzero(draw(tmp_path)[0])
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (18, 78, 44, 52)
    assert len(rows) == 480
    cvat(tmp_path, shape='<box label="x" xtl="10" ytl="10" xbr="50" ybr="30" rotation="30"/>')
    corners = cv2.boxPoints(((30, 20), (40, 20), 30)).astype(np.int64)
    expected = cv2.fillPoly(np.zeros((96, 96), np.uint8), [corners], 1)
    assert (draw(tmp_path)[0] != expected).sum() < 70  # along the edges


@pytest.mark.parametrize(
    "attribute", ['outside="0"', 'keyframe="1"', 'frame="3"', 'angle="4"'], ids=str
)
def test_unknown_attributes_of_cvat_are_refused(attribute: str, tmp_path: Path) -> None:
    save(tmp_path)
    cvat(tmp_path, shape=f'<box label="x" xtl="1" ytl="4" xbr="8" ybr="5" {attribute}/>')
    name = attribute.partition("=")[0]
    with pytest.raises(DataError, match=f"the attribute '{name}' is not read"):
        draw(tmp_path)


def test_masks_and_ellipses_of_cvat_are_drawn(tmp_path: Path) -> None:
    save(tmp_path)
    cvat(
        tmp_path,
        shape='<mask label="x" rle="2, 3, 1" left="20" top="30" width="3" height="2"/>',
    )
    assert np.argwhere(draw(tmp_path)[0]).tolist() == [[30, 22], [31, 20], [31, 21]]
    cvat(tmp_path, shape='<ellipse label="x" cx="48" cy="48" rx="20" ry="10" rotation="90"/>')
    rows, columns = np.nonzero(draw(tmp_path)[0])
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (40, 20)


def test_layers_of_cvat_and_subsets(tmp_path: Path) -> None:
    for split in ("Train", "Test"):
        (tmp_path / "images" / split).mkdir(parents=True)
        save(tmp_path / "images" / split)
    points = "20,20;60,20;60,60;20,60"
    shapes = f'<polygon label="top" points="{points}" z_order="1"/>'
    shapes += '<polygon label="low" points="20,20;90,20;90,60;20,60" z_order="0"/>'
    image = '<image name="0.jpg" subset="{}">{}</image>'
    text = image.format("Train", shapes) + image.format("Test", "")
    (tmp_path / "annotations.xml").write_text(f"<annotations>{text}</annotations>")
    test, train = draw(tmp_path, ["top", "low"])
    assert not test.any()
    assert (train == 1).sum() == 1600
    assert (train == 2).sum() == 1200


def test_holes_and_ignored_shapes_of_labelme(tmp_path: Path) -> None:
    save(tmp_path)
    labelme(tmp_path, shapes=[("crack", SQUARE), ("_background_", INNER)])
    assert np.bincount(draw(tmp_path)[0].ravel()).tolist() == [96**2 - 1200, 1200]
    labelme(tmp_path, shapes=[("crack", SQUARE), ("__ignore__", INNER)])
    for classes in (None, ["crack"]):
        mask = draw(tmp_path, classes)[0]
        assert (mask[30:50, 30:50] == 255).all()
        assert (mask == 1).sum() == 1200


def test_crowds_are_ignored_pixels_behind_objects(tmp_path: Path) -> None:
    save(tmp_path)
    coco(tmp_path)
    path = tmp_path / "annotations.json"
    content = json.loads(path.read_text())
    crowd = {"image_id": 0, "category_id": 1, "segmentation": [INNER], "iscrowd": 1}
    content["annotations"].append(crowd)
    path.write_text(json.dumps(content))
    assert np.bincount(draw(tmp_path)[0].ravel())[1] == 1600
    content["annotations"] = [crowd]
    path.write_text(json.dumps(content))
    assert (draw(tmp_path)[0] == 255).sum() == 400
    annotated = read_annotations(tmp_path, [tmp_path / "0.jpg"])
    with pytest.raises(DataError, match="this mark and all others are ignored"):
        annotated.count_ignored()


@pytest.mark.parametrize("order", [1, -1])
def test_a_shape_inside_of_another_stays_on_top(order: int, tmp_path: Path) -> None:
    save(tmp_path)
    labelme(tmp_path, shapes=[("stain", SQUARE), ("pit", INNER)][::order])
    mask = draw(tmp_path, ["stain", "pit"])[0]
    assert (mask == 1).sum() == 1200
    assert (mask == 2).sum() == 400
    labelme(tmp_path, shapes=[("stain", SQUARE), ("pit", SQUARE)])
    with pytest.raises(DataError, match="'pit' overlaps other classes in 1600 px"):
        draw(tmp_path, ["stain", "pit"])


def test_a_box_among_polygons_of_yolo_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path, name=f"{number}.jpg")
    yolo(tmp_path)
    (tmp_path / "1.txt").write_text("0 0.4 0.4 0.4 0.4\n")
    (tmp_path / "2.txt").write_text("\n")
    with pytest.raises(DataError, match=r"1\.txt, line 1: a box among outlines"):
        draw(tmp_path)
    (tmp_path / "1.txt").write_text("0;0.4;0.4\n")
    with pytest.raises(DataError, match=r"1\.txt, line 1: '0;0.4;0.4' is not a class with three"):
        draw(tmp_path)
    (tmp_path / "1.txt").write_text("")
    assert len(draw(tmp_path)) == 1


def test_other_text_beside_images_is_no_annotation(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "README.txt").write_text("These images were taken in November 2025.\n")
    (tmp_path / "LICENSE.txt").write_text("1 All of these rights are reserved here\n")
    assert read_annotations(tmp_path, [tmp_path / "0.jpg"]) is None
    yolo(tmp_path)
    assert_array_equal(draw(tmp_path)[0].max(), 1)


def test_polygons_of_yolo_count_from_one_as_boxes_do(tmp_path: Path) -> None:
    save(tmp_path)
    yolo(tmp_path)
    text = (tmp_path / "0.txt").read_text()
    (tmp_path / "0.txt").write_text(f"1{text[1:]}\n2{text[1:]}")
    (tmp_path / "dataset.yaml").write_text("names: [crack, pit]\n")
    annotated = read_annotations(tmp_path, [tmp_path / "0.jpg"])
    assert annotated.count_categories() == {"crack": 1, "pit": 1}
    (tmp_path / "0.txt").write_text(f"0{text[1:]}\n7{text[1:]}")
    with pytest.raises(DataError, match="line 2: class 7 has no name: there are 2"):
        draw(tmp_path)


INPUTS = {
    coco: ("annotations.json",),
    labelme: ("0.json",),
    cvat: ("annotations.xml",),
    yolo: ("0.txt", "classes.txt", "data.yaml"),
}


@pytest.mark.parametrize("write", INPUTS)
def test_every_input_of_drawn_masks_is_in_their_key(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    save(folder)
    write(folder)
    keys = set[Path]()

    def count_keys(**options: Any) -> int:
        files = InspectionFiles(root=str(folder), cache_dir=str(tmp_path / "cache"), **options)
        (mask,) = files.image_set.masks
        keys.add(mask.parent)
        return len(keys)

    assert count_keys() == count_keys() == 1
    assert count_keys(read=ReadOptions(exif="apply", gray_to_rgb=True)) == 2
    for name in INPUTS[write]:
        path = folder / name
        texts = {"classes.txt": "crack", "data.yaml": "names: [crack]"}
        text = path.read_text() if path.exists() else texts[name]
        before = len(keys)
        path.write_text(text)
        count_keys()
        path.write_text(f"{text}\n")
        assert count_keys() > before
    before = len(keys)
    assert count_keys(classes=["crack"]) == before + 1
    save(folder)
    assert count_keys() == before + 2


def test_objects_that_touch_have_a_box_each(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    save(folder)
    labelme(folder, shapes=[("a", SQUARE), ("b", INNER), ("__ignore__", [0, 0, 9, 0, 9, 9, 0, 9])])
    files = InspectionFiles(
        root=str(folder), cache_dir=str(tmp_path / "cache"), classes=["a", "b"], splits={"train": 1}
    )
    boxes = find_mask_boxes(files).labels.boxes
    assert boxes[:, 0].tolist() == [0, 1, -1, -2]
    assert boxes[:2, 1:] * 96 == pytest.approx(np.array([[40, 40, 40, 40], [40, 40, 20, 20]]))


def test_polygons_of_cvat_are_not_turned(tmp_path: Path) -> None:
    save(tmp_path)
    cvat(tmp_path, shape='<polygon label="x" points="1,1;9,1;9,9" rotation="5"/>')
    with pytest.raises(DataError, match="a polygon with a rotation; only boxes and ellipses"):
        draw(tmp_path)


def test_images_of_one_stem_are_told_apart_by_type(tmp_path: Path) -> None:
    save(tmp_path)
    cv2.imwrite(str(tmp_path / "0.png"), np.zeros((96, 96), np.uint8))
    images = [tmp_path / "0.jpg", tmp_path / "0.png"]
    labelme(tmp_path)
    annotated = read_annotations(tmp_path, images)
    assert set(annotated.marks) == {0}
    (tmp_path / "0.json").unlink()
    yolo(tmp_path)
    annotated = read_annotations(tmp_path, images)
    with pytest.raises(DataError, match="2 images are named"):
        annotated.problems.raise_if_any("bad")


@pytest.mark.parametrize(
    "named", ["0.jpg", "..\\images\\0.jpg", "C:\\data\\0.jpg", "/home/a/0.png"]
)
def test_a_file_with_another_name_counts_for_the_image_that_it_names(
    named: str, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    save(tmp_path / "images")
    write_json(tmp_path / "json" / "job_1.json", named)
    assert (draw(tmp_path)[0] > 0).sum() == 1600


@pytest.mark.parametrize(
    ("named_by", "message"),
    [
        ({"0.json": "1.jpg"}, "0.json: has the name of .*0.jpg, but its imagePath is .*1.jpg"),
        ({"a.json": "0.jpg", "b.json": "0.jpg"}, "b.json: labels the same image as .*a.json: join"),
        (
            {"a.json": "9.jpg"},
            "a.json: no image is named 'a', and none '9.jpg', which it names",
        ),
    ],
)
def test_files_that_name_an_image_in_two_ways_are_refused(
    named_by: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name in ("0.jpg", "1.jpg"):
        save(tmp_path, name=name)
    for name, named in named_by.items():
        write_json(tmp_path / name, named)
    with pytest.raises(DataError, match=message):
        draw(tmp_path)


def test_a_copied_file_counts_for_the_image_of_its_name(tmp_path: Path) -> None:
    for name in ("0", "0_flipped"):
        save(tmp_path, name=f"{name}.jpg")
        write_json(tmp_path / f"{name}.json", "0.jpg")
    assert len(draw(tmp_path)) == 2


@pytest.mark.parametrize(
    "folders", [("train/{}", "val/{}"), ("{}/train", "{}/val"), ("{}/cam1", "{}/cam2")]
)
def test_a_lost_image_is_not_replaced_by_one_of_another_folder(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    names = (("0.jpg", "1.jpg", "2.jpg"), ("1.jpg", "2.jpg", "3.jpg"))
    for folder, parts in zip(folders, names, strict=True):
        (tmp_path / folder.format("pictures")).mkdir(parents=True)
        for name in parts:
            save(tmp_path / folder.format("pictures"), name=name)
    label = tmp_path / folders[0].format("json") / "2.json"
    write_json(label, "2.jpg")
    assert len(draw(tmp_path)) == 1
    label.rename(label.with_name("3.json"))
    write_json(label.with_name("3.json"), "3.jpg")
    with pytest.raises(
        DataError, match=r"no image is named '3.jpg' except for .*3.jpg, which is in"
    ):
        draw(tmp_path)


def test_every_file_that_marks_an_image_is_noted(tmp_path: Path) -> None:
    save(tmp_path)
    for name in ("cracks.json", "pits.json"):
        coco(tmp_path)
        (tmp_path / "annotations.json").rename(tmp_path / name)
    annotated = read_annotations(tmp_path, [tmp_path / "0.jpg"])
    assert [path.name for path in annotated.files] == ["cracks.json", "pits.json"]
    less = read_annotations(tmp_path, [tmp_path / "0.jpg"], exclude=["pits.json"])
    assert [path.name for path in less.files] == ["cracks.json"]


def test_boxes_with_key_points_are_no_outlines(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "0.txt").write_text("0 .5 .5 .4 .4 .3 .3 .6 .6\n")
    assert len(draw(tmp_path)) == 1
    (tmp_path / "data.yaml").write_text("names: [crack]\nkpt_shape: [2, 2]\n")
    with pytest.raises(DataError, match=r"kpt_shape means that labels are boxes with key points"):
        draw(tmp_path)
