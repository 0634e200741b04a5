from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.annotations.labels import Frame, LabelTable
from lit_data.annotations.yolo import read_class_names, read_data_yaml, read_lines, read_yolo_labels
from lit_data.core.errors import ConfigError, DataError

CLASSES = ("a", "b", "c")


def read(
    folder: Path, *texts: str | bytes | None, classes: list[str] | None = None, **options: Any
) -> LabelTable:
    """Label files of images of 100 x 200 pixels; None is an image without one."""
    files = [
        None if text is None else folder / f"{number}.txt" for number, text in enumerate(texts)
    ]
    for path, text in zip(files, texts, strict=True):
        if path is not None and text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
    images = [f"{number}.jpg" for number in range(len(texts))]
    return read_yolo_labels(
        images, [Frame((100, 200))] * len(texts), files, names=CLASSES, classes=classes, **options
    )


def test_lines_become_boxes(tmp_path: Path) -> None:
    table = read(tmp_path, "0 .5 0.5 0.2 0.4\n2 0.25 0.25 1e-1 5E-2", None, "1.0 0.1 0.1 0.1 0.1")
    assert table.classes == CLASSES
    assert table.ends.tolist() == [2, 2, 3]
    assert table.boxes == pytest.approx(
        np.array([[0, 0.5, 0.5, 0.2, 0.4], [2, 0.25, 0.25, 0.1, 0.05], [1, 0.1, 0.1, 0.1, 0.1]])
    )


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbf0 .5 .5 .2 .2",
        b"\r\n0 .5 .5 .2 .2\r\n\r\n",
        b"\n \n0\t.5  .5 .2 .2 \n",
        b"\r0 .5 .5 .2 .2\r",
    ],
)
def test_row_54_blank_lines_marks_and_line_ends_are_accepted(tmp_path: Path, text: bytes) -> None:
    assert read(tmp_path, text).boxes == pytest.approx(np.array([[0, 0.5, 0.5, 0.2, 0.2]]))


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_row_56_an_image_without_boxes_is_valid(tmp_path: Path, text: str | None) -> None:
    assert read(tmp_path, text).of(0)[:, 1:].shape == (0, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *[
            (
                f"{value} .5 .5 .2 .2",
                rf"class '{value}' is not allowed; .* from 0 to 2 \(3 classes\)",
            )
            for value in ("1.5", "cat", "NaN", "-1", "3", "99999999999")
        ],
        (" .5 .5 .2 .2", ".* has 4 columns; a box has 5: class cx cy w h; is the class missing"),
        ("0 .5 .5 0 .2", r"box \(0.5, 0.5, 0, 0.2\) has no area"),
        ("0 .5 .5 .2 -.2", r"box \(0.5, 0.5, 0.2, -0.2\) has no area"),
        ("0 .05 .5 .2 .2", ".* is 25 % outside its image of 100 x 200 pixels"),
        ("0 1e-50 .5 1e-50 .2", ".* has no area"),
        ("0 1.5 .5 .2 .2", ".* is outside its image"),
        ("0 .5 .5 .2 .2 .9", ".* has 6 columns; .* confidences"),
        ("0 .1 .1 .3 .1 .3 .3", ".* has 7 columns; a box has 5"),
        ("0 .5 .5", ".* has 3 columns"),
        ("0;.5;.5;.2;.2", ".* holds ';' or ','"),
        ("0 0,5 0,5 0,2 0,2", ".* decimals with a point"),
        ("0 .5 .5 .2 nan", "'nan' is not a finite number"),
        ("0 .5 .5 .2 1_0", "'1_0' is not a finite number"),
        ("0 .5 .5 .2 1e999", ".* not a number of a sensible size"),
    ],
)
def test_rows_50_51_52_54_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=f"0.txt: line 2: {message}"):
        read(tmp_path, f"1 .5 .5 .1 .1\n{line}\n")
    assert read(tmp_path, f"1 .5 .5 .1 .1\n{line}\n", on_bad="skip").ends.tolist() == [1]


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_classes_that_count_from_1_are_recognised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_bad: str
) -> None:
    boxes = [f"{number} .5 .5 .2 .2" for number in (3, 1, 2)]
    table = read(tmp_path, boxes[0], "\n".join(boxes[1:]), on_bad=on_bad)
    assert table.boxes[:, 0].tolist() == [2, 0, 1]
    assert "classes of labels count from 1, not from 0: 1 is a, 3 is c" in caplog.text
    caplog.clear()
    table = read(tmp_path, boxes[1], boxes[2])
    assert table.boxes[:, 0].tolist() == [1, 2]  # none is beyond the names
    assert read(tmp_path, "0 .5 .5 .2 .2", *boxes, on_bad="skip").boxes[:, 0].tolist() == [0, 1, 2]
    assert "count from 1" not in caplog.text


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_row_53_pixels_among_shares_name_the_first_of_each(tmp_path: Path, on_bad: str) -> None:
    first = r"1.txt: line 2: box \(50, 50, 20, 20\) is in pixels, with 1 more of this file; "
    second = r".*0.txt, line 1: box \(0.5, 0.5, 0.2, 0.2\) is in shares of the image; YOLO text"
    with pytest.raises(DataError, match=first + second):
        read(tmp_path, "0 .5 .5 .2 .2", "\n0 50 50 20 20\n0 60 50 20 20", on_bad=on_bad)


