"""Files of annotations become masks, and what is wrong in them is listed in one pass."""

import base64
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.annotations.mark_files import read_annotations
from lit_data.annotations.marked import Annotated
from lit_data.annotations.marks import counts, outline
from lit_data.core.errors import DataError
from lit_data.datamodules import InspectionDataModule
from lit_data.images.read_options import DEFAULT_READ

SIZE = (20, 30)
BOX = [(5, 4), (15, 4), (15, 12), (5, 12)]  # x, y


def _expected() -> np.ndarray:
    mask = np.zeros(SIZE, np.uint8)
    mask[4:12, 5:15] = 1
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
    crack = [{"id": 3, "name": "crack"}]
    content = {"images": images, "annotations": [annotation], "categories": crack}
    (folder / "instances.json").write_text(json.dumps(content))


def _labelme(folder: Path, points: Any = BOX, kind: str = "polygon") -> None:
    shapes = [{"label": "x", "points": points, "shape_type": kind}]
    content = {"shapes": shapes, "imagePath": "C:\\a.png"}
    (folder / "a.json").write_text(json.dumps(content))


def _csv(folder: Path, *rows: str, head: str = "ImageId,ClassId,EncodedPixels") -> None:
    (folder / "train.csv").write_text("\n".join([head, *rows]))


def _yolo(folder: Path, text: str) -> None:
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text(f"0 {text}")


def _cvat(folder: Path, points: str, shape: str = "") -> None:
    shape = shape or f'<polygon label="x" points="{points}"/>'
    text = f'<annotations><image id="0" name="a.png" width="30" height="20">{shape}</image></annotations>'
    (folder / "annotations.xml").write_text(text)


