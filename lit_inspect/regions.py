"""Scores and defects of a map; large maps are processed by rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MOST_PX = 1024
"""Most pixels whose mean is the score of an image."""
SLAB_PX = 2**22


@dataclass(frozen=True, slots=True)
class Defect:
    """One connected region of a map.

    Args:
        y: Row of its center of gravity, px.
        x: Column of its center of gravity, px.
        height_px: Height of its bounding box.
        width_px: Width of its bounding box.
        area_px: Number of pixels.
        score: Highest probability in it.
        kind: Number of the class of most of its pixels; 0 without classes.
    """

    y: float
    x: float
    height_px: int
    width_px: int
    area_px: int
    score: float
    kind: int = 0


def slabs(height: int, width: int) -> Iterator[slice]:
    """Yield the rows of an image in parts that fit into memory; most images are one part."""
    step = max(1, SLAB_PX // width)
    for top in range(0, height, step):
        yield slice(top, min(top + step, height))


def count_top_px(pixels: int, fraction: float) -> int:
    """Return the number of the highest pixels whose mean is the score of an image.

    Args:
        pixels: Number of pixels of the image.
        fraction: Fraction of the pixels, 0..1; 0 uses only the highest one.

    Returns:
        ``fraction * pixels``, rounded, from 1 to 1024.
    """
    return min(max(int(fraction * pixels + 0.5), 1), MOST_PX)


def mean_highest(parts: Iterable[Floats], count: int) -> float:
    """Return the mean of the highest values of an image; memory holds one part at a time.

    Args:
        parts: Parts of the image, of any shapes.
        count: Number of values; all values if there are fewer.
    """
    highest: Floats = np.zeros(0, np.float32)
    for part in parts:
        values = np.concatenate((highest, part.ravel()))
        surplus = len(values) - count
        highest = values if surplus <= 0 else np.partition(values, surplus)[surplus:]
    return float(highest.mean(dtype=np.float64))


def round_score(score: float) -> float:
    """Round the score of an image as in the tables; its verdict depends on the rounded score.

    Scores have four digits, and from 0.99 on five decimals, because scores of confident nets are
    close together there. Further digits differ between libraries that compute the same net.
    """
    return round(score, 5) if score >= 0.99 else float(f"{score:.4g}")


@dataclass(slots=True)
class _Regions:
    """Sums over the regions of all parts so far; a region that joins another one points to it.

    Attributes:
        parents: For each region the one that it belongs to.
        rows: For each region (left, top, right, bottom, area, sum of x, sum of y, score).
        kinds: For each region its number of pixels of each class.
    """

    parents: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    kinds: list[NDArray[np.int64]] = field(default_factory=list)

    def find(self, region: int) -> int:
        while self.parents[region] != region:
            self.parents[region] = self.parents[self.parents[region]]
            region = self.parents[region]
        return region

    def join(self, one: int, other: int) -> None:
        first, second = sorted((self.find(one), self.find(other)))
        if first == second:
            return
        self.parents[second] = first
        row, joined = self.rows[first], self.rows[second]
        row[:2] = [min(pair) for pair in zip(row[:2], joined[:2], strict=True)]
        row[2:4] = [max(pair) for pair in zip(row[2:4], joined[2:4], strict=True)]
        row[4:7] = [sum(pair) for pair in zip(row[4:7], joined[4:7], strict=True)]
        row[7] = max(row[7], joined[7])
        self.kinds[first] = self.kinds[first] + self.kinds[second]


def find_defects(
    parts: Iterable[tuple[Floats, NDArray[np.uint8] | None]],
    *,
    threshold: float,
    min_area_px: int,
    classes: int = 0,
) -> list[Defect]:
    """Find regions of pixels (8-connected) that reach a threshold.

    Args:
        parts: Rows of a map from the top, [n, W], with the class number of each pixel.
        threshold: Least probability of a pixel.
        min_area_px: Smaller regions are skipped.
        classes: Number of classes.

    Returns:
        The regions, sorted by descending score.
    """
    regions = _Regions()
    above: NDArray[np.int64] | None = None  # region of each pixel of the row above, else -1
    top = 0
    for probability, kinds in parts:
        numbers = _add_slab(regions, probability, kinds, top, threshold, classes)
        if above is not None:
            _join_rows(regions, above, numbers[0])
        above = numbers[-1]
        top += len(probability)
    defects = []
    for region, row in enumerate(regions.rows):
        if regions.parents[region] == region and row[4] >= min_area_px:
            defects.append(_describe(row, regions.kinds[region]))
    return sorted(defects, key=lambda defect: -defect.score)


def _add_slab(
    regions: _Regions,
    probability: Floats,
    kinds: NDArray[np.uint8] | None,
    top: int,
    threshold: float,
    classes: int,
) -> NDArray[np.int64]:
    """Add the regions of some rows; return the region of each pixel, -1 for none."""
    import cv2

    is_marked = (probability >= threshold).astype(np.uint8)
    if not is_marked.any():
        return np.full(is_marked[:1].shape, -1, np.int64)
    count, labels, stats, centres = cv2.connectedComponentsWithStats(is_marked, connectivity=8)
    marked = np.flatnonzero(labels)
    label_of = labels.ravel()[marked]
    scores = np.zeros(count, np.float32)
    np.maximum.at(scores, label_of, probability.ravel()[marked])
    pixels_of_kind = np.zeros((count, classes + 1), np.int64)
    if kinds is not None:
        np.add.at(pixels_of_kind, (label_of, kinds.ravel()[marked]), 1)
    first = len(regions.rows) - 1  # label 0 is the background
    for label in range(1, count):
        left, above, width, height, area = stats[label].tolist()
        x, y = centres[label].tolist()
        box = [left, above + top, left + width, above + top + height]
        sums = (
            round(x * area),
            round(y * area) + top * area,
        )  # integers, as for the sums of all pixels
        regions.rows.append([*box, area, *sums, float(scores[label])])
        regions.parents.append(first + label)
        regions.kinds.append(pixels_of_kind[label])
    ends = labels[[0, -1]].astype(np.int64)
    return np.where(ends > 0, ends + first, -1)


def _join_rows(regions: _Regions, above: NDArray[np.int64], row: NDArray[np.int64]) -> None:
    padded = np.pad(above, 1, constant_values=-1)
    width = len(row)
    for shift in range(3):  # 8-connected: the pixel above, and its neighbours
        upper = padded[shift : shift + width]
        is_joined = (upper >= 0) & (row >= 0)
        for pair in np.unique(np.stack((upper[is_joined], row[is_joined])), axis=1).T.tolist():
            regions.join(*pair)


def _describe(row: list[float], kinds: NDArray[np.int64]) -> Defect:
    left, top, right, bottom, area, x, y, score = row
    return Defect(
        y=y / area,
        x=x / area,
        height_px=int(bottom - top),
        width_px=int(right - left),
        area_px=int(area),
        score=score,
        kind=int(kinds.argmax()),
    )
