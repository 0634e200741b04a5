"""Readers of the marks in the annotation files of a dataset.

The formats are COCO instances (polygons, runs as numbers or as text), CSV files with runs of pixels
(column by column, from 1, one or several rows per image), YOLO polygons, and shapes of LabelMe and
CVAT.
"""

import json
import logging
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_data.annotations.coco import CocoFile, Id, find_coco, is_id, is_ignored, parse_coco, quote
from lit_data.annotations.marked import Annotated, Effect
from lit_data.annotations.marks import (
    CVAT_ELLIPSE,
    CVAT_MASK,
    CVAT_SIDES,
    Draw,
    counts,
    cvat_shape,
    labelme_shape,
    outline,
    runs,
)
from lit_data.annotations.name_index import NameIndex, describe_clash
from lit_data.annotations.tables import (
    BOTH_COLUMNS,
    CLASS_COLUMNS,
    IMAGE_COLUMNS,
    choose_column,
    read_cell,
    read_table,
    refuse_repeated,
)
from lit_data.annotations.voc import read_xml
from lit_data.annotations.yolo import (
    find_class_file,
    name_numbers,
    read_class_names,
    refuse_key_points,
)
from lit_data.core.errors import DataError, Problems, escape, show_path
from lit_data.core.files import check_kind
from lit_data.core.names import is_mask_folder
from lit_data.core.opening import describe_missing, open_source, read_whole
from lit_data.datasets.layouts import Layout
from lit_data.datasets.split_names import find_split, split_of, split_of_annotations
from lit_data.images.discovery import check_inside, compile_exclusion, list_shown
from lit_inspect.counts import counted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

log = logging.getLogger(__name__)

MAX_BYTES = 2**30
_HEAD_BYTES = 2**16
ANNOTATION_SUFFIXES = (".json", ".csv", ".xml", ".txt", ".yaml", ".yml", ".names")
_CVAT_OTHERS = ("tag", "image")  # of the whole image, and an image inside of this one
_CVAT_ATTRIBUTES = {
    "id",
    "label",
    "source",
    "occluded",
    "z_order",
    "group_id",
    "points",
    "rotation",
    "rle",
    *CVAT_SIDES,
    *CVAT_ELLIPSE,
    *CVAT_MASK,
}
_LABELME_EFFECTS: Mapping[str, Effect] = {"__ignore__": "ignored", "_background_": "hole"}
_CROWD = ("iscrowd", "is_crowd")
_RUN_COLUMNS = ("encodedpixels", "encoded_pixels", "rle", "mask_rle", "runs", "segmentation")
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
_POLYGON = re.compile(rf"([0-9]{{1,9}})(?:\.0*)?((?:\s+{_NUMBER}\s+{_NUMBER}){{3,}}+)")


def read_annotations(
    folder: Path,
    images: Sequence[Path],
    excluded: Sequence[Path] = (),
    exclude: Sequence[str] = (),
) -> Annotated | None:
    """Read the annotation files of a folder, or return None if there are none.

    If all of them are damaged, the result has problems and no marks.

    Args:
        folder: Folder of the dataset.
        images: Images of the dataset.
        excluded: Images that files may name, and that are left out.
        exclude: Globs of annotation files to leave out.

    Raises:
        DataError: Files are links out of the folder; all of them are listed.
    """
    index = NameIndex(images, excluded)
    files = _list_files(folder, exclude)
    refused: Annotated | None = None
    # The first kind that names an image is taken; files of other kinds are ignored.
    for layout, (suffix, read) in _READERS.items():
        annotated = Annotated(layout, folder, index)
        read([path for path in files if path.suffix.lower() == suffix], annotated)
        if annotated.marks:
            return annotated
        if refused is None and len(annotated.problems):
            refused = annotated
    return refused


def _read_each(
    read: Callable[[Path, Annotated], None],
) -> Callable[[Sequence[Path], Annotated], None]:
    """Make a reader of all files of a kind from a reader of a single file."""

    def read_all(paths: Sequence[Path], annotated: Annotated) -> None:
        for path in paths:
            _read_file(path, read, annotated)

    return read_all


def _read_file(path: Path, read: Callable[[Path, Annotated], None], annotated: Annotated) -> None:
    """Read a file that may be of another kind, and note it if it has any content."""
    before = len(annotated.problems)
    try:
        read(path, annotated)
    except DataError as error:
        annotated.problems.add(path, str(error))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        # A file of another program with this suffix can have any content.
        reason = f"{type(error).__name__}: {escape(str(error))[:200]}"
        annotated.problems.add(path, f"cannot be read ({reason})")
    if len(annotated.problems) > before:
        annotated.note_file(path)


