"""Chunks written by litData's ``optimize``: ``index.json`` and ``chunk-*.bin``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError
from lit_data.wings.imports.records import Record, open_library, take_record

TITLE = "a set of litData"
_PLAIN = {"str", "text", "bool", "int", "float", "bytes", "tensor", "no_header_tensor"}
_PLAIN |= {"image", "tifffile", "pil", "jpeg", "jpeg_array", "numpy", "no_header_numpy"}
"""Formats of values that are data; others run pickled code, or read other files."""


def recognize(files: Sequence[Path]) -> bool:
    """Return True for an index with chunks."""
    names = {path.name for path in files}
    return "index.json" in names and any(name.startswith("chunk-") for name in names)


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of a dataset.

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
                f"{index}: values of the format {', '.join(sorted(others))} are not read, "
                "because they may run code: write images as PIL images, arrays or bytes"
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
    return take_record(item, item, name=str(item.get("name", f"{number:06d}")), split=split)
