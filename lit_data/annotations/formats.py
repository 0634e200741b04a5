"""Formats of label files in a folder that are not read, and how to read them."""

import re
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Literal

from lit_data.core.errors import DataError
from lit_data.core.leftovers import Leftovers, Unread
from lit_data.core.opening import open_source
from lit_data.images.discovery import check_inside, name_below

Purpose = Literal["masks", "boxes", "classes", "pairs"]
"""Content of label files that a kind of data reads."""

_EXTENSIONS = (".json", ".jsonl", ".ndjson", ".geojson", ".xml", ".csv", ".tsv", ".xlsx", ".txt")
_NO_LABELS = re.compile(
    "(readme|licen[cs]e|copying|requirements|classes|names|splits|train|val|test|trainval).*",
    re.IGNORECASE,
)
"""Names of files that are neither labels nor of a known format."""
_HEAD_BYTES = 2**16
_MOST_READ = 16  # files of an extension, from different folders
_NUMBER = r"-?\d+(?:\.\d+)?"
_FRACTION = r"(?:[01]|[01]?\.\d+)"

_FORMATS = (
    ("CVAT for video", ".xml", r"<track\b"),
    ("CVAT", ".xml", r"<annotations\b", r"<image\b"),
    ("VOC", ".xml", r"<bndbox\b"),
    ("LabelMe", ".json", r'"shapes"\s*:'),
    ("COCO panoptic", ".json", r'"segments_info"\s*:'),
    ("COCO captions", ".json", r'"caption"\s*:'),
    ("COCO", ".json", r'"images"\s*:'),
    ("segment-anything", ".json", r'"image"\s*:', r'"segmentation"\s*:'),
    ("Datumaro", ".json", r'"items"\s*:'),
    ("Supervisely", ".json", r'"objects"\s*:', r'"(?:classTitle|geometryType)"\s*:'),
    ("VGG Image Annotator", ".json", r'"regions"\s*:'),
    ("Label Studio", ".json", r'"annotations"\s*:', r'"result"\s*:'),
    ("JSON lines", ".jsonl"),
    ("JSON lines", ".ndjson"),
    ("GeoJSON", ".geojson"),
    ("Excel", ".xlsx"),
    ("TSV", ".tsv"),
    ("CSV of run lengths", ".csv", r"\A[^\n]*\b(encoded_?pixels|rle|mask_rle)\b"),
    ("CSV of boxes", ".csv", r"\A[^\n]*\b(x_?min|x1|bbox|left)\b"),
    ("CSV of labels", ".csv", r"\A[^\n]*\b(label|class|class_?id|category)\b"),
    ("YOLO boxes", ".txt", rf"\A\d+(?: +{_FRACTION}){{4}} *(?:\r?\n|\Z)"),
    ("YOLO polygons", ".txt", rf"\A\d+(?: +{_FRACTION}){{6,}} *(?:\r?\n|\Z)"),
    ("KITTI", ".txt", rf"\A[a-z_]+(?: {_NUMBER}){{14}}"),
    ("DOTA", ".txt", rf"\A(?:imagesource:|(?:{_NUMBER} +){{8}}[a-z])"),
    ("boxes in pixels", ".txt", rf"\A{_NUMBER}(?:[, ] *{_NUMBER}){{4,}}"),
)
"""Name, extension, and text at the beginning of a file; the first format that fits is taken."""

_OUTLINES = ("CVAT", "LabelMe", "COCO", "CSV of run lengths", "YOLO polygons")
_BOXES = ("VOC", "YOLO boxes", "CSV of boxes", "KITTI", "DOTA", "boxes in pixels")
_OTHERS = {
    "CVAT for video": "export [it|them] as CVAT for images",
    "CSV of labels": "experiment=classification trains on [it|them]",
    "COCO captions": "[it marks|they mark] nothing",
}
_CURES: Mapping[Purpose, Mapping[str, str]] = {
    "masks": {
        **dict.fromkeys(_OUTLINES, "other masks are used first; data.exclude skips them"),
        **dict.fromkeys(_BOXES, "experiment=detection trains on boxes"),
        **_OTHERS,
        "": "export [it|them] as COCO, or as masks",
    },
    "boxes": {
        **dict.fromkeys(_OUTLINES, "data.boxes_from=masks puts boxes around outlines"),
        "COCO": "data.annotations=FILE reads [it|one of them]",
        **_OTHERS,
        "VOC": "data.label_format=voc reads [it|them]",
        "YOLO boxes": "data.label_format=yolo reads [it|them]",
        "": "convert [it|them] to COCO, YOLO or VOC",
    },
    "classes": {
        **dict.fromkeys(_OUTLINES, "experiment=segmentation trains on masks"),
        **dict.fromkeys(_BOXES, "experiment=detection trains on boxes"),
        "LabelMe": "[its|their] flags count if no folder or table names classes, and "
        "experiment=segmentation trains on outlines",
        "CSV of labels": "if there are several tables, the first by name is read",
        "": "a CSV with the columns image and label, or a folder for each class, is read",
    },
    "pairs": {"": "convert [it|them] to masks, and name the folder of the masks with data.masks"},
}
"""Advice for one or several files of each format, see `Leftovers.add`; that of "" is for all others."""


