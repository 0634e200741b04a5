"""Labels in PASCAL VOC format: one XML file per image, with boxes in whole pixels counted from 1.

Lists of VOC name images without folder or extension. The index of such names is also used by the
other formats.
"""

import logging
import os
import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

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
from lit_data.core.errors import DataError, Problems, escape, list_some, show_path
from lit_data.core.opening import open_source, read_whole
from lit_data.core.types import Doubles, PathText
from lit_data.datasets.split_names import split_of
from lit_data.images.discovery import FolderWalk
from lit_data.images.header_scan import OnBad
from lit_inspect.counts import counted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

log = logging.getLogger(__name__)

Difficult = bool | Literal["ignore"]
"""Treatment of objects marked as difficult: keep, drop, or exclude from training and scores."""

MAX_XML_BYTES = 10_000_000

_FEW = 8  # images of one name that are compared one by one
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}(?:\.[0-9]*)?")


def _find_corners(boxes: Doubles, sizes_px: Doubles) -> Doubles:
    return np.hstack([(boxes[:, :2] - 1) / sizes_px, boxes[:, 2:] / sizes_px])


def _find_corners_from_zero(boxes: Doubles, sizes_px: Doubles) -> Doubles:
    return np.hstack([boxes[:, :2] / sizes_px, boxes[:, 2:] / sizes_px])


_FORM = BoxForm(
    "VOC XML", "object {}", ("pixels", "shares of the image"), is_share_box, _find_corners
)
_FROM_ZERO = replace(_FORM, to_corners=_find_corners_from_zero)


class NameIndex:
    """Index of images by the names in lists and label files.

    A name is any end of the path, with or without extension.

    Args:
        images: Paths of the images.
        excluded: Paths of excluded images, whose numbers follow those of the images. An image with
            the same name takes precedence.

    Attributes:
        count: Number of images; higher numbers are those of excluded ones.
    """

    def __init__(self, images: Sequence[PathText], excluded: Sequence[PathText] = ()) -> None:
        self.count = len(images)
        self._paths = [_root_path(os.fspath(path)) for path in (*images, *excluded)]
        folders = [posixpath.dirname(path) for path in self._paths] or ["/"]
        # A common folder of all images does not tell a split.
        self._common = len(posixpath.commonpath(folders))
        self._numbers: dict[str, list[int]] = defaultdict(list)
        self._tails: dict[str, dict[str, list[int]]] = {}  # for names that many images have
        for number, path in enumerate(self._paths):
            name = posixpath.basename(path)
            for key in {name, posixpath.splitext(name)[0]}:
                self._numbers[key].append(number)

    def find_path(self, path: str) -> int | None:
        """Return the number of the image with a whole path, or None if there is none."""
        target = _root_path(path)
        for number in self._numbers.get(posixpath.basename(target), ()):
            if self._paths[number] == target:
                return number
        return None

    def has(self, name: str) -> bool:
        """Return True if at least one image has a name."""
        return bool(self._match(name))

    def find(self, name: str, split: str | None = None, source: PathText | None = None) -> int:
        """Return the number of the image with a name.

        Args:
            name: `a`, `a.jpg`, `train/a.jpg`, `./images/train/a.jpg` or a whole path; composed and
                decomposed accents are equal.
            split: Split to choose among images of one name in folders of several splits.
            source: Path of the file with the name; among images of one name, the one in the same folder
                is meant, or in the first folder above that has any.

        Raises:
            DataError: There is no such image, or more than one.
        """
        matches = self._match(name)
        if len(matches) > 1:
            matches = [n for n in matches if split and self._split(n) == split] or matches
            matches = self._list_nearest(matches, source)
            # An image takes precedence over excluded ones, any of which will do.
            matches = [n for n in matches if n < self.count] or matches[:1]
        if not matches:
            raise DataError(f"no image is named {escape(name)!r}")
        if len(matches) > 1:
            stems = {self._stem(number) for number in matches}
            cure = "name them with their folder"
            if len(stems) == 1:
                cure = "they differ only in their type: rename one, or add the type to the name"
            raise DataError(f"{len(matches)} images are named {escape(name)!r}; {cure}")
        return matches[0]

    def _list_nearest(self, numbers: list[int], source: PathText | None) -> list[int]:
        """Return the images in the innermost folder around a file that has any of them."""
        folder = "/" if source is None else posixpath.dirname(_root_path(os.fspath(source)))
        while folder != "/":
            nearest = [n for n in numbers if self._paths[n].startswith(f"{folder}/")]
            if nearest:
                return nearest
            folder = posixpath.dirname(folder)
        return numbers

    def _match(self, name: str) -> list[int]:
        """Return the numbers of the images with a name."""
        # Tools that serve images over the web encode blanks and accents of their names.
        return self._list_matches(_root_path(name)) or self._list_matches(_root_path(unquote(name)))

    def _list_matches(self, target: str) -> list[int]:
        """Return the numbers of the images whose path ends with a target, with or without extension."""
        name = posixpath.basename(target)
        known: Sequence[int] = self._numbers.get(name, ())
        if len(known) > _FEW:
            known = self._find_tail(name, target, known)
        matches = []
        for number in known:
            if self._paths[number].endswith(target) or self._stem(number).endswith(target):
                matches.append(number)
        return matches

    def _find_tail(self, name: str, target: str, numbers: Sequence[int]) -> Sequence[int]:
        """Look up the images whose path ends with a target, among many images of one name."""
        if name not in self._tails:
            tails = self._tails[name] = defaultdict(list)
            for number in numbers:
                for path in {self._paths[number], self._stem(number)}:
                    for start, letter in enumerate(path):
                        if letter == "/":
                            tails[path[start:]].append(number)
        return self._tails[name].get(target, ())

    def _stem(self, number: int) -> str:
        return posixpath.splitext(self._paths[number])[0]

    def _split(self, number: int) -> str | None:
        return split_of(self._paths[number][self._common :])


