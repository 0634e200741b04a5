"""Writers of labels for labeling tools: COCO, LabelMe, CVAT, Label Studio, FiftyOne, masks."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote
from xml.etree.ElementTree import Element, ElementTree, SubElement

import numpy as np

from lit_data.annotations.marks import run_lengths
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, DataError, escape
from lit_data.core.files import write_text
from lit_data.core.types import Bools, Bytes, Size
from lit_data.images.header import read_header
from lit_data.images.read_options import ReadOptions
from lit_data.images.writing import write_png
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

Kind = Literal["regions", "boxes", "classes"]
"""Kind of labels of an image: pixels, boxes, or one class."""

Polygon = list[list[float]]
_SLACK_PX = 0.5  # largest distance of an outline from its pixels, so that it has few points
_LABELSTUDIO_TAGS: Mapping[Kind, str] = {
    "regions": "PolygonLabels",
    "boxes": "RectangleLabels",
    "classes": "Choices",
}
_UPRIGHT = ReadOptions(exif="apply")
_WHOLE = 255  # value of defects in masks with a single class


@dataclass(frozen=True, slots=True)
class Labelled:
    """Object in an image, or the class of the whole image.

    Attributes:
        name: Name of its class.
        number: Number of its class, from 1.
        score: Score in 0..1.
        box: Left, top, width and height, px.
        pixels: [h, w] True for pixels of the box that belong to it; None if unknown.
    """

    name: str
    number: int
    score: float
    box: tuple[float, float, float, float]
    pixels: Bools | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLabels:
    """Labels of an image.

    Attributes:
        kind: Kind of labels.
        name: Path below the root, with forward slashes.
        stem: The same without the extension, if that is enough to identify the image.
        path: Path of the file.
        size_px: (height, width) of the file.
        score: Score of the image, 0..1.
        margin: Distance of the score from the threshold that would change the verdict.
        objects: Objects of the image, or its one class.
    """

    kind: Kind
    name: str
    stem: str
    path: str
    size_px: Size
    score: float
    margin: float
    objects: Sequence[Labelled]


Images = Iterable[ImageLabels]
"""Images that are read one at a time, the least certain first."""


def write_coco(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Write ``annotations/instances_default.json``, COCO instances with their scores."""
    tables: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    for number, image in enumerate(images, 1):
        height, width = image.size_px
        entry = {"id": number, "file_name": image.name, "height": height, "width": width}
        tables["images"].append(entry)
        for labelled in image.objects:
            annotation = {
                "id": len(tables["annotations"]) + 1,
                "image_id": number,
                "category_id": labelled.number,
                "bbox": list(labelled.box),
                "area": labelled.box[2] * labelled.box[3],
                "iscrowd": 0,
                "score": labelled.score,
            }
            if labelled.pixels is not None:
                annotation["area"] = int(labelled.pixels.sum())
                annotation["segmentation"] = _count_runs(labelled, image.size_px)
            tables["annotations"].append(annotation)
    tables["categories"] = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    path = folder / "annotations" / "instances_default.json"  # as CVAT and Datumaro name it
    path.parent.mkdir()
    _write_json(path, tables)


def _count_runs(labelled: Labelled, size_px: Size) -> dict[str, Any]:
    """Return the pixels of an object as runs of COCO, which go down the columns of the image."""
    assert labelled.pixels is not None
    height, width = size_px
    left, top, columns, rows = map(int, labelled.box)
    band = np.zeros((height, columns), np.bool_)
    band[top : top + rows] = labelled.pixels
    counts = run_lengths(band)
    counts[0] += left * height
    rest = (width - left - columns) * height
    if len(counts) % 2:
        counts[-1] += rest
    else:
        counts.append(rest)
    return {"size": [height, width], "counts": counts}


