"""Labels in COCO JSON: one file for many images, with boxes ``[x, y, w, h]`` in pixels."""

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from lit_data.annotations.formats import find_format
from lit_data.annotations.labels import (
    BoxCollector,
    BoxForm,
    Faults,
    Frame,
    LabelTable,
    check_classes,
    describe_turn,
    is_share_box,
)
from lit_data.annotations.name_index import NameIndex
from lit_data.core.errors import DataError, Problems, escape, list_some, show_path
from lit_data.core.opening import naming, open_source, read_whole
from lit_data.core.types import Bools, Doubles, PathText
from lit_data.datasets.split_names import split_of_annotations
from lit_data.images.discovery import check_inside
from lit_data.images.header_scan import OnBad
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_COCO_OF_SPLITS = "annotations/*.json"
_HEAD_BYTES = 2**16
_KEYS = (b'"images"', b'"annotations"', b'"categories"')
COCO_PLACES = (
    "annotations/instances_*.json",
    _COCO_OF_SPLITS,
    "_annotations.coco.json",  # as Roboflow exports them
    "*/_annotations.coco.json",
)

Id = int | str


def _find_corners(boxes: Doubles, sizes_px: Doubles) -> Doubles:
    return np.hstack([boxes[:, :2] / sizes_px, (boxes[:, :2] + boxes[:, 2:]) / sizes_px])


def _find_shares(boxes: Doubles) -> Bools:
    return is_share_box(np.hstack([boxes, boxes[:, :2] + boxes[:, 2:]]))


_FORM = BoxForm(
    "COCO JSON", "annotations[{}]", ("pixels", "shares of the image"), _find_shares, _find_corners
)


@dataclass(frozen=True, slots=True)
class CocoFile:
    """Annotation file.

    Args:
        path: Path of the file.
        images: Its ``images`` by their number there, each with an ``id`` and a ``file_name``.
        annotations: Its ``annotations``, unchecked.
        categories: Name of each category by its id; categories with the same name are one class.
        headings: Ids of supercategories that no annotation uses, such as the one that Roboflow
            writes for the dataset.
        split: Split of all its images, if its name or folder tells one.
        faults: Faults of images and categories that are left out.
    """

    path: PathText
    images: Mapping[int, Mapping[str, Any]]
    annotations: tuple[Any, ...]
    categories: Mapping[Id, str]
    headings: frozenset[Id] = frozenset()
    split: str | None = None
    faults: tuple[str, ...] = ()

    def match(self, index: NameIndex) -> tuple[dict[Id, int], Problems]:
        """Find the images of the file.

        Args:
            index: Index of the images of the dataset.

        Returns:
            The number of the image of each id in the file, and one problem for each missing image.
        """
        numbers: dict[Id, int] = {}
        problems = Problems()
        folder = os.path.dirname(self.path)  # noqa: PTH120 - str or PathLike
        for entry_number, entry in self.images.items():
            name = entry["file_name"]
            try:
                # An image beside the file takes precedence over one with its name elsewhere.
                beside = index.find_path(os.path.join(folder, name))  # noqa: PTH118
                if beside is None:
                    numbers[entry["id"]] = index.find(name, self.split, self.path)
                else:
                    numbers[entry["id"]] = beside
            except DataError as error:
                problems.add(self.path, f"images[{entry_number}]: {error}")
        return numbers, problems


def load_coco(path: PathText, split: str | None = None) -> CocoFile:
    """Read an annotation file and check its structure.

    Args:
        path: Path of the file.
        split: Split of all its images, if there is one.

    Raises:
        DataError: The file is not JSON, or lacks parts of an annotation file of boxes.
    """
    with open_source(path) as stream:
        text = read_whole(stream)
    return replace(parse_coco(path, text), split=split)


def list_coco(root: Path, annotations: PathText | None) -> list[Path]:
    """Return the given COCO file, or else those of the first place that has any.

    Raises:
        DataError: There are several files, but not in a known place.
    """
    if annotations is not None:
        path = root / annotations
        if path.is_symlink():
            check_inside(path, root)
        return [path]
    paths = find_coco(root)
    if paths:
        return paths
    others = [*filter(_is_coco, sorted(root.glob("*.json")))]
    if len(others) > 1 and not all(split_of_annotations(path.name) for path in others):
        listed = list_some([path.name for path in others])
        raise DataError(
            f"several COCO files: {listed}; choose one, data.annotations={others[0].name}"
        )
    return others


def find_coco(root: Path) -> list[Path]:
    """Return the COCO files of the first known place that has any."""
    for pattern in COCO_PLACES:
        paths = sorted(root.glob(pattern))
        if pattern == _COCO_OF_SPLITS:
            paths = [path for path in paths if split_of_annotations(path.name)]
        if paths:
            return paths
    return []


def _is_coco(path: Path) -> bool:
    """Return True for JSON with the lists of a file of instances; there may be thousands of other JSON files."""
    with open_source(path) as stream:
        head = stream.read(_HEAD_BYTES)
        if not any(key in head for key in _KEYS):
            return False
        stream.seek(0)
        text = read_whole(stream)
    return all(key in text for key in _KEYS)


