"""Label files with one image each: the search for them, and for the image of each."""

import posixpath
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lit_data.annotations.formats import find_format
from lit_data.annotations.labels import Faults
from lit_data.annotations.name_index import NameIndex
from lit_data.annotations.voc import read_text, read_xml
from lit_data.core.errors import DataError, Problems, escape, show_path
from lit_data.datasets.split_names import split_of
from lit_data.images.discovery import FolderWalk
from lit_inspect.counts import counted


class _LabelWalk(FolderWalk):
    """A walk that keeps files of one extension instead of images."""

    def __init__(
        self, root: Path, suffix: str, folders: Sequence[str], exclude: Sequence[str]
    ) -> None:
        patterns = [f"**/{name}/**/*" for name in folders] or ["**/*"]
        super().__init__(root, patterns, exclude)
        self._suffix = suffix

    def _is_wanted(self, name: str, relative: str) -> bool:
        # LabelImg writes it beside labels.
        if name == "classes.txt" or not name.lower().endswith(self._suffix):
            return False
        return self._matches(relative) is not None and not self._excludes(relative)


def list_label_files(
    root: Path, suffix: str, parents: Sequence[str], exclude: Sequence[str], faults: Faults
) -> list[str]:
    """List the files of one extension in folders with given names, or in all folders without names.

    Links that lead nowhere or out of the root, and entries that are not files, are added to the
    faults.
    """
    walk = _LabelWalk(root, suffix, parents, exclude)
    names = sorted(walk.run())
    if len(walk.problems):
        faults.take(
            walk.problems.make_error(
                f"{counted(len(walk.problems), 'bad name')} under {show_path(root)}"
            )
        )
    return names


def match_label_files(
    root: Path,
    index: NameIndex,
    names: Sequence[str],
    parents: Sequence[str],
    *,
    is_beside: bool,
) -> tuple[dict[int, Path], Problems]:
    """Find the images of label files.

    Args:
        root: Folder of the dataset.
        index: Index of the images.
        names: Names of the files, relative to the root.
        parents: Names of folders of labels.
        is_beside: A file belongs to the image of its name in its own folder.

    Returns:
        The label file of each image that has one, and the problems of the other files.
    """
    files: dict[int, Path] = {}
    problems = Problems()
    for row, name in enumerate(names, 1):
        try:
            number = _find_by_name(root, index, name, parents, is_beside=is_beside)
            if number >= index.count:
                continue
            first = files.setdefault(number, root / name)
            if first != root / name:
                raise DataError(f"labels the same image as {show_path(first)}")
        except DataError as error:
            # Text files such as a README.txt may be beside labels too.
            if not _is_xml(name) and not find_format(root / name, root):
                continue
            problems.add(root / name, f"label file {row} of {len(names)}: {error}")
    return files, problems


def _is_xml(name: str) -> bool:
    return name.lower().endswith(".xml")


def _find_by_name(
    root: Path, index: NameIndex, name: str, parents: Sequence[str], *, is_beside: bool
) -> int:
    """Find the image of the name of a label file, or else the one that an XML file names."""
    stem, path = posixpath.splitext(name)[0], root / name
    try:
        if is_beside:
            return index.find(str(root / stem))
        return _find_labelled(index, path, stem, parents)
    except DataError as error:
        if not _is_xml(name):
            raise
        named = ""
        with suppress(DataError):  # a damaged file is reported as one without an image
            named = read_text(read_xml(path), "filename")
        number = index.find_path(str(path.parent / named))
        if number is None and not is_beside:
            number = index.find_named(named, split_of(name), path)
        if number is not None:
            return number
        if not named:
            raise
        raise DataError(f"{error}, and none {escape(named)!r}, which it names") from error


def _find_labelled(index: NameIndex, path: Path, name: str, parents: Sequence[str]) -> int:
    """Find the image of a label file.

    It is in the folder of the same name below ``images``, or has that name anywhere. Among images
    with the same name, the one in the split of the label file is chosen, or the nearest one. Images
    need not be in folders of splits if their labels are.
    """
    parts = name.split("/")
    # The innermost folder of labels, since folders above it may have such names too.
    named = [index for index, part in enumerate(parts[:-1]) if part in parents]
    last = named[-1] if named else len(parts) - 2
    rest = "/".join(parts[last + 1 :])
    with suppress(DataError):
        return index.find("/".join([*parts[:last], "images", rest]))
    if not index.has(rest):
        number = index.find_below(rest, split_of(name))
        if number is not None:
            return number
    return index.find(rest, split_of(name), path)
