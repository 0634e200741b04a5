"""Tables and text files of images with their labels or runs of pixels."""

import csv
import io
import json
import logging
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lit_data.annotations.name_index import NameIndex
from lit_data.annotations.yolo import read_lines
from lit_data.core.errors import DataError, Problems, show_path
from lit_data.core.opening import decode_text, open_source, read_whole
from lit_data.datasets.split_names import find_listed_split
from lit_data.images.discovery import check_inside, is_hidden, list_shown
from lit_inspect.cells import restore_cell
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)

_MOST_TABLES = 3  # tables that a message describes
_NUMBERED = r"([^/\d]+?)[-_. ]?\d+\.\w+$"
"""Pattern of the word at the beginning of the name of a file, before its number."""
_MOST_STEMS = 20
BOTH_COLUMNS = "imageid_classid"  # name of a column with both
IMAGE_COLUMNS = (
    "imageid",
    "image",
    "image_id",
    "filename",
    "file_name",
    "file",
    "name",
    "img",
    BOTH_COLUMNS,
)
CLASS_COLUMNS = (
    "classid",
    "class_id",
    "class",
    "label",
    "category",
    "defect",
    "defect_type",
)


class ListedLabels(NamedTuple):
    """Labels of images, and the files that list them."""

    labels: tuple[str, ...]
    files: tuple[Path, ...]


class _Row(NamedTuple):
    """Row that names an image and its label, perhaps in the list of a split."""

    where: str
    image: str
    label: str
    split: str | None = None


def read_table(path: Path) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """Return the names of the columns of a CSV file, and its rows.

    Raises:
        DataError: The file cannot be read, or is a table of images that is not UTF-8.
    """
    with open_source(path) as stream:
        data = read_whole(stream)
        # Runs of a large mask are one long field.
        csv.field_size_limit(max(csv.field_size_limit(), len(data)))
        text = data.decode("utf-8-sig", "replace")
        heading = text.partition("\n")[0]
        separator = max(",;\t", key=heading.count)  # Excel writes semicolons or tabs
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        if choose_column(rows.fieldnames or (), IMAGE_COLUMNS):
            # Other tables may be in any encoding.
            text = decode_text(data)
            rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        restored = [{key: restore_cell(cell) for key, cell in row.items()} for row in rows]
        return rows.fieldnames or (), restored


def choose_column(columns: Sequence[str], known: Sequence[str]) -> str:
    """Return the column of a table with one of the known names, in any case, or "" if there is none."""
    column_of = {str(name).strip().lower(): str(name) for name in columns}
    return next((column_of[name] for name in known if name in column_of), "")


def refuse_repeated(path: Path, columns: Sequence[str], used: Sequence[str]) -> None:
    """Refuse a table with several columns of a name that is used: only the last would be read.

    Raises:
        DataError: There are several.
    """
    for name in used:
        if name and columns.count(name) > 1:
            raise DataError(f"{show_path(path)}: several columns are named {name!r}: keep one")


def read_cell(row: Mapping[str, Any], column: str) -> str:
    """Return a cell without the blanks around it; empty where the row ends before it."""
    return str(row.get(column) or "").strip()


def read_labels(
    folder: Path, images: Sequence[Path], excluded: Sequence[Path], *, need_all: bool = True
) -> ListedLabels | None:
    """Read the label of each image from a CSV file with a column of images and one of classes.

    Args:
        folder: The root of the set.
        images: All images.
        excluded: Images that are left out, which a table may name too.
        need_all: False only warns of images without a label, which gets "", and of other faults.

    Returns:
        The labels, or None if there is no such table.

    Raises:
        DataError: The table names missing images, or lacks some; all are listed.
    """
    index = NameIndex(images, excluded)
    for path in list_shown(folder, "*.csv"):
        check_inside(path, folder)
        columns, rows = read_table(path)
        image_column = choose_column(columns, IMAGE_COLUMNS)
        class_column = choose_column(columns, CLASS_COLUMNS)
        if rows and image_column and class_column:
            refuse_repeated(path, columns, (image_column, class_column))
            listed = [
                _Row(f"{path}, row {line}", str(row[image_column]), read_cell(row, class_column))
                for line, row in enumerate(rows, 2)  # the first line has the names of the columns
            ]
            cure = "correct the table, or move it out of the folder if it labels other images"
            labels = _match_labels(
                listed, images, index, (show_path(path), cure), need_all=need_all
            )
            return ListedLabels(labels, (path,))
    return None