def test_all_problems_of_all_files_are_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path, "9 .5 .5 .2 .2\n0 .5 .5 0 0", "0 .5", b"\xff\xfe0", "0 2 .5 .1 .1")
    lines = str(raised.value).splitlines()
    assert lines[-2] == "5 problems with labels:"
    shown = sorted(line.split("/")[-1][:13] for line in lines[:-2])
    first = ["0.txt: line 1", "0.txt: line 2", "1.txt: line 1"]
    assert shown == [*first, "2.txt: not UT", "3.txt: line 1"]


def test_names_keep_odd_characters(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a\x85b.jpg\r\n c.jpg ", encoding="utf-8")
    assert read_lines(tmp_path / "list.txt") == ["a\x85b.jpg", "c.jpg"]


def test_class_names(tmp_path: Path) -> None:
    assert read_class_names(tmp_path) == ()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "classes.txt").write_text("\ufeffred cell\n\nwhite\n", encoding="utf-8")
    assert read_class_names(tmp_path) == ("red cell", "white")
    (tmp_path / "classes.txt").write_text("a\na\n")
    message = r"classes.txt: classes=\['a', 'a'\] must be one or more names, each only once"
    with pytest.raises(DataError, match=message):
        read_class_names(tmp_path)


@pytest.mark.parametrize("names", ["[x, y]", "{0: x, 1: y}", "\n  1: y\n  0: x"])
def test_data_yaml_names_classes_and_splits(tmp_path: Path, names: str) -> None:
    text = "path: sub\ntrain: images/train\nval: [a.txt, b.txt]\nnc: 2\n"
    (tmp_path / "data.yaml").write_text(f"{text}names: {names}\n")
    found = read_data_yaml(tmp_path / "data.yaml")
    assert (found.classes, found.folder) == (("x", "y"), "sub")
    assert found.splits == {"train": ("images/train",), "val": ("a.txt", "b.txt")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "data.yaml: must hold keys such as names"),
        ("names: [x, y]\nnc: 3", "nc is 3, but names holds 2"),
        ("names: {1: x, 2: y}", "names must have the keys 0 to 1"),
        ("names: [yes, no]", "names must be a list of names, .* in quotes"),
        ("names: cat", "names must be a list of names"),
        ("names: [a, a]", "each only once"),
        ("path: 3", "path must be the name of a folder, found int"),
        ("train: [3]", "train must be the name of a folder or list file"),
        ("names: !!python/object/apply:os.getcwd []", "ConstructorError"),
        ("names: [", "cannot be read"),
    ],
)
def test_a_wrong_data_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_data_yaml(tmp_path / "data.yaml")


def test_classes_must_be_names() -> None:
    with pytest.raises(ConfigError, match=r"classes='abc' must be one or more names"):
        read_yolo_labels([], [], [], classes="abc")


@pytest.mark.parametrize("name", ["data.yaml", "dataset.yaml", "cells.yaml", "data.yml"])
def test_the_yaml_of_a_set_may_have_other_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("names: [bright, dark]\ntrain: images\n")
    assert read_class_names(tmp_path) == ("bright", "dark")


def test_classes_go_by_name_where_the_set_names_them(tmp_path: Path) -> None:
    table = read(tmp_path, "0 .5 .5 .2 .2\n2 .5 .5 .2 .2", classes=["c", "d", "a"])
    assert table.classes == ("c", "d", "a")
    assert table.boxes[:, 0].tolist() == [2, 0]
    with pytest.raises(DataError, match="line 1: class 1 is 'b', which is not one of a, c"):
        read(tmp_path, "1 .5 .5 .2 .2", classes=["a", "c"])


def test_numbers_that_no_file_names_are_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.txt").write_text("4 .5 .5 .2 .2\n2 .5 .5 .2 .2")
    with caplog.at_level("INFO"):
        table = read_yolo_labels(["0.jpg"], [Frame((9, 9))], [tmp_path / "0.txt"])
    assert table.classes == ("2", "4")
    assert table.boxes[:, 0].tolist() == [1, 0]
    assert "so they are named by their numbers: 2, 4" in caplog.text
