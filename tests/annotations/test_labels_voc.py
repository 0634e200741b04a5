from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.annotations.labels import Frame, LabelTable
from lit_data.annotations.name_index import NameIndex
from lit_data.annotations.voc import read_voc_labels
from lit_data.core.errors import DataError

IMAGES = ["/set/images/0.jpg", "/set/images/1.jpg"]


def item(box: tuple[object, ...], name: str = "cat", difficult: int = 0) -> str:
    sides = "".join(
        f"<{side}>{value}</{side}>"
        for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{sides}</bndbox></object>"


def read(
    folder: Path, body: str, *, size: tuple[object, object] = (100, 200), **options: Any
) -> LabelTable:
    """Labels of an image of 100 x 200 pixels (height x width), and of another one without a file."""
    stated = f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>"
    (folder / "0.xml").write_text(f"<annotation>{stated}{body}</annotation>", encoding="utf-8")
    return read_voc_labels(IMAGES, [Frame((100, 200))] * 2, [folder / "0.xml", None], **options)


def test_boxes_count_from_one_and_include_their_last_pixel(tmp_path: Path) -> None:
    table = read(tmp_path, item((1, 1, 200, 100)) + item((11, 21, 30, 40)) + item((5, 5, 5, 5)))
    assert table.boxes == pytest.approx(
        np.array([[0, 0.5, 0.5, 1, 1], [0, 0.1, 0.3, 0.1, 0.2], [0, 0.0225, 0.045, 0.005, 0.01]])
    )


def test_row_56_an_image_without_a_file_or_object_is_valid(tmp_path: Path) -> None:
    table = read(tmp_path, "", classes=["cat"])
    assert [table.of(image)[:, 1:].shape for image in (0, 1)] == [(0, 4), (0, 4)]
    with pytest.raises(DataError, match=r"classes: no file names one\n.*\n  set data.classes="):
        read(tmp_path, "")


def test_classes_are_sorted_unless_given(tmp_path: Path) -> None:
    body = item((1, 1, 9, 9), "dog") + item((1, 1, 9, 8), "ant")
    assert read(tmp_path, body).classes == ("ant", "dog")
    assert read(tmp_path, body, classes=["dog", "ant"]).boxes[:, 0].tolist() == [0, 1]


def test_difficult_objects_are_ignored_kept_or_left_out(tmp_path: Path) -> None:
    body = item((1, 1, 9, 9)) + item((1, 1, 9, 8), difficult=1)
    assert read(tmp_path, body).boxes[:, 0].tolist() == [0, -1]
    assert read(tmp_path, body, difficult=True).boxes[:, 0].tolist() == [0, 0]
    assert read(tmp_path, body, difficult=False).boxes[:, 0].tolist() == [0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (item((1, 1, 9, 9), "cow"), "class 'cow' is not allowed; allowed are cat"),
        (item((1, 1, 9, 9), ""), "class '' is not allowed"),
        (item((9, 1, 5, 9)), r"box \(9, 1, 5, 9\) has no area"),
        (item((1, 1, 250, 50)), ".* is 20 % outside its image of 100 x 200 pixels"),
        (item((1, 1, "x", 9)), "<bndbox> holds xmax='x'; each must be a number of pixels"),
        (item((1, 1, "nan", "3,5")), ".*xmax='nan', ymax='3,5'"),
        ("<object><name>cat</name></object>", "<bndbox> holds xmin=''"),
    ],
)
def test_rows_50_51_52_54_a_bad_object_is_named(tmp_path: Path, bad: str, message: str) -> None:
    body, options = item((1, 1, 9, 9)) + bad, {"classes": ["cat"]}
    with pytest.raises(DataError, match=f"0.xml: object 2: {message}"):
        read(tmp_path, body, **options)
    assert read(tmp_path, body, **options, on_bad="skip").ends.tolist() == [1, 1]


def test_row_53_shares_among_pixels_name_the_first_of_each(tmp_path: Path) -> None:
    first = r"object 2: box \(0.1, 0.1, 0.5, 0.5\) is in shares of the image"
    with pytest.raises(DataError, match=rf"{first}, .*object 1: box \(1, 1, 9, 9\) is in pixels"):
        read(tmp_path, item((1, 1, 9, 9)) + item((0.1, 0.1, 0.5, 0.5)))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((200, 100), "for 200 x 100 px .height x width., the image has 100 x 200: it was rotated"),
        ((90, 200), "for 90 x 200 px .height x width., the image has 100 x 200: scale it back"),
        (("x", 200), "0.xml: its annotations are for x x 200 px"),
    ],
)
def test_other_sizes_are_refused(tmp_path: Path, size: tuple[Any, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, item((1, 1, 9, 9)), size=size, on_bad="skip")


BOMB = '<!DOCTYPE a [<!ENTITY b "boom"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB.encode(), "holds a <!DOCTYPE>"),
        (BOMB.encode("utf-16"), "holds a <!DOCTYPE>"),
        (b"<annotation><object>", "damaged XML"),
        (b"<html/>", "starts with <html>; such files of labels start with <annotation>"),
        (b"", "0 bytes"),
        (b" " * 10_000_001, "10000001 bytes, more than the 10000000 allowed"),
    ],
    ids=["entities", "entities in UTF-16", "cut", "HTML", "empty", "large"],
)
def test_what_is_no_annotation_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "0.xml").write_bytes(content)
    with pytest.raises(DataError, match=f"0.xml: {message}"):
        read_voc_labels(IMAGES[:1], [Frame((100, 200))], [tmp_path / "0.xml"], classes=["cat"])