def _list_files(folder: Path, exclude: Sequence[str]) -> list[Path]:
    files = []
    problems = Problems()
    excludes = compile_exclusion(exclude).fullmatch
    for path in list_shown(folder, "*.*"):
        is_excluded = excludes(path.relative_to(folder).as_posix())
        if path.suffix.lower() in ANNOTATION_SUFFIXES and not is_excluded:
            try:
                if _is_file(path, folder):
                    files.append(path)
            except DataError as error:
                problems.add(path, str(error))
    problems.raise_if_any(
        counted(len(problems), "file of annotations is bad", "files of annotations are bad")
    )
    return files


def _is_file(path: Path, folder: Path) -> bool:
    """Return False for a folder, and for a file that is too large, which is logged.

    Raises:
        DataError: The path is a link out of the folder or to nothing, or not a regular file.
    """
    if path.is_symlink():
        check_inside(path, folder)
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(describe_missing(path, error)) from error
    if stat.S_ISDIR(status.st_mode):
        return False
    check_kind(status.st_mode)
    if status.st_size > MAX_BYTES:
        log.warning("%s is not read: it has more than %d bytes", show_path(path), MAX_BYTES)
        return False
    return True


def _read_coco(paths: Sequence[Path], annotated: Annotated) -> None:
    # Official datasets have captions and key points of the same images beside the instances.
    chosen = {path.resolve() for path in find_coco(annotated.folder)}
    instances = [path for path in paths if path.resolve() in chosen]
    _read_each(_read_coco_file)(instances or paths, annotated)