def load_coco_files(paths: Sequence[Path], root: Path, faults: Faults) -> tuple[CocoFile, ...]:
    """Read files below a root, and note those that cannot be read as faults.

    Raises:
        DataError: No file can be read.
    """
    files = []
    for path in paths:
        try:
            files.append(load_coco(path, split_of_annotations(os.path.relpath(path, root))))
        except DataError as error:
            name = find_format(path, root)
            message = (
                f"{show_path(path)}: a file of {name}, not of COCO; convert it to COCO, YOLO or VOC"
            )
            faults.take(error if name in ("", "COCO") else DataError(message))
    if not files:
        faults.raise_if_any()
    return tuple(files)


def parse_coco(path: PathText, text: bytes) -> CocoFile:
    """Parse the content of a file, see `load_coco`."""
    with naming(path):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers of too many digits
            raise DataError(f"damaged JSON: {error}") from error
        if not isinstance(content, dict):
            raise DataError("must hold images, annotations and categories")
        faults: list[str] = []
        images = _take_entries(content, "images", "file_name", faults)
        annotations = _list_items(content, "annotations")
        categories = _take_entries(content, "categories", "name", faults, is_name_unique=False)
        named = [entry | {"name": entry["name"].strip()} for entry in categories.values()]
        names = {entry["id"]: entry["name"] for entry in named}
        headings = _find_headings(named, annotations)
        return CocoFile(path, images, tuple(annotations), names, headings, faults=tuple(faults))


def describe_first_image(files: Sequence[CocoFile]) -> str:
    """Return a clause on the first image that annotation files name; "" if they name none."""
    for file in files:
        for entry in file.images.values():
            return f"; {Path(file.path).name} names {quote(entry['file_name'])}"
    return ""


def split_by_file(files: Sequence[CocoFile], index: NameIndex) -> dict[str, list[int]]:
    """Return the images of each split, for files with names such as ``instances_train.json``.

    Raises:
        DataError: Two files name the same image.
    """
    splits: dict[str, list[int]] = defaultdict(list)
    problems, owners = Problems(), dict[int, CocoFile]()
    for file in files:
        for number in file.match(index)[0].values():
            if owners.setdefault(number, file) is not file:
                problems.add(
                    file.path,
                    f"names an image that {show_path(owners[number].path)} names too: {number}",
                )
            splits[file.split or ""].append(number)
    problems.raise_if_any(
        counted(len(problems), "image is", "images are") + " in more than one split"
    )
    return splits


def read_coco_labels(
    images: Sequence[PathText],
    frames: Sequence[Frame],
    files: Sequence[CocoFile],
    *,
    others: Sequence[PathText] = (),
    excluded: Sequence[PathText] = (),
    classes: Sequence[str] | None = None,
    on_bad: OnBad = "error",
) -> LabelTable:
    """Read the boxes of one or more annotation files.

    Boxes of crowds (``iscrowd: 1``) cover several objects, and become ignored regions of their
    class.

    Args:
        images: Paths of the images.
        frames: Frames of the images.
        files: Annotation files.
        others: Images that the files may name in addition to `images`, and that are left out.
        excluded: The same, but another image with the same name takes precedence.
        classes: Names of the classes; by default the categories in the order of their ids, which
            may have gaps.
        on_bad: ``skip`` skips bad boxes and entries whose image is missing, and lists them. An
            entry that states another size than that of its image stays an error.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Files are bad; the error lists everything that is wrong.
    """
    collector = BoxCollector(_FORM, frames, on_bad=on_bad)
    names = _name_classes(files) if classes is None else check_classes(classes)
    if not names:
        message = "has no categories, which files of instances have; see data.annotations"
        collector.problems.add(files[0].path, message)
    order = {name: number for number, name in enumerate(names)}
    index = NameIndex([*images, *others], excluded)
    crowds = 0
    for file in files:
        collector.start_file(file.path)
        for fault in file.faults:
            collector.problems.add(file.path, fault)
        numbers, missing = file.match(index)
        collector.reject_entries(missing)
        # Higher numbers are those of images that are left out.
        numbers = {key: number for key, number in numbers.items() if number < len(images)}
        for row, entry in file.images.items():
            if entry["id"] in numbers:
                number = numbers[entry["id"]]
                where = f"images[{row}], {show_path(images[number])}: "
                collector.state_size(number, entry.get("height"), entry.get("width"), where)
        ids = {key: order[name] for key, name in file.categories.items() if name in order}
        crowds += _add_boxes(collector, file, numbers, ids)
    if crowds:
        boxes = counted(
            crowds,
            "box with iscrowd or ignore is an ignored region",
            "boxes with iscrowd or ignore are ignored regions",
        )
        log.info("%s", boxes)
    return collector.finish(names)


def _list_items(content: Mapping[str, Any], key: str) -> list[Any]:
    items = content.get(key)
    if not isinstance(items, list):
        raise DataError(
            f"{key!r} must be a list, found {type(items).__name__}; is this a file of instances?"
        )
    return items


