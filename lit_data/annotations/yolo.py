"""Labels in YOLO text, one file per image: each line is ``class cx cy w h`` in fractions of the image."""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_data.annotations.labels import BoxCollector, BoxForm, Frame, LabelTable, check_classes
from lit_data.core.errors import ConfigError, DataError, escape, list_some, show_path
from lit_data.core.files import is_there
from lit_data.core.opening import decode_text, naming, open_source, read_whole, read_within
from lit_data.core.plain import parse_yaml
from lit_data.core.types import Bools, Doubles, PathText
from lit_data.datasets.split_names import find_listed_split
from lit_data.images.header_scan import OnBad
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

CLASS_FILES = (
    "classes.txt",
    "labels/classes.txt",
    "images/classes.txt",  # LabelImg, beside the labels
    "obj.names",
    "train/_darknet.labels",  # CVAT; Roboflow
)
"""Files below the root with the name of a class on each line."""

YAML_FILES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
"""Files below the root that describe a dataset."""

YAML_SUFFIXES = (".yaml", ".yml")
_NESTED_FILES = ("obj.names", "classes.txt", *YAML_FILES)
"""Files with the names of classes in a folder of the root, if the root has none."""
_MOST_YAML_BYTES = 2**24
_MOST_DIGITS = 10  # of a class number

# Possessive repetitions try no digit twice, so that long lines do not take long.
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
_IS_NUMBER = re.compile(_NUMBER)
_LINE = re.compile(r"([0-9]{1,9})(?:\.0*)?" + rf"[ \t]+({_NUMBER})" * 4)
_LARGEST_FRACTION = 2.0
"""Limit above which a number is in pixels; between 1 and the limit, a box is merely outside the image."""


def _find_pixels(boxes: Doubles) -> Bools:
    return np.asarray((np.abs(boxes) > _LARGEST_FRACTION).any(1))


def _find_corners(boxes: Doubles, sizes_px: Doubles) -> Doubles:
    del sizes_px  # shares already
    return np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])


_FORM = BoxForm(
    "YOLO text", "line {}", ("shares of the image", "pixels"), _find_pixels, _find_corners
)


def read_yolo_labels(
    images: Sequence[PathText],
    frames: Sequence[Frame],
    files: Sequence[PathText | None],
    *,
    names: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    on_bad: OnBad = "error",
) -> LabelTable:
    """Read one text file for each image.

    Blank lines, a byte order mark and any kind of line end are accepted; a class may be written
    ``1.0``. See `name_numbers` for the names of the classes.

    Args:
        images: Paths of the images.
        frames: Frames of the images.
        files: Label file of each image; None, or an empty file, for an image without boxes.
        names: Names of the class numbers in the files, from 0, if a file of the dataset has them.
        classes: Names of the classes of the result; by default `names`. Without `names`, they are
            the names of the numbers.
        on_bad: ``skip`` skips bad lines and lists them. Pixels among fractions stay an error.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Lines or files are bad; everything is listed.
    """
    collector = BoxCollector(_FORM, frames, on_bad=on_bad)
    numbers, others = _collect([path for _, path in zip(images, files, strict=True)], collector)
    name_of = name_numbers(numbers, names or classes or ())
    classes = check_classes(classes or tuple(name_of.values()) or ("object",))
    order = {number: classes.index(name) for number, name in name_of.items() if name in classes}
    for path, row, line in others:
        collector.bad.add(path, f"line {row}: {_explain(line, name_of)}")
    if any(order.get(number) != number for number in numbers):
        collector.renumber(order, lambda number: _explain_class(str(number), name_of, classes))
    return collector.finish(classes)


def _collect(
    files: Sequence[PathText | None], collector: BoxCollector
) -> tuple[set[int], list[tuple[PathText, int, str]]]:
    """Collect the boxes of all files, and return the class numbers and the lines that are not boxes."""
    numbers = set[int]()
    others = []
    for image, path in enumerate(files):
        if path is None:
            continue
        try:
            lines = read_lines(path)
        except DataError as error:
            collector.problems.add(path, str(error))
            continue
        collector.start_file(path)
        for row, line in enumerate(lines, 1):
            match = _LINE.fullmatch(line)
            if match:
                number = int(match[1])
                numbers.add(number)
                collector.add(image, row, number, [float(value) for value in match.groups()[1:]])
            elif line:
                others.append((path, row, line))
    return numbers, others


