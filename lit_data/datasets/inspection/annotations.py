"""Outlines and runs of pixels in files of annotations, drawn as masks once.

Known are COCO instances (polygons, runs as numbers or as text), CSV files with runs of pixels (column by column, from
1, one or several rows an image), YOLO polygons, LabelMe and CVAT polygons. Every category counts as a defect.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.detection.coco import load_coco
from lit_data.datasets.detection.voc import NameIndex, read_xml
from lit_data.datasets.inspection.layouts import Layout
from lit_data.errors import DataError, Problems, show_path
from lit_data.io.images.header import read_header
from lit_data.io.source import open_source, read_whole

MAX_BYTES: Final = 2**30
_BOTH: Final = "imageid_classid"  # of a column that holds both
_IMAGE_COLUMNS: Final = (
    "imageid",
    "image",
    "image_id",
    "filename",
    "file_name",
    "file",
    "name",
    "img",
    _BOTH,
)
_RUN_COLUMNS: Final = ("encodedpixels", "encoded_pixels", "rle", "mask_rle", "runs", "segmentation")
_SLACK_PX: Final = 1.0  # points of outlines may lie so far outside their image

Mask = NDArray[np.uint8]
Draw = Callable[[Mask], None]
"""Marks something in a mask [H, W]; raises `DataError` for what does not fit."""


@dataclass(slots=True)
class Annotated:
    """What files of annotations say.

    Attributes:
        layout: `coco`, `csv`, `yolo`, `labelme` or `cvat`.
        files: Those that were read.
        marks: For the number of each image that is named: where it is said, and what draws it.
        problems: What is wrong with the files.
    """

    layout: Layout
    files: list[Path] = field(default_factory=list)
    marks: dict[int, list[tuple[str, Draw]]] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def add(self, index: NameIndex, name: str, where: str, draw: Draw | None) -> None:
        """Note a mark of an image; None names the image and marks nothing."""
        try:
            number = index.find(name)
        except DataError as error:
            self.problems.add(where, str(error))
            return
        self.marks.setdefault(number, [])
        if draw is not None:
            self.marks[number].append((where, draw))


def read_annotations(folder: Path, images: Sequence[Path]) -> Annotated | None:
    """Read the files of annotations of a folder; None where there are none.

    Args:
        folder: Of the set.
        images: Its images.
    """
    index = NameIndex(images)
    files = [path for path in sorted(folder.rglob("*.*")) if path.is_file() and not path.name.startswith(".")]
    for layout, (suffix, read) in _READERS.items():
        found = Annotated(layout)
        for path in files:
            if path.suffix.lower() == suffix and path.stat().st_size <= MAX_BYTES:
                before = len(found.marks), len(found.problems)
                try:
                    read(path, index, found)
                except DataError as error:
                    found.problems.add(path, str(error))
                if (len(found.marks), len(found.problems)) != before:
                    found.files.append(path)
        if found.marks:
            return found
    return None


def draw_masks(annotated: Annotated, images: Sequence[Path]) -> Iterator[tuple[int, Mask]]:
    """Number and mask [H, W] in {0, 255} of each image that is named.

    Raises:
        DataError: At the end: lists what is wrong.
    """
    problems = annotated.problems
    for number, marks in sorted(annotated.marks.items()):
        try:
            header = read_header(images[number])
        except DataError:
            continue  # the image itself is bad, which is told where images are read
        mask = np.zeros((header.height_px, header.width_px), np.uint8)
        for where, draw in marks:
            try:
                draw(mask)
            except DataError as error:
                problems.add(where, f"{show_path(images[number])}: {error}")
        yield number, mask * np.uint8(255)
    problems.raise_if_any(f"{len(problems)} annotations are bad")


def outline(points: Any, *, scaled: bool = False) -> Draw:  # noqa: ANN401 - numbers as a file gives them
    """What fills an outline.

    Args:
        points: x, y, x, y, ... in px, or shares of the image.
        scaled: They are shares.
    """

    def draw(mask: Mask) -> None:
        try:
            corners = np.asarray(points, np.float64).reshape(-1, 2)
        except (ValueError, TypeError) as error:
            raise DataError("an outline that is no list of points") from error
        size = np.array([mask.shape[1], mask.shape[0]])
        corners = corners * size if scaled else corners
        if len(corners) < 3 or not np.isfinite(corners).all():
            raise DataError(f"an outline of {len(corners)} points; three at least are needed")
        if (corners < -_SLACK_PX).any() or (corners > size + _SLACK_PX).any():
            raise DataError(f"an outline that leaves the image of {mask.shape[0]} x {mask.shape[1]} px")
        _fill(mask, corners)

    return draw


def _fill(mask: Mask, corners: NDArray[np.float64]) -> None:
    """Mark the pixels whose middle lies inside an outline; of one that holds no middle those of its corners."""
    (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, axis=0).T
    middles = np.arange(mask.shape[0]) + 0.5
    edge, row = np.nonzero((y[:, None] <= middles) != (next_y[:, None] <= middles))
    crossings = x[edge] + (middles[row] - y[edge]) * (next_x - x)[edge] / (next_y - y)[edge]
    columns = np.clip(np.ceil(crossings - 0.5), 0, mask.shape[1]).astype(np.int64)
    turns = np.zeros((mask.shape[0], mask.shape[1] + 1), np.int64)
    np.add.at(turns, (row, columns), 1)
    inside = (np.cumsum(turns, axis=1)[:, :-1] % 2).astype(np.uint8)
    if not inside.any():
        places = np.clip(np.floor(corners), 0, np.array(mask.shape)[::-1] - 1).astype(np.int64)
        inside[places[:, 1], places[:, 0]] = 1
    mask |= inside


def runs(text: str) -> Draw:
    """What marks runs of pixels: start and length in turn, column by column, counted from 1."""

    def draw(mask: Mask) -> None:
        try:
            numbers = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"runs that are no whole numbers: {text[:40]!r}") from error
        if len(numbers) % 2 or (len(numbers) and numbers.min() < 1):
            raise DataError(f"runs of {len(numbers)} numbers: starts from 1 and lengths in turn are expected")
        begins, lengths = numbers[::2] - 1, numbers[1::2]
        _mark_runs(mask, begins, lengths)

    return draw


def counts(said: Any) -> Draw:  # noqa: ANN401 - as a file gives it
    """What marks the runs of COCO: ``counts``, a list or a text, and ``size``; by columns, unmarked ones first."""

    def draw(mask: Mask) -> None:
        size, given = said.get("size"), said.get("counts")
        if list(size or ()) != list(mask.shape):
            raise DataError(f"runs of an image of {size}, found {list(mask.shape)}")
        try:
            lengths = np.array(_unpack(given) if isinstance(given, str) else given, np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError("runs that cannot be read") from error
        if lengths.ndim != 1 or (len(lengths) and lengths.min() < 0):
            raise DataError("runs that cannot be read")
        ends = np.cumsum(lengths)
        _mark_runs(mask, (ends - lengths)[1::2], lengths[1::2])

    return draw


def _mark_runs(mask: Mask, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    if len(begins) and int((begins + lengths).max()) > mask.size:
        raise DataError(f"runs up to pixel {int((begins + lengths).max())} of an image of {mask.size}")
    steps = np.zeros(mask.size + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + lengths, -1)
    marked = np.cumsum(steps[:-1]) > 0
    mask |= marked.reshape(mask.shape[::-1]).T.astype(np.uint8)


def _unpack(text: str) -> list[int]:
    """Numbers of COCO's text: groups of six bits from 48 on, of which one says that more follow, as differences."""
    found: list[int] = []
    place = 0
    while place < len(text):
        value, shift, more = 0, 0, True
        while more:
            if place >= len(text):
                raise ValueError("cut")
            bits = ord(text[place]) - 48
            value |= (bits & 31) << shift
            more, place, shift = bool(bits & 32), place + 1, shift + 5
            if not more and bits & 16:
                value -= 1 << shift
        found.append(value + (found[-2] if len(found) > 2 else 0))
    return found