def read_list_labels(
    folder: Path, images: Sequence[Path], excluded: Sequence[Path], *, need_all: bool = True
) -> ListedLabels | None:
    """Read the label of each image from text files whose lines are an image and a label.

    Caffe and its descendants train from such files, ``train.txt`` and ``val.txt`` with
    ``images/1.png 3``. They may be separated by spaces, tabs, commas or semicolons. The files lie in
    the root, or in a folder that holds all images.

    Args:
        folder: The root of the set.
        images: All images.
        excluded: Images that are left out, which a file may name too.
        need_all: As in `read_labels`.

    Returns:
        The labels, or None if there is no such file.

    Raises:
        DataError: The files name missing images, or lack some; all are listed.
    """
    ends = (min(images, default=folder), max(images, default=folder))
    for shared in list_shared_folders(
        folder, [path.relative_to(folder).as_posix() for path in ends]
    ):
        paths = [path for path in sorted(shared.glob("*.txt")) if not is_hidden(path.name)]
        if not paths:  # the index of many images takes long
            continue
        index = NameIndex(images, excluded)
        listed, files = list[_Row](), list[Path]()
        for path in paths:
            check_inside(path, folder)
            rows = _read_rows(path)
            count = sum(bool(row.label) and index.has(row.image) for row in rows)
            if count and count >= len(rows) / 2:  # otherwise a list of images, or any text
                listed += rows
                files.append(path)
        if files:
            names = ", ".join(path.name for path in files)
            cure = "correct the files, or move them out of the folder if they label other images"
            labels = _match_labels(listed, images, index, (names, cure), need_all=need_all)
            return ListedLabels(labels, tuple(files))
    return None


def read_flag_labels(
    folder: Path, images: Sequence[Path], excluded: Sequence[Path], *, need_all: bool = True
) -> ListedLabels | None:
    """Read the label of each image from LabelMe files: the only one of their flags that is set.

    Args:
        folder: The root of the set.
        images: All images.
        excluded: Images that are left out, which files may label too.
        need_all: As in `read_labels`.

    Returns:
        The labels, or None if no file has a flag that is set.

    Raises:
        DataError: Files label missing images, or set several flags, or images have no label.
    """
    index = NameIndex(images, excluded)
    listed, files = list[_Row](), list[Path]()
    for path in list_shown(folder, "*.json"):
        check_inside(path, folder)
        flags, named = _read_flags(path)
        if not flags:
            continue
        if len(flags) > 1:
            raise DataError(
                f"{show_path(path)}: several flags are set ({', '.join(flags)}), but an image has one "
                "class: leave one"
            )
        stem = str(path.with_suffix(""))
        listed.append(_Row(str(path), stem if index.has(stem) else named, flags[0]))
        files.append(path)
    if not files:
        return None
    cure = "set one flag in each LabelMe file, or skip images with data.exclude"
    source = ("the flags of LabelMe files", cure)
    return ListedLabels(
        _match_labels(listed, images, index, source, need_all=need_all), tuple(files)
    )


def _read_flags(path: Path) -> tuple[list[str], str]:
    """Return the flags that a LabelMe file sets, and the name of its image; none for other JSON."""
    with open_source(path) as stream:
        try:
            content = json.loads(read_whole(stream))
        except (ValueError, RecursionError):
            return [], ""
    if not isinstance(content, dict) or not isinstance(content.get("flags"), dict):
        return [], ""
    flags = [str(name) for name, is_set in content["flags"].items() if is_set is True]
    named = str(content.get("imagePath") or "").replace("\\", "/")
    return flags, posixpath.basename(named)