def add_label_files(
    leftovers: Leftovers,
    folder: Path,
    purpose: Purpose,
    used: Collection[Path] = (),
    *,
    with_unknown: bool = False,
) -> None:
    """Add the label files that are not used, by their formats.

    Args:
        leftovers: Receives the label files; it has the files that no reader of images read.
        folder: The root.
        purpose: Content that is read from label files.
        used: Label files that were read.
        with_unknown: Also add files that may or may not be label files.
    """
    cures = _CURES[purpose]
    for label_format, names in sort_by_format(folder, leftovers.unread, used).items():
        if label_format:
            leftovers.add(
                f"label [file|files] ({label_format}) [is|are] not used",
                names,
                cures.get(label_format, cures[""]),
            )
        elif with_unknown:
            names = [name for name in names if not _NO_LABELS.fullmatch(name.rpartition("/")[2])]
            leftovers.add("[file has|files have] an unknown format", names, cures[""])


def add_unlabelled(
    leftovers: Leftovers,
    names: Mapping[int, str],
    labelled: Container[int],
    splits: Mapping[str, Collection[int]],
) -> None:
    """Add the images without a label file, and the splits without any.

    Args:
        leftovers: Receives the images.
        names: Names of all images, by their numbers.
        labelled: Numbers of the images with a label file.
        splits: Numbers of the images of each split.
    """
    unlabelled = {number: name for number, name in names.items() if number not in labelled}
    cure = "[it counts as an image|they count as images] without an object; data.exclude skips [it|them]"
    names_without = list(unlabelled.values())
    leftovers.add("[image has|images have] no label file", names_without, cure)
    for split, numbers in splits.items():
        if unlabelled.keys() >= set(numbers):
            leftovers.add_split(split, [names[number] for number in numbers], "label file")


def sort_by_format(
    folder: Path, unread: Unread, used: Collection[Path] = ()
) -> Mapping[str, Sequence[str]]:
    """Return the names of label files by their format, with "" for unknown formats.

    If there are many files of an extension, the first one of each folder is read and stands for all
    in it.

    Args:
        folder: The root.
        unread: Files by their extension.
        used: Files to leave out.
    """
    used_names = {name_below(folder, path) for path in used}
    by_format: dict[str, list[str]] = {}
    for extension in _EXTENSIONS:
        paths = sorted(unread.get(extension, ()))
        names = [name for name in paths if name not in used_names]
        groups: dict[str, list[str]] = {}
        for name in names:
            key = name if len(names) <= _MOST_READ else name.rpartition("/")[0]
            groups.setdefault(key, []).append(name)
        first = ""
        for number, group in enumerate(groups.values()):
            label_format = first
            if number < _MOST_READ:
                # An image without objects has an empty file, which tells nothing.
                sample = next((name for name in group if _has_content(folder / name)), group[0])
                label_format = find_format(folder / sample, folder)
            first = first or label_format
            by_format.setdefault(label_format, []).extend(group)
    return by_format


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def find_format(path: Path, folder: Path) -> str:
    """Return the name of the format of a label file, judged by its beginning, or "" if unknown."""
    try:
        check_inside(path, folder)
        with open_source(path) as stream:
            head = stream.read(_HEAD_BYTES)
    except DataError:
        return ""
    text = head.replace(b"\0", b"").decode("utf-8-sig", "replace").lstrip()
    for name, extension, *parts in _FORMATS:
        is_named_so = path.suffix.lower() == extension
        if is_named_so and all(re.search(part, text, re.IGNORECASE) for part in parts):
            return name
    return ""
