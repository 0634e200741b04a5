"""Mosaics and windows of volumes as people make them, for the suite ``loaders``."""

import random
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from lit_data.core.types import Array, Batch
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.volumes import CTDataModule

Floats = NDArray[np.float64]
_FILL = 114
_MOST_BOXES = 300


class PlainMosaics(Dataset[Batch]):
    """Four images around a random point of a canvas of twice the size, which is scaled and cut.

    A sample holds ``image`` [3, H, W] uint8 and ``boxes`` [300, 5] float32 (class, centre and size
    as fractions), filled up with zeros.

    Args:
        images: [3, h, w] uint8 each, no larger than a sample.
        boxes: [n, 5] of each image, as those of a sample.
        size_px: (height, width) of a sample.
    """

    def __init__(
        self, images: Sequence[Array], boxes: Sequence[Array], size_px: tuple[int, int]
    ) -> None:
        self.images = [np.ascontiguousarray(np.moveaxis(image, 0, 2)) for image in images]
        self.boxes = boxes
        self.size_px = size_px

    def __len__(self) -> int:
        return len(self.images)

    @override
    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng(random.getrandbits(64))
        height, width = self.size_px
        canvas = np.full((2 * height, 2 * width, 3), _FILL, np.uint8)
        middle_y, middle_x = (int(rng.uniform(0.5, 1.5) * side) for side in self.size_px)
        corners = []
        for tile, number in enumerate((index, *rng.integers(len(self.images), size=3))):
            image = self.images[number]
            tall, wide = image.shape[:2]
            top = middle_y - tall if tile < 2 else middle_y
            left = middle_x - wide if tile % 2 == 0 else middle_x
            y0, x0 = max(top, 0), max(left, 0)
            y1, x1 = min(top + tall, 2 * height), min(left + wide, 2 * width)
            canvas[y0:y1, x0:x1] = image[y0 - top : y1 - top, x0 - left : x1 - left]
            corners.append(_find_corners(self.boxes[number], (tall, wide), (top, left)))
        scale = rng.uniform(0.7, 1.5)
        shift = rng.uniform(0.4, 0.6, 2) * (width, height) - scale * np.array((width, height))
        matrix = np.column_stack((np.eye(2) * scale, shift))
        cut = cv2.warpAffine(canvas, matrix, (width, height), borderValue=(_FILL,) * 3)
        boxes = np.concatenate(corners)
        boxes[:, 1:] = (boxes[:, 1:] * scale + np.tile(shift, 2)).clip(0, (width, height) * 2)
        if rng.random() < 0.5:
            cut = cut[:, ::-1]
            boxes[:, [1, 3]] = width - boxes[:, [3, 1]]
        planar = np.ascontiguousarray(np.moveaxis(cut, 2, 0))
        return {
            "image": torch.from_numpy(planar),
            "boxes": torch.from_numpy(_to_fractions(boxes, self.size_px)),
        }


def make_plain_mosaics(datamodule: DetectionDataModule) -> PlainMosaics:
    """Make mosaics of the training images of an opened set, which are kept in memory."""
    files = datamodule.files
    numbers = files.splits["train"]
    images = [np.asarray(datamodule.bank[number]) for number in numbers]
    boxes = [files.labels.of(number) for number in numbers]
    return PlainMosaics(images, boxes, datamodule.source.size_px)


def _find_corners(boxes: Array, size_px: tuple[int, int], corner_px: tuple[int, int]) -> Floats:
    """Turn fractions of an image into (class, left, top, right, bottom) in px of the canvas."""
    (height, width), (top, left) = size_px, corner_px
    kind, x, y, w, h = boxes.astype(np.float64).T
    ends = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    scaled = [end * side for end, side in zip(ends, (width, height) * 2, strict=True)]
    moved = [end + start for end, start in zip(scaled, (left, top) * 2, strict=True)]
    return np.stack((kind, *moved), axis=1)


def _to_fractions(boxes: Floats, size_px: tuple[int, int]) -> NDArray[np.float32]:
    """Turn corners into centres and sizes, without boxes of less than 2 px."""
    height, width = size_px
    sides = boxes[:, 3:] - boxes[:, 1:3]
    kept = boxes[(sides >= 2).all(1)][:_MOST_BOXES]
    kind, x0, y0, x1, y1 = kept.T
    rows = np.zeros((_MOST_BOXES, 5), np.float32)
    centres = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height)
    rows[: len(kept)] = np.stack((kind, *centres, (x1 - x0) / width, (y1 - y0) / height), axis=1)
    return rows


class PlainWindows(Dataset[Batch]):
    """Windows around a voxel in the foreground, which each sample looks for in the whole volume.

    Args:
        paths: ``.npy`` volumes in Hounsfield units.
        size: (z, y, x) voxels of a window.
        low_hu: Voxels above are in the foreground.
        per_volume: Windows of a volume in an epoch.
    """

    def __init__(
        self, paths: Sequence[Path], size: tuple[int, ...], low_hu: float, per_volume: int
    ) -> None:
        self.paths = paths
        self.size = size
        self.low_hu = low_hu
        self.per_volume = per_volume

    def __len__(self) -> int:
        return len(self.paths) * self.per_volume

    @override
    def __getitem__(self, index: int) -> Batch:
        volume = np.load(self.paths[index // self.per_volume], allow_pickle=False)
        voxels = np.argwhere(volume > self.low_hu)
        start = voxels[random.randrange(len(voxels))] - np.array(self.size) // 2
        start = start.clip(0, np.array(volume.shape) - self.size)
        window = volume[tuple(map(slice, start, start + self.size))]
        return {
            "image": torch.from_numpy(window[None].astype(np.float32)),
            "occupied": torch.from_numpy(window[None] > self.low_hu),
        }


def make_plain_windows(datamodule: CTDataModule) -> PlainWindows:
    """Make windows of the training volumes of an opened set, which are ``.npy`` files."""
    volumes = datamodule.volumes
    paths = [Path(volumes.sources[number].path) for number in volumes.splits["train"]]
    windows = datamodule.windows
    return PlainWindows(
        paths, windows.sides, datamodule.source.index_options.low_hu, windows.per_volume
    )
