"""Labels of images in text files and in flags."""

import json
from pathlib import Path

import pytest

from lit_data.annotations.tables import read_flag_labels, read_list_labels, split_label
from lit_data.core.errors import DataError


@pytest.mark.parametrize(
    ("line", "image", "label"),
    [
        ("images/1.png 3", "images/1.png", "3"),
        ("images/1.png\tscratch", "images/1.png", "scratch"),
        ("images/1.png, -1", "images/1.png", "-1"),
        ("images/1.png;3", "images/1.png", "3"),
        ("my photo 1.png  cat", "my photo 1.png", "cat"),
        ("images/1.png", "images/1.png", ""),
        ("images/1.png,", "images/1.png,", ""),
    ],
)
def test_a_line_is_an_image_and_its_label(line: str, image: str, label: str) -> None:
    assert split_label(line) == (image, label)


def test_texts_that_are_no_lists_do_no_harm(tmp_path: Path) -> None:
    images = [tmp_path / "1.png", tmp_path / "2.png"]
    (tmp_path / "notes.txt").write_bytes("Lötstellen".encode("latin-1"))
    (tmp_path / ".train.txt").write_bytes(b"\x00\x05\xff")
    (tmp_path / "folder.txt").mkdir()
    assert read_list_labels(tmp_path, images, ()) is None
    (tmp_path / "train.txt").write_text("1.png cat\n2.png dog\n")
    listed = read_list_labels(tmp_path, images, ())
    assert listed is not None
    assert listed.labels == ("cat", "dog")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"a": True, "b": True}, r"2.json: several flags are set \(a, b\)"),
        ({"a": False}, "2.png: an image without a label in the flags of LabelMe files"),
    ],
)
def test_the_only_flag_of_an_image_is_its_label(
    flags: dict[str, bool], message: str, tmp_path: Path
) -> None:
    images = [tmp_path / "1.png", tmp_path / "2.png"]
    (tmp_path / "notes.json").write_text("[]")
    assert read_flag_labels(tmp_path, images, ()) is None
    (tmp_path / "job.json").write_text(json.dumps({"flags": {"a": True}, "imagePath": "x\\1.png"}))
    (tmp_path / "2.json").write_text(json.dumps({"flags": {"b": True, "a": False}}))
    listed = read_flag_labels(tmp_path, images, ())
    assert listed is not None
    assert listed.labels == ("a", "b")
    (tmp_path / "2.json").write_text(json.dumps({"flags": flags}))
    with pytest.raises(DataError, match=message):
        read_flag_labels(tmp_path, images, ())