def write_labelme(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Copy the images, numbered from the least certain one, with a file of shapes beside each.

    LabelMe rotates images by their EXIF tag, and refuses shapes of another size. A warning counts
    such images.

    Raises:
        ConfigError: The images are on a server.
    """
    turned = []
    for number, image in enumerate(images, 1):
        if is_remote(image.path):
            raise ConfigError("predict.to=labelme copies images: bring them to a local data.root")
        target = folder / f"{number:05d}-{PurePosixPath(image.name).name}"
        shutil.copyfile(image.path, target)
        height, width = image.size_px
        content: dict[str, Any] = {
            "version": "5.5.0",
            "flags": {},
            "shapes": [_draw_shape(labelled) for labelled in image.objects],
            "imagePath": target.name,
            "imageData": None,
            "imageHeight": height,
            "imageWidth": width,
        }
        _write_json(target.with_suffix(".json"), content)
        if _is_turned(target, image.size_px):
            turned.append(image.name)
    if turned:
        log.warning(
            "LabelMe refuses the labels of %s, such as %s, which it turns by their EXIF tag: "
            "set data.read.exif=apply, and train and predict again",
            counted(len(turned), "image"),
            escape(turned[0]),
        )


def _is_turned(path: Path, size_px: Size) -> bool:
    """Return True if programs that follow the EXIF tag show an image in another size."""
    try:
        return read_header(path, _UPRIGHT).shape[1:] != size_px
    except DataError:
        return False  # an image that the default options do not read, such as a large one


def _draw_shape(labelled: Labelled) -> dict[str, Any]:
    left, top, width, height = labelled.box
    shape: dict[str, Any] = {
        "label": labelled.name,
        "group_id": None,
        "flags": {},
        "description": "",
    }
    if labelled.pixels is None:
        corners = [[left, top], [left + width, top + height]]
        return shape | {"shape_type": "rectangle", "points": corners}
    return shape | {"shape_type": "polygon", "points": outline_pixels(labelled)}


def outline_pixels(labelled: Labelled) -> Polygon:
    """Return an outline of an object in px of its image, as [x, y], with holes filled."""
    import cv2

    assert labelled.pixels is not None
    left, top, _, _ = labelled.box
    # At twice the resolution, so that the centers of all pixels are inside.
    fine = labelled.pixels.astype(np.uint8).repeat(2, 0).repeat(2, 1)
    contours, _ = cv2.findContours(fine, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    contour = max(contours, key=len)
    smooth = cv2.approxPolyDP(contour, 2 * _SLACK_PX, closed=True)
    corners = contour if len(smooth) < 3 else smooth
    points: Polygon = ((corners[:, 0] + 0.5) / 2 + (left, top)).tolist()
    return points


def write_cvat(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Write ``annotations.xml``, CVAT for images 1.1: masks, boxes, or a tag for each image."""
    root = Element("annotations")
    SubElement(root, "version").text = "1.1"
    labels = SubElement(SubElement(SubElement(root, "meta"), "task"), "labels")
    for name in classes:
        SubElement(SubElement(labels, "label"), "name").text = escape(name)
    for number, image in enumerate(images):
        height, width = image.size_px
        sides = {"width": str(width), "height": str(height)}
        parent = SubElement(root, "image", {"id": str(number), "name": escape(image.name), **sides})
        for labelled in image.objects:
            common = {"label": escape(labelled.name), "source": "auto"}
            if image.kind == "classes":
                SubElement(parent, "tag", common)
            else:
                tag, shape = _describe_cvat(labelled)
                SubElement(parent, tag, common | {"occluded": "0", "z_order": "0"} | shape)
    tree = ElementTree(root)
    tree.write(folder / "annotations.xml", encoding="utf-8", xml_declaration=True)


def _describe_cvat(labelled: Labelled) -> tuple[str, dict[str, str]]:
    left, top, width, height = labelled.box
    if labelled.pixels is None:
        sides = {"xtl": left, "ytl": top, "xbr": left + width, "ybr": top + height}
        return "box", {name: f"{value:.2f}" for name, value in sides.items()}
    counts = run_lengths(labelled.pixels.T)  # which go along the rows here
    corner_and_size = {"left": left, "top": top, "width": width, "height": height}
    runs = ", ".join(map(str, counts))
    return "mask", {"rle": runs, **{name: f"{value:g}" for name, value in corner_and_size.items()}}


def write_labelstudio(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Write ``tasks.json`` with a prediction for each image, and ``config.xml`` for its project."""
    tasks = []
    tag = ""
    for image in images:
        tag = _LABELSTUDIO_TAGS[image.kind]
        results = [_describe_result(labelled, image) for labelled in image.objects]
        for number, result in enumerate(results):
            result |= {"id": f"r{number}", "from_name": "label", "to_name": "image"}
        prediction = {"model_version": "lit_data", "score": image.margin, "result": results}
        below_root = quote(os.fsencode(image.name))
        url = image.path if is_remote(image.path) else f"/data/local-files/?d={below_root}"
        tasks.append({"data": {"image": url, "score": image.score}, "predictions": [prediction]})
    _write_json(folder / "tasks.json", tasks)
    if not tag:
        return
    view = Element("View")
    SubElement(view, "Image", {"name": "image", "value": "$image"})
    control = SubElement(view, tag, {"name": "label", "toName": "image"})
    for name in classes:
        SubElement(control, "Choice" if tag == "Choices" else "Label", {"value": name})
    ElementTree(view).write(folder / "config.xml", encoding="utf-8")


def _describe_result(labelled: Labelled, image: ImageLabels) -> dict[str, Any]:
    height, width = image.size_px
    percent = np.array((100 / width, 100 / height))
    result: dict[str, Any] = {"original_width": width, "original_height": height}
    result |= {"image_rotation": 0, "score": labelled.score}
    if image.kind == "classes":
        return result | {"type": "choices", "value": {"choices": [labelled.name]}}
    if labelled.pixels is None:
        sides = np.array(labelled.box) * np.tile(percent, 2)
        value = dict(zip(("x", "y", "width", "height"), sides.tolist(), strict=True))
        value |= {"rotation": 0, "rectanglelabels": [labelled.name]}
        return result | {"type": "rectanglelabels", "value": value}
    points = (np.array(outline_pixels(labelled)) * percent).tolist()
    value = {"points": points, "closed": True, "polygonlabels": [labelled.name]}
    return result | {"type": "polygonlabels", "value": value}


def write_fiftyone(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Write ``samples.json``: a dictionary for each image, as ``fiftyone.Sample.from_dict`` takes it."""
    samples = []
    for image in images:
        described = [_describe_fiftyone(labelled, image) for labelled in image.objects]
        path = image.path if is_remote(image.path) else str(Path(image.path).resolve())
        sample = {"filepath": path, "tags": [], "score": image.score, "margin": image.margin}
        predictions: dict[str, Any]
        if image.kind == "classes":
            [predictions] = described
        elif image.kind == "boxes":
            predictions = {"_cls": "Detections", "detections": described}
        else:
            predictions = {"_cls": "Polylines", "polylines": described}
        samples.append(sample | {"predictions": predictions})
    _write_json(folder / "samples.json", {"samples": samples})


def _describe_fiftyone(labelled: Labelled, image: ImageLabels) -> dict[str, Any]:
    height, width = image.size_px
    common = {"label": labelled.name, "confidence": labelled.score}
    if image.kind == "classes":
        return {"_cls": "Classification", **common}
    sides = np.array((width, height))
    if labelled.pixels is None:
        box = (np.array(labelled.box) / np.tile(sides, 2)).tolist()
        return {"_cls": "Detection", **common, "bounding_box": box}
    points = (np.array(outline_pixels(labelled)) / sides).tolist()
    return {"_cls": "Polyline", **common, "points": [points], "closed": True, "filled": True}


def write_masks(images: Images, classes: Sequence[str], folder: Path) -> None:
    """Write a PNG for each image: 0 and 255, or class numbers if there are several classes."""
    for image in images:
        mask: Bytes = np.zeros(image.size_px, np.uint8)
        for labelled in image.objects:
            assert labelled.pixels is not None
            left, top, width, height = map(int, labelled.box)
            value = labelled.number if len(classes) > 1 else _WHOLE
            mask[top : top + height, left : left + width][labelled.pixels] = value
        write_png(folder / f"{image.stem}.png", mask)


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False))


FORMS: Mapping[str, tuple[Callable[[Images, Sequence[str], Path], None], frozenset[Kind]]] = {
    "coco": (write_coco, frozenset(("regions", "boxes"))),
    "cvat": (write_cvat, frozenset(("regions", "boxes", "classes"))),
    "fiftyone": (write_fiftyone, frozenset(("regions", "boxes", "classes"))),
    "labelme": (write_labelme, frozenset(("regions", "boxes"))),
    "labelstudio": (write_labelstudio, frozenset(("regions", "boxes", "classes"))),
    "masks": (write_masks, frozenset(("regions",))),
}
"""Writer of each format, and the kinds of labels that it supports."""
