"""Label files that are not read are known by how they begin."""

from pathlib import Path

import pytest

from lit_data.annotations.formats import add_label_files, find_format, sort_by_format
from lit_data.core.leftovers import Leftovers
from tests.datasets.contents import WRITERS

TEXTS = {
    "YOLO boxes": "0 0.5 0.5 0.25 .25",
    "YOLO polygons": "0 .1 .1 .6 .1 .6 .6\r\n",
    "KITTI": "Car 0.00 0 -1.57 599.41 156.40 629.75 189.25 2.85 2.63 12.34 0.47 1.49 69.44 -1.56",
    "DOTA": "imagesource:GoogleEarth\ngsd:0.14\n1 1 9 1 9 9 1 9 plane 0",
    "boxes in pixels": "1,1,912,484,97,109,0,7,1\n",
    "": "These images were taken in November 2025.",
}
CONTENTS = {
    "coco": ("a.json", "COCO"),
    "captions": ("a.json", "COCO captions"),
    "panoptic": ("a.json", "COCO panoptic"),
    "segment_anything": ("a.json", "segment-anything"),
    "datumaro": ("a.json", "Datumaro"),
    "labelme": ("a.json", "LabelMe"),
    "cvat": ("a.xml", "CVAT"),
    "cvat_video": ("a.xml", "CVAT for video"),
    "voc": ("a.xml", "VOC"),
    "runs": ("a.csv", "CSV of run lengths"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_formats_of_text_are_known(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXTS[name].encode())
    assert find_format(path, tmp_path) == name


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jpg.json", '{"objects": [{"geometryType": "polygon"}]}', "Supervisely"),
        ("a.ndjson", '{"data_row": {"external_id": "a.jpg"}}', "JSON lines"),
    ],
)
def test_formats_of_json_are_known(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert find_format(tmp_path / name, tmp_path) == expected


@pytest.mark.parametrize("content", CONTENTS)
def test_formats_of_programs_are_known(content: str, tmp_path: Path) -> None:
    name, label_format = CONTENTS[content]
    WRITERS[content](tmp_path / name, "", ["a.jpg"])
    assert find_format(tmp_path / name, tmp_path) == label_format
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text, encoding="utf-16")  # as programs of Windows write XML
    assert find_format(tmp_path / name, tmp_path) in (label_format, "")


def test_empty_files_links_to_nothing_and_links_outside_have_no_format(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").touch()
    (folder / "b.txt").symlink_to("nothing.txt")
    (tmp_path / "c.txt").write_text(TEXTS["YOLO boxes"])
    (folder / "c.txt").symlink_to(tmp_path / "c.txt")
    assert [find_format(folder / name, folder) for name in ("a.txt", "b.txt", "c.txt")] == [""] * 3


def test_one_of_many_files_of_a_folder_is_read(tmp_path: Path) -> None:
    names = [f"{folder}/{number:02}.txt" for folder in ("a", "b") for number in range(20)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = TEXTS["YOLO boxes"] if name.startswith("a") else TEXTS["KITTI"]
        (tmp_path / name).write_text(text if name.endswith("01.txt") else "")  # 00 shows no object
    assert sort_by_format(tmp_path, {".txt": names}) == {
        "YOLO boxes": names[:20],
        "KITTI": names[20:],
    }


@pytest.mark.parametrize(
    ("purpose", "cure"),
    [
        ("masks", "other masks are used first; data.exclude skips them"),
        ("boxes", "data.annotations=b.json reads it"),
        ("classes", "experiment=segmentation trains on masks"),
        ("pairs", "convert it to masks, and name the folder of the masks with data.masks"),
    ],
)
def test_the_cure_is_that_of_the_reader(purpose: str, cure: str, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        WRITERS["coco"](tmp_path / name, "", ["a.jpg"])
    leftovers = Leftovers()
    leftovers.take(tmp_path, {".json": ["a.json", "b.json"]}, ())
    add_label_files(leftovers, tmp_path, purpose, [tmp_path / "a.json"])
    assert leftovers.describe() == [f"1 label file (COCO) is not used: b.json; {cure}"]
