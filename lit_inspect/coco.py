"""Tables of boxes, equal to those of `predict`: YOLO text for each image, and COCO for all images."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_inspect.boxes import Box
from lit_inspect.errors import escape


def describe_boxes(boxes: Sequence[Box], size_px: tuple[int, int]) -> str:
    """Return lines ``class cx cy w h score``, in fractions of an image of (height, width)."""
    height, width = size_px
    lines = []
    for box in boxes:
        left, right = box.left / width, box.right / width
        top, bottom = box.top / height, box.bottom / height
        values = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top, box.score)
        columns = " ".join(f"{value:.6f}" for value in values)
        lines.append(f"{box.kind} {columns}\n")
    return "".join(lines)


class CocoTable:
    """COCO table of the objects of all images; images, annotations and categories count from 1."""

    def __init__(self) -> None:
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []

    def add(self, name: str, size_px: tuple[int, int], boxes: Sequence[Box]) -> None:
        """Add the objects of an image of (height, width)."""
        image_id = len(self._images) + 1
        height, width = size_px
        image = {"id": image_id, "file_name": escape(name), "height": height, "width": width}
        self._images.append(image)
        for box in boxes:
            annotation = {"id": len(self._annotations) + 1, "image_id": image_id}
            self._annotations.append(annotation | describe_object(box))

    def encode(self, classes: Sequence[str]) -> bytes:
        """Return the bytes of ``detections.json``."""
        categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
        table = {
            "images": self._images,
            "annotations": self._annotations,
            "categories": categories,
        }
        return json.dumps(table, indent=1, allow_nan=False).encode()


def describe_object(box: Box) -> dict[str, Any]:
    """Return an object in COCO's form, without ids."""
    corners = np.array((box.left, box.top, box.right, box.bottom))
    left, top, right, bottom = corners.round(3).tolist()  # Python would round differently
    width, height = right - left, bottom - top
    return {
        "category_id": box.kind + 1,
        "bbox": [left, top, round(width, 3), round(height, 3)],
        "area": round(width * height, 3),
        "iscrowd": 0,
        "score": round(box.score, 6),
    }
