"""Comparison with a reference without a net that learns.

``python -m benchmarks.pair_ways WAY ROOT TEST OUT``

ROOT is a set of `benchmarks.pair_sets`, TEST has the folders ``target`` and ``ref``, and maps go to
``OUT/maps``. WAY is `difference`, that of images by OpenCV, or `features`, that of what
EfficientNet-Lite0 sees of both.
"""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.learning import average_precision
from benchmarks.learning_sets import read_split
from benchmarks.pair_sets import read_grey
from lit_data.modules import EfficientNetLite

Floats = NDArray[np.floating[Any]]
Compare = Callable[[Floats, Floats], Floats]
_BLURS_PX = (0.0, 1.0, 2.0, 4.0)
_TOLERANCES_PX = (0, 1, 2, 3)
_MOST_SHIFT_PX = 8.0
_STRIDES_PX = (4, 8, 16)


def find_difference(target: Floats, reference: Floats, blur_px: float, tolerance_px: int) -> Floats:
    """Find how far a target is from all that its aligned reference shows near each pixel.

    Args:
        target: [H, W] in 0..1.
        reference: [H, W]; it is moved by parts of a pixel, and brought to the mean and the
            deviation of the target.
        blur_px: Standard deviation of a Gaussian blur of both.
        tolerance_px: How near.
    """
    moved = _align(target, reference)
    moved = (moved - moved.mean()) * (target.std() / max(moved.std(), 1e-6)) + target.mean()
    if blur_px:
        target, moved = (cv2.GaussianBlur(each, (0, 0), blur_px) for each in (target, moved))
    near = np.ones((2 * tolerance_px + 1,) * 2, np.uint8)
    above, below = target - cv2.dilate(moved, near), cv2.erode(moved, near) - target
    return np.asarray(np.maximum(np.maximum(above, below), 0), np.float32)


def _align(target: Floats, reference: Floats) -> Floats:
    window = cv2.createHanningWindow(target.shape[::-1], cv2.CV_32F)
    (right, down), _ = cv2.phaseCorrelate(reference, target, window)
    if max(abs(right), abs(down)) > _MOST_SHIFT_PX:
        return reference
    matrix = np.array([[1, 0, right], [0, 1, down]], np.float32)
    size = target.shape[1], target.shape[0]
    moved = cv2.warpAffine(reference, matrix, size, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(moved, np.float32)


def choose_difference(root: Path) -> Compare:
    """Choose blur and tolerance by the average precision of pixels in validation."""
    names = read_split(root, "val")
    masks = [read_grey(root / "masks" / Path(name).name) >= 128 for name in names]
    truth = np.concatenate([mask.ravel() for mask in masks])
    pairs = [read_pair(root, Path(name).name) for name in names]

    def rate(options: tuple[float, int]) -> float:
        maps = [find_difference(target, reference, *options) for target, reference in pairs]
        scores = np.concatenate([each.ravel() for each in maps]).astype(np.float64)
        return average_precision(scores, truth)[0]

    blur_px, tolerance_px = max(product(_BLURS_PX, _TOLERANCES_PX), key=rate)
    print(f"blur {blur_px} px, tolerance {tolerance_px} px")
    return lambda target, reference: find_difference(target, reference, blur_px, tolerance_px)


def compare_features(root: Path) -> Compare:
    """Return the mean over strides of distances of features, each as a multiple of that of good tiles."""
    encoder = EfficientNetLite(strides_px=_STRIDES_PX, channels=1).eval()

    @torch.no_grad()
    def find_distances(target: Floats, reference: Floats) -> list[Tensor]:
        images = torch.from_numpy(np.stack((target, reference)))[:, None]
        distances = []
        for features in encoder(images):
            one, other = F.normalize(features, dim=1)
            distances.append((one - other).norm(dim=0))
        return distances

    good = [name for name in read_split(root, "train") if not _shows_defect(root, name)][:40]
    seen = [find_distances(*read_pair(root, Path(name).name)) for name in good]
    usual = [float(torch.stack(maps).mean()) for maps in zip(*seen, strict=True)]

    def compare(target: Floats, reference: Floats) -> Floats:
        total = np.zeros_like(target)
        size = target.shape[1], target.shape[0]
        for distance, typical in zip(find_distances(target, reference), usual, strict=True):
            total += cv2.resize(distance.numpy() / max(typical, 1e-6), size)
        return (total / len(usual)).astype(np.float32)

    return compare


def _shows_defect(root: Path, name: str) -> bool:
    return bool(read_grey(root / "masks" / Path(name).name).any())


def read_pair(folder: Path, name: str) -> tuple[Floats, Floats]:
    """Read a target and its reference, [H, W] in 0..1 each."""
    target, reference = (read_grey(folder / role / name) for role in ("target", "ref"))
    return target.astype(np.float32) / 255, reference.astype(np.float32) / 255


def main(way: str, root: Path, test: Path, out: Path) -> None:
    """Write a map of each target (16 bit)."""
    compare = {"difference": choose_difference, "features": compare_features}[way](root)
    (out / "maps").mkdir(parents=True, exist_ok=True)
    for path in sorted((test / "target").iterdir()):
        values = compare(*read_pair(test, path.name))
        bounded = values / (1 + values)  # in the same order, below 1
        cv2.imwrite(str(out / "maps" / path.name), (bounded * 65535).round().astype(np.uint16))


if __name__ == "__main__":
    way, *folders = sys.argv[1:]
    root, test, out = map(Path, folders)
    main(way, root, test, out)
