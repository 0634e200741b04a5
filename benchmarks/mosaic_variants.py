"""Mosaics of four as people make them before: in each ``__getitem__`` four images, a canvas, a
warp, colours, a flip.

The steps and their order are those of YOLOv5 (``utils/dataloaders.py``, `load_mosaic` and
`random_perspective`) and of ultralytics (``data/augment.py``), so that ``benchmark`` compares ways
to do the same work.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

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
_TILES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicRecipe:
    """What becomes of four images.

    Args:
        size_px: (height, width) of a sample.
        spec: Scale and shift of the canvas, and which boxes are kept.
        gains: Largest changes of hue, saturation and value, as shares.
        flip: Probability of mirroring left-right.
    """

    size_px: tuple[int, int]
    spec: MosaicSpec
    gains: tuple[float, float, float] = (0.015, 0.7, 0.4)
    flip: float = 0.5


class OriginalMosaics(Dataset[Batch]):
    """Map-style: ``image`` [3, H, W] uint8 R, G, B, and ``boxes`` [n, 6] float32 as in
    `DetectionDataset`.

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
        self.read, self.labels, self.images, self.recipe = read, labels, list(images), recipe
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        shown = [self.images[index], *self.random.choices(self.images, k=_TILES - 1)]
        canvas, boxes = self._lay_out(shown)
        image, boxes = self._warp(canvas, boxes)
        draws = [self.random.uniform(-1, 1) * gain + 1 for gain in self.recipe.gains]
        image = change_colours(image, draws[0], draws[1], draws[2])
        if self.random.random() < self.recipe.flip:
            image, boxes = np.fliplr(image), _mirror(boxes, image.shape[1])
        planar = np.ascontiguousarray(image.transpose(2, 0, 1)[::-1])
        return {
            "image": torch.from_numpy(planar),
            "boxes": torch.from_numpy(_to_shares(boxes, self.recipe.size_px)),
        }

    def _lay_out(self, shown: Sequence[int]) -> tuple[Array, Floats]:
        """Four images around a point of a large canvas; boxes [n, 5] (class, x1, y1, x2, y2) in px of it."""
        height, width = self.recipe.size_px
        canvas = np.full((2 * height, 2 * width, 3), FILL, np.uint8)
        middle_y, middle_x = (
            round(self.random.uniform(0.5, 1.5) * side) for side in (height, width)
        )
        boxes = []
        for number, image in enumerate(shown):
            pixels = self.read(image)
            tall, wide = pixels.shape[:2]
            top = middle_y - tall if number < 2 else middle_y
            left = middle_x - wide if number % 2 == 0 else middle_x
            y, x = (
                slice(max(top, 0), min(top + tall, 2 * height)),
                slice(max(left, 0), min(left + wide, 2 * width)),
            )
            canvas[y, x] = pixels[y.start - top : y.stop - top, x.start - left : x.stop - left]
            boxes.append(_to_pixels(self.labels.of(image), (tall, wide), (top, left)))
        found = np.concatenate(boxes)
        found[:, 1:] = found[:, 1:].clip(0, (2 * width, 2 * height, 2 * width, 2 * height))
        return canvas, found

    def _warp(self, canvas: Array, boxes: Floats) -> tuple[Array, Floats]:
        """Scale and shift the canvas about its middle; boxes go with it, are cut, and small ones are left out."""
        import cv2

        (height, width), spec = self.recipe.size_px, self.recipe.spec
        scale = self.random.uniform(*spec.scale)
        low, high = 0.5 - spec.translate, 0.5 + spec.translate
        to_middle, back = np.eye(3), np.diag((scale, scale, 1.0))
        to_middle[:2, 2] = -width, -height
        back[:2, 2] = (
            self.random.uniform(low, high) * width,
            self.random.uniform(low, high) * height,
        )
        matrix = back @ to_middle
        image = cv2.warpAffine(canvas, matrix[:2], (width, height), borderValue=(FILL, FILL, FILL))
        corners = np.ones((4 * len(boxes), 3))
        corners[:, :2] = boxes[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(-1, 2)
        moved = (corners @ matrix.T)[:, :2].reshape(-1, 4, 2)
        cut = np.concatenate((moved.min(1), moved.max(1)), axis=1).clip(
            0, (width, height, width, height)
        )
        kept = _is_large_enough(cut, boxes[:, 1:] * scale, spec)
        return image, np.concatenate((boxes[kept, :1], cut[kept]), axis=1)


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
    tables = (levels * hue % 180, (levels * saturation).clip(0, 255), (levels * value).clip(0, 255))
    planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    changed = [
        cv2.LUT(plane, table.astype(np.uint8)) for plane, table in zip(planes, tables, strict=True)
    ]
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
    """Images of a bank as `OriginalMosaics` reads them, in memory: [h, w, 3] uint8 each, B, G, R."""
    return {
        image: np.ascontiguousarray(np.moveaxis(bank[image][::-1], 0, 2)) for image in set(images)
    }


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
    boxes: NDArray[np.float32], size_px: tuple[int, int], place_px: tuple[int, int]
) -> Floats:
    """[n, 5] (class, cx, cy, w, h) in shares of an image, as (class, x1, y1, x2, y2) where it lies."""
    (height, width), (top, left) = size_px, place_px
    kind, cx, cy, w, h = boxes.astype(np.float64).T
    x, y = cx * width + left, cy * height + top
    return np.stack(
        (kind, x - w * width / 2, y - h * height / 2, x + w * width / 2, y + h * height / 2), axis=1
    )


def _is_large_enough(cut: Floats, whole: Floats, spec: MosaicSpec) -> NDArray[np.bool_]:
    sides, before = cut[:, 2:] - cut[:, :2], whole[:, 2:] - whole[:, :2]
    visible = sides.prod(1) >= spec.min_box_visible * before.prod(1)
    aspect = sides.max(1) <= spec.max_box_aspect * np.maximum(sides.min(1), 1e-9)
    kept: NDArray[np.bool_] = (
        (sides > 0).all(1) & (sides >= spec.min_box_px).all(1) & visible & aspect
    )
    return kept


def _mirror(boxes: Floats, width_px: int) -> Floats:
    mirrored = boxes.copy()
    mirrored[:, [1, 3]] = width_px - boxes[:, [3, 1]]
    return mirrored


def _to_shares(boxes: Floats, size_px: tuple[int, int]) -> NDArray[np.float32]:
    """[n, 5] (class, x1, y1, x2, y2) px, as (0, class, cx, cy, w, h) in shares of the sample."""
    kind, x1, y1, x2, y2 = boxes.T
    height, width = size_px
    columns = np.zeros_like(kind), kind, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
    return np.stack((*columns, (x2 - x1) / width, (y2 - y1) / height), axis=1).astype(np.float32)
