"""Real photographs in each layout that people keep: the same masks come out of all of them."""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.datamodules import InspectionDataModule
from tests.datasets.inspection.test_annotations import to_runs

pytestmark = pytest.mark.data

Box = tuple[int, int, int, int]  # left, top, right, bottom, px
Images = dict[str, tuple[NDArray[np.uint8], list[Box]]]


def _read_textures(shared: Path) -> Images:
    """Twelve tiles of photographed brick, grass and gravel; in every other one dark spots, drawn."""
    rng, images = np.random.default_rng(0), Images()
    for texture in ("brick", "grass", "gravel"):
        whole = cv2.imread(str(shared / "textures" / f"{texture}.png"))
        for tile in range(4):
            pixels, boxes = whole[:256, tile * 64 : tile * 64 + 192].copy(), list[Box]()
            for _ in range(2 * (tile % 2)):
                left, top = rng.integers(0, 140, 2).tolist()
                boxes.append((left, top, left + 30, top + 20))
                pixels[top : top + 20, left : left + 30] //= 4
            images[f"{texture}{tile}.png"] = pixels, boxes
    return images


def _draw(image: NDArray[np.uint8], boxes: list[Box]) -> NDArray[np.uint8]:
    mask = np.zeros(image.shape[:2], np.uint8)
    for left, top, right, bottom in boxes:
        mask[top:bottom, left:right] = 255
    return mask


def _corners(box: Box) -> list[tuple[int, int]]:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _write_masks(
    folder: Path, images: Images, place: Callable[[str], str], *, blank: bool = True
) -> None:
    for name, (pixels, boxes) in images.items():
        path = folder / place(Path(name).stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        if boxes or blank:
            cv2.imwrite(str(path), _draw(pixels, boxes))


def _write_anomaly(folder: Path, images: Images) -> None:
    for name, (pixels, boxes) in images.items():
        (folder / name).unlink()
        parts = ("test", "spot") if boxes else ("train", "good")
        path = folder.joinpath(*parts, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels)
    defective = {name: found for name, found in images.items() if found[1]}
    _write_masks(folder, defective, lambda stem: f"ground_truth/spot/{stem}_mask.png")


def _write_coco(folder: Path, images: Images) -> None:
    listed = [
        {"id": n, "file_name": name, "width": pixels.shape[1], "height": pixels.shape[0]}
        for n, (name, (pixels, _)) in enumerate(images.items())
    ]
    annotations = [
        {"image_id": n, "category_id": 1, "segmentation": [np.ravel(_corners(box)).tolist()]}
        for n, (_, boxes) in enumerate(images.values())
        for box in boxes
    ]
    annotations = [{"id": n, **row} for n, row in enumerate(annotations)]
    table = {
        "images": listed,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "spot"}],
    }
    (folder / "instances.json").write_text(json.dumps(table))


def _write_runs(folder: Path, images: Images) -> None:
    rows = [
        f"{name},1,{' '.join(map(str, to_runs(_draw(*found))))}" for name, found in images.items()
    ]
    (folder / "train.csv").write_text("\n".join(["ImageId,ClassId,EncodedPixels", *rows]))


def _write_yolo(folder: Path, images: Images) -> None:
    (folder / "labels").mkdir()
    for name, (pixels, boxes) in images.items():
        size = np.array(pixels.shape[1::-1])
        lines = [
            "0 " + " ".join(f"{value:.7f}" for value in np.ravel(_corners(box) / size))
            for box in boxes
        ]
        (folder / "labels" / f"{Path(name).stem}.txt").write_text("\n".join(lines))


def _write_labelme(folder: Path, images: Images) -> None:
    for name, (_, boxes) in images.items():
        shapes = [
            {"label": "spot", "points": _corners(box), "shape_type": "polygon"} for box in boxes
        ]
        (folder / f"{Path(name).stem}.json").write_text(
            json.dumps({"shapes": shapes, "imagePath": name})
        )


def _write_cvat(folder: Path, images: Images) -> None:
    text = ""
    for n, (name, (pixels, boxes)) in enumerate(images.items()):
        outlines = (";".join(f"{x},{y}" for x, y in _corners(box)) for box in boxes)
        polygons = "".join(f'<polygon label="spot" points="{points}"/>' for points in outlines)
        height, width = pixels.shape[:2]
        text += (
            f'<image id="{n}" name="{name}" width="{width}" height="{height}">{polygons}</image>'
        )
    (folder / "annotations.xml").write_text(f"<annotations>{text}</annotations>")


LAYOUTS: dict[str, tuple[str, Callable[[Path, Images], None]]] = {
    "folder": (
        "folder",
        lambda folder, images: _write_masks(folder, images, "masks/{}_GT.png".format),
    ),
    "folder, defects only": (
        "folder",
        lambda folder, images: _write_masks(folder, images, "masks/{}.png".format, blank=False),
    ),
    "beside": ("beside", lambda folder, images: _write_masks(folder, images, "{}_mask.png".format)),
    "anomaly": ("anomaly", _write_anomaly),
    "coco": ("coco", _write_coco),
    "csv": ("csv", _write_runs),
    "yolo": ("yolo", _write_yolo),
    "labelme": ("labelme", _write_labelme),
    "cvat": ("cvat", _write_cvat),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_gives_the_masks_that_were_written(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    layout, write = LAYOUTS[name]
    images, folder = _read_textures(shared_data), tmp_path / "set"
    inside = folder / "images" if layout == "folder" else folder
    inside.mkdir(parents=True)
    for image, (pixels, _) in images.items():
        cv2.imwrite(str(inside / image), pixels)
    write(folder, images)
    data = InspectionDataModule(
        str(folder), cache_dir=str(tmp_path / "cache"), splits={"train": 1.0}
    )
    data.setup("fit")
    assert data.describe()["layout"] == layout
    for number in range(len(data.bank)):
        mask, wanted = data.read_mask(number), _draw(*images[Path(data.bank.name(number)).name])
        assert mask is not None
        np.testing.assert_array_equal(mask > 0, wanted > 0)
    assert len(data.bank) == len(images)
