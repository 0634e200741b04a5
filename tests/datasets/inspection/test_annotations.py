"""Files of annotations become masks, and what is wrong in them is listed in one pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.datasets.inspection.annotations import draw_masks, read_annotations, read_table
from lit_data.errors import DataError

SIZE = (20, 30)
BOX = [(5, 4), (15, 4), (15, 12), (5, 12)]  # x, y


def _expected() -> np.ndarray:
    mask = np.zeros(SIZE, np.uint8)
    mask[4:12, 5:15] = 255
    return mask


def to_runs(mask: np.ndarray) -> list[int]:
    """Starts from 1 and lengths, column by column."""
    flat = np.concatenate([[0], mask.T.reshape(-1) > 0, [0]]).astype(int)
    begins, ends = np.flatnonzero(np.diff(flat) == 1), np.flatnonzero(np.diff(flat) == -1)
    return np.stack([begins + 1, ends - begins], axis=1).reshape(-1).tolist()


def _to_counts(mask: np.ndarray) -> list[int]:
    flat = (mask.T.reshape(-1) > 0).astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    found = np.diff([0, *edges.tolist(), len(flat)]).tolist()
    return found if not flat[0] else [0, *found]


def _pack(counts: list[int]) -> str:
    """COCO's text of counts."""
    text = ""
    for place, count in enumerate(counts):
        value, more = count - (counts[place - 2] if place > 2 else 0), True
        while more:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text += chr(bits + (32 if more else 0) + 48)
    return text


def _coco(folder: Path, segmentation: Any, **changed: Any) -> None:
    images = [{"id": 1, "file_name": "a.png", "width": 30, "height": 20}]
    images.append({"id": 2, "file_name": "b.png", "width": 30, "height": 20})
    annotation = {"id": 1, "image_id": 1, "category_id": 3, "segmentation": segmentation, **changed}
    content = {"images": images, "annotations": [annotation], "categories": [{"id": 3, "name": "crack"}]}
    (folder / "instances.json").write_text(json.dumps(content))


def _labelme(folder: Path, points: Any = BOX, kind: str = "polygon") -> None:
    content = {"shapes": [{"label": "x", "points": points, "shape_type": kind}], "imagePath": "C:\\a.png"}
    (folder / "a.json").write_text(json.dumps(content))


def _csv(folder: Path, *rows: str, head: str = "ImageId,ClassId,EncodedPixels") -> None:
    (folder / "train.csv").write_text("\n".join([head, *rows]))


def _yolo(folder: Path, text: str) -> None:
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text(text)


def _cvat(folder: Path, points: str) -> None:
    polygon = f'<polygon label="x" points="{points}"/>'
    text = f'<annotations><image id="0" name="a.png" width="30" height="20">{polygon}</image></annotations>'
    (folder / "annotations.xml").write_text(text)


FLAT = [float(value) for point in BOX for value in point]
RUNS = " ".join(map(str, to_runs(_expected())))
KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "COCO polygons": ("coco", lambda folder: _coco(folder, [FLAT])),
    "COCO counts": ("coco", lambda folder: _coco(folder, {"size": SIZE, "counts": _to_counts(_expected())})),
    "COCO text": ("coco", lambda folder: _coco(folder, {"size": SIZE, "counts": _pack(_to_counts(_expected()))})),
    "LabelMe": ("labelme", _labelme),
    "runs": ("csv", lambda folder: _csv(folder, f"a.png,1,{RUNS}", "b.png,,")),
    "runs in several rows": (
        "csv",
        lambda folder: _csv(
            folder,
            f"a.png_1,{' '.join(RUNS.split()[:6])}",
            f"a.png_4,{' '.join(RUNS.split()[6:])}",
            head="ImageId_ClassId,EncodedPixels",
        ),
    ),
    "YOLO": ("yolo", lambda folder: _yolo(folder, "0 " + " ".join(f"{x / 30} {y / 20}" for x, y in BOX))),
    "CVAT": ("cvat", lambda folder: _cvat(folder, ";".join(f"{x},{y}" for x, y in BOX))),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        cv2.imwrite(str(tmp_path / name), np.full(SIZE, 100, np.uint8))
    return tmp_path