def name_numbers(numbers: Collection[int], names: Sequence[str]) -> dict[int, str]:
    """Return the name of each class number in label files.

    Without names, numbers stand for themselves. If the numbers are exactly 1 to the number of
    names, they count from 1. Either is logged.

    Args:
        numbers: Class numbers in all files of the dataset.
        names: Names from a file of the dataset; empty if there are none.
    """
    if not names:
        if numbers:
            listed = list_some(sorted(numbers))
            log.info(
                "no data.yaml names the classes, so they are named by their numbers: %s", listed
            )
        return {number: str(number) for number in sorted(numbers)}
    first = int(set(numbers) == set(range(1, len(names) + 1)))
    if first:
        log.warning(
            "classes of labels count from 1, not from 0: 1 is %s, %d is %s",
            names[0],
            len(names),
            names[-1],
        )
    return dict(enumerate(names, first))


def read_lines(path: PathText) -> list[str]:
    """Return the lines of a UTF-8 text file without surrounding spaces; an empty file has no lines.

    Raises:
        DataError: The file cannot be read.
    """
    with naming(path):
        if Path(path).is_file() and Path(path).stat().st_size == 0:
            return []
    with open_source(path) as stream:
        text = decode_text(read_whole(stream))
    # str.splitlines would also split at characters that names may contain.
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


@dataclass(frozen=True, slots=True)
class DataYaml:
    """Content of a ``data.yaml``.

    Args:
        classes: Names of the classes; empty if the file has none.
        folder: ``path``, relative to the folder of the file.
        splits: Folders and list files of each of train, val and test that the file names, relative
            to `folder`.
        has_key_points: True if lines of label files are boxes with key points.
    """

    classes: tuple[str, ...]
    folder: str
    splits: Mapping[str, tuple[str, ...]]
    has_key_points: bool = False


def read_data_yaml(path: PathText) -> DataYaml:
    """Read the file that describes a dataset for Ultralytics (docs.ultralytics.com/datasets/detect).

    Args:
        path: A YAML file with ``names`` as a list or by number, ``nc``, ``path``, ``train``,
            ``val``, ``test``.

    Raises:
        DataError: The file has another form, or ``nc`` and ``names`` disagree.
    """
    data = read_within(path, _MOST_YAML_BYTES)
    with naming(path):
        content = parse_yaml(data)
        if not isinstance(content, dict):
            raise DataError("must hold keys such as names, train and val")
        classes = _read_names(content.get("names"), content.get("nc"))
        folder = content.get("path") or "."
        if not isinstance(folder, str):
            raise DataError(f"path must be the name of a folder, found {type(folder).__name__}")
        splits = {}
        for key, entry in content.items():
            split = find_listed_split(str(key))
            if split and entry:
                splits[split] = _read_entry(key, entry)
        return DataYaml(classes, folder, splits, has_key_points="kpt_shape" in content)


def refuse_key_points(root: Path) -> None:
    """Refuse a dataset with key points, whose lines look like outlines.

    Raises:
        DataError: Its YAML file has `kpt_shape`.
    """
    path = find_set_yaml(root)
    if path is not None and read_data_yaml(path).has_key_points:
        raise DataError(
            f"{show_path(path)}: kpt_shape means that labels are boxes with key points, which are not "
            "read: keep the first five columns of each line for experiment=detection"
        )


def find_set_yaml(root: Path) -> Path | None:
    """Return the YAML file that describes a dataset: `data.yaml`, `dataset.yaml`, or the only one with names."""
    named = [path for path in map(root.joinpath, YAML_FILES) if is_there(path)]
    if named:
        return named[0]
    others = [path for path in sorted(root.glob("*.y*ml")) if _names_classes(path)]
    return others[0] if len(others) == 1 else None


def _names_classes(path: Path) -> bool:
    try:
        content = parse_yaml(read_within(path, _MOST_YAML_BYTES))
    except DataError:
        return False
    return isinstance(content, dict) and {"names", "train"} <= content.keys()


def find_class_file(root: Path, *, is_nested: bool = True) -> Path | None:
    """Return the file with the class names of a dataset, if there is one.

    It is in the root, or in a folder of it if it may be nested, as in an export beside its images.

    Raises:
        DataError: Files in several folders name the classes differently.
    """
    yaml = find_set_yaml(root)
    if yaml is not None and read_data_yaml(yaml).classes:
        return yaml
    for path in map(root.joinpath, CLASS_FILES):
        if is_there(path):
            return path
    paths = _list_nested(root) if is_nested else []
    for other in paths[1:]:
        if _read_class_file(other) != _read_class_file(paths[0]):
            raise DataError(
                f"{show_path(other)} and {show_path(paths[0])} name the classes differently, so "
                "numbers in label files have several meanings: set data.root to one of the folders, "
                "or number the classes alike"
            )
    return next(iter(paths), None)


