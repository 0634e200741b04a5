import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.annotations.coco import load_coco, read_coco_labels
from lit_data.annotations.labels import Frame, LabelTable
from lit_data.core.errors import DataError

IMAGES = ["/set/images/0.jpg", "/set/images/1.jpg"]
FIRST = {"id": 70, "file_name": "1.jpg", "height": 100, "width": 200}
ENTRIES = [FIRST, {"id": 5, "file_name": "0.jpg"}]
CATEGORIES = [{"id": 90, "name": "dog"}, {"id": 3, "name": "cat"}]


def box(bbox: object, category: object = 3, image: object = 5, **more: object) -> dict[str, object]:
    return {"image_id": image, "category_id": category, "bbox": bbox, **more}


def write(folder: Path, annotations: object, name: str = "a.json", **changes: object) -> Path:
    content = {"images": ENTRIES, "annotations": annotations, "categories": CATEGORIES} | changes
    (folder / name).write_text(json.dumps(content))
    return folder / name


def read(
    folder: Path, annotations: object, *, options: dict[str, Any] | None = None, **changes: object
) -> LabelTable:
    """Labels of two images of 100 x 200 pixels (height x width)."""
    file = load_coco(write(folder, annotations, **changes))
    return read_coco_labels(IMAGES, [Frame((100, 200))] * 2, [file], **(options or {}))


def test_pixels_become_shares_and_categories_go_by_id(tmp_path: Path) -> None:
    table = read(
        tmp_path, [box([20, 10, 40, 40], 90, 70), box([0, 0, 200, 100]), box([0.5, 0, 1, 1])]
    )
    assert table.classes == ("cat", "dog")
    assert table.ends.tolist() == [2, 3]
    assert table.boxes == pytest.approx(
        np.array([[0, 0.5, 0.5, 1, 1], [0, 0.005, 0.005, 0.005, 0.01], [1, 0.2, 0.3, 0.2, 0.4]])
    )


def test_crowds_are_ignored_regions_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    labels = read(tmp_path, [box([0, 0, 9, 9]), box([0, 0, 50, 50], iscrowd=1)])
    assert labels.boxes[:, 0].tolist() == [0, -1]  # a region of class 0
    assert labels.object_count == 1
    assert caplog.messages == ["1 box with iscrowd or ignore is an ignored region"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (box([0, 0, 9, 9], image=6), "image_id 6 is not in the file, which has 2 images"),
        *[
            (box([0, 0, 9, 9], value), "category_id .* is not allowed; allowed are 3, 90")
            for value in (1.5, "cat", "", None, -1, 4, True)
        ],
        (box([0, 0, 0, 9]), r"box \(0, 0, 0, 9\) has no area"),
        (box([9, 9, -3, 9]), ".*has no area"),
        (box([195, 0, 10, 10]), ".*is 50 % outside its image of 100 x 200 pixels"),
        (box([500, 0, 10, 10]), ".*is outside its image"),
        (box([0, 0, 9]), r"bbox \[0, 0, 9\] must be 4 numbers"),
        (box(["0", 0, 9, 9]), ".*must be 4 numbers"),
        (box(None), "bbox None must be 4 numbers"),
        (box([0, 0, float("nan"), 9]), ".*not a number of a sensible size"),
        (box([0, 0, 10**400, 9]), ".*(must be 4 numbers|not a number of a sensible size)"),
        (7, "7 is not an annotation"),
    ],
)
def test_rows_49_50_51_52_54_a_bad_box_is_named(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"annotations\[1\]: {message}"):
        read(tmp_path, [box([0, 0, 9, 9]), bad])
    assert len(read(tmp_path, [box([0, 0, 9, 9]), bad], options={"on_bad": "skip"}).boxes) == 1


def test_row_53_shares_among_pixels_name_the_first_of_each(tmp_path: Path) -> None:
    message = r"\(0.1, 0.1, 0.5, 0.5\) is in shares of the image, .*annotations\[0\].* is in pixels"
    with pytest.raises(DataError, match=rf"annotations\[1\]: box {message}"):
        read(tmp_path, [box([0, 0, 9, 9]), box([0.1, 0.1, 0.5, 0.5])])


def test_row_49_an_entry_without_its_image_is_named_once(tmp_path: Path) -> None:
    entries = [*ENTRIES, {"id": 8, "file_name": "gone.jpg"}]
    annotations = [box([0, 0, 9, 9]), *[box([0, 0, 9, 9], image=8)] * 5]
    message = r"images\[2\]: no image is named 'gone.jpg'(.|\n)*1 problem with labels"
    with pytest.raises(DataError, match=message):
        read(tmp_path, annotations, images=entries)
    assert len(read(tmp_path, annotations, images=entries, options={"on_bad": "skip"}).boxes) == 1


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ((200, 100), "for 200 x 100 px .height x width., the image has 100 x 200: it was rotated"),
        ((100, 201), "for 100 x 201 px .height x width., the image has 100 x 200: scale it back"),
        ((100, "x"), "for 100 x x px"),
        ((100, 10**400), "for 100 x 10{39} px"),
    ],
    ids=["turned", "wider", "text", "digits"],
)
def test_other_sizes_are_refused(tmp_path: Path, stated: tuple[Any, Any], message: str) -> None:
    entry = {"id": 5, "file_name": "0.jpg", "height": stated[0], "width": stated[1]}
    with pytest.raises(DataError, match=rf"images\[0\], .*0.jpg: its annotations are {message}"):
        read(tmp_path, [], images=[entry], options={"on_bad": "skip"})


