"""Mosaics of four as people make them: four images, a canvas, a warp, colours, a flip.

The steps and their order are those of YOLOv5 (``utils/dataloaders.py``, `load_mosaic` and
`random_perspective`) and of ultralytics (``data/augment.py``), so that ``benchmark`` compares ways
to do the same work.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lit_data.datasets.detection.labels import LabelTable
from lit_data.errors import DataError, show_path
from lit_data.io.images.image_source import ImageBank
from lit_data.mosaic import FILL, MosaicSpec
from lit_data.types import Array, Batch

Floats = NDArray[np.float64]
_TILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicRecipe:
    """Making of a sample of four images.

    Args:
        size_px: (height, width) of a sample.
        spec: Scale and shift of the canvas, and which boxes are kept.
        gains: Largest changes of hue, saturation and value, as fractions.
        flip: Probability of mirroring left-right.
    """

    size_px: tuple[int, int]
    spec: MosaicSpec
    gains: tuple[float, float, float] = (0.015, 0.7, 0.4)
    flip: float = 0.5


class OriginalMosaics(Dataset[Batch]):
    """Map-style: ``image`` [3, H, W] uint8 R, G, B, and ``boxes`` [n, 6] float32.

    Boxes are those of `DetectionDataset`.

    What is drawn comes from a generator of its own, one sample after the other: another order gives
    other samples.

    Args:
        read: Gives an image by its number, [h, w, 3] uint8 B, G, R, as large as it fits into a
            sample.
        labels: Boxes of all images.
        images: Numbers of the split's images.
        recipe: How a sample is made.
        seed: Of everything that is drawn.
    """

    def __init__(
        self,
        read: Callable[[int], Array],
        labels: LabelTable,
        images: Sequence[int],
        recipe: MosaicRecipe,
        *,
        seed: int = 0,
    ) -> None:
        self.read = read
        self.labels = labels
        self.images = list(images)
        self.recipe = recipe
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        numbers = [self.images[index], *self.random.choices(self.images, k=_TILES - 1)]
        canvas, boxes = self._lay_out(numbers)
        image, boxes = self._warp(canvas, boxes)
        draws = [self.random.uniform(-1, 1) * gain + 1 for gain in self.recipe.gains]
        image = change_colours(image, draws[0], draws[1], draws[2])
        if self.random.random() < self.recipe.flip:
            image, boxes = np.fliplr(image), _mirror(boxes, image.shape[1])
        planar = np.ascontiguousarray(image.transpose(2, 0, 1)[::-1])
        return {
            "image": torch.from_numpy(planar),
            "boxes": torch.from_numpy(_to_fractions(boxes, self.recipe.size_px)),
        }

    def _lay_out(self, numbers: Sequence[int]) -> tuple[Array, Floats]:
        """Lay four images around a point of a large canvas.

        Returns:
            The canvas [2H, 2W, 3], and boxes [n, 5] (class, x1, y1, x2, y2) in px of it.
        """
        height, width = self.recipe.size_px
        canvas = np.full((2 * height, 2 * width, 3), FILL, np.uint8)
        middle_y = round(self.random.uniform(0.5, 1.5) * height)
        middle_x = round(self.random.uniform(0.5, 1.5) * width)
        all_boxes = []
        for tile, number in enumerate(numbers):
            pixels = self.read(number)
            tall, wide = pixels.shape[:2]
            # tiles in reading order, each with one corner at the point
            top = middle_y - tall if tile < 2 else middle_y
            left = middle_x - wide if tile % 2 == 0 else middle_x
            y = slice(max(top, 0), min(top + tall, 2 * height))
            x = slice(max(left, 0), min(left + wide, 2 * width))
            canvas[y, x] = pixels[y.start - top : y.stop - top, x.start - left : x.stop - left]
            all_boxes.append(_to_pixels(self.labels.of(number), (tall, wide), (top, left)))
        boxes = np.concatenate(all_boxes)
        boxes[:, 1:] = boxes[:, 1:].clip(0, (2 * width, 2 * height, 2 * width, 2 * height))
        return canvas, boxes

    def _warp(self, canvas: Array, boxes: Floats) -> tuple[Array, Floats]:
        """Scale and shift the canvas about its middle; boxes go with it and small ones go out."""
        import cv2

        height, width = self.recipe.size_px
        spec = self.recipe.spec
        scale = self.random.uniform(*spec.scale)
        low, high = 0.5 - spec.translate, 0.5 + spec.translate
        to_middle, back = np.eye(3), np.diag((scale, scale, 1.0))
        to_middle[:2, 2] = -width, -height
        back[0, 2] = self.random.uniform(low, high) * width
        back[1, 2] = self.random.uniform(low, high) * height
        matrix = back @ to_middle
        image = cv2.warpAffine(canvas, matrix[:2], (width, height), borderValue=(FILL, FILL, FILL))
        corners = np.ones((4 * len(boxes), 3))
        corners[:, :2] = boxes[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(-1, 2)
        moved = (corners @ matrix.T)[:, :2].reshape(-1, 4, 2)
        around = np.concatenate((moved.min(1), moved.max(1)), axis=1)
        cut = around.clip(0, (width, height, width, height))
        is_large = _is_large_enough(cut, boxes[:, 1:] * scale, spec)
        return image, np.concatenate((boxes[is_large, :1], cut[is_large]), axis=1)


def change_colours(image: Array, hue: float, saturation: float, value: float) -> Array:
    """Multiply hue, saturation and value, each through a table.

    Args:
        image: [h, w, 3] uint8, B, G, R.
        hue: Factor.
        saturation: Factor.
        value: Factor.
    """
    import cv2

    levels = np.arange(256.0)
    hues = levels * hue % 180  # OpenCV counts them in steps of 2 degrees
    tables = (hues, (levels * saturation).clip(0, 255), (levels * value).clip(0, 255))
    planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    changed = []
    for plane, table in zip(planes, tables, strict=True):
        changed.append(cv2.LUT(plane, table.astype(np.uint8)))
    return np.asarray(cv2.cvtColor(cv2.merge(changed), cv2.COLOR_HSV2BGR))


def collate_boxes(samples: Sequence[Batch]) -> Batch:
    """Stack images, and join boxes with their row in front: [B, 3, H, W] and [N, 6]."""
    for row, sample in enumerate(samples):
        sample["boxes"][:, 0] = row
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "boxes": torch.cat([sample["boxes"] for sample in samples]),
    }


def keep_images(bank: ImageBank, images: Iterable[int]) -> dict[int, Array]:
    """Read images of a bank into memory for `OriginalMosaics`: [h, w, 3] uint8 each, B, G, R."""
    pixels = {}
    for image in set(images):
        pixels[image] = np.ascontiguousarray(np.moveaxis(bank[image][::-1], 0, 2))
    return pixels


def read_fitting(path: str, size_px: tuple[int, int]) -> Array:
    """Decode a file and scale it as large as it fits: [h, w, 3] uint8, B, G, R.

    Raises:
        DataError: OpenCV cannot read it.
    """
    import cv2

    image = cv2.imread(path, cv2.IMREAD_COLOR)
    if image is None:
        raise DataError(f"OpenCV cannot read {show_path(path)}")
    height, width = image.shape[:2]
    scale = min(size_px[0] / height, size_px[1] / width)
    if scale == 1:
        return np.asarray(image)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR))


def _to_pixels(
    boxes: NDArray[np.float32], size_px: tuple[int, int], corner_px: tuple[int, int]
) -> Floats:
    """Turn fractions of an image into px of the canvas.

    Args:
        boxes: [n, 5] (class, cx, cy, w, h) in fractions.
        size_px: (height, width) of the image.
        corner_px: (top, left) of the image on the canvas.

    Returns:
        [n, 5] (class, x1, y1, x2, y2).
    """
    height, width = size_px
    top, left = corner_px
    kind, cx, cy, w, h = boxes.astype(np.float64).T
    x, y = cx * width + left, cy * height + top
    half_w, half_h = w * width / 2, h * height / 2
    return np.stack((kind, x - half_w, y - half_h, x + half_w, y + half_h), axis=1)


def _is_large_enough(cut: Floats, uncut: Floats, spec: MosaicSpec) -> NDArray[np.bool_]:
    """Return [n], True for boxes of which enough is left."""
    sides = cut[:, 2:] - cut[:, :2]
    sides_before = uncut[:, 2:] - uncut[:, :2]
    is_visible = sides.prod(1) >= spec.min_box_visible * sides_before.prod(1)
    is_compact = sides.max(1) <= spec.max_box_aspect * np.maximum(sides.min(1), 1e-9)
    is_inside = np.all(sides > 0, axis=1) & np.all(sides >= spec.min_box_px, axis=1)
    is_enough: NDArray[np.bool_] = is_inside & is_visible & is_compact
    return is_enough


def _mirror(boxes: Floats, width_px: int) -> Floats:
    mirrored = boxes.copy()
    mirrored[:, [1, 3]] = width_px - boxes[:, [3, 1]]
    return mirrored


def _to_fractions(boxes: Floats, size_px: tuple[int, int]) -> NDArray[np.float32]:
    """Turn [n, 5] (class, x1, y1, x2, y2) px into fractions (0, class, cx, cy, w, h)."""
    kind, x1, y1, x2, y2 = boxes.T
    height, width = size_px
    columns = np.zeros_like(kind), kind, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
    return np.stack((*columns, (x2 - x1) / width, (y2 - y1) / height), axis=1).astype(np.float32)
