"""Contents of the files of small trees: pictures, masks, and annotations of the images that lie there."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from lit_data.core.types import Array

SIDE = 24
"""Height and width of a picture, px."""
_CORNERS = [[6, 6], [18, 6], [18, 18], [6, 18]]
_OUTLINE = [6, 6, 18, 6, 18, 18, 6, 18]
_POINTS = ";".join(f"{x},{y}" for x, y in _CORNERS)

Writer = Callable[[Path, str, Sequence[str]], None]
"""Writes a file of an argument, and of the names of all images relative to the folder of the file."""


def _picture(channels: int, dtype: str = "uint8", side: int = SIDE) -> Writer:
    def write(path: Path, argument: str, images: Sequence[str]) -> None:
        draws = np.random.default_rng(zlib.crc32(str(path).encode()))
        highest = np.iinfo(dtype).max
        _save(path, draws.integers(0, highest, (side, side, channels)).astype(dtype))

    return write


def _mask(*values: int, dtype: str = "uint8") -> Writer:
    def write(path: Path, argument: str, images: Sequence[str]) -> None:
        mask = np.zeros((SIDE, SIDE), dtype)
        for number, value in enumerate(values):
            mask[6 + 4 * number : 10 + 4 * number, 6:18] = value
        _save(path, mask)

    return write


def _colours(path: Path, argument: str, images: Sequence[str]) -> None:
    mask = np.zeros((SIDE, SIDE, 3), np.uint8)
    mask[6:10, 6:18], mask[12:18, 6:18] = (0, 0, 128), (0, 128, 0)
    _save(path, mask)


def _save(path: Path, pixels: Array) -> None:
    is_written, encoded = cv2.imencode(path.suffix, pixels)
    assert is_written, path
    path.write_bytes(encoded.tobytes())


def _text(path: Path, argument: str, images: Sequence[str]) -> None:
    path.write_text(argument.replace("\\n", "\n") + "\n", encoding="utf-8")


def _list(path: Path, argument: str, images: Sequence[str]) -> None:
    """Write words as lines, as lists of splits have them."""
    path.write_text("\n".join(argument.split()) + "\n", encoding="utf-8")


def _json(make: Callable[[Sequence[str]], object]) -> Writer:
    def write(path: Path, argument: str, images: Sequence[str]) -> None:
        named = [
            name for name in images if name.startswith(argument) and (argument or name[0] != ".")
        ]
        path.write_text(json.dumps(make(named)), encoding="utf-8")

    return write


def _list_images(names: Sequence[str]) -> list[dict[str, object]]:
    size = {"height": SIDE, "width": SIDE}
    return [{"id": n, "file_name": Path(name).name} | size for n, name in enumerate(names, 1)]


def _coco(names: Sequence[str]) -> Mapping[str, object]:
    marks = []
    for number in range(1, len(names) + 1):
        shape = {
            "bbox": [6, 6, 12, 12],
            "area": 144,
            "iscrowd": 0,
            "segmentation": [_OUTLINE],
        }
        marks.append({"id": number, "image_id": number, "category_id": 1} | shape)
    categories = [{"id": 1, "name": "crack"}]
    return {"images": _list_images(names), "annotations": marks, "categories": categories}


def _boxes(names: Sequence[str]) -> Mapping[str, object]:
    content = dict(_coco(names))
    marks: list[dict[str, object]] = content["annotations"]
    content["annotations"] = [mark | {"segmentation": []} for mark in marks]
    return content


def _captions(names: Sequence[str]) -> Mapping[str, object]:
    captions = [{"id": n, "image_id": n, "caption": "a part"} for n in range(1, len(names) + 1)]
    return {"images": _list_images(names), "annotations": captions}


def _panoptic(names: Sequence[str]) -> Mapping[str, object]:
    marks = [
        {"image_id": n, "file_name": f"{n}.png", "segments_info": []}
        for n in range(1, len(names) + 1)
    ]
    categories = [{"id": 1, "name": "crack", "isthing": 1}]
    return {"images": _list_images(names), "annotations": marks, "categories": categories}


def _segment_anything(names: Sequence[str]) -> Mapping[str, object]:
    image = {"image_id": 1, "file_name": names[0], "height": SIDE, "width": SIDE}
    runs = {"size": [SIDE, SIDE], "counts": "o0"}
    return {
        "image": image,
        "annotations": [{"id": 1, "segmentation": runs, "bbox": [6, 6, 12, 12]}],
    }


def _datumaro(names: Sequence[str]) -> Mapping[str, object]:
    items = [{"id": name, "annotations": [{"type": "polygon"}]} for name in names]
    return {"info": {}, "categories": {"label": {"labels": []}}, "items": items}


def _labelme(path: Path, argument: str, images: Sequence[str]) -> None:
    shape = {"label": argument or "crack", "points": _CORNERS, "shape_type": "polygon"}
    name = next(name for name in images if Path(name).stem == path.stem)
    content = {"shapes": [shape], "imagePath": Path(name).name}
    path.write_text(json.dumps(content | {"imageHeight": SIDE, "imageWidth": SIDE}))


def _cvat(path: Path, argument: str, images: Sequence[str]) -> None:
    """Write polygons of all images; those of a project name their subset, the folder above them."""
    lines = ["<annotations>"]
    for number, name in enumerate(images):
        subset = f' subset="{Path(name).parent.name}"' if argument == "project" else ""
        head = f'<image id="{number}" name="{Path(name).name}"{subset}'
        lines.append(f'{head} width="{SIDE}" height="{SIDE}">')
        lines.append(f'<polygon label="crack" points="{_POINTS}"/></image>')
    path.write_text("\n".join([*lines, "</annotations>"]))


def _cvat_video(path: Path, argument: str, images: Sequence[str]) -> None:
    box = '<box frame="0" outside="0" xtl="6" ytl="6" xbr="18" ybr="18"/>'
    path.write_text(f'<annotations><track id="0" label="crack">{box}</track></annotations>')


def _voc(path: Path, argument: str, images: Sequence[str]) -> None:
    size = f"<size><width>{SIDE}</width><height>{SIDE}</height><depth>3</depth></size>"
    box = "<bndbox><xmin>7</xmin><ymin>7</ymin><xmax>18</xmax><ymax>18</ymax></bndbox>"
    thing = f"<object><name>{argument or 'crack'}</name>{box}</object>"
    path.write_text(f"<annotation><filename>{path.stem}.jpg</filename>{size}{thing}</annotation>")


def _runs(path: Path, argument: str, images: Sequence[str]) -> None:
    """Write run lengths, column by column from 1, of the images that the argument names."""
    rows = [f"{name},1,150 8 180 8" for name in argument.split()]
    path.write_text("\n".join(["ImageId,ClassId,EncodedPixels", *rows]) + "\n")


def _volume(is_label: bool) -> Writer:
    def write(path: Path, argument: str, images: Sequence[str]) -> None:
        import nibabel as nib

        volume = np.full((12, 12, 12), 0 if is_label else -1000, np.int16)
        volume[3:9, 3:9, 3:9] = 1 if is_label else 500
        nib.save(nib.Nifti1Image(volume, np.diag([1.0, 1.0, 2.0, 1.0])), path)

    return write


def _dicom(path: Path, argument: str, images: Sequence[str]) -> None:
    """Write the slice of a series whose number the argument has."""
    import pydicom
    from pydicom.data import get_testdata_file

    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    dataset.ImagePositionPatient = [0, 0, 2 * int(argument)]
    dataset.InstanceNumber = int(argument)
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = f"1.2.3.{argument}"
    dataset.save_as(path)


def _bytes(path: Path, argument: str, images: Sequence[str]) -> None:
    """Write a file of a type that is not read."""
    path.write_bytes(b"not an image")


IMAGES = ("image", "gray", "deep", "large", "alpha")
"""Contents of images, which annotations name."""

WRITERS: Mapping[str, Writer] = {
    "image": _picture(3),
    "gray": _picture(1),
    "deep": _picture(1, "uint16"),
    "alpha": _picture(4),
    "large": _picture(3, side=2 * SIDE),
    "mask": _mask(255),
    "blank": _mask(),
    "numbers": _mask(1, 2),
    "ones": _mask(1),
    "deep_numbers": _mask(1, 2, dtype="uint16"),
    "deep_mask": _mask(65535, dtype="uint16"),
    "instances": _mask(1001, 26002, dtype="uint16"),
    "colours": _colours,
    "text": _text,
    "list": _list,
    "coco": _json(_coco),
    "coco_boxes": _json(_boxes),
    "captions": _json(_captions),
    "panoptic": _json(_panoptic),
    "segment_anything": _json(_segment_anything),
    "datumaro": _json(_datumaro),
    "labelme": _labelme,
    "cvat": _cvat,
    "cvat_video": _cvat_video,
    "voc": _voc,
    "runs": _runs,
    "volume": _volume(is_label=False),
    "labels": _volume(is_label=True),
    "dicom": _dicom,
    "bytes": _bytes,
}
