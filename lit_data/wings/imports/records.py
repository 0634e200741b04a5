"""`Record`: an image of another library's dataset, with its mask, boxes and label; written as plain files."""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_data.core.errors import ConfigError, DataError, first_line
from lit_data.core.types import Array
from lit_data.images.writing import write_image

Pixels = bytes | Array
"""An encoded file, or an array [H, W] or [H, W, C]."""
IMAGE_NAMES = ("image", "img", "picture", "jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
MASK_NAMES = ("mask", "masks", "segmentation", "segmentation_mask", "seg", "annotation")
LABEL_NAMES = ("label", "labels", "cls", "class", "category", "target")
BOX_NAMES = ("objects", "boxes", "bboxes", "annotations", "detections")
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"II*\0": ".tif", b"MM\0*": ".tif"}
_UNSAFE = re.compile(r"[^\w.-]+")


class Box(NamedTuple):
    """A box of an image.

    Attributes:
        label: Name of its class.
        x: Left edge, px.
        y: Top edge, px.
        width: Width, px.
        height: Height, px.
    """

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An image of a dataset.

    Args:
        name: Name of the image, by which it can be found again.
        image: Pixels of the image.
        mask: Pixels of its mask, if it has one.
        boxes: Boxes in the image; None if the dataset has no boxes.
        label: Name of its class, if it has one.
        split: Split of the image, if the dataset states it.
    """

    name: str
    image: Pixels
    mask: Pixels | None = None
    boxes: Sequence[Box] | None = None
    label: str | None = None
    split: str = ""


class Place(NamedTuple):
    """Place of a written image, its record's split, label and boxes, and its (height, width) px."""

    path: Path
    split: str
    label: str | None
    boxes: Sequence[Box] | None
    size_px: tuple[int, int]


def write_records(records: Iterable[Record], folder: Path) -> str:
    """Write records as a folder in a layout that lit_data recognizes.

    With masks, images are in ``images`` and masks in ``masks``. With boxes, a COCO file is beside
    the images. With labels only, there is a folder for each label. If there are splits, each has
    such a folder.

    Args:
        records: At least one record.
        folder: An empty folder.

    Returns:
        A description of the written data.

    Raises:
        DataError: There are no records, or an image cannot be read.
    """
    places: list[Place] = []
    masks = 0
    names: set[Path] = set()
    for number, record in enumerate(records):
        shelf = folder / _clean(record.split)
        # A name is only a hint: it may lead outside the folder, or occur twice.
        target = shelf / "images" / (_clean(record.name) or f"{number:06d}")
        if target in names:
            target = target.with_name(f"{target.name}-{number:06d}")
        names.add(target)
        path, size_px = _write_pixels(target, record.image)
        if record.mask is not None:
            _write_pixels(shelf / "masks" / target.name, record.mask)
            masks += 1
        places.append(Place(path, record.split, record.label, record.boxes, size_px))
    if not places:
        raise DataError("it holds no image")
    boxes = labels = 0
    # An image without boxes is a background if others have some.
    has_boxes = False
    for written in places:
        has_boxes |= written.boxes is not None
        boxes += len(written.boxes or ())
        labels += written.label is not None
    if has_boxes:
        _write_boxes(places)
    if labels and (has_boxes or masks):
        _write_labels(places, folder)
    elif labels:
        _sort_by_labels(places, folder)
    counts = {"masks": masks, "boxes": boxes, "labels": labels}
    return _describe({"images": len(places), **counts})


def take_record(
    pictures: Mapping[Any, Any],
    notes: Mapping[Any, Any],
    *,
    name: str,
    split: str = "",
    classes: Sequence[str] = (),
    box_classes: Sequence[str] = (),
) -> Record:
    """Make a record from the values under the usual names.

    Args:
        pictures: An image, and a mask if there is one.
        notes: A label and boxes, if there are any; boxes may be JSON.
        name: Name of the image.
        split: Split of the image.
        classes: Names of classes, if labels are numbers.
        box_classes: Names of the classes of boxes, if their labels are numbers.

    Raises:
        DataError: There is no image.
    """
    image, mask = _take(pictures, IMAGE_NAMES), _take(pictures, MASK_NAMES)
    if image is None:
        raise DataError(f"sample {name} has no image: it has {', '.join(map(str, pictures))}")
    label, boxes = _take(notes, LABEL_NAMES), _take(notes, BOX_NAMES)
    return Record(
        name=name,
        image=_as_pixels(image),
        mask=None if mask is None else _as_pixels(mask),
        boxes=_read_boxes(json.loads(boxes) if isinstance(boxes, str) else boxes, box_classes),
        label=None if label is None else _name_class(label, classes),
        split=split,
    )


def find_column(names: Iterable[Any], known: Sequence[str]) -> Any:  # noqa: ANN401 - one of the names
    """Return the first known name among those of a record's values, ignoring case."""
    by_name = {str(name).casefold(): name for name in names}
    return next((by_name[name] for name in known if name in by_name), None)


def _take(values: Mapping[Any, Any], known: Sequence[str]) -> Any:  # noqa: ANN401 - of others
    return values.get(find_column(values, known))


