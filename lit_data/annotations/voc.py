"""Labels in PASCAL VOC format: one XML file per image, with boxes in whole pixels counted from 1."""

import logging
import os
import posixpath
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lit_data.annotations.labels import (
    BoxCollector,
    BoxForm,
    Frame,
    LabelTable,
    check_classes,
    describe_turn,
    is_share_box,
)
from lit_data.annotations.name_index import NameIndex, describe_clash, root_path
from lit_data.core.errors import DataError, Problems, escape, list_some, show_path
from lit_data.core.opening import open_source, read_whole
from lit_data.core.types import Doubles, PathText
from lit_data.images.header_scan import OnBad

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

log = logging.getLogger(__name__)

Difficult = bool | Literal["ignore"]
"""Treatment of objects marked as difficult: keep, drop, or exclude from training and scores."""

MAX_XML_BYTES = 10_000_000

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
    collector.problems.extend(_list_clashes(images, files, roots))
    names = _collect_names(roots) if classes is None else check_classes(classes)
    numbers = {name: number for number, name in enumerate(names)}
    allowed = list_some(names)
    for image, (_, path, root) in enumerate(zip(images, files, roots, strict=True)):
        if path is None or root is None:
            continue
        collector.start_file(path)
        collector.state_size(image, root.findtext("size/height"), root.findtext("size/width"))
        for index, item in enumerate(root.iterfind("object"), 1):
            is_difficult = read_text(item, "difficult") == "1"
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


def _list_clashes(
    images: Sequence[PathText],
    files: Sequence[PathText | None],
    roots: "Sequence[Element | None]",
) -> Problems:
    """List files that name another image than their own, if that one has no file.

    If it has one, the name was not changed when the file was copied.
    """
    problems = Problems()
    index: NameIndex | None = None
    for image, path, root in zip(images, files, roots, strict=True):
        if path is None or root is None:
            continue
        named = read_text(root, "filename")
        if not named or _find_stem(named) == _find_stem(os.fspath(image)):
            continue
        index = index or NameIndex(images)
        with suppress(DataError):  # several images have that name
            other = index.find_named(named, None, path)
            if other is not None and files[other] is None:
                problems.add(path, describe_clash((image, images[other]), "<filename>"))
    return problems


def _find_stem(name: str) -> str:
    return posixpath.splitext(posixpath.basename(root_path(name)))[0]


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
            edges = [read_text(box, side) for side in _SIDES[:2]]
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
            names |= {read_text(item, "name") for item in root.iterfind("object")}
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
    name = read_text(item, "name")
    texts = {side: read_text(item, f"bndbox/{side}") for side in _SIDES}
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
    angles = [read_text(item, "robndbox/angle"), read_text(item, "bndbox/angle")]
    for attribute in item.iterfind("attributes/attribute"):
        if read_text(attribute, "name") == "rotation":
            angles.append(read_text(attribute, "value"))
    return next(filter(None, map(describe_turn, angles)), "")


def read_text(item: "Element", path: str) -> str:
    """Return the text of an element below another one, without the blanks around it; empty if there is none."""
    return (item.findtext(path) or "").strip()