def _read_coco(path: Path, index: NameIndex, found: Annotated) -> None:
    with open_source(path) as stream:
        head = read_whole(stream)
    if b'"annotations"' not in head or b'"images"' not in head:
        return  # JSON of another kind
    content = load_coco(path)
    names = {entry["id"]: str(entry["file_name"]) for entry in content.images}
    for name in names.values():
        found.add(index, name, str(path), None)
    for place, entry in enumerate(content.annotations):
        where, image = f"{path}, annotations[{place}]", entry.get("image_id")
        if image not in names:
            found.problems.add(where, f"an image {image!r} that images does not hold")
        elif entry.get("category_id") not in content.categories:
            found.problems.add(where, f"a category {entry.get('category_id')!r} that categories does not hold")
        else:
            said = entry.get("segmentation")
            parts = [counts(said)] if isinstance(said, Mapping) else [outline(part) for part in said or [()]]
            for part in parts:
                found.add(index, names[image], where, part)


def _read_labelme(path: Path, index: NameIndex, found: Annotated) -> None:
    with open_source(path) as stream:
        try:
            content = json.loads(read_whole(stream))
        except (ValueError, RecursionError) as error:
            raise DataError(f"damaged JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        return
    name = path.stem  # LabelMe's imagePath may be that of another machine
    found.add(index, name, str(path), None)
    for place, shape in enumerate(content["shapes"]):
        where = f"{path}, shapes[{place}]"
        if shape.get("shape_type", "polygon") == "polygon":
            found.add(index, name, where, outline([x for point in shape.get("points", []) for x in point]))
        else:
            found.problems.add(where, f"a {shape.get('shape_type')}: polygons are read")


def _read_csv(path: Path, index: NameIndex, found: Annotated) -> None:
    with open_source(path) as stream:
        text = io.StringIO(read_whole(stream).decode("utf-8-sig", "replace"), newline="")
    rows = csv.DictReader(text)
    columns = {str(name).strip().lower(): str(name) for name in rows.fieldnames or ()}
    image, run = (next((columns[n] for n in known if n in columns), "") for known in (_IMAGE_COLUMNS, _RUN_COLUMNS))
    if not image or not run:
        return
    for place, row in enumerate(rows, 2):
        name = str(row.get(image) or "")
        name = name.rpartition("_")[0] if image.lower() == _BOTH else name
        said = str(row.get(run) or "").strip()
        found.add(index, name, f"{path}, row {place}", runs(said) if said and said != "-1" else None)


def _read_yolo(path: Path, index: NameIndex, found: Annotated) -> None:
    with open_source(path) as stream:
        lines = read_whole(stream).decode("utf-8-sig", "replace").splitlines()
    words = [line.split() for line in lines]
    if not any(len(line) > 6 and len(line) % 2 for line in words):
        return
    for place, line in enumerate(words, 1):
        if line:
            found.add(index, path.stem, f"{path}, line {place}", outline(line[1:], scaled=True))


def _read_cvat(path: Path, index: NameIndex, found: Annotated) -> None:
    for image in read_xml(path, "annotations").iter("image"):
        name = str(image.get("name"))
        found.add(index, name, str(path), None)
        for place, polygon in enumerate(image.iter("polygon")):
            points = str(polygon.get("points", "")).replace(";", ",").split(",")
            found.add(index, name, f"{path}, {name}, polygon {place}", outline(points))


_READERS: Final[Mapping[Layout, tuple[str, Callable[[Path, NameIndex, Annotated], None]]]] = {
    "coco": (".json", _read_coco),
    "labelme": (".json", _read_labelme),
    "csv": (".csv", _read_csv),
    "yolo": (".txt", _read_yolo),
    "cvat": (".xml", _read_cvat),
}