def _as_pixels(value: Any) -> Pixels:  # noqa: ANN401 - of others
    """Return bytes unchanged, and images, arrays and tensors as [H, W] or [H, W, C]."""
    if isinstance(value, bytes):
        return value
    pixels = np.asarray(value)
    is_planar = pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) and pixels.shape[2] > 4
    return np.moveaxis(pixels, 0, -1) if is_planar else pixels


def _read_boxes(value: Any, names: Sequence[str]) -> list[Box] | None:  # noqa: ANN401 - of others
    """Read boxes in COCO's form: a list of dicts, or a dict of lists, with ``bbox`` in px."""
    if isinstance(value, Mapping):
        edges = value.get("bbox", value.get("boxes", ()))
        classes = value.get("category", value.get("label", value.get("category_id", ())))
    elif isinstance(value, Sequence):
        edges, classes = [], []
        for each in value:
            edges.append(each["bbox"])
            classes.append(each.get("category", each.get("label", "object")))
    else:
        return None
    boxes = []
    for corner, label in zip(edges, classes, strict=True):
        boxes.append(Box(_name_class(label, names), *map(float, corner)))
    return boxes


def _name_class(label: Any, names: Sequence[str]) -> str:  # noqa: ANN401 - of others
    """Return the name of a class from its number or name, which may be in an array."""
    label = label.item() if hasattr(label, "item") else label
    text = label.decode() if isinstance(label, bytes) else str(label)
    if text.strip().isdecimal() and int(text) < len(names):
        return names[int(text)]
    return text.strip()


def open_library(name: str, what: str) -> Any:  # noqa: ANN401 - a module
    """Import the library that wrote a dataset.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"data.root is {what}, which needs {name}: pip install 'lit-data-inspect[imports]'"
        ) from error


def _write_pixels(target: Path, pixels: Pixels) -> tuple[Path, tuple[int, int]]:
    """Write pixels to a path without a suffix; return the file and its (height, width) px."""
    from PIL import Image

    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(pixels, bytes):
        suffix = _find_suffix(pixels)
        try:
            with Image.open(io.BytesIO(pixels)) as image:
                width, height = image.size
                decoded = None if suffix else np.asarray(image)
        except Exception as error:  # of many kinds
            raise DataError(f"{target.name}: no image ({first_line(error)})") from error
        if decoded is None:
            path = target.with_name(target.name + suffix)
            path.write_bytes(pixels)
            return path, (height, width)
        pixels = decoded
    planes = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    if planes.dtype.kind in "bi" or planes.dtype.itemsize > 4:  # numbers of classes
        planes = planes.astype(np.uint8 if planes.max(initial=0) < 256 else np.uint16)
    file = target.with_name(write_image(target, planes))
    return file, (planes.shape[1], planes.shape[2])


def _find_suffix(content: bytes) -> str:
    for start, suffix in _SUFFIXES.items():
        if content.startswith(start):
            return suffix
    return ""


def _write_boxes(places: Sequence[Place]) -> None:
    """Write a COCO file for each split."""
    names = sorted({box.label for written in places for box in written.boxes or ()})
    splits = defaultdict(list)
    for written in places:
        splits[written.split].append(written)
    for members in splits.values():
        images: list[dict[str, Any]] = []
        marks: list[dict[str, Any]] = []
        for number, written in enumerate(members, start=1):
            height, width = written.size_px
            image = {"id": number, "file_name": written.path.name}
            images.append(image | {"height": height, "width": width})
            for box in written.boxes or ():
                mark: dict[str, Any] = {"id": len(marks) + 1, "image_id": number, "iscrowd": 0}
                mark |= {"category_id": names.index(box.label) + 1, "bbox": list(box[1:])}
                marks.append(mark | {"area": box.width * box.height})
        classes = []
        for number, name in enumerate(names, start=1):
            classes.append({"id": number, "name": name})
        table = {"images": images, "annotations": marks, "categories": classes}
        file = members[0].path.with_name("_annotations.coco.json")
        file.write_text(json.dumps(table), encoding="utf-8")


def _write_labels(places: Sequence[Place], folder: Path) -> None:
    with (folder / "labels.csv").open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(("image", "label"))
        for written in places:
            if written.label is not None:
                table.writerow((written.path.relative_to(folder).as_posix(), written.label))


def _describe(counts: Mapping[str, int]) -> str:
    parts = []
    for name, count in counts.items():
        if count:
            parts.append(f"{count} {name}")
    return ", ".join(parts)


def _sort_by_labels(places: Sequence[Place], folder: Path) -> None:
    """Move images into a folder for each label."""
    for written in places:
        shelf = folder / _clean(written.split) / (_clean(written.label or "") or "none")
        shelf.mkdir(exist_ok=True)
        written.path.rename(shelf / written.path.name)
    for parent in set(map(_find_parent, places)):
        parent.rmdir()


def _find_parent(written: Place) -> Path:
    return written.path.parent


def _clean(name: str) -> str:
    """Return a safe name of a file or folder, wherever it came from."""
    return _UNSAFE.sub("_", name).strip("._")[:80]