def _draw(folder: Path, classes: list[str] | None = None) -> tuple[str, dict[int, np.ndarray]]:
    images = [folder / "a.png", folder / "b.png"]
    annotated = read_annotations(folder, images)
    assert annotated is not None
    masks = dict(draw_masks(annotated, images, classes))
    annotated.problems.raise_if_any(f"{len(annotated.problems)} annotations are bad")
    return annotated.layout, masks


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_gives_the_same_mask(name: str, folder: Path) -> None:
    layout, write = KINDS[name]
    write(folder)
    found, masks = _draw(folder)
    assert found == layout
    np.testing.assert_array_equal(masks[0], _expected())
    assert not masks.get(1, np.zeros(1)).any()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "outside": (lambda f: _coco(f, [[0, 0, 50, 0, 50, 10]]), "an outline that leaves the image of 20 x 30 px"),
    "empty polygon": (lambda f: _coco(f, []), "an outline of 0 points; three at least are needed"),
    "two points": (lambda f: _labelme(f, BOX[:2]), "an outline of 2 points"),
    "no polygon": (lambda f: _labelme(f, BOX, "circle"), "a circle: polygons are read"),
    "no numbers": (lambda f: _cvat(f, "a,b"), "an outline that is no list of points"),
    "beyond the image": (lambda f: _csv(f, "a.png,1,595 10"), "runs up to pixel 604 of an image of 600"),
    "half a run": (lambda f: _csv(f, "a.png,1,595 1 7"), "runs of 3 numbers"),
    "no run": (lambda f: _csv(f, "a.png,1,x"), "runs that are no whole numbers"),
    "another size": (lambda f: _coco(f, {"size": [5, 5], "counts": [25]}), r"runs of an image of \[5, 5\]"),
    "cut text": (lambda f: _coco(f, {"size": SIZE, "counts": "oooo"}), "runs that cannot be read"),
    "unknown category": (lambda f: _coco(f, [FLAT], category_id=9), "a category 9 that categories does not hold"),
    "unknown image": (lambda f: _coco(f, [FLAT], image_id=9), "an image 9 that images does not hold"),
    "no such image": (lambda f: _csv(f, f"a.png,1,{RUNS}", "c.png,1,1 1"), r"row 3: .*"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_listed(name: str, folder: Path) -> None:
    write, message = FAULTS[name]
    write(folder)
    with pytest.raises(DataError, match=rf"{message}(.|\n)*1 annotations are bad"):
        _draw(folder)


def test_several_faults_are_listed_together(folder: Path) -> None:
    _csv(folder, "a.png,1,595 10", "b.png,1,7", "d.png,1,1 1")
    with pytest.raises(DataError, match=r"(.*\n){3}3 annotations are bad"):
        _draw(folder)


@pytest.mark.parametrize("name", ["notes.json", "table.csv", "classes.txt", "settings.xml"])
def test_other_files_are_left_alone(name: str, folder: Path) -> None:
    texts = {"notes.json": '{"a": 1}', "table.csv": "name,size\na,1", "classes.txt": "crack\nhole\n"}
    (folder / name).write_text(texts.get(name, "<settings/>"))
    found = read_annotations(folder, [folder / "a.png", folder / "b.png"])
    assert found is None or not found.marks


def test_an_outline_thinner_than_a_pixel_still_marks_some(folder: Path) -> None:
    _coco(folder, [[3.1, 3.1, 3.2, 3.1, 3.2, 3.2]])
    assert np.argwhere(_draw(folder)[1][0]).tolist() == [[3, 3]]


def test_an_outline_with_a_notch_is_filled_by_its_middles(folder: Path) -> None:
    corners = [2, 2, 12, 2, 12, 12, 7, 6, 2, 12]
    _coco(folder, [corners])
    mask = _draw(folder)[1][0] > 0
    assert mask[3, 2:12].all()
    assert not mask[11, 5:9].any()
    assert mask.sum() == pytest.approx(100 - 30, abs=4)  # the square without the notch


def test_categories_become_the_numbers_of_classes(folder: Path) -> None:
    second = " ".join(str(number) for number in to_runs(np.roll(_expected(), 12, axis=1)))
    _csv(folder, f"a.png,2,{RUNS}", f"a.png,1,{second}", "b.png,7,1 3")
    assert sorted(np.unique(_draw(folder)[1][0])) == [0, 255]
    masks = _draw(folder, ["2", "1"])[1]
    assert (masks[0] == 1).sum() == (_expected() > 0).sum()
    assert (masks[0] == 2).sum() == (_expected() > 0).sum()
    assert not masks[1].any()  # a category that is not asked for
    annotated = read_annotations(folder, [folder / "a.png", folder / "b.png"])
    assert annotated is not None
    assert annotated.count_categories() == {"2": 1, "1": 1, "7": 1}


def test_classes_that_overlap_are_listed_with_their_image(folder: Path) -> None:
    part = " ".join(str(number) for number in to_runs(np.where(np.arange(30) < 9, _expected(), 0)))
    _csv(folder, f"a.png,1,{RUNS}", f"a.png,2,{part}")
    with pytest.raises(
        DataError, match=r"row 3: .*a\.png: '2' overlaps other classes in 32(.|\n)*1 annotations are bad"
    ):
        _draw(folder, ["1", "2"])
    annotated = read_annotations(folder, [folder / "a.png", folder / "b.png"])
    assert annotated is not None
    list(draw_masks(annotated, [folder / "a.png", folder / "b.png"], ["1", "2"]))
    assert annotated.bad == {0}


def test_names_of_yolo_classes_come_from_the_file_beside_them(folder: Path) -> None:
    KINDS["YOLO"][1](folder)
    (folder / "data.yaml").write_text("names: [crack, pit]\n")
    annotated = read_annotations(folder, [folder / "a.png", folder / "b.png"])
    assert annotated is not None
    assert annotated.count_categories() == {"crack": 1}


@pytest.mark.parametrize("layout", ["images/train/1.png labels/train/1.txt", "train/1.png train/1.txt"])
def test_label_files_find_the_image_of_their_folder(layout: str, tmp_path: Path) -> None:
    image, label = layout.split()
    for split, x in (("train", 0.1), ("val", 0.5)):
        one, two = tmp_path / image.replace("train", split), tmp_path / label.replace("train", split)
        one.parent.mkdir(parents=True, exist_ok=True)
        two.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(one), np.full(SIZE, 9, np.uint8))
        two.write_text(f"0 {x} 0.1 {x + 0.2} 0.1 {x + 0.2} 0.5 {x} 0.5")
    images = [tmp_path / image, tmp_path / image.replace("train", "val")]
    annotated = read_annotations(tmp_path, images)
    assert annotated is not None
    masks = dict(draw_masks(annotated, images))
    assert [int(np.argwhere(masks[number])[0, 1]) for number in (0, 1)] == [3, 15]


def test_values_of_another_kind_are_a_fault_and_no_crash(folder: Path) -> None:
    _labelme(folder)
    (folder / "b.json").write_text(json.dumps({"shapes": [1, 2]}))
    with pytest.raises(DataError, match=r"b\.json: cannot be read \(AttributeError(.|\n)*1 annotations are bad"):
        _draw(folder)


def test_runs_may_be_longer_than_python_takes_for_a_field(tmp_path: Path) -> None:
    image = np.zeros((400, 500), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    every_second = " ".join(f"{start} 1" for start in range(1, image.size, 2))
    assert len(every_second) > 2**17
    _csv(tmp_path, f'a.png,1,"{every_second}"')
    columns, rows = read_table(tmp_path / "train.csv")
    assert list(columns) == ["ImageId", "ClassId", "EncodedPixels"]
    assert rows[0]["EncodedPixels"] == every_second
