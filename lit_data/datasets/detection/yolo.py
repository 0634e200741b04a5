"""Labels as YOLO text, one file an image: ``class cx cy w h`` in fractions of the image a line."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_data.datasets.detection.labels import BoxCollector, BoxForm, LabelTable, check_classes
from lit_data.datasets.detection.voc import NameIndex
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, DataError, Problems, escape
from lit_data.files import is_there
from lit_data.io.discovery import check_inside
from lit_data.io.images.header_scan import OnBad
from lit_data.io.plain import parse_yaml
from lit_data.io.source import decode_text, naming, open_source, read_whole, read_within
from lit_data.types import Bools, Doubles, Ints, PathText

log = logging.getLogger(__name__)

CLASS_FILES = (
    *("classes.txt", "labels/classes.txt", "images/classes.txt"),  # LabelImg, beside the labels
    *("obj.names", "train/_darknet.labels"),  # CVAT; Roboflow
)
"""Files with the name of a class in each line, below the root."""

_MOST_YAML_BYTES = 2**24

# Possessive repetitions: no digit is tried twice, so that long lines take no long time.
_NUMBER = r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
_IS_NUMBER = re.compile(_NUMBER)
_LINE = re.compile(r"([0-9]{1,9})(?:\.0*)?" + rf"[ \t]+({_NUMBER})" * 4)
_LARGEST_FRACTION = 2.0
"""Above it a number is in pixels; between 1 and it a box merely lies outside."""


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
    sizes_px: Ints,
    files: Sequence[PathText | None],
    *,
    classes: Sequence[str],
    on_bad: OnBad = "error",
) -> LabelTable:
    """Read one text file for each image.

    Blank lines, a byte order mark and any kind of line end are accepted; a class may be written
    ``1.0``. Where the classes of all files are 1 to the number of names, all of them and no other,
    they count from 1, which a line says.

    Args:
        images: Their paths.
        sizes_px: [I, 2] (height, width) of the images.
        files: The label file of each image; None, or an empty file, for an image without boxes.
        classes: Names of the classes.
        on_bad: ``skip`` leaves bad lines out and lists them. Pixels among shares stay an error.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Lists what is wrong with any line of any file.
    """
    classes = check_classes(classes)
    numbers = set[int]()
    files = [path for _, path in zip(images, files, strict=True)]
    collector = _collect(files, BoxCollector(_FORM, sizes_px, on_bad=on_bad), classes, numbers)
    count = len(classes)
    if numbers == set(range(1, count + 1)):
        log.warning(
            "classes of labels count from 1, not from 0: 1 is %s, %d is %s",
            *(classes[0], count, classes[-1]),
        )
        # Read again, as the last class was refused and the others were one too high.
        collector = BoxCollector(_FORM, sizes_px, on_bad=on_bad)
        _collect(files, collector, classes, numbers, first=1)
    return collector.finish(classes)


def _collect(
    files: Sequence[PathText | None],
    collector: BoxCollector,
    classes: Sequence[str],
    numbers: set[int],
    *,
    first: int = 0,
) -> BoxCollector:
    """Collect the boxes of all files, whose lowest class is `first`.

    Args:
        files: Label file of each image.
        collector: Takes the boxes.
        classes: Names of the classes.
        numbers: Gets the classes as they are written.
        first: Number of the first class.
    """
    for image, path in enumerate(files):
        if path is None:
            continue
        try:
            lines = read_lines(path)
        except DataError as error:
            collector.problems.add(path, str(error))
            continue
        collector.start_file(path)
        for line_number, line in enumerate(lines, 1):
            if line:
                _read_line(collector, image, line_number, line, classes, numbers, first)
    return collector


def read_lines(path: PathText) -> list[str]:
    """Return the lines of a UTF-8 text file without the spaces around them; an empty file has none.

    Raises:
        DataError: It cannot be read.
    """
    with naming(path):
        if Path(path).is_file() and Path(path).stat().st_size == 0:
            return []
    with open_source(path) as stream:
        text = decode_text(read_whole(stream))
    # str.splitlines would also split at characters that names may hold.
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


@dataclass(frozen=True, slots=True)
class DataYaml:
    """Content of a ``data.yaml``.

    Args:
        classes: Names of the classes; empty if it names none.
        folder: ``path``, relative to the file's folder.
        splits: For each of train, val, test its folders and list files, relative to `folder`; those
            it names only.
    """

    classes: tuple[str, ...]
    folder: str
    splits: Mapping[str, tuple[str, ...]]


def read_data_yaml(path: PathText) -> DataYaml:
    """Read the file that Ultralytics describes a set with (docs.ultralytics.com/datasets/detect).

    Args:
        path: A YAML file with ``names`` as a list or by number, ``nc``, ``path``, ``train``,
            ``val``, ``test``.

    Raises:
        DataError: It is not that; ``nc`` and ``names`` disagree.
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
        splits = {key: _read_entry(key, content[key]) for key in SPLITS if content.get(key)}
        return DataYaml(classes, folder, splits)