POINTS = ";".join(f"{x},{y}" for x, y in BOX)
FLAT = [float(value) for point in BOX for value in point]
RUNS = " ".join(map(str, to_runs(_expected())))
COUNTS = _to_counts(_expected())
SPLIT_RUNS = (RUNS.split()[:6], RUNS.split()[6:])
KINDS = {
    "COCO polygons": ("coco", lambda folder: _coco(folder, [FLAT])),
    "COCO counts": ("coco", lambda folder: _coco(folder, {"size": SIZE, "counts": COUNTS})),
    "COCO text": ("coco", lambda folder: _coco(folder, {"size": SIZE, "counts": _pack(COUNTS)})),
    "LabelMe": ("labelme", _labelme),
    "runs": ("csv", lambda folder: _csv(folder, f"a.png,1,{RUNS}", "b.png,,")),
    "runs in several rows": (
        "csv",
        lambda folder: _csv(
            folder,
            *(f"a.png_{1 + 3 * row},{' '.join(runs)}" for row, runs in enumerate(SPLIT_RUNS)),
            head="ImageId_ClassId,EncodedPixels",
        ),
    ),
    "YOLO": ("yolo", lambda folder: _yolo(folder, " ".join(f"{x / 30} {y / 20}" for x, y in BOX))),
    "CVAT": ("cvat", lambda folder: _cvat(folder, POINTS)),
    "rectangle of LabelMe": ("labelme", lambda folder: _labelme(folder, BOX[::2], "rectangle")),
    "box of CVAT": (
        "cvat",
        lambda folder: _cvat(folder, "", '<box label="x" xtl="5" ytl="4" xbr="15" ybr="12"/>'),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        cv2.imwrite(str(tmp_path / name), np.full(SIZE, 100, np.uint8))
    return tmp_path


def draw_masks(
    annotated: Annotated, images: list[Path], classes: list[str] | None = None
) -> list[tuple[int, np.ndarray]]:
    drawn = annotated.draw(images, DEFAULT_READ, classes)
    return [(image.number, image.mask) for image in drawn]


def _draw(folder: Path, classes: list[str] | None = None) -> tuple[str, dict[int, np.ndarray]]:
    images = [folder / "a.png", folder / "b.png"]
    annotated = read_annotations(folder, images)
    masks = dict(draw_masks(annotated, images, classes))
    annotated.problems.raise_if_any(f"{len(annotated.problems)} annotations are bad")
    return annotated.layout, masks


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_annotation(
    name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout, write = KINDS[name]
    write(folder)
    found, masks = _draw(folder)
    assert found == layout
    assert_array_equal(masks[0], _expected())
    assert not masks.get(1, np.zeros(1)).any()
    cache = str(tmp_path_factory.mktemp("cache"))
    data = InspectionDataModule(str(folder), patch_px=8, splits={"train": 1.0}, cache_dir=cache)
    data.setup("fit")
    assert data.describe()["layout"] == layout
    mask = data.read_mask(0)
    assert_array_equal(mask > 0, _expected() > 0)


def test_a_circle_of_labelme_is_filled(folder: Path) -> None:
    _labelme(folder, [(15, 10), (15, 6)], "circle")
    rows, columns = np.mgrid[:20, :30] + 0.5
    expected = np.hypot(columns - 15, rows - 10) < 4
    assert_array_equal(_draw(folder)[1][0] > 0, expected)


def _cut(folder: Path, corners: Any, cut: np.ndarray) -> None:
    _labelme(folder, corners, "mask")
    content = json.loads((folder / "a.json").read_text())
    png = cv2.imencode(".png", cut)[1]
    content["shapes"][0]["mask"] = base64.b64encode(png.tobytes()).decode()
    (folder / "a.json").write_text(json.dumps(content))


@pytest.mark.parametrize("last", [(28.0, 17.0), (29.0, 18.0)], ids=["within", "behind"])
def test_a_mask_of_labelme_lies_in_its_box(last: tuple[float, float], folder: Path) -> None:
    cut = (np.arange(6 * 9).reshape(6, 9) % 3 > 0).astype(np.uint8)
    _cut(folder, [(20.0, 12.0), last], cut)
    expected = np.zeros(SIZE, np.uint8)
    expected[12:18, 20:29] = cut
    assert_array_equal(_draw(folder)[1][0], expected)


@pytest.mark.parametrize(
    ("corners", "size", "message"),
    [
        ([(20, 12), (28, 17)], (60, 90), "a mask of 60 x 90 px at row 12, column 20 to row 17"),
        ([(20, 15), (28, 20)], (6, 9), "column 28 of an image of 20 x 30 px"),
    ],
)
def test_a_mask_of_labelme_that_leaves_its_box_is_refused(
    corners: Any, size: tuple[int, int], message: str, folder: Path
) -> None:
    _cut(folder, corners, np.zeros(size, np.uint8))
    with pytest.raises(DataError, match=rf"{message}(.|\n)*1 annotations are bad"):
        _draw(folder)


LINESTRIP = partial(_labelme, kind="linestrip")
BOX_ALONE = partial(_coco, bbox=[1, 1, 9, 9])
POLYLINE = partial(_cvat, shape='<polyline label="x" points="1,1;9,9"/>')
FAULTS = [
    (_coco, [[0, 0, 50, 0, 50, 10]], "an outline that leaves the image of 20 x 30 px"),
    (_coco, [], "an outline of 0 points; at least three are needed"),
    (_labelme, BOX[:2], "an outline of 2 points"),
    (LINESTRIP, BOX, "a 'linestrip' has no area: draw a polygon around it, or delete it"),
    (partial(_labelme, kind="cuboid"), BOX, "a 'cuboid': polygons, rectangles, circles and masks"),
    (partial(_labelme, kind="mask"), BOX[:2], "a mask that is not an image in a box of two points"),
    (BOX_ALONE, [], "a box without an outline; experiment=detection trains on boxes"),
    (POLYLINE, "", "a.png, polyline 0: .*a polyline: polygons, boxes, ellipses and masks are read"),
    (_cvat, "a,b", "an outline that is not a list of points"),
    (_csv, "a.png,1,595 10", "runs up to pixel 604 of an image of 600"),
    (_csv, "a.png,1,595 1 7", "runs of 3 numbers"),
    (_csv, "a.png,1,x", "runs that are not whole numbers"),
    (_csv, f"a.png,1,{2**62} {2**62}", f"runs up to pixel {2**62} of"),
    (_csv, f"a.png,1,{RUNS}\nc.png,1,1 1", r"row 3: .*"),
    (_coco, {"size": [5, 5], "counts": [25]}, r"runs of an image of \[5, 5\]"),
    (_coco, {"size": 5, "counts": [600]}, "runs of an image of 5, found"),
    (_coco, {"size": SIZE, "counts": "oooo"}, "runs that cannot be read"),
    (_coco, {"size": SIZE, "counts": "\u00e9"}, "runs that cannot be read"),
    (_coco, {"size": SIZE, "counts": [2**62] * 4}, f"runs up to pixel {2**62} of"),
    (_coco, [[10**400] * 6], "an outline that is not a list of points"),
    (_cvat, ";".join(["9" * 400 + ",1"] * 3), "an outline that leaves the image"),
    (partial(_coco, image_id=10**400), [FLAT], "an image 10{79} that images does not hold"),
    (partial(_coco, image_id=9), [FLAT], "an image 9 that images does not hold"),
    (partial(_coco, category_id=9), [FLAT], "a category 9 that categories does not hold"),
]


@pytest.mark.parametrize(("write", "content", "message"), FAULTS, ids=range(len(FAULTS)))
def test_what_does_not_fit_is_listed(
    write: Callable[..., None], content: Any, message: str, folder: Path
) -> None:
    write(folder, content)
    with pytest.raises(DataError, match=rf"{message}(.|\n)*1 annotations are bad"):
        _draw(folder)


@pytest.mark.parametrize("name", ["notes.json", "table.csv", "classes.txt", "settings.xml"])
def test_other_files_are_left_alone(name: str, folder: Path) -> None:
    texts = {
        "notes.json": '{"a": 1}',
        "table.csv": "name,size\na,1",
        "classes.txt": "crack\nhole\n",
    }
    (folder / name).write_text(texts.get(name, "<settings/>"))
    found = read_annotations(folder, [folder / "a.png", folder / "b.png"])
    assert found is None or not found.marks


def test_an_outline_thinner_than_a_pixel_still_marks_some(folder: Path) -> None:
    _coco(folder, [[3.1, 3.1, 3.2, 3.1, 3.2, 3.2]])
    assert np.argwhere(_draw(folder)[1][0]).tolist() == [[3, 3]]


def _read(folder: Path) -> Any:
    return read_annotations(folder, [folder / "a.png", folder / "b.png"])


def test_categories_become_the_numbers_of_classes(folder: Path) -> None:
    second = " ".join(str(number) for number in to_runs(np.roll(_expected(), 12, axis=1)))
    _csv(folder, f"a.png,2,{RUNS}", f"a.png,1,{second}", "b.png,7,1 3")
    assert sorted(np.unique(_draw(folder)[1][0])) == [0, 1]
    masks = _draw(folder, ["2", "1"])[1]
    assert (masks[0] == 1).sum() == (masks[0] == 2).sum() == (_expected() > 0).sum()
    assert not masks[1].any()  # a category that is not asked for
    assert _read(folder).count_categories() == {"2": 1, "1": 1, "7": 1}


def test_classes_that_overlap_are_listed_with_their_image(folder: Path) -> None:
    part = " ".join(str(number) for number in to_runs(np.roll(_expected(), 4, axis=1)))
    _csv(folder, f"a.png,1,{RUNS}", f"a.png,2,{part}")
    message = r"row 3: .*a\.png: '2' overlaps other classes in 48(.|\n)*1 annotations are bad"
    with pytest.raises(DataError, match=message):
        _draw(folder, ["1", "2"])
    annotated = _read(folder)
    list(draw_masks(annotated, [folder / "a.png", folder / "b.png"], ["1", "2"]))
    assert annotated.bad == {0}


def test_names_of_yolo_classes_come_from_the_file_beside_them(folder: Path) -> None:
    KINDS["YOLO"][1](folder)
    (folder / "data.yaml").write_text("names: [crack, pit]\n")
    assert _read(folder).count_categories() == {"crack": 1}


@pytest.mark.parametrize("text", ["[" * 200_000, f'{{"shapes": {"9" * 5_000}}}'], ids=range(2))
def test_json_that_python_does_not_take_is_named_in_a_line(text: str, folder: Path) -> None:
    _labelme(folder)
    (folder / "b.json").write_text(text)
    message = r"b\.json: damaged JSON: .*\n1 annotations are bad$"
    with pytest.raises(DataError, match=message) as raised:
        _draw(folder)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("name", ["instances.json", "train.csv", "annotations.xml"])
def test_a_link_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    inside = folder / "set"
    inside.mkdir()
    KINDS["LabelMe"][1](folder)
    (inside / name).symlink_to(folder / "a.json")
    with pytest.raises(DataError, match=rf"{name}: leads out of the data folder, to .*a\.json"):
        read_annotations(inside, [folder / "a.png"])
    (inside / name).unlink()
    (inside / "kept.txt").write_text("{}")
    (inside / name).symlink_to("kept.txt")
    assert read_annotations(inside, [folder / "a.png"]) is None


BOX_PX = [2, 0, 1, 4]  # of the pixels 8 to 11 of an image of 4 x 5


@pytest.mark.parametrize(("area", "bbox"), [(4, None), (4, BOX_PX), (9, [2, 0, 1, 9]), (0, BOX_PX)])
def test_a_last_run_without_marks_may_be_missing(area: int, bbox: Any) -> None:
    drawn = counts({"size": [4, 5], "counts": [8, 4]}, area, bbox)((4, 5))
    assert drawn.marked.sum() == 4


@pytest.mark.parametrize(
    ("lengths", "area", "bbox"),
    [
        ([], 4, BOX_PX),
        ([8], 4, BOX_PX),
        ([8, 4, 7], 4, BOX_PX),
        ([8, 4], 5, BOX_PX),
        ([8, 4], 12, [2, 0, 3, 4]),
        ([8, 4], None, None),
        ([8, 4], "4", ["2", 0, 1, 4]),
    ],
)
def test_runs_that_are_cut_off_are_no_smaller_object(
    lengths: list[int], area: Any, bbox: Any
) -> None:
    with pytest.raises(DataError, match=r"runs that end at pixel \d+ of an image of 20"):
        counts({"size": [4, 5], "counts": lengths}, area, bbox)((4, 5))


def _zigzag(points: int) -> list[float]:
    """An outline that crosses all rows of an image of 2,000 x 2,000 px with each edge."""
    numbers = np.arange(points)
    corners = np.stack([numbers % 2000, np.where(numbers % 2, 1900.0, 20.0)], axis=1)
    return corners.reshape(-1).tolist()


def test_a_million_points_or_letters_take_no_long_time() -> None:
    angles, size = np.linspace(0, 2 * np.pi, 10**6, endpoint=False), (2000, 2000)
    begin = time.perf_counter()
    points = 1000 + 900 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    marked = outline(points.reshape(-1).tolist())(size).marked
    assert marked.sum() == pytest.approx(np.pi * 900**2, rel=1e-3)
    with pytest.raises(DataError, match=r"crosses the rows of its image 1880000000 times"):
        outline(_zigzag(10**6))(size)
    with pytest.raises(DataError, match="runs that cannot be read"):
        counts({"size": list(size), "counts": "o" * 10**6 + "0"})(size)
    assert time.perf_counter() - begin < 15


def _whole(kind: str, side: int) -> dict[str, Any]:
    corners = [[0, 0], [side, 0], [side, side], [0, side]]
    if kind == "labelme":
        return {"label": "x", "points": corners}
    runs = {"size": [side, side], "counts": [0, side * side]}
    segmentation = [np.ravel(corners).tolist()] if kind == "polygon" else runs
    return {"image_id": 1, "category_id": 1, "segmentation": segmentation}


@pytest.mark.parametrize("kind", ["labelme", "polygon", "runs"])
def test_shapes_that_cover_an_image_again_and_again_end_in_a_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, count = 100, 10_000
    monkeypatch.setattr("lit_data.annotations.marks.MOST_DRAWN_PX", 10**6)
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((side, side), np.uint8))
    shapes = [_whole(kind, side)] * count
    content = {"shapes": shapes}
    if kind != "labelme":
        images = [{"id": 1, "file_name": "a.png"}]
        categories = [{"id": 1, "name": "x"}]
        content = {"images": images, "annotations": shapes, "categories": categories}
    (tmp_path / "a.json").write_text(json.dumps(content))
    annotated = read_annotations(tmp_path, [tmp_path / "a.png"])
    [(_, mask)] = draw_masks(annotated, [tmp_path / "a.png"], ["x"])
    assert (mask == 1).all()
    assert annotated.bad == {0}
    [(where, message)] = annotated.problems.entries
    assert where.endswith("[256]")
    assert message.endswith(
        "a.png: 10000 shapes that cover it more than 256 times over; remove shapes that cover "
        "most of the image, or skip the image with data.exclude"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (5, "5 is not a shape"),
        ("x", "'x' is not a shape"),
        (None, "None is not a shape"),
        ({"label": "a", "points": 5}, "the point 5 is not x and y"),
        ({"label": "a", "points": [[1]]}, r"the point \[1\] is not x and y"),
        ({"label": "a", "points": [["1", 2]]}, "is not x and y"),
        ({"label": "a", "points": [[1e308, 5], [5, 5], [1, 1]]}, "is not x and y"),
        ({"label": "a", "points": [[10**400, 5]]}, "is not x and y"),
        ({"label": "a", "points": [[float("nan"), 5]]}, "is not x and y"),
    ],
)
def test_a_shape_of_labelme_that_is_none_is_named(
    shape: object, message: str, folder: Path
) -> None:
    _labelme(folder)
    content = json.loads((folder / "a.json").read_text())
    content["shapes"].append(shape)
    (folder / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"shapes\[1\]: .*{message}"):
        _draw(folder)


@pytest.mark.parametrize("name", ["a.json", "runs.csv", "shapes.xml", "a.txt"])
def test_a_pipe_or_a_broken_link_is_named(name: str, folder: Path) -> None:
    os.mkfifo(folder / name)
    with pytest.raises(DataError, match=rf"{name}: not a regular file \(a named pipe\)"):
        _read(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("gone")
    with pytest.raises(DataError, match=rf"{name}: a broken link to gone"):
        _read(folder)


@pytest.mark.parametrize("label", [[1], {"x": 1}, None, 5])
def test_a_label_that_is_no_text_is_named(label: object, folder: Path) -> None:
    shape = {"label": label, "points": BOX}
    (folder / "a.json").write_text(json.dumps({"shapes": [shape]}))
    with pytest.raises(DataError, match=r"shapes\[0\]: the label .* is not a text"):
        _read(folder).problems.raise_if_any("bad")
