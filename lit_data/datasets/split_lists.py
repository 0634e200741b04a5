"""Lists of the images of each split beside the images: text files, ``data.yaml`` and tables."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from lit_data.annotations.coco import find_coco, load_coco
from lit_data.annotations.name_index import NameIndex, list_shorter
from lit_data.annotations.tables import (
    IMAGE_COLUMNS,
    choose_column,
    list_shared_folders,
    read_cell,
    read_table,
    refuse_repeated,
    split_label,
)
from lit_data.annotations.yolo import (
    YAML_FILES,
    YAML_SUFFIXES,
    find_set_yaml,
    read_data_yaml,
    read_lines,
)
from lit_data.core.errors import DataError, Problems, escape, show_path
from lit_data.datasets.split_names import (
    SPLITS,
    find_listed_split,
    find_split,
    split_of_annotations,
)
from lit_data.images.discovery import check_inside
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_FOLDERS = ("ImageSets/Segmentation", "ImageSets/Main", "ImageSets/Layout", "ImageSets")
LIST_PATHS = (
    *YAML_FILES,
    *(f"{split}.txt" for split in SPLITS),
    *(f"{folder}/{stem}.txt" for folder in _FOLDERS for stem in (*SPLITS, "trainval")),
)
"""Common paths of lists, for roots on servers."""
_SPLIT_COLUMNS = ("split", "subset", "set", "partition")
TO_SHARE = "'data.splits={train: 0.7, val: 0.15, test: 0.15}'"
_CURE = f"correct the lists, or split all images with {TO_SHARE}"


class SplitList(NamedTuple):
    """Names of images of one split.

    Attributes:
        split: Name of the split.
        source: Source of the names, for messages.
        rows: Names of images; empty ones count as lines.
        first: Number of the first line.
    """

    split: str
    source: str
    rows: Sequence[str]
    first: int = 1


def find_lists(root: Path, names: Sequence[str], folders: Sequence[str] = ()) -> list[SplitList]:
    """Find the lists of a dataset, in the first known place that has any.

    The places are ``data.yaml``, ``train.txt`` and so on in the root, in
    ``ImageSets/Segmentation``, ``Main`` or ``Layout``, and one table in the root with a column of
    images and one of splits. A folder that holds all images, and one with the class names of an
    export, are searched like the root.

    Args:
        root: Folder of the dataset.
        names: Paths of all images relative to the root.
        folders: Known folders of lists that come first.

    Raises:
        DataError: A list cannot be read, or is outside the root.
    """
    for shared in _list_folders(root, names):
        start = 0 if shared == root else len(shared.relative_to(root).as_posix()) + 1
        lists = _find_lists_in(shared, [name[start:] for name in names], folders)
        if lists:
            return lists
    return []


def _list_folders(root: Path, names: Sequence[str]) -> list[Path]:
    """List the folders in which lists are searched, without repetitions."""
    folders = list_shared_folders(root, names)
    exports = [path.parent for path in root.glob("*/obj.names")]
    if len(exports) == 1 and exports[0] not in folders:
        folders.append(exports[0])  # of CVAT, beside the folder of the images
    return folders


def _find_lists_in(root: Path, names: Sequence[str], folders: Sequence[str]) -> list[SplitList]:
    files, subfolders = _scan(root)
    yaml = _find_yaml(root, files)
    lists = [] if yaml is None else _read_yaml_lists(yaml, names)
    if lists:
        return lists
    for split, path in _find_list_files(root, files, subfolders, folders):
        check_inside(path, root)
        lists.append(SplitList(split, show_path(path), read_lines(path)))
    if lists:
        return lists
    table = _find_table(root, files)
    return [] if table is None else read_split_table(table)


def find_list_files(root: Path, names: Sequence[str]) -> list[Path]:
    """Find the files that list the images of a split; for args see `find_lists`."""
    paths = list[Path | None]()
    for shared in _list_folders(root, names):
        files, subfolders = _scan(shared)
        paths += [path for _, path in _find_list_files(shared, files, subfolders)]
        paths += [_find_yaml(shared, files), _find_table(shared, files)]
    return [path for path in paths if path is not None]


def find_coco_lists(root: Path) -> list[SplitList]:
    """Return the images of COCO files in ``annotations`` that are named after a split: ``instances_val.json``."""
    lists: list[SplitList] = []
    if not (root / "annotations").is_dir():
        return lists
    for path in find_coco(root):
        split = split_of_annotations(path.name)
        with suppress(DataError):  # the reader of their marks reports what is wrong
            images = load_coco(path, split).images.values() if split else ()
            names = [image["file_name"] for image in images]
            lists += [SplitList(split, show_path(path), names)] if split and names else []
    return lists


def _find_yaml(root: Path, files: Sequence[Path]) -> Path | None:
    is_there = any(path.suffix.lower() in YAML_SUFFIXES for path in files)
    return find_set_yaml(root) if is_there else None


def _scan(root: Path) -> tuple[list[Path], list[Path]]:
    """List the text files and tables in a folder, and its folders, without the images, which may be many."""
    files, subfolders = list[Path](), list[Path]()
    if not root.is_dir():
        return files, subfolders
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.lower().endswith((".txt", ".csv", *YAML_SUFFIXES)):
                files.append(Path(entry.path))
            elif "." not in entry.name and entry.is_dir():
                subfolders.append(Path(entry.path))
    return sorted(files), sorted(subfolders)


def _find_list_files(
    root: Path, files: Sequence[Path], subfolders: Sequence[Path], first: Sequence[str] = ()
) -> list[tuple[str, Path]]:
    """Return the text files that list the images of a split, with their splits."""
    lists = _choose_lists(files)
    for folder in dict.fromkeys((*first, *_FOLDERS)):
        if lists:
            break
        for parent in (root, *subfolders):  # as VOC2007 and VOC2012 in one folder
            lists += _choose_lists(sorted((parent / folder).glob("*")))
    return lists


def _choose_lists(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return the given files that list the images of a split, with their splits."""
    path_of: dict[str, Path] = {}
    for path in paths:
        if path.suffix.lower() == ".txt" and find_listed_split(path.stem):
            path_of[path.stem.casefold()] = path
    # The images of trainval are also in train and val.
    if "train" in path_of:
        path_of.pop("trainval", None)
    return [(find_listed_split(stem) or "", path) for stem, path in path_of.items()]