class _LabelWalk(FolderWalk):
    """A walk that keeps files of one extension instead of images."""

    def __init__(
        self, root: Path, suffix: str, folders: Sequence[str], exclude: Sequence[str]
    ) -> None:
        patterns = [f"**/{name}/**/*{suffix}" for name in folders] or [f"**/*{suffix}"]
        super().__init__(root, patterns, exclude)

    def _is_wanted(self, name: str, relative: str) -> bool:
        if name == "classes.txt":  # LabelImg writes it beside labels
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
        stem, suffix = posixpath.splitext(name)
        try:
            if is_beside:
                number = index.find(str(root / stem))
            else:
                number = _find_labelled(index, root / name, stem, parents)
            if number >= index.count:
                continue
            first = files.setdefault(number, root / name)
            if first != root / name:
                raise DataError(f"labels the same image as {show_path(first)}")
        except DataError as error:
            # Text files such as a README.txt may be beside labels too.
            if suffix == ".txt" and not find_format(root / name, root):
                continue
            problems.add(root / name, f"label file {row} of {len(names)}: {error}")
    return files, problems


def _find_labelled(index: NameIndex, path: Path, name: str, parents: Sequence[str]) -> int:
    """Find the image of a label file.

    It is in the folder of the same name below ``images``, or has that name anywhere. Among images
    with the same name, the one in the split of the label file is chosen, or the nearest one.
    """
    parts = name.split("/")
    # The innermost folder of labels, since folders above it may have such names too.
    named = [index for index, part in enumerate(parts[:-1]) if part in parents]
    last = named[-1] if named else len(parts) - 2
    try:
        return index.find("/".join([*parts[:last], "images", *parts[last + 1 :]]))
    except DataError:
        return index.find("/".join(parts[last + 1 :]), split_of(name), path)


def read_voc_labels(
    images: Sequence[PathText],
    frames: Sequence[Frame],
    files: Sequence[PathText | None],
    *,
    classes: Sequence[str] | None = None,
    difficult: Difficult = "ignore",
    on_bad: OnBad = "error",
) -> LabelTable:
    """Read one XML file for each image.

    Pixels count from 1 and ``xmax``, ``ymax`` belong to the box, as the VOC development kit
    measures it (``VOCevaldet.m``: width = ``xmax - xmin + 1``). So x1 = (xmin - 1) / width, x2 =
    xmax / width, and a box from 1 to the width of the image covers it; detectron2
    ``data/datasets/pascal_voc.py`` reads it the same way. A box with ``xmin == xmax`` is one pixel
    wide. If a box of any file begins at 0, all boxes are taken from edge to edge, counted from 0,
    as other programs write them; this is logged.

    Args:
        images: Paths of the images.
        frames: Frames of the images.
        files: XML file of each image; None for an image without boxes.
        classes: Names of the classes; by default those that occur, sorted.
        difficult: Treatment of objects that are marked as difficult.
        on_bad: ``skip`` skips bad objects and lists them. Files that cannot be read, or that
            state another size than that of their image, stay an error.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Objects or files are bad; everything is listed.
    """
    problems = Problems()
    roots = _read_roots(files, problems)
    collector = BoxCollector(_choose_form(roots, files), frames, on_bad=on_bad)
    collector.problems.extend(problems)
    names = _collect_names(roots) if classes is None else check_classes(classes)
    numbers = {name: number for number, name in enumerate(names)}
    allowed = list_some(names)
    for image, (_, path, root) in enumerate(zip(images, files, roots, strict=True)):
        if path is None or root is None:
            continue
        collector.start_file(path)
        collector.state_size(image, root.findtext("size/height"), root.findtext("size/width"))
        for index, item in enumerate(root.iterfind("object"), 1):
            is_difficult = _read_text(item, "difficult") == "1"
            if is_difficult and difficult is False:
                continue
            is_ignored = is_difficult and difficult == "ignore"
            _read_object(
                collector, image, index, item, numbers, allowed=allowed, is_ignored=is_ignored
            )
    if not names:
        collector.problems.add("classes", "no file names one; set data.classes=[NAME, ...]")
    return collector.finish(names)


