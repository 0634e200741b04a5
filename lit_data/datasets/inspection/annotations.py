"""Outlines and runs of pixels in files of annotations, drawn as masks once.

Known are COCO instances (polygons, runs as numbers or as text), CSV files with runs of pixels
(column by column, from 1, one or several rows an image), YOLO polygons, LabelMe and CVAT polygons.
"""

import json
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_data.datasets.detection.coco import parse_coco, quote
from lit_data.datasets.detection.labels import find_split
from lit_data.datasets.detection.voc import NameIndex, read_xml
from lit_data.datasets.detection.yolo import read_class_names, read_data_yaml
from lit_data.datasets.inspection.layouts import MASK_FOLDERS, Layout
from lit_data.datasets.inspection.marks import (
    Draw,
    DrawnPixels,
    Mask,
    Patch,
    box_corners,
    counts,
    labelme_shape,
    outline,
    runs,
)
from lit_data.datasets.inspection.tables import (
    BOTH_COLUMNS,
    CLASS_COLUMNS,
    IMAGE_COLUMNS,
    choose_column,
    read_table,
)
from lit_data.errors import DataError, Problems, escape, show_path
from lit_data.files import check_kind, is_there
from lit_data.io.discovery import check_inside, list_shown
from lit_data.io.images.header import read_header
from lit_data.io.source import describe_missing, open_source, read_whole
from lit_data.types import Ints

MAX_BYTES = 2**30
_HEAD_BYTES = 2**16
ANNOTATION_SUFFIXES = (".json", ".csv", ".xml", ".txt", ".yaml")
_CVAT_SIDES = ("xtl", "ytl", "xbr", "ybr")
_CVAT_SHAPES = ("polyline", "points", "ellipse", "cuboid", "skeleton", "mask")
_LABELME_OTHERS = ("__ignore__", "_background_")  # labels of what is no object
_RUN_COLUMNS = ("encodedpixels", "encoded_pixels", "rle", "mask_rle", "runs", "segmentation")
_MOST_TABLES = 3  # that a message describes


class Mark(NamedTuple):
    """Something marked in an image.

    Attributes:
        where: It is said: the file and the place in it.
        category: Of the defect; empty where nothing says so.
        draw: Draws it.
    """

    where: str
    category: str
    draw: Draw


@dataclass
class Annotated:
    """Marks and problems of files of annotations.

    Attributes:
        layout: `coco`, `csv`, `yolo`, `labelme` or `cvat`.
        folder: Of the set.
        index: Finds images by their names.
        files: Those that were read.
        marks: For the number of each image that is named what is marked in it.
        problems: What is wrong with the files.
        bad: Numbers of the images that it is wrong with.
        sizes: Where the size of an image is stated, and its (height, width), unchecked.
    """

    layout: Layout
    folder: Path
    index: NameIndex
    files: list[Path] = field(default_factory=list)
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    bad: set[int] = field(default_factory=set)
    sizes: dict[int, tuple[str, tuple[object, object]]] = field(default_factory=dict)

    def find(self, names: Sequence[str], where: str, *, split: str | None = None) -> int | None:
        """Return the number of the image of the first name that is known, which is then named.

        None for an image that is excluded; None, and a problem, if none is known.
        """
        for name in names:
            with suppress(DataError):
                number = self.index.find(name, split)
                if number >= self.index.count:
                    return None
                self.marks.setdefault(number, [])
                return number
        try:
            self.index.find(names[-1], split)
        except DataError as error:
            self.problems.add(where, str(error))
        return None

    def add(self, number: int | None, where: str, category: object, draw: Draw) -> None:
        """Note a mark of an image that was found."""
        if number is not None:
            self.marks[number].append(Mark(where, str(category), draw))

    def state_size(self, number: int | None, where: str, height: object, width: object) -> None:
        """Note the size of an image as a file states it, if it does."""
        if number is not None and height is not None and width is not None:
            self.sizes[number] = where, (height, width)

    def reject(self, number: int | None, where: str, message: str) -> None:
        """Note what is wrong with an image."""
        self.problems.add(where, message)
        if number is not None:
            self.bad.add(number)

    @cached_property
    def yolo_names(self) -> Sequence[str]:
        """The names of YOLO's classes, if a file beside the images gives them."""
        for name in ("data.yaml", "dataset.yaml"):
            path = self.folder / name
            if is_there(path):
                return read_data_yaml(path).classes
        return read_class_names(self.folder)

    def count_categories(self) -> "Counter[str]":
        """Count the marks of each category."""
        return Counter(mark.category for marks in self.marks.values() for mark in marks)