def _list_nested(root: Path) -> list[Path]:
    """List the files that name classes in the folders of the root."""
    with os.scandir(root) as entries:
        folders = sorted(
            entry.path for entry in entries if "." not in entry.name and entry.is_dir()
        )
    paths = []
    for folder in map(Path, folders):
        for name in _NESTED_FILES:
            path = folder / name
            if path.is_file() and (path.suffix not in YAML_SUFFIXES or _names_classes(path)):
                paths.append(path)
    return paths


def read_class_names(root: Path, *, are_numbered: bool = True) -> tuple[str, ...]:
    """Read the class names, from the YAML file or else from the lines of a class file.

    Args:
        root: Folder of the dataset.
        are_numbered: Labels have numbers, so files in folders of the root are needed too.

    Raises:
        DataError: The file cannot be read, has no names, or repeats one; or several files differ.
    """
    path = find_class_file(root, is_nested=are_numbered)
    return () if path is None else _read_class_file(path)


def _read_class_file(path: Path) -> tuple[str, ...]:
    if path.suffix in YAML_SUFFIXES:
        return read_data_yaml(path).classes
    lines = read_lines(path)
    with naming(path):
        return _name_classes([line for line in lines if line])


def _read_names(names: object, count: object) -> tuple[str, ...]:
    """Return the names of classes.

    Messages show only text values, since aliases in YAML can make others huge.
    """
    # Names by number, as Ultralytics writes them.
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise DataError(f"names must have the keys 0 to {len(names) - 1}, one for each class")
        names = [names[number] for number in range(len(names))]
    if names and not (isinstance(names, list) and all(type(name) in (str, int) for name in names)):
        raise DataError(
            "names must be a list of names, or a name for each number; put names such as 'yes' in quotes"
        )
    if not isinstance(names, list) or not names:
        return ()
    classes = _name_classes([str(name) for name in names])
    if count is not None and (type(count) is not int or count != len(classes)):
        stated = count if isinstance(count, int) else type(count).__name__
        raise DataError(f"nc is {stated}, but names holds {len(classes)}; make them agree")
    return classes


def _name_classes(names: Sequence[str]) -> tuple[str, ...]:
    try:
        return check_classes(names)
    except ConfigError as error:
        raise DataError(str(error)) from None


def _read_entry(key: str, entry: object) -> tuple[str, ...]:
    parts = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(part, str) and part for part in parts):
        raise DataError(f"{key} must be the name of a folder or list file, or a list of these")
    return tuple(parts)


def _explain(line: str, name_of: Mapping[int, str]) -> str:
    """Return why a line is not a box."""
    if ";" in line or "," in line:
        return (
            f"{_quote(line)} holds ';' or ','; separate columns by spaces, and write decimals "
            "with a point"
        )
    columns = line.split()
    if len(columns) != 5:
        hint = ""
        if len(columns) == 4:
            hint = f"; is the class missing, {_describe_numbers(name_of)}?"
        elif len(columns) == 6:
            hint = "; confidences are not read"
        elif len(columns) > 6:
            hint = "; polygons are read with data.boxes_from=masks"
        return f"{_quote(line)} has {counted(len(columns), 'column')}; a box has 5: class cx cy w h{hint}"
    for column in columns[1:]:
        if not _IS_NUMBER.fullmatch(column):
            return f"{_quote(column)} is not a finite number"
    return _explain_class(columns[0], name_of, ())


def _explain_class(text: str, name_of: Mapping[int, str], classes: Sequence[str]) -> str:
    name = name_of.get(int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else None
    if name is not None:
        return (
            f"class {text} is {_quote(name)}, which is not one of {list_some(classes)}; correct "
            "the names in the file of the set, or set data.classes"
        )
    allowed = (
        f"a whole number {_describe_numbers(name_of)} ({counted(len(name_of), 'class', 'classes')})"
    )
    return f"class {_quote(text)} is not allowed; it must be {allowed}"


def _describe_numbers(name_of: Mapping[int, str]) -> str:
    return f"from {min(name_of, default=0)} to {max(name_of, default=0)}"


def _quote(text: str) -> str:
    return repr(escape(text[:80]))