def _read_roots(files: Sequence[PathText | None], problems: Problems) -> "list[Element | None]":
    """Return the content of each file, or None for a missing or bad file; bad files become problems."""
    roots: list[Element | None] = []
    for path in files:
        root = None
        if path is not None:
            try:
                root = read_xml(path)
            except DataError as error:
                problems.add(path, str(error))
        roots.append(root)
    return roots


def read_xml(path: PathText, tag: str = "annotation", max_bytes: int = MAX_XML_BYTES) -> "Element":
    """Read a label file, and refuse entities, which could expand to any size or name other files.

    Args:
        path: Path of the file.
        tag: Tag of its root.
        max_bytes: Largest size of the file.

    Raises:
        DataError: The file is damaged, too large, declares entities, or has another root.
    """
    from xml.etree.ElementTree import ParseError, fromstring

    with open_source(path) as stream:
        size_bytes = Path(path).stat().st_size
        if size_bytes > max_bytes:
            what = "labels of one image" if max_bytes == MAX_XML_BYTES else "a file of labels"
            raise DataError(f"{size_bytes} bytes, more than the {max_bytes} allowed for {what}")
        data = read_whole(stream)
        # Entities, which can expand to any size or name other files, are declared there. Without
        # the zero bytes, the word is visible in UTF-16 too.
        if b"<!DOCTYPE" in data.replace(b"\0", b""):
            raise DataError("holds a <!DOCTYPE>, which labels do not need; remove it")
        try:
            root = fromstring(data)
        except ParseError as error:
            raise DataError(f"damaged XML: {error}") from error
        if root.tag != tag:
            raise DataError(
                f"starts with <{escape(root.tag)}>; such files of labels start with <{tag}>"
            )
        return root


def _choose_form(roots: "Sequence[Element | None]", files: Sequence[PathText | None]) -> BoxForm:
    """Return the form of the boxes of all files; an edge at 0 means that pixels count from 0."""
    for root, path in zip(roots, files, strict=True):
        for box in () if root is None else root.iterfind("object/bndbox"):
            edges = [_read_text(box, side) for side in _SIDES[:2]]
            if any(_NUMBER.fullmatch(edge) and 0 <= float(edge) < 1 for edge in edges):
                log.info(
                    "VOC boxes are read from edge to edge, counted from 0, as in %s; those of the "
                    "development kit count from 1",
                    show_path(path or ""),
                )
                return _FROM_ZERO
    return _FORM


def _collect_names(roots: "Sequence[Element | None]") -> tuple[str, ...]:
    names = set()
    for root in roots:
        if root is not None:
            names |= {_read_text(item, "name") for item in root.iterfind("object")}
    return tuple(sorted(names - {""}))


def _read_object(
    collector: BoxCollector,
    image: int,
    place: int,
    item: "Element",
    numbers: dict[str, int],
    *,
    allowed: str,
    is_ignored: bool,
) -> None:
    name = _read_text(item, "name")
    texts = {side: _read_text(item, f"bndbox/{side}") for side in _SIDES}
    wrong = []
    for side, text in texts.items():
        if not _NUMBER.fullmatch(text):
            wrong.append(f"{side}={escape(text)!r}")
    if name not in numbers:
        collector.reject(place, f"class {escape(name)!r} is not allowed; allowed are {allowed}")
    elif turn := _describe_turn(item):
        collector.reject(place, turn)
    elif wrong:
        collector.reject(
            place, f"<bndbox> holds {', '.join(wrong)}; each must be a number of pixels"
        )
    else:
        box = [float(text) for text in texts.values()]
        collector.add(image, place, numbers[name], box, is_ignored=is_ignored)


def _describe_turn(item: "Element") -> str:
    """Return why a rotated object of roLabelImg or CVAT is refused, or "" for others."""
    angles = [_read_text(item, "robndbox/angle"), _read_text(item, "bndbox/angle")]
    for attribute in item.iterfind("attributes/attribute"):
        if _read_text(attribute, "name") == "rotation":
            angles.append(_read_text(attribute, "value"))
    return next(filter(None, map(describe_turn, angles)), "")


def _read_text(item: "Element", path: str) -> str:
    return (item.findtext(path) or "").strip()


def _root_path(name: str) -> str:
    """Return a name as a path from the root, with composed accents and without ``./``."""
    normal = unicodedata.normalize("NFC", name.replace("\\", "/"))  # lists written on Windows
    return "/" + posixpath.normpath(normal).lstrip("/")