def _take_entries(
    content: Mapping[str, Any],
    key: str,
    text: str,
    faults: list[str],
    *,
    is_name_unique: bool = True,
) -> dict[int, Any]:
    """Return the entries of a list with a valid and unique id and name, by their numbers.

    Args:
        content: Content of the file.
        key: Key of the list.
        text: Key of the name.
        faults: Receives the faults of the other entries.
        is_name_unique: Refuse repeated names.

    Raises:
        DataError: There is no such list.
    """
    ids, names = set(), set()
    entries = {}
    for index, entry in enumerate(_list_items(content, key)):
        has_id = isinstance(entry, dict) and type(entry.get("id")) in (int, str)
        if not has_id or not isinstance(entry.get(text), str):
            faults.append(
                f"{key}[{index}] must have an 'id' and a text {text!r}, found {quote(entry)}"
            )
        elif entry["id"] in ids or (is_name_unique and entry[text] in names):
            faults.append(
                f"{key}[{index}] repeats the id {quote(entry['id'])} or the {text} {quote(entry[text])}"
            )
        else:
            ids.add(entry["id"])
            names.add(entry[text])
            entries[index] = entry
    return entries


def _find_headings(categories: Sequence[Any], annotations: Sequence[Any]) -> frozenset[Id]:
    """Return the ids of categories that are supercategories of others and mark nothing."""
    used_ids = set()
    for entry in annotations:
        if isinstance(entry, dict) and type(entry.get("category_id")) in (int, str):
            used_ids.add(entry["category_id"])
    headed = Counter(str(category.get("supercategory")) for category in categories)
    headings = set()
    for category in categories:
        heads_itself = str(category.get("supercategory")) == category["name"]
        heads_others = headed[category["name"]] > int(heads_itself)
        if heads_others and category["id"] not in used_ids:
            headings.add(category["id"])
    return frozenset(headings)


def _rank(key: Id) -> tuple[bool, int, str]:
    """Return the sort key of ids: numbers before text."""
    return (True, 0, key) if isinstance(key, str) else (False, key, "")


def _name_classes(files: Sequence[CocoFile]) -> tuple[str, ...]:
    """Return the categories of all files in the order of their lowest ids, without headings.

    Files may number them differently; categories with the same name are one class.
    """
    # A category that any file uses is a class in all of them.
    headings = frozenset.intersection(*(file.headings for file in files))
    keys: dict[str, Id] = {}
    for file in files:
        for key, name in file.categories.items():
            if key not in headings:
                keys[name] = min(keys.get(name, key), key, key=_rank)
    return tuple(sorted(keys, key=lambda name: _rank(keys[name])))


def _add_boxes(
    collector: BoxCollector, file: CocoFile, numbers: Mapping[Id, int], ids: Mapping[Id, int]
) -> int:
    """Add all boxes of a file, and return the number of those of crowds."""
    crowds = 0
    known = {entry["id"] for entry in file.images.values()}
    ordered = sorted(ids, key=_rank)
    allowed = list_some(ordered) or "none"
    for index, entry in enumerate(file.annotations):
        if not isinstance(entry, dict):
            collector.reject(index, f"{quote(entry)} is not an annotation")
        elif wrong := next(_find_faults(entry, known, ids, file, allowed), ""):
            collector.reject(index, wrong)
        elif entry["image_id"] in numbers:
            # A missing image is reported once, not for each of its boxes.
            image = numbers[entry["image_id"]]
            # It covers several objects, and would teach a detector one large box.
            is_crowd = is_ignored(entry)
            number = ids[entry["category_id"]]
            collector.add(image, index, number, entry["bbox"], is_ignored=is_crowd)
            crowds += is_crowd
    return crowds


def is_id(value: object, known: Container[Id]) -> TypeGuard[Id]:
    """Return True for one of the ids of a file; a bool is not an id."""
    return type(value) in (int, str) and value in known


def is_ignored(entry: Mapping[str, Any]) -> bool:
    """Return True for an annotation that is excluded from training and scores."""
    return entry.get("iscrowd") == 1 or entry.get("ignore") == 1


def _find_faults(
    entry: Mapping[str, Any],
    known: set[Id],
    ids: Mapping[Id, int],
    file: CocoFile,
    allowed: str,
) -> Iterator[str]:
    image, category, box = entry.get("image_id"), entry.get("category_id"), entry.get("bbox")
    if not is_id(image, known):
        yield f"image_id {quote(image)} is not in the file, which has {counted(len(known), 'image')}"
    if not is_id(category, ids):
        name = ""
        if is_id(category, file.categories):
            name = f" ({quote(file.categories[category])})"
        yield f"category_id {quote(category)}{name} is not allowed; allowed are {allowed}"
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(type(value) in (int, float) for value in box)
    ):
        yield f"bbox {quote(box)} must be 4 numbers: x, y, width, height in pixels"
    attributes = entry.get("attributes")
    turn = describe_turn(attributes.get("rotation")) if isinstance(attributes, dict) else ""
    if turn:
        yield turn


def quote(value: object) -> str:
    """Return a value of a file for a message, short and without control characters."""
    return escape(repr(value)[:80])