def read_annotations(
    folder: Path, images: Sequence[Path], excluded: Sequence[Path] = ()
) -> Annotated | None:
    """Read the files of annotations of a folder; None where there are none.

    Where all of them are damaged, there are problems and no marks.

    Args:
        folder: Of the set.
        images: Its images.
        excluded: What may be named and is not meant.

    Raises:
        DataError: Lists the files that are links out of the folder.
    """
    index = NameIndex(images, excluded)
    files = _list_files(folder)
    refused: Annotated | None = None
    # The first kind that names an image is taken; files of others count for nothing.
    for layout, (suffix, read) in _READERS.items():
        annotated = Annotated(layout, folder, index)
        for path in files:
            if path.suffix.lower() == suffix and path.stat().st_size <= MAX_BYTES:
                _read_file(path, read, annotated)
        if annotated.marks:
            return annotated
        if refused is None and len(annotated.problems):
            refused = annotated
    return refused


def _read_file(path: Path, read: Callable[[Path, Annotated], None], annotated: Annotated) -> None:
    """Read a file that may be of another kind; note it if it says anything."""
    before = len(annotated.marks), len(annotated.problems)
    try:
        read(path, annotated)
    except DataError as error:
        annotated.problems.add(path, str(error))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        # Another program's file with this suffix can hold anything.
        reason = f"{type(error).__name__}: {escape(str(error))[:200]}"
        annotated.problems.add(path, f"cannot be read ({reason})")
    if (len(annotated.marks), len(annotated.problems)) != before:
        annotated.files.append(path)


def _list_files(folder: Path) -> list[Path]:
    files = []
    problems = Problems()
    for path in list_shown(folder, "*.*"):
        if path.suffix.lower() in ANNOTATION_SUFFIXES:
            try:
                if _is_file(path, folder):
                    files.append(path)
            except DataError as error:
                problems.add(path, str(error))
    problems.raise_if_any(f"{len(problems)} files of annotations are bad")
    return files


def _is_file(path: Path, folder: Path) -> bool:
    """Return False for a folder.

    Raises:
        DataError: It is a link out of the folder of the set, or to nothing, or no regular file.
    """
    if path.is_symlink():
        check_inside(path, folder)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(describe_missing(path, error)) from error
    if stat.S_ISDIR(mode):
        return False
    check_kind(mode)
    return True


def draw_masks(
    annotated: Annotated, images: Sequence[Path], classes: Sequence[str] | None = None
) -> Iterator[tuple[int, Mask]]:
    """Yield number and mask [H, W] of each image that is named; note in `annotated` what does not fit.

    Args:
        annotated: What is drawn.
        images: All images.
        classes: Categories that get the numbers from 1 on, all others 0; None: 255 for every
            category.
    """
    for number, marks in sorted(annotated.marks.items()):
        try:
            header = read_header(images[number])
        except DataError:
            continue  # the image itself is bad, which is told where images are read
        size_px = header.height_px, header.width_px
        mask = np.zeros(size_px, np.uint8)
        where, stated = annotated.sizes.get(number, ("", size_px))
        if stated != size_px:
            message = f"its annotations are for {quote(stated)} (height, width), it has {size_px}"
            annotated.reject(number, where, f"{show_path(images[number])}: {message} px")
            yield number, mask
            continue
        areas_px = np.zeros(256, np.int64)  # of each number of the mask
        drawn = DrawnPixels(size_px)
        for mark in marks:
            if drawn.are_too_many:
                message = (
                    f"{len(marks)} shapes that cover it more than {drawn.most_covers} times over; "
                    "leave out shapes that cover most of the image, or data.exclude the image"
                )
                annotated.reject(number, mark.where, f"{show_path(images[number])}: {message}")
                break
            try:
                patch = mark.draw(size_px)
                drawn.add(patch)
                _paint(mask, areas_px, patch, mark.category, classes)
            except DataError as error:
                annotated.reject(number, mark.where, f"{show_path(images[number])}: {error}")
        yield number, mask