def list_shared_folders(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders that hold all images, the root first: lists of a set may lie in each of them.

    Args:
        folder: The root of the set.
        names: Paths of the images relative to the root.
    """
    # What the first and the last have in common, all have.
    ends = [min(names, default=""), max(names, default="")]
    common = posixpath.commonpath([posixpath.dirname(end) for end in ends])
    shared_folders = [folder]
    for part in PurePosixPath(common).parts:
        shared_folders.append(shared_folders[-1] / part)
    return shared_folders


def _read_rows(path: Path) -> list[_Row]:
    """Return the lines of a text file; none if it is in another encoding, or a folder."""
    try:
        lines = read_lines(path)
    except DataError:
        return []
    split = find_listed_split(path.stem)
    rows = []
    for number, text in enumerate(lines, 1):
        if text:
            rows.append(_Row(f"{path}, line {number}", *split_label(text), split))
    return rows


def split_label(text: str) -> tuple[str, str]:
    """Split a line into an image, whose name may have spaces, and a label; "" if it has none."""
    match = re.fullmatch(r"(.+?)\s*[\s,;]\s*([^\s,;]+)", text)
    return (match[1], match[2]) if match else (text, "")


def _match_labels(
    listed: Sequence[_Row],
    images: Sequence[Path],
    index: NameIndex,
    source: tuple[str, str],
    *,
    need_all: bool,
) -> tuple[str, ...]:
    """Return the label of each image, from the rows of a source, which comes with the cure for faults."""
    name_of_source, cure = source
    labels, problems = dict[int, str](), Problems()
    for where, name, label, split in listed:
        try:
            number = index.find(name, split)
        except DataError as error:
            problems.add(where, str(error))
            continue
        if number >= index.count:  # of an image that is left out
            continue
        first_label = labels.setdefault(number, label)
        if first_label != label:
            problems.add(where, f"a second label {label!r} of {name}, beside {first_label!r}")
    unlabeled = [number for number in range(len(images)) if number not in labels]
    for number in unlabeled if need_all else ():
        problems.add(images[number], f"an image without a label in {name_of_source}")
    heading = counted(len(problems), "label is bad", "labels are bad")
    if need_all:
        problems.raise_if_any(heading, cure)
    problems.warn_if_any(log, heading)
    if unlabeled:
        count = counted_of(len(unlabeled), len(images), "image", "has", "have")
        log.info("%s no label in %s", count, name_of_source)
    return tuple(labels.get(number, "") for number in range(len(images)))


def describe_lack(folder: Path, kinds: Sequence[str], names: Sequence[str]) -> str:
    """Return the message for a folder whose images have no labels, with what was found instead.

    Args:
        folder: Folder of the dataset.
        kinds: Kinds that folders name.
        names: Paths of the images below the folder.
    """
    seen = list(kinds)
    for path in list_shown(folder, "*.csv")[:_MOST_TABLES]:
        columns = list(map(str, read_table(path)[0]))
        seen.append(f"{path.relative_to(folder)} with the columns {columns}")
    message = (
        f"{show_path(folder)}: its images have no labels: use a folder for each class, a CSV with "
        "the columns image and label, or a text file with an image and its label in each line "
        f"(found: {', '.join(seen) or 'no labels'})"
    )
    counts = Counter(match[1] for match in map(re.compile(_NUMBERED).search, names) if match)
    if not 2 <= len(counts) <= _MOST_STEMS or sum(counts.values()) < len(names):
        return message
    stems = ", ".join(f"{stem} {count}" for stem, count in sorted(counts.items()))
    return (
        f"{message}. If the file names hold the class ({stems}): "
        f"'data.class_pattern=\"{_NUMBERED}\"'"
    )