TWICE = f'{{"id": {"9" * 400}, "name": "a"}},' * 2


@pytest.mark.parametrize(
    ("images", "annotations", "categories", "message"),
    [
        ("[]", "[]", f"[{TWICE}0]", r"categories\[1\] repeats the id 9{80} or"),
        ("[]", "null", "[]", "'annotations' must be a list, found NoneType"),
        ("[{}]", "[]", "[]", r"images\[0\] must have an 'id'"),
        ("9" * 5_000, "[]", "[]", "damaged JSON: Exceeds the limit"),
    ],
    ids=["a long id", "null", "no id", "digits"],
)
def test_parts_of_another_kind_are_refused(
    tmp_path: Path, images: str, annotations: str, categories: str, message: str
) -> None:
    text = f'{{"images": {images}, "annotations": {annotations}, "categories": {categories}}}'
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=f"a.json: {message}"):
        read_coco_labels(IMAGES, [Frame((100, 200))] * 2, [load_coco(tmp_path / "a.json")])


def test_what_is_no_annotation_file_is_refused(tmp_path: Path) -> None:
    for content, message in (
        ("{", "damaged JSON"),
        ("[" * 200_000, "damaged JSON: maximum recursion"),
        ("[]", "must hold images, annotations and categories"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=f"a.json: {message}"):
            load_coco(tmp_path / "a.json")


def test_files_may_number_their_categories_each_in_its_way(tmp_path: Path) -> None:
    other = [{"id": 3, "name": "dog"}, {"id": 4, "name": "cat"}]
    boxes = [{"image_id": 70, "category_id": 3, "bbox": [1, 1, 9, 9]}]
    later = [{"image_id": 5, "category_id": 3, "bbox": [1, 1, 9, 9]}]
    one = write(tmp_path, boxes)
    two = write(tmp_path, later, "b.json", categories=other)
    table = read_coco_labels(IMAGES, [Frame((100, 200))] * 2, [load_coco(one), load_coco(two)])
    assert table.classes == ("dog", "cat")
    assert table.boxes[:, 0].tolist() == [0, 1]


def test_ids_may_be_texts(tmp_path: Path) -> None:
    images = [{"id": "x", "file_name": "0.jpg"}]
    categories = [{"id": "b", "name": "dog"}, {"id": "a", "name": "cat"}]
    box = {"image_id": "x", "category_id": "b", "bbox": [1, 1, 9, 9]}
    table = read(tmp_path, [box], images=images, categories=categories)
    assert table.classes == ("cat", "dog")
    assert table.boxes[:, 0].tolist() == [1]


def test_boxes_with_a_rotation_are_refused_and_ignored_ones_are_regions(tmp_path: Path) -> None:
    box = {"image_id": 5, "category_id": 3, "bbox": [1, 1, 9, 9]}
    assert read(tmp_path, [box | {"attributes": {"rotation": 0.0}}]).boxes[:, 0].tolist() == [0]
    assert read(tmp_path, [box | {"ignore": 1}]).boxes[:, 0].tolist() == [-1]
    with pytest.raises(
        DataError, match=r"a box rotated by 30\.5 degrees, which its sides do not show"
    ):
        read(tmp_path, [box | {"attributes": {"rotation": 30.5}}])


def test_a_file_without_categories_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json: has no categories"):
        read(tmp_path, [], categories=[])


def test_categories_of_one_name_are_one_class(tmp_path: Path) -> None:
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 4, "name": "cat "}]
    boxes = [box([0, 0, 9, 9], 1), box([0, 0, 9, 8], 4), box([0, 0, 9, 7], 2)]
    table = read(tmp_path, boxes, categories=categories)
    assert table.classes == ("cat", "dog")
    assert sorted(table.boxes[:, 0].tolist()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("heading", "classes"), [(3, ("cat", "dog")), (0, ("animals", "cat", "dog"))]
)
def test_a_category_that_heads_others_and_marks_nothing_is_no_class(
    tmp_path: Path, heading: int, classes: tuple[str, ...]
) -> None:
    categories = [
        {"id": 0, "name": "animals", "supercategory": "none"},
        {"id": 3, "name": "cat", "supercategory": "animals"},
        {"id": 4, "name": "dog", "supercategory": "animals"},
    ]
    table = read(tmp_path, [box([0, 0, 9, 9], heading)], categories=categories)
    assert table.classes == classes