def test_an_image_is_found_by_any_end_of_its_path() -> None:
    index = NameIndex(["/set/images/train/a.jpg", "/set/images/train/b.jpg"])
    names = ["b", "b.jpg", "train/b", "./train/b.jpg", "/set/images/train/b.jpg"]
    for name in [*names, "images\\train\\b.jpg"]:
        assert index.find(name) == 1
    for name in ("c", "b.png", "other/b.jpg", "../b.jpg", "/b.jpg.jpg", ""):
        with pytest.raises(DataError, match="no image is named"):
            index.find(name)
    index = NameIndex(["/set/caf\u00e9.jpg", "/set/a.b.jpg"])
    assert (index.find("cafe\u0301"), index.find("a.b")) == (0, 1)


def test_names_may_be_encoded_as_in_addresses() -> None:
    index = NameIndex(["/set/my part.jpg", "/set/a%20b.jpg", "/set/a b.jpg"])
    assert index.find("set/my%20part.jpg") == 0
    assert index.find("a%20b.jpg") == 1  # the name as it is comes first
    assert index.find("a b.jpg") == 2
    with pytest.raises(DataError, match=r"no image is named 'c%20d\.jpg'"):
        index.find("c%20d.jpg")


def test_a_name_of_two_images_needs_its_folder_or_split() -> None:
    index = NameIndex(["/test/images/train/a.jpg", "/test/images/val/a.jpg"])
    with pytest.raises(DataError, match=r"2 images are named 'a.jpg'; name them with their folder"):
        index.find("a.jpg")
    assert (index.find("a.jpg", "val"), index.find("train/a.jpg")) == (1, 0)
    assert index.find("a", source="/test/images/val/labels/deep/a.xml") == 1
    with pytest.raises(DataError, match="name them with their folder"):
        index.find("a", source="/test/labels/a.xml")


def test_a_set_with_a_box_from_zero_counts_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = item((0, 10, 200, 100)) + item((20, 30, 40, 50))
    with caplog.at_level("INFO"):
        boxes = read(tmp_path, body).boxes
    assert boxes[:, 1:] == pytest.approx(
        np.array([[0.5, 0.55, 1, 0.9], [0.15, 0.4, 0.1, 0.2]], np.float32)
    )
    assert "counted from 0, as in" in caplog.text


@pytest.mark.parametrize("size", [(0, 0), ("", "")])
def test_a_size_that_is_not_known_is_none(size: tuple[object, object], tmp_path: Path) -> None:
    assert len(read(tmp_path, item((1, 1, 9, 9)), size=size).boxes) == 1


@pytest.mark.parametrize(
    "turn",
    [
        "<robndbox><cx>9</cx><angle>0.5</angle></robndbox>",
        "<attributes><attribute><name>rotation</name><value>45.0</value></attribute></attributes>",
    ],
)
def test_boxes_that_are_turned_are_refused(turn: str, tmp_path: Path) -> None:
    body = item((1, 1, 9, 9)).replace("</object>", f"{turn}</object>")
    with pytest.raises(DataError, match=r"object 1: a box rotated by (0\.5|45\.0) degrees"):
        read(tmp_path, body)
    still = body.replace("45.0", "0.0").replace("0.5", "0")
    assert len(read(tmp_path, still).boxes) == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [8, 9, 8000])
def test_many_images_of_one_name_are_told_apart_by_their_folders_in_time(count: int) -> None:
    index = NameIndex([f"/set/{number:04}/image.png" for number in range(count)])
    for number in range(count):
        assert index.find(f"{number:04}/image.png") == number
    assert index.find("/set/0003/image") == 3
    message = f"{count} images are named 'image.png'; name them with their folder"
    with pytest.raises(DataError, match=message):
        index.find("image.png")
    for name in ("9999/image.png", "3/image.png"):  # the end of a folder's name is not its name
        with pytest.raises(DataError, match="no image is named"):
            index.find(name)


@pytest.mark.parametrize("named", ["1.jpg", "1", "D:\\pictures\\1.png"])
def test_a_file_that_names_another_image_is_refused(named: str, tmp_path: Path) -> None:
    body = item((1, 1, 9, 9))
    assert len(read(tmp_path, f"<filename>9.jpg</filename>{body}").boxes) == 1
    with pytest.raises(DataError, match=r"has the name of .*0.jpg, but its <filename> is .*1.jpg"):
        read(tmp_path, f"<filename>{named}</filename>{body}")
