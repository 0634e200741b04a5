"""What lies in a folder and is not used is counted by cause, logged once, and named in messages."""

import logging
from pathlib import Path

import pytest

from lit_data.core.errors import DataError
from lit_data.core.leftovers import Leftovers
from lit_data.images.discovery import find_images
from tests.helpers.files import touch


def _walk(folder: Path, **options: list[str]) -> Leftovers:
    leftovers = Leftovers()
    find_images(folder, leftovers=leftovers, **options)
    return leftovers


def test_files_of_other_types_are_counted_by_cause(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", *(f"x/{n}.JP2" for n in range(5)), "b.zip", "v.nii.gz", "w.nrrd")
    touch(tmp_path, "notes.md", "train.py", ".hidden.zip", "__MACOSX/c.zip")
    assert _walk(tmp_path).describe() == [
        "5 images have a type that is not read: x/0.JP2, x/1.JP2, x/2.JP2 and 2 more; "
        "save them as PNG or TIFF",
        "1 archive is not read: b.zip; unpack them into files",
        "1 volume is not an image: v.nii.gz; experiment=ct_segmentation reads them",
        "1 volume has a type that is not read: w.nrrd; save them as NIfTI",
    ]


def test_what_is_excluded_is_not_counted(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "old/b.zip", "c.zip")
    assert _walk(tmp_path, exclude=["old"]).describe() == [
        "1 archive is not read: c.zip; unpack them into files"
    ]


def test_a_line_is_logged_once_and_not_after_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leftovers = _walk(touch(tmp_path, "a.png", "b.zip"))
    for _ in range(2):
        leftovers.log()
    assert caplog.text.count("b.zip") == 1
    leftovers.add(
        "image has no label file",
        "images have no label file",
        ["a.png"],
        "they count as without an object",
    )
    assert leftovers.quote().count("\n") == 2
    leftovers.log()
    assert "label file" not in caplog.text


def test_of_many_causes_those_of_most_files_are_logged() -> None:
    leftovers = Leftovers()
    for number in range(9):
        leftovers.add(
            f"file of kind {number}", f"files of kind {number}", ["a"] * (number + 1), "leave them"
        )
    lines = leftovers.describe()
    assert [line.split()[0] for line in lines] == ["9", "8", "7", "6", "5", "4"]


def test_a_folder_without_images_says_what_is_there_and_what_is_read(tmp_path: Path) -> None:
    touch(tmp_path, "train.tfrecord", "a.zip", "notes.md")
    with pytest.raises(DataError) as refusal:
        find_images(tmp_path)
    message = str(refusal.value)
    assert "found 3 of another type; .png, .jpg" in message
    assert "2 archives are not read: a.zip, train.tfrecord; unpack them into files" in message


def test_control_characters_of_names_are_escaped(tmp_path: Path) -> None:
    assert "\\x1b" in _walk(touch(tmp_path, "a.png", "b\x1b[31m.zip")).describe()[0]
