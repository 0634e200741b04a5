"""Boxes of annotated objects, or around the connected parts of masks."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import DataError, Problems
from lit_data.core.progress import track
from lit_data.core.types import IGNORED, Bools, Bytes, Floats, Ints, Size
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datasets.balanced_splits import ImageSplitter
from lit_data.images.decoders import ImageSource, MaskDecoder
from lit_data.images.header import describe_size_mismatch, read_header
from lit_data.wings.detection.files import DetectionFiles
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_ONE_CLASS = ("defect",)


class _Marked(NamedTuple):
    """An image with the boxes of its mask.

    Attributes:
        path: Path of the image.
        size_px: (height, width).
        boxes: [n, 5] float32 as in `LabelTable`.
    """

    path: Path
    size_px: Size
    boxes: Floats


def find_mask_boxes(files: InspectionFiles) -> DetectionFiles:
    """Find images with masks, and a box for each marked object.

    Objects are those of the annotations if these separate objects, otherwise the connected parts (8
    neighbors) of each class. Ignored pixels become ignored regions of all classes. An image without
    a mask has no box.

    Args:
        files: Images and masks. Boxes have their classes, or `defect` if they have none.

    Raises:
        DataError: Images or masks are bad and `files.on_bad` is not `skip`; all are listed.
    """
    image_set = files.image_set
    classes = tuple(files.classes or _ONE_CLASS)
    files.refuse_unshown()
    kinds = files.number_kinds(image_set.kinds)
    decoder = MaskDecoder(files.mask_options)
    objects = None if image_set.boxes is None else np.load(image_set.boxes, allow_pickle=False)
    problems = Problems()
    marked: list[_Marked] = []
    pairs = list(zip(image_set.images, image_set.masks, strict=True))
    for number, (image, mask) in enumerate(track(pairs, "reading masks", len(pairs))):
        kind = None if kinds is None else int(kinds[number])
        try:
            header = read_header(image, files.read)
            size_px = header.height_px, header.width_px
            boxes = np.zeros((0, 5), np.float32)
            if mask is None or image in image_set.bad:
                pass
            elif objects is not None:
                boxes = share_objects(objects[objects[:, 0] == number, 1:], len(classes), size_px)
            else:
                numbers = _read_mask(decoder, mask, image, size_px)
                boxes = box_parts(numbers, len(classes), kind)
            marked.append(_Marked(image, size_px, boxes))
        except DataError as error:
            problems.add(image, str(error))
    _report(problems, files, len(marked))
    return _join(files, marked, classes)


def box_parts(numbers: Bytes, class_count: int, kind: int | None) -> Floats:
    """Return a box around each connected part (8 neighbors) of each class.

    Args:
        numbers: [H, W] class of each pixel from 1, 0 for the background, 255 for ignored pixels.
        class_count: Number of classes.
        kind: Class, from 1, of all marked pixels; None takes the class of each pixel.

    Returns:
        [n, 5] as in `LabelTable`, class after class, followed by the ignored regions.
    """
    is_ignored = numbers == IGNORED
    boxes = []
    for number in np.unique(numbers[~is_ignored & (numbers > 0)]).tolist():
        class_number = (kind or number) - 1
        boxes.append(_box_components(numbers == number, class_number))
    for class_number in range(class_count if is_ignored.any() else 0):
        boxes.append(_box_components(is_ignored, -1 - class_number))
    return np.concatenate([np.zeros((0, 5), np.float32), *boxes])


def _box_components(is_marked: Bools, number: int) -> Floats:
    import cv2

    mask = is_marked.astype(np.uint8)
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    # A row is (left, top, width, height, area); the first row is the background.
    return _share_boxes(number, stats[1:, :2], stats[1:, 2:4], is_marked.shape)


def share_objects(objects_px: Ints, class_count: int, size_px: Size) -> Floats:
    """Return the boxes of the annotated objects of an image, in the form of `box_parts`.

    Args:
        objects_px: [n, 5] (class from 1 or 255, left, top, right, bottom).
        class_count: Number of classes.
        size_px: (height, width) of the image.
    """
    is_ignored = objects_px[:, 0] == IGNORED
    corners, sides = objects_px[:, 1:3], objects_px[:, 3:] - objects_px[:, 1:3]
    boxes = _share_boxes(objects_px[:, 0] - 1, corners, sides, size_px)
    parts = [boxes[~is_ignored]]
    for class_number in range(class_count if is_ignored.any() else 0):
        parts.append(boxes[is_ignored])
        parts[-1][:, 0] = -1 - class_number
    return np.concatenate(parts)


def _share_boxes(numbers: Ints | int, corners: Ints, sides: Ints, size_px: Size) -> Floats:
    """Return boxes in px as fractions of the image: [n, 5] as in `LabelTable`."""
    classes = np.broadcast_to(np.reshape(numbers, (-1, 1)), (len(sides), 1))
    centres = corners + sides / 2
    columns = (classes, centres / size_px[::-1], sides / size_px[::-1])
    boxes: Floats = np.hstack(columns).astype(np.float32)
    return boxes


def _read_mask(decoder: MaskDecoder, mask: Path, image: Path, size_px: Size) -> Bytes:
    numbers: Bytes = decoder(ImageSource((str(mask),))).array[0]
    height, width = numbers.shape
    if (height, width) != size_px:
        raise DataError(describe_size_mismatch((mask, image), ((height, width), size_px)))
    return numbers


def _report(problems: Problems, files: InspectionFiles, good: int) -> None:
    heading = counted(len(problems), "image with a mask is bad", "images with masks are bad")
    if files.on_bad == "skip" and good:
        problems.warn_if_any(log, f"{heading}: skipped")
    else:
        problems.raise_if_any(heading)


def _join(
    files: InspectionFiles, marked: Sequence[_Marked], classes: tuple[str, ...]
) -> DetectionFiles:
    sizes_px: Ints = np.array([image.size_px for image in marked], np.int64)
    boxes = np.concatenate([image.boxes for image in marked])
    counts = [len(image.boxes) for image in marked]
    labels = LabelTable(classes, boxes, np.cumsum(counts, dtype=np.int64))
    image_set = files.image_set
    names = [image.path.relative_to(files.folder).as_posix() for image in marked]
    splitter = ImageSplitter(
        names=names,
        kinds=labels.strata,
        has_mask=None,
        count_classes=None,
        find_groups=lambda names: np.arange(len(names)),  # `keep_groups_together` comes later
        seed=files.split_seed,
        root=files.folder,
        others=[files.name(path) for path in (*image_set.images, *image_set.excluded)],
        leftovers=files.leftovers,
    )
    parts = splitter.split(files.splits)
    splits = {split: part.tolist() for split, part in parts.items()}
    fractions = splitter.find_fractions(files.splits)
    paths = tuple(str(image.path) for image in marked)
    return DetectionFiles(paths, labels, splits, sizes_px, fractions)
