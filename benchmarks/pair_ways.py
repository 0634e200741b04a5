"""Comparison with a reference without a net that learns.

``python -m benchmarks.pair_ways ROOT TEST OUT``

ROOT is a set of `benchmarks.pair_sets`, TEST has the folders ``target`` and ``ref``, and maps of the
difference of images by OpenCV go to ``OUT/maps``.
"""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from benchmarks.learning import average_precision
from benchmarks.learning_sets import read_split
from benchmarks.pair_sets import read_grey

Floats = NDArray[np.floating[Any]]
Compare = Callable[[Floats, Floats], Floats]
_BLURS_PX = (0.0, 1.0, 2.0, 4.0)
_TOLERANCES_PX = (0, 1, 2, 3)
_MOST_SHIFT_PX = 8.0


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


def read_pair(folder: Path, name: str) -> tuple[Floats, Floats]:
    """Read a target and its reference, [H, W] in 0..1 each."""
    target, reference = (read_grey(folder / role / name) for role in ("target", "ref"))
    return target.astype(np.float32) / 255, reference.astype(np.float32) / 255


def main(root: Path, test: Path, out: Path) -> None:
    """Write a map of each target (16 bit)."""
    compare = choose_difference(root)
    (out / "maps").mkdir(parents=True, exist_ok=True)
    for path in sorted((test / "target").iterdir()):
        values = compare(*read_pair(test, path.name))
        bounded = values / (1 + values)  # in the same order, below 1
        cv2.imwrite(str(out / "maps" / path.name), (bounded * 65535).round().astype(np.uint16))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