def _read_yaml_lists(path: Path, names: Sequence[str]) -> list[SplitList]:
    root = path.parent
    check_inside(path, root)
    yaml = read_data_yaml(path)
    lists = []
    for split, entries in yaml.splits.items():
        for entry in entries:
            listed = _find_entry((root / yaml.folder, root), entry)
            lists.append(SplitList(split, show_path(root / entry), _list_rows(listed, root, names)))
    return lists


def _find_entry(folders: Sequence[Path], entry: str) -> Path | None:
    """Return the first existing path of an entry that is below the last folder."""
    for folder in folders:
        # ``../`` may be superfluous, as in datasets from Roboflow.
        for text in (entry, entry.removeprefix("../")):
            path = Path(os.path.normpath(folder / text))
            if path.exists() and path.is_relative_to(folders[-1]):
                return path
    return None


def _list_rows(path: Path | None, root: Path, names: Sequence[str]) -> list[str]:
    if path is None:
        return []
    check_inside(path, root)
    if not path.is_dir():
        return read_lines(path)
    return [name for name in names if (root / name).is_relative_to(path)]


def _find_table(root: Path, files: Sequence[Path]) -> Path | None:
    """Return the only table in the root with a column of images and one of splits."""
    tables = []
    for path in files:
        if path.suffix.lower() != ".csv":
            continue
        check_inside(path, root)
        columns, rows = read_table(path)
        split_column = choose_column(columns, _SPLIT_COLUMNS)
        named = [find_split(read_cell(row, split_column)) for row in rows]
        if choose_column(columns, IMAGE_COLUMNS) and named and all(named):
            tables.append(path)
    if len(tables) > 1:
        listed = ", ".join(path.name for path in tables)
        raise DataError(
            f"{show_path(root)}: {len(tables)} tables name a split of each image ({listed}): choose one "
            f"with data.splits={show_path(tables[0])}"
        )
    return tables[0] if tables else None


