"""Exports of FiftyOne's own format: ``samples.json`` and ``metadata.json`` beside the images."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError
from lit_data.datasets.split_names import find_split
from lit_data.wings.imports.records import Box, Record

TITLE = "a dataset of FiftyOne"
_MASK = "Segmentation"
_LABEL = "Classification"
_BOXES = "Detections"


def recognise(root: Path, files: Sequence[Path]) -> bool:
    """Return True for an export."""
    return {"samples.json", "metadata.json"} <= {path.name for path in files}


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of an export, which is plain JSON: neither the library nor its database is needed."""
    table = json.loads((root / "samples.json").read_bytes())
    for sample in table.get("samples", ()):
        yield _read_sample(sample, root)


def _read_sample(sample: Mapping[str, Any], root: Path) -> Record:
    from PIL import Image

    path = _resolve(root, sample["filepath"])
    splits = set(map(find_split, map(str, sample.get("tags") or ()))) - {None}
    by_kind: dict[str, Any] = {}
    for value in sample.values():
        if isinstance(value, Mapping):
            by_kind[str(value.get("_cls"))] = value
    boxes = None
    if _BOXES in by_kind:
        with Image.open(path) as image:
            width, height = image.size
        boxes = []
        for mark in by_kind[_BOXES].get("detections") or ():
            x, y, w, h = mark["bounding_box"]
            boxes.append(Box(str(mark["label"]), x * width, y * height, w * width, h * height))
    mask = (by_kind.get(_MASK) or {}).get("mask_path")
    return Record(
        name=path.stem,
        image=path.read_bytes(),
        mask=_resolve(root, mask).read_bytes() if mask else None,
        boxes=boxes,
        label=(by_kind.get(_LABEL) or {}).get("label"),
        split=next(iter(splits), None) or "",
    )


def _resolve(root: Path, name: str) -> Path:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"samples.json names {name}, which lies outside of its folder")
    return path
