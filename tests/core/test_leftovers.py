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
        "1 archive is not read: b.zip; unpack it into files",
        "1 volume is not an image: v.nii.gz; experiment=ct_segmentation reads it",
        "1 volume has a type that is not read: w.nrrd; save it as NIfTI",
    ]


def test_what_is_excluded_is_not_counted(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "old/b.zip", "c.zip")
    assert _walk(tmp_path, exclude=["old"]).describe() == [
        "1 archive is not read: c.zip; unpack it into files"
    ]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["a.png"], "1 image has no mask: a.png; it counts as good; data.masks=a.png reads it"),
        (
            ["a.png", "[b|c].png"],
            "2 images have no mask: a.png, [b|c].png; they count as good; data.masks=a.png reads them",
        ),
        (
            ["[b|c].png"],
            "1 image has no mask: [b|c].png; it counts as good; data.masks=[b|c].png reads it",
        ),
    ],
)
def test_words_fit_the_number_of_files(names: list[str], line: str) -> None:
    leftovers = Leftovers()
    cure = "[it counts|they count] as good; data.masks=FILE reads [it|them]"
    leftovers.add("[image has|images have] no mask", names, cure)
    assert leftovers.describe() == [line]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_split_without_labels_has_words_for_one_and_for_many(*, is_left_out: bool) -> None:
    lines = []
    for names in (["a.png"], ["a.png", "b.png"]):
        leftovers = Leftovers()
        leftovers.add_split("val", names, "label file", is_left_out=is_left_out)
        lines += leftovers.describe()
    assert lines[0].startswith("1 image is all of the split val and has no label file: a.png; ")
    assert lines[1].startswith("2 images are all of the split val and have no label file: a.png, ")
    words = [("add a label file, or", "add label files, or")]
    if is_left_out:
        words = [("it is skipped", "they are skipped"), ("add a label file, or", "for each, or")]
    for one, many in words:
        assert one in lines[0]
        assert many in lines[1]


def test_a_line_is_logged_once_and_not_after_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leftovers = _walk(touch(tmp_path, "a.png", "b.zip"))
    for _ in range(2):
        leftovers.log()
    assert caplog.text.count("b.zip") == 1
    leftovers.add(
        "[image has|images have] no label file", ["a.png"], "data.exclude skips [it|them]"
    )
    assert leftovers.quote().count("\n") == 2
    leftovers.log()
    assert "label file" not in caplog.text


def test_of_many_causes_those_of_most_files_are_logged() -> None:
    leftovers = Leftovers()
    for number in range(9):
        leftovers.add(f"[file|files] of kind {number}", ["a"] * (number + 1), "leave [it|them]")
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