def read_split_table(path: Path) -> list[SplitList]:
    """Read a table with a column of images and one of splits, such as the ``splits.csv`` of a run.

    Raises:
        DataError: The table cannot be read, or a row has no image or no split.
    """
    columns, rows = read_table(path)
    image_column = choose_column(columns, IMAGE_COLUMNS)
    split_column = choose_column(columns, _SPLIT_COLUMNS)
    refuse_repeated(path, columns, (image_column, split_column))
    lists = []
    for number, row in enumerate(rows, 2):  # the first line has the names of the columns
        name = row.get(image_column)
        split = find_split(read_cell(row, split_column))
        if not name or split is None:
            raise DataError(
                f"{show_path(path)}, line {number}: needs an image and its split, one of "
                f"{', '.join(SPLITS)}"
            )
        lists.append(SplitList(split, show_path(path), (str(name),), number))
    return lists


def match_lists(
    lists: Sequence[SplitList],
    names: Sequence[str],
    index: NameIndex,
    *,
    may_be_older: bool = False,
) -> dict[str, list[int]]:
    """Find the images of lists.

    Args:
        lists: Lists whose rows have a path, a name or a stem. If the whole row is not an image,
            the part before a space or comma counts, because a label may follow.
        names: All images, relative to the root; other images that lists may name follow in the
            index.
        index: Index of the images.
        may_be_older: Log rows without an image and skip them, unless no row has one, because images may
            have been removed since.

    Raises:
        DataError: Rows have no image, images are listed twice, or lists have no rows; all are
            listed.
    """
    number_of = {name: number for number, name in enumerate(names)}
    splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    first_rows: dict[int, str] = {}  # of each listed image
    repeated = Problems()
    missing = Problems()
    problems = Problems()
    for split_list in lists:
        if not any(split_list.rows):
            reason = "is neither a list file with rows nor a folder with images of the dataset"
            problems.add(split_list.source, f"{split_list.split} {reason}")
        for row, name in _number_rows(split_list):
            try:
                number = _find_row(number_of, index, name, split_list.split)
            except DataError as error:
                among = f"among {counted(len(names), 'image')}, such as {escape(names[0])}"
                reason = f"line {row}: {error} {among}"
                (problems if index.has(name) else missing).add(split_list.source, reason)
                continue
            if number in first_rows:
                again = f"{escape(name)} is listed already, in {first_rows[number]}"
                repeated.add(split_list.source, f"line {row}: {again}")
            first_rows.setdefault(number, f"{Path(split_list.source).name}, line {row}")
            splits[split_list.split].append(number)
    _refuse_twins(splits)
    if may_be_older and first_rows:
        rows = counted(len(missing), "row has", "rows have")
        missing.warn_if_any(log, f"{rows} no image in the folder; skipped")
    else:
        problems.extend(missing)
    problems.extend(repeated)
    problems.raise_if_any(f"{counted(len(problems), 'problem')} with the lists of splits", _CURE)
    return splits


def _number_rows(split_list: SplitList) -> Iterator[tuple[int, str]]:
    for row, name in enumerate(split_list.rows, split_list.first):
        if name:
            yield row, name


def _refuse_twins(splits: Mapping[str, Sequence[int]]) -> None:
    """Refuse two splits with the same images by one line, as in the ``data.yaml`` of sample datasets."""
    for one, other in combinations(SPLITS, 2):
        count = len(splits[one])
        if count and set(splits[one]) == set(splits[other]):
            raise DataError(
                f"{one} and {other} are the same images ({count}), so that scores would say "
                f"nothing about new ones: list others for {other}, or split the images with "
                f"{TO_SHARE}"
            )


def _find_row(number_of: Mapping[str, int], index: NameIndex, row: str, split: str) -> int:
    """Return the number of the image of a row, which may have folders of an export and end with labels."""
    if row in number_of:
        return number_of[row]
    without_labels = (row.split(maxsplit=1)[0], split_label(row)[0])
    for name in (row, *without_labels):
        if index.has(name):
            return index.find(name, split)
    number = index.find_below(row, split)
    if number is None:
        names = " or ".join(map(repr, map(escape, (row, *list_shorter(row)))))
        raise DataError(f"no image is named {names}")
    return number
