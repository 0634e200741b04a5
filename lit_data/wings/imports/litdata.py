"""Chunks that litData's ``optimize`` wrote: ``index.json`` and ``chunk-*.bin``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.core.errors import DataError
from lit_data.wings.imports.records import (
    BOX_NAMES,
    IMAGE_NAMES,
    LABEL_NAMES,
    MASK_NAMES,
    Pixels,
    Record,
    find_column,
    name_class,
    open_library,
    read_boxes,
)

TITLE = "a set of litData"
_PLAIN = {"str", "text", "bool", "int", "float", "bytes", "tensor", "no_header_tensor"}
_PLAIN |= {"image", "tifffile", "pil", "jpeg", "jpeg_array", "numpy", "no_header_numpy"}
"""Formats of values that are data; others run what is pickled in them, or read other files."""


def recognise(root: Path, files: Sequence[Path]) -> bool:
    """Return True for an index with chunks."""
    names = {path.name for path in files}
    return "index.json" in names and any(name.startswith("chunk-") for name in names)


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of a set.

    Raises:
        DataError: Values are pickled, or none is an image.
    """
    library = open_library("litdata", TITLE)
    for index in files:
        if index.name != "index.json":
            continue
        formats = json.loads(index.read_bytes())["config"]["data_format"]
        others = {str(each).partition(":")[0] for each in formats} - _PLAIN
        if others:
            raise DataError(
                f"{index}: values of the format {', '.join(sorted(others))} are not read, as they may run code: "
                "write images as PIL images, arrays or bytes"
            )
        split = index.parent.name
        if index.parent == root:
            split = ""
        chunks = library.StreamingDataset(str(index.parent), shuffle=False)
        for number in range(len(chunks)):
            yield _read_item(chunks[number], number, split)


def _read_item(item: Any, number: int, split: str) -> Record:  # noqa: ANN401 - of the library
    if not isinstance(item, Mapping):
        values = (
            item if isinstance(item, Sequence) and not isinstance(item, str | bytes) else [item]
        )
        item = dict(zip(("image", "label"), values, strict=False))
    image, mask = find_column(item, IMAGE_NAMES), find_column(item, MASK_NAMES)
    if image is None:
        raise DataError(f"item {number} has no image: it has {', '.join(map(str, item))}")
    label, objects = find_column(item, LABEL_NAMES), find_column(item, BOX_NAMES)
    value = None
    if objects:
        value = item[objects]
    return Record(
        name=str(item.get("name", f"{number:06d}")),
        image=_as_pixels(item[image]),
        mask=_as_pixels(item[mask]) if mask else None,
        boxes=read_boxes(json.loads(value) if isinstance(value, str) else value),
        label=None if label is None else name_class(_as_plain(item[label])),
        split=split,
    )


def _as_plain(value: Any) -> Any:  # noqa: ANN401 - of the library
    return value.item() if hasattr(value, "item") else value


def _as_pixels(value: Any) -> Pixels:  # noqa: ANN401 - of the library
    """Return bytes as they are, and [H, W] or [H, W, C] of images, arrays and tensors."""
    if isinstance(value, bytes):
        return value
    pixels = np.asarray(value)
    is_planar = pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) and pixels.shape[2] > 4
    return np.moveaxis(pixels, 0, -1) if is_planar else pixels