def _paint(
    mask: Mask,
    areas_px: Ints,
    patch: Patch,
    category: str,
    classes: Sequence[str] | None,
) -> None:
    """Paint a shape where it is, as there may be 100,000 of them, and keep the areas of all numbers."""
    part = patch.of(mask)
    if classes is None:
        part[patch.marked] = 255
    elif category in classes:
        number = classes.index(category) + 1
        # Pixels by the class that has them now.
        covered_px = np.bincount(part[patch.marked], minlength=256)
        marked_px = int(covered_px.sum())
        overlap_px = int(covered_px[1:].sum() - covered_px[number])
        others_px = int(areas_px.sum() - areas_px[number])
        # More than half of the smaller one: neighbours that only touch at their edges are no fault.
        if 2 * overlap_px > min(marked_px, others_px):
            raise DataError(
                f"{category!r} overlaps other classes in {overlap_px} px; a pixel has one class"
            )
        part[patch.marked] = number
        # What a later mark covers is lost to the classes that had it.
        areas_px[1:] -= covered_px[1:]
        areas_px[number] += marked_px


def _read_coco(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        text = read_whole(stream)
    if b'"annotations"' not in text or b'"images"' not in text:
        return  # JSON of another kind
    content = parse_coco(path, text)
    if content.faults:
        raise DataError("; ".join(content.faults))
    names = {entry["id"]: str(entry["file_name"]) for entry in content.images.values()}
    numbers = {
        key: annotated.find((str(path.parent / name), name), str(path))
        for key, name in names.items()
    }
    for index, entry in content.images.items():
        where = f"{path}, images[{index}]"
        annotated.state_size(numbers[entry["id"]], where, entry.get("height"), entry.get("width"))
    for index, entry in enumerate(content.annotations):
        where = f"{path}, annotations[{index}]"
        if not isinstance(entry, dict):
            annotated.reject(None, where, f"{quote(entry)} is no annotation")
            continue
        image, category = entry.get("image_id"), entry.get("category_id")
        if type(image) is not int or image not in names:
            annotated.reject(None, where, f"an image {quote(image)} that images does not hold")
        elif type(category) is not int or category not in content.categories:
            annotated.reject(
                numbers[image], where, f"a category {quote(category)} that categories does not hold"
            )
        elif not entry.get("segmentation") and entry.get("bbox"):
            message = "a box without an outline; +experiment=detection learns boxes"
            annotated.reject(numbers[image], where, message)
        else:
            segmentation = entry.get("segmentation")
            parts = (
                [counts(segmentation)]
                if isinstance(segmentation, Mapping)
                else [outline(part) for part in segmentation or [()]]
            )
            for part in parts:
                annotated.add(numbers[image], where, content.categories[category], part)


def _read_labelme(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        try:
            content = json.loads(read_whole(stream))
        except (ValueError, RecursionError) as error:
            raise DataError(f"damaged JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        return
    number = _find_labelled(path, annotated)  # LabelMe's imagePath may be that of another machine
    annotated.state_size(number, str(path), content.get("imageHeight"), content.get("imageWidth"))
    for index, shape in enumerate(content["shapes"]):
        where = f"{path}, shapes[{index}]"
        try:
            if not isinstance(shape, dict):
                raise DataError(f"{quote(shape)} is no shape with a label and points")
            label = shape.get("label", "")
            if not isinstance(label, str):
                raise DataError(f"the label {quote(label)} is no text")
            if label not in _LABELME_OTHERS:
                annotated.add(number, where, label, labelme_shape(shape))
        except DataError as error:
            annotated.reject(number, where, str(error))


def _read_csv(path: Path, annotated: Annotated) -> None:
    columns, rows = read_table(path)
    known = (IMAGE_COLUMNS, _RUN_COLUMNS, CLASS_COLUMNS)
    image, run, kind = (choose_column(columns, names) for names in known)
    if not image or not run:
        return
    for row_number, row in enumerate(rows, 2):
        name, category, where = (
            str(row.get(image) or ""),
            str(row.get(kind) or ""),
            f"{path}, row {row_number}",
        )
        if image.lower() == BOTH_COLUMNS:
            name, _, category = name.rpartition("_")
        number = annotated.find((str(path.parent / name), name), where)
        runs_text = str(row.get(run) or "").strip()
        if runs_text and runs_text != "-1":
            annotated.add(number, where, category, runs(runs_text))


def _read_yolo(path: Path, annotated: Annotated) -> None:
    if not path.stat().st_size:  # an image without objects
        return
    with open_source(path) as stream:
        lines = read_whole(stream).decode("utf-8-sig", "replace").splitlines()
    words = [line.split() for line in lines]
    if not any(len(line) > 6 and len(line) % 2 for line in words):
        return
    number, names = _find_labelled(path, annotated), annotated.yolo_names
    for line_number, line in enumerate(words, 1):
        if line:
            category = (
                names[int(line[0])]
                if line[0].isdecimal() and int(line[0]) < len(names)
                else line[0]
            )
            annotated.add(
                number, f"{path}, line {line_number}", category, outline(line[1:], scaled=True)
            )


def _read_cvat(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        # Zero bytes are those of UTF-16; other programs write XML too.
        if b"<annotations" not in stream.read(_HEAD_BYTES).replace(b"\0", b""):
            return
    for image in read_xml(path, "annotations", MAX_BYTES).iterfind("image"):
        name = str(image.get("name"))
        number = annotated.find((str(path.parent / name), name), str(path))
        height, width = map(_read_side, (image.get("height"), image.get("width")))
        annotated.state_size(number, f"{path}, {name}", height, width)
        numbers: Counter[str] = Counter()
        for shape in image:
            where = f"{path}, {name}, {shape.tag} {numbers[shape.tag]}"
            numbers[shape.tag] += 1
            points: Sequence[str] | Sequence[float]
            if shape.tag == "polygon":
                points = str(shape.get("points", "")).replace(";", ",").split(",")
            elif shape.tag == "box":
                points = box_corners(*(float(shape.get(side, "nan")) for side in _CVAT_SIDES))
            elif shape.tag in _CVAT_SHAPES:
                annotated.reject(number, where, f"a {shape.tag}: polygons and boxes are read")
                continue
            else:
                continue  # tags of the whole image, and images inside of this one
            annotated.add(number, where, shape.get("label", ""), outline(points))


def _read_side(text: str | None) -> int | str | None:
    """Return a side of an image as a number; what is none stays text."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else text


def _find_labelled(path: Path, annotated: Annotated) -> int | None:
    """The image of a file of labels: beside it, in the folder that stands for its folder of labels, or of its stem."""
    stem, parts = path.with_suffix(""), path.with_suffix("").parts
    swapped = [
        Path(*parts[:index], *images, *parts[index + 1 :])
        for index, part in enumerate(parts[:-1])
        if MASK_FOLDERS.fullmatch(part) and index >= len(annotated.folder.parts)
        for images in (("images",), ())
    ]
    return annotated.find(
        [*map(str, (stem, *swapped)), stem.name], str(path), split=find_split(str(path.parent))
    )


_READERS: Mapping[Layout, tuple[str, Callable[[Path, Annotated], None]]] = {
    "coco": (".json", _read_coco),
    "labelme": (".json", _read_labelme),
    "csv": (".csv", _read_csv),
    "yolo": (".txt", _read_yolo),
    "cvat": (".xml", _read_cvat),
}