def read_class_names(root: Path) -> tuple[str, ...]:
    """Read the names, one a line, of the first of `CLASS_FILES`; without any there are none.

    Raises:
        DataError: It cannot be read, names none, or names one twice.
    """
    for path in map(root.joinpath, CLASS_FILES):
        if is_there(path):
            lines = read_lines(path)
            with naming(path):
                return _name_classes([line for line in lines if line])
    return ()


def read_splits(
    folders: Sequence[Path],
    entries: Mapping[str, Sequence[str]],
    names: Sequence[str],
    index: NameIndex,
) -> dict[str, list[int]]:
    """Find the images of each split.

    Args:
        folders: What entries are relative to, the first that has one; the last is the root of the
            set.
        entries: For each split its folders of images, and list files with a path, a name or a stem
            in each row.
        names: All images, relative to the root.
        index: Of the images.

    Raises:
        DataError: Lists all rows without an image, images that are listed twice, and files that are
            missing.
    """
    problems = Problems()
    first_rows: dict[int, str] = {}  # of each image that is listed
    root = folders[-1]
    splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for entry in entries.get(split, ()):
            path = _find_entry(folders, entry)
            if path:
                check_inside(path, root)
            rows = _list_rows(path, root, names) if path else []
            if not any(rows):
                reason = "is no list file with rows, and no folder with images of the set"
                problems.add(root / entry, f"{split} {reason}")
            for row, name in enumerate(rows, 1):
                if not name:
                    continue
                try:
                    number = _find_row(index, name)
                except DataError as error:
                    where = f"line {row} of {len(rows)}"
                    problems.add(root / entry, f"{where}: {error} among {len(names)} images")
                    continue
                if number in first_rows:
                    again = f"{escape(name)} is listed already, in {first_rows[number]}"
                    problems.add(root / entry, f"line {row}: {again}")
                first_rows.setdefault(number, f"{entry}, line {row}")
                splits[split].append(number)
    problems.raise_if_any(f"{len(problems)} problems with the lists of splits")
    return splits


def _find_row(index: NameIndex, name: str) -> int:
    """Return the number of an image that a row names, also below the ``data/`` of CVAT, no folder."""
    try:
        return index.find(name)
    except DataError:
        if not name.startswith("data/"):
            raise
        return index.find(name.removeprefix("data/"))


def _find_entry(folders: Sequence[Path], entry: str) -> Path | None:
    """Return the first path of an entry that lies below the last folder."""
    for folder in folders:
        # ``../`` may be too much, as in sets that Roboflow writes.
        for text in (entry, entry.removeprefix("../")):
            path = Path(os.path.normpath(folder / text))
            if path.exists() and path.is_relative_to(folders[-1]):
                return path
    return None


def _list_rows(path: Path, root: Path, names: Sequence[str]) -> list[str]:
    if not path.is_dir():
        return read_lines(path)
    return [str(root / name) for name in names if (root / name).is_relative_to(path)]


def _read_names(names: object, count: object) -> tuple[str, ...]:
    """Return the names of classes.

    Values that are no text are never shown, since aliases of YAML can make these huge.
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


def _read_line(
    collector: BoxCollector,
    image: int,
    place: int,
    line: str,
    classes: Sequence[str],
    numbers: set[int],
    first: int,
) -> None:
    match = _LINE.fullmatch(line)
    if match is None:
        collector.reject(place, _explain(line, len(classes)))
        return
    written = int(match[1])
    numbers.add(written)
    number = written - first
    if not 0 <= number < len(classes):
        collector.reject(place, _explain_class(match[1], len(classes)))
    else:
        collector.add(image, place, number, [float(value) for value in match.groups()[1:]])


def _explain(line: str, classes: int) -> str:
    """Return the reason why a line is no box."""
    if ";" in line or "," in line:
        return f"{_quote(line)} holds ';' or ','; columns are parted by spaces, decimals by a point"
    columns = line.split()
    if len(columns) != 5:
        hint = ""
        if len(columns) == 4:
            hint = f"; is the class missing, 0 to {classes - 1}?"
        elif len(columns) == 6:
            hint = "; confidences are not read"
        elif len(columns) > 6:
            hint = "; polygons are read with data.boxes_from=masks"
        return f"{_quote(line)} has {len(columns)} columns; a box has 5: class cx cy w h{hint}"
    for column in columns[1:]:
        if not _IS_NUMBER.fullmatch(column):
            return f"{_quote(column)} is no finite number"
    return _explain_class(columns[0], classes)


def _explain_class(text: str, classes: int) -> str:
    return f"class {_quote(text)} is not allowed; it must be a whole number from 0 to {classes - 1} ({classes} classes)"


def _quote(text: str) -> str:
    return repr(escape(text[:80]))