def _read_coco_file(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        text = read_whole(stream)
    if b'"annotations"' not in text or b'"images"' not in text or b'"segments_info"' in text:
        return  # JSON of another kind, or panoptic
    content = parse_coco(path, text)
    if content.faults:
        raise DataError("; ".join(content.faults))
    if not content.categories and b'"segmentation"' not in text:
        return  # captions, or images alone
    split = split_of_annotations(path.relative_to(annotated.folder).as_posix())
    numbers: dict[Id, int | None] = {}
    for index, entry in content.images.items():
        where, name = f"{path}, images[{index}]", str(entry["file_name"])
        number = annotated.find((str(path.parent / name), name), path, split=split)
        annotated.state_size(number, where, entry.get("height"), entry.get("width"))
        numbers[entry["id"]] = number
    # Crowds come first, so that objects in front of them stay.
    for index, entry in sorted(enumerate(content.annotations), key=_crowds_first):
        where = f"{path}, annotations[{index}]"
        if not isinstance(entry, dict):
            annotated.reject(None, where, f"{quote(entry)} is not an annotation")
        elif not is_id(entry.get("image_id"), numbers):
            message = f"an image {quote(entry.get('image_id'))} that images does not hold"
            annotated.reject(None, where, message)
        else:
            _add_coco(entry, content, annotated, numbers[entry["image_id"]], where)


def _crowds_first(item: tuple[int, Any]) -> bool:
    return not (isinstance(item[1], dict) and is_ignored(item[1]))


def _add_coco(
    entry: Mapping[str, Any],
    content: CocoFile,
    annotated: Annotated,
    number: int | None,
    where: str,
) -> None:
    category, segmentation = entry.get("category_id"), entry.get("segmentation")
    if not is_id(category, content.categories):
        message = f"a category {quote(category)} that categories does not hold"
        annotated.reject(number, where, message)
    elif not segmentation and entry.get("bbox"):
        message = "a box without an outline; experiment=detection trains on boxes"
        annotated.reject(number, where, message)
    else:
        parts: Iterable[Draw]
        if isinstance(segmentation, Mapping):
            parts = [counts(segmentation, entry.get("area"), entry.get("bbox"))]
        else:
            parts = map(outline, segmentation or [()])
        effect: Effect = "ignored" if is_ignored(entry) else "object"
        for part in parts:
            annotated.add(number, where, content.categories[category], part, effect, where)


def _read_labelme(paths: Sequence[Path], annotated: Annotated) -> None:
    _read_each(_read_labelme_file)(paths, annotated)
    for path, (number, other) in annotated.clashes.items():
        # If the other image has a file, the path was not changed when this one was copied.
        if other not in annotated.owners and other < annotated.index.count:
            names = map(annotated.index.name, (number, other))
            annotated.reject(number, str(path), describe_clash(names, "imagePath"))


def _read_labelme_file(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        try:
            content = json.loads(read_whole(stream))
        except (ValueError, RecursionError) as error:
            raise DataError(f"damaged JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        return
    number = _find_labelled(path, annotated, str(content.get("imagePath") or ""))
    annotated.state_size(number, str(path), content.get("imageHeight"), content.get("imageWidth"))
    for index, shape in enumerate(content["shapes"]):
        where = f"{path}, shapes[{index}]"
        try:
            _add_labelme(shape, annotated, number, where)
        except DataError as error:
            annotated.reject(number, where, str(error))


def _add_labelme(shape: object, annotated: Annotated, number: int | None, where: str) -> None:
    if not isinstance(shape, dict):
        raise DataError(f"{quote(shape)} is not a shape with a label and points")
    label = shape.get("label", "")
    if not isinstance(label, str):
        raise DataError(f"the label {quote(label)} is not a text")
    effect = _LABELME_EFFECTS.get(label, "object")
    if shape.get("difficult") is True:
        effect = "ignored"
    group = shape.get("group_id")
    instance = None if group is None else quote(group)
    annotated.add(number, where, label, labelme_shape(shape), effect, instance)


def _read_csv(path: Path, annotated: Annotated) -> None:
    columns, rows = read_table(path)
    known = (IMAGE_COLUMNS, _RUN_COLUMNS, CLASS_COLUMNS)
    image, run, kind = (choose_column(columns, names) for names in known)
    if not image or not run:
        return
    refuse_repeated(path, columns, (image, run, kind))
    for row_number, row in enumerate(rows, 2):
        name, category, where = (
            str(row.get(image) or ""),
            read_cell(row, kind),
            f"{path}, row {row_number}",
        )
        if image.lower() == BOTH_COLUMNS:
            name, _, category = name.rpartition("_")
        number = annotated.find((str(path.parent / name), name), path, where=where)
        annotated.state_size(number, where, row.get("height"), row.get("width"))
        runs_text = read_cell(row, run)
        if runs_text and runs_text != "-1":
            annotated.add(number, where, category, runs(runs_text))


def _read_yolo(paths: Sequence[Path], annotated: Annotated) -> None:
    """Read the label files of a dataset with any outlines; lines without an outline are then faults.

    Raises:
        DataError: The lines are boxes with key points, which look like outlines.
    """
    texts = {path: _read_text(path) for path in paths}
    matches = {path: [*map(_POLYGON.fullmatch, lines)] for path, lines in texts.items()}
    numbers = {int(match[1]) for found_lines in matches.values() for match in found_lines if match}
    if not numbers:
        return
    refuse_key_points(annotated.folder)
    name_of = name_numbers(numbers, read_class_names(annotated.folder))
    named_by = find_class_file(annotated.folder)
    annotated.files += [] if named_by is None else [named_by]
    for path, lines in texts.items():
        # Other text files such as a README.txt are there too, without the name of an image.
        if any(lines) and (any(matches[path]) or _has_image(path, annotated)):
            annotated.files.append(path)
            _add_polygons(path, zip(lines, matches[path], strict=True), name_of, annotated)


def _add_polygons(
    path: Path,
    lines: Iterable[tuple[str, re.Match[str] | None]],
    name_of: Mapping[int, str],
    annotated: Annotated,
) -> None:
    """Add the outlines of a label file, whose lines come with their matches."""
    number = _find_labelled(path, annotated)
    for row, (line, match) in enumerate(lines, 1):
        where = f"{path}, line {row}"
        if match and int(match[1]) in name_of:
            draw = outline(match[2].split(), scaled=True)
            annotated.add(number, where, name_of[int(match[1])], draw)
        elif line:
            annotated.reject(number, where, _explain_line(line, match, name_of))


def _read_text(path: Path) -> list[str]:
    if not path.stat().st_size or path.name == "classes.txt":  # no objects; names of classes
        return []
    with open_source(path) as stream:
        text = read_whole(stream).decode("utf-8-sig", "replace")
    return [line.strip() for line in text.splitlines()]


def _explain_line(line: str, match: re.Match[str] | None, name_of: Mapping[int, str]) -> str:
    """Return why a line is not an outline."""
    if match:
        return f"class {match[1]} has no name: there are {len(name_of)} ({', '.join(name_of.values())})"
    if len(line.split()) == 5:
        return (
            "a box among outlines; draw its outline, or train on a dataset of boxes alone with "
            "experiment=detection"
        )
    return (
        f"{quote(line)} is not a class with three points or more, x and y in fractions of the image"
    )


def _read_cvat(path: Path, annotated: Annotated) -> None:
    with open_source(path) as stream:
        # Zero bytes come from UTF-16; other programs write XML too.
        if b"<annotations" not in stream.read(_HEAD_BYTES).replace(b"\0", b""):
            return
    for image in read_xml(path, "annotations", MAX_BYTES).iterfind("image"):
        name = str(image.get("name"))
        split = find_split(image.get("subset", ""))
        number = annotated.find((str(path.parent / name), name), path, split=split)
        annotated.state_size(number, f"{path}, {name}", image.get("height"), image.get("width"))
        numbers: Counter[str] = Counter()
        shapes = []
        for shape in image:
            shapes.append((shape, f"{path}, {name}, {shape.tag} {numbers[shape.tag]}"))
            numbers[shape.tag] += 1
        for shape, where in sorted(shapes, key=_find_layer):
            try:
                _add_cvat(shape, annotated, number, where)
            except DataError as error:
                annotated.reject(number, where, str(error))


def _find_layer(item: "tuple[Element, str]") -> int:
    """Return the layer of a shape; higher layers cover lower ones."""
    return int(item[0].get("z_order") or 0)


def _add_cvat(shape: "Element", annotated: Annotated, number: int | None, where: str) -> None:
    if shape.tag in _CVAT_OTHERS:
        return
    unknown = sorted(set(shape.attrib) - _CVAT_ATTRIBUTES)
    if unknown:
        raise DataError(
            f"the attribute {quote(unknown[0])} is not read, and may move the shape; export it "
            "as 'CVAT for images 1.1', or remove the attribute"
        )
    effect: Effect = "object"
    for attribute in shape.iterfind("attribute"):
        if attribute.get("name") in _CROWD and (attribute.text or "").lower() in ("1", "true"):
            effect = "ignored"
    group = shape.get("group_id")
    instance = group if group and group != "0" else None
    annotated.add(number, where, shape.get("label", ""), cvat_shape(shape), effect, instance)


def _find_labelled(path: Path, annotated: Annotated, named: str = "") -> int | None:
    """Find the image of the name of a label file, or else the one that the file names.

    Return None for an excluded image, or if a problem is noted.

    Args:
        path: The file.
        annotated: Receives the image.
        named: Path in the file, perhaps of another machine.
    """
    number, other, problem = None, None, ""
    split = _split_of(path, annotated)
    try:
        number = _find_by_name(path, annotated, Path(named.replace("\\", "/")).suffix)
    except DataError as error:
        problem = str(error)
        if named:
            problem += f", and none {quote(named)}, which it names"
    try:
        other = annotated.index.find_named(named, split, path)
    except DataError as error:
        problem = problem and str(error)
    if number is None:
        number = other
    elif other not in (None, number):
        annotated.clashes[path] = number, other
    if number is None:
        annotated.problems.add(path, problem)
        return None
    return annotated.claim(number, path)


def _find_by_name(path: Path, annotated: Annotated, suffix: str = "") -> int:
    """Return the number of the image of the name of a label file.

    Raises:
        DataError: There is no such image, or more than one.
    """
    split = _split_of(path, annotated)
    # The extension that a file names tells images of one stem apart.
    names = [*_list_names(path, annotated, suffix), *_list_names(path, annotated)]
    for name in names[:-1]:
        with suppress(DataError):
            return annotated.index.find(name, split, path)
    return annotated.index.find(names[-1], split, path)


def _split_of(path: Path, annotated: Annotated) -> str | None:
    return split_of(path.relative_to(annotated.folder).as_posix())


def _has_image(path: Path, annotated: Annotated) -> bool:
    with suppress(DataError):
        return _find_by_name(path, annotated) >= 0
    return False


def _list_names(path: Path, annotated: Annotated, suffix: str = "") -> list[str]:
    """List the possible names of the image of a label file.

    The image is beside the file, in the folder that corresponds to its folder of labels, or
    anywhere.
    """
    stem = path.with_suffix("")
    stem = stem.with_name(stem.name + suffix)
    swapped = [
        Path(*stem.parts[:index], *images, *stem.parts[index + 1 :])
        for index, part in enumerate(stem.parts[:-1])
        if is_mask_folder(part) and index >= len(annotated.folder.parts)
        for images in (("images",), ())
    ]
    return [*map(str, (stem, *swapped)), stem.name]


_READERS: Mapping[Layout, tuple[str, Callable[[Sequence[Path], Annotated], None]]] = {
    "coco": (".json", _read_coco),
    "labelme": (".json", _read_labelme),
    "csv": (".csv", _read_each(_read_csv)),
    "yolo": (".txt", _read_yolo),
    "cvat": (".xml", _read_each(_read_cvat)),
}
