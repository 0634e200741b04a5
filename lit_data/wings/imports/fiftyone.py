"""Exports in FiftyOne's own format: ``samples.json`` and ``metadata.json`` beside the images."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError
from lit_data.datasets.split_names import find_split
from lit_data.wings.imports.records import Record, take_record

TITLE = "a dataset of FiftyOne"
_MASK = "Segmentation"
_LABEL = "Classification"
_BOXES = "Detections"


def recognize(root: Path) -> bool:
    """Return True if a folder is an export."""
    return all((root / name).is_file() for name in ("samples.json", "metadata.json"))


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of an export; it is plain JSON, so neither the library nor its database is needed."""
    table = json.loads((root / "samples.json").read_bytes())
    for sample in table.get("samples", ()):
        yield _read_sample(sample, root)


def _read_sample(sample: Mapping[str, Any], root: Path) -> Record:
    path = _resolve(root, sample["filepath"])
    splits = set(map(find_split, map(str, sample.get("tags") or ()))) - {None}
    by_kind: dict[str, Any] = {}
    for value in sample.values():
        if isinstance(value, Mapping):
            by_kind[str(value.get("_cls"))] = value
    notes = {"label": (by_kind.get(_LABEL) or {}).get("label")}
    if _BOXES in by_kind:
        notes["objects"] = _scale_boxes(by_kind[_BOXES].get("detections") or (), path)
    mask = (by_kind.get(_MASK) or {}).get("mask_path")
    pictures = {
        "image": path.read_bytes(),
        "mask": _resolve(root, mask).read_bytes() if mask else None,
    }
    split = next(iter(splits), None) or ""
    return take_record(pictures, notes, name=path.stem, split=split)


def _scale_boxes(marks: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Convert boxes from fractions of an image to px."""
    from PIL import Image

    with Image.open(path) as image:
        width, height = image.size
    boxes = []
    for mark in marks:
        x, y, w, h = mark["bounding_box"]
        boxes.append(
            {"label": mark["label"], "bbox": (x * width, y * height, w * width, h * height)}
        )
    return boxes


def _resolve(root: Path, name: str) -> Path:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"samples.json names {name}, which is outside of its folder")
    return path
