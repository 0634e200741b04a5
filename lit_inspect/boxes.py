"""Objects of images, found in windows and joined."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_inspect.bounds import MOST_VIEWS, Fraction, Sides, Value
from lit_inspect.errors import AnswerError
from lit_inspect.scaling import Scaling
from lit_inspect.tiles import Rows

Pixels = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

LEAST_SCORE = 0.01
"""Boxes with lower scores are ignored in average precision and in the scores of images."""

_MOST_FOUND = 100
_MOST_COMPARED = 1000
_BELOW = 0.999  # factor of the threshold: boxes that help to join windows may score slightly lower
_SAME_IOU = 0.4
"""Boxes of one class in two windows that overlap more are one object; 8 px boxes may be 2 px apart."""
_CUT_PX = 2.0
"""Boxes that are this near to the edge of their window, inside the image, may be cut there."""
_COVERED = 0.5
"""If a box of another window covers this fraction of a cut box, it shows the rest of the object too."""
_SMALLEST = 1e-9
_GOLDEN_PLACES = 1000


@dataclass(frozen=True, slots=True)
class Box:
    """An object of an image.

    Attributes:
        left: Left edge of its box, px of the image.
        top: Top edge, px.
        right: Right edge, px.
        bottom: Bottom edge, px.
        kind: Number of its class, from 0.
        name: Name of its class.
        score: Score in 0..1.
    """

    left: float
    top: float
    right: float
    bottom: float
    kind: int
    name: str
    score: float


class Objects(NamedTuple):
    """Objects of an image or of a sample.

    Attributes:
        corners: [n, 4] (left, top, right, bottom) px.
        classes: [n].
        scores: [n] float32.
    """

    corners: NDArray[Any]
    classes: Ints
    scores: NDArray[np.float32]

    def take(self, rows: NDArray[Any]) -> "Objects":
        """Return some of the objects, by numbers or by a mask."""
        return Objects(self.corners[rows], self.classes[rows], self.scores[rows])


class Sample(NamedTuple):
    """An input of the net.

    Attributes:
        pixels: [C, h, w], as stored.
        frame: (left, top, right, bottom) of a window in its image, px.
        origin: (left, top) of the image in the sample, px.
        shown_px: (height, width) of the image in the sample.
    """

    pixels: Pixels
    frame: tuple[int, int, int, int]
    origin: tuple[int, int]
    shown_px: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRules:
    """Rules that cut an image into samples for a detector, and that drop objects.

    Attributes:
        sample_px: (height, width) of a sample.
        stride_px: (down, right) from one window to the next; None if a sample shows a whole image,
            scaled to fit.
        fill: Pixel value around an image.
        iou_threshold: If two objects of a class overlap more, only the one with the higher score
            stays.
    """

    sample_px: Sides
    stride_px: Sides | None
    fill: Value
    iou_threshold: Fraction

    def __post_init__(self) -> None:
        """Check that windows leave no gaps and do not overlap too often."""
        if self.stride_px is None:
            return
        for side, stride in zip(self.sample_px, self.stride_px, strict=True):
            if not side / MOST_VIEWS <= stride <= side:
                raise ValueError(f"stride_px={stride} does not fit windows of {side} px")

    def sample(self, image: Rows) -> Iterator[Sample]:
        """Yield the samples of an image; those of large images row by row."""
        height, width = image.shape[1:]
        if self.stride_px is None:
            pixels = self.fit(image)
            shown_px = pixels.shape[1], pixels.shape[2]
            # Halves are rounded to even numbers, as in `lit_data.core.mosaic`.
            left = round((self.sample_px[1] - shown_px[1]) / 2)
            top = round((self.sample_px[0] - shown_px[0]) / 2)
            yield self._place(pixels, (0, 0), (left, top))
            return
        window_height, window_width = self.sample_px
        for top in _find_starts(height, window_height, self.stride_px[0]):
            rows = image.read(top, min(top + window_height, height))
            for left in _find_starts(width, window_width, self.stride_px[1]):
                yield self._place(rows[:, :, left : left + window_width], (left, top), (0, 0))

    def fit(self, image: Rows) -> Pixels:
        """Return an image scaled to fit into a sample, [C, h, w]."""
        return Scaling(self.sample_px, None).resize(image.read(0, image.shape[1]))

    def _place(self, pixels: Pixels, corner: tuple[int, int], origin: tuple[int, int]) -> Sample:
        height, width = pixels.shape[1:]
        left, top = origin
        sides_px = self.sample_px
        sample = pixels
        if (height, width) != sides_px:
            sample = np.full((len(pixels), *sides_px), self.fill, pixels.dtype)
            sample[:, top : top + height, left : left + width] = pixels
        frame = (*corner, corner[0] + sides_px[1], corner[1] + sides_px[0])
        return Sample(sample, frame, origin, (height, width))

    def find(
        self,
        image: Rows,
        run: Callable[[Pixels], NDArray[np.float32]],
        *,
        threshold: float,
        min_area_px: int,
    ) -> tuple[Objects, float]:
        """Find the objects of an image.

        Args:
            image: The image.
            run: The net, from the pixels of a sample to [P, 4 + classes], see `find_objects`.
            threshold: Least score.
            min_area_px: Smallest area of a box in the image.

        Returns:
            The objects in px of the image, sorted by descending score, and the score of the image.
        """
        parts = []
        frames = []
        score = 0.0
        least = _BELOW * threshold
        for sample in self.sample(image):
            objects = find_objects(
                run(sample.pixels), self.sample_px, min(LEAST_SCORE, least), self.iou_threshold
            )
            objects = objects._replace(corners=self.find_originals(objects, sample, image))
            score = max(score, score_image([objects]))
            parts.append(objects.take(objects.scores > least))
            frames.append(sample.frame)
        joined = parts[0]
        if self.stride_px is not None:
            joined = join_windows(parts, np.array(frames, np.int64), image.shape[1:])
        sides_px = joined.corners[:, 2:] - joined.corners[:, :2]
        is_large = (sides_px > 0).all(1) & (sides_px.prod(1) >= min_area_px)
        return joined.take(is_large & (joined.scores >= threshold)), score

    def find_originals(self, objects: Objects, sample: Sample, image: Rows) -> NDArray[Any]:
        """Return the corners of objects of a sample in px of its image, clipped to the image."""
        corners = objects.corners.astype(np.float64)
        size_px = _both(image.shape[1:])
        if self.stride_px is not None:
            originals = corners + np.tile(sample.frame[:2], 2)
        else:
            in_image = corners - np.tile(sample.origin, 2)
            originals = in_image * size_px / _both(sample.shown_px)
        cut: NDArray[Any] = np.clip(originals, 0, size_px)
        return cut

    def thin(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of [P, 4 + classes] that a golden answer contains, spread over a sample."""
        return values[:: -(-len(values) // _GOLDEN_PLACES)]


def score_image(parts: Sequence[Objects]) -> float:
    """Return the highest score of the boxes of an image; 0 if none is above `LEAST_SCORE`.

    A box that was dropped for a box in another window counts too, because both show the same object.

    Args:
        parts: Objects of each sample of the image; objects outside of the image have no area.
    """
    highest = 0.0
    for objects in parts:
        sides_px = objects.corners[:, 2:] - objects.corners[:, :2]
        counts = (sides_px > 0).all(1) & (objects.scores > LEAST_SCORE)
        highest = max(highest, float(objects.scores[counts].max(initial=0)))
    return highest


def _both(size_px: tuple[int, ...]) -> NDArray[np.float64]:
    """Return (width, height, width, height), to scale corners."""
    height, width = size_px
    return np.array((width, height) * 2, np.float64)


def _find_starts(length_px: int, window_px: int, stride_px: int) -> list[int]:
    """Return the first pixels of windows along an axis; the last window ends at the edge."""
    last = max(length_px - window_px, 0)
    starts = list(range(0, last + 1, stride_px))
    if starts[-1] < last:
        starts.append(last)
    return starts


def find_objects(
    values: NDArray[np.float32],
    sample_px: tuple[int, int],
    score_threshold: float,
    iou_threshold: float,
) -> Objects:
    """Find the objects of a sample, see `lit_data.wings.detection.model.module.find_objects`.

    Args:
        values: [P, 4 + classes]: corners in fractions of the sample, and the probability of each
            class.
        sample_px: (height, width).
        score_threshold: Score that objects must exceed.
        iou_threshold: Boxes of a class that overlap more are dropped.

    Raises:
        AnswerError: A box ends before it begins.
    """
    scores = values[:, 4:].ravel()
    flat = np.flatnonzero(scores > score_threshold)
    flat = flat[np.argsort(-scores[flat], kind="stable")[:_MOST_COMPARED]]
    places, classes = np.divmod(flat, values.shape[1] - 4)
    corners = values[places, :4] * _both(sample_px).astype(np.float32)
    if (corners[:, 2:] < corners[:, :2]).any():
        raise AnswerError("the net gives a box whose end is before its start")
    drops = find_iou(corners[:, None], corners) > iou_threshold
    drops &= classes[:, None] == classes
    pairs = np.argwhere(np.triu(drops, 1)).T
    stays = settle_drops(np.ones(len(flat), np.bool_), pairs)
    return Objects(corners, classes, scores[flat]).take(np.flatnonzero(stays)[:_MOST_FOUND])


def find_iou(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Return the intersection over union of corners [..., 4], which broadcast."""
    shared = _find_shared(one, other)
    union = _find_areas(one) + _find_areas(other) - shared
    overlaps: NDArray[Any] = shared / np.maximum(union, _SMALLEST)
    return overlaps


def _find_shared(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    low = np.maximum(one[..., :2], other[..., :2])
    high = np.minimum(one[..., 2:], other[..., 2:])
    shared: NDArray[Any] = np.maximum(high - low, 0).prod(-1)
    return shared


def _find_areas(boxes: NDArray[Any]) -> NDArray[Any]:
    areas: NDArray[Any] = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return areas


def settle_drops(alive: Bools, edges: Ints) -> Bools:
    """Find the boxes that stay if boxes drop each other: ``stays[j] = no i that stays drops j``.

    Args:
        alive: [n] True for boxes to consider.
        edges: [2, E] numbers of boxes, the first of which drops the second if it stays.
    """
    edges = edges[:, alive[edges].all(0)]
    stays = alive
    while True:
        settled = alive.copy()
        settled[edges[1, stays[edges[0]]]] = False
        if np.array_equal(stays, settled):
            return stays
        stays = settled


def join_windows(parts: Sequence[Objects], frames: Ints, size_px: tuple[int, ...]) -> Objects:
    """Join the objects of the windows of an image, without duplicates.

    A box that touches the edge of its window, inside the image, is dropped if an uncut box of
    another window covers half of it. If boxes of one class in two windows overlap by more than 0.4,
    the one with the higher score stays. Boxes of the same window never drop each other.

    Args:
        parts: Objects of each window, in px of the image.
        frames: [windows, 4] corners of the windows in the image.
        size_px: (height, width) of the image.

    Returns:
        The objects of the image, the highest score first.
    """
    counts = np.array([len(part.scores) for part in parts])
    joined = Objects(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    order = np.argsort(-joined.scores, kind="stable")
    rank = np.argsort(order)
    is_cut = _find_cut(joined.corners, frames.repeat(counts, 0), size_px)
    yields = np.zeros_like(is_cut)
    edges = [np.zeros((2, 0), np.int64)]
    for rows, others in _list_neighbours(counts, frames):
        boxes, other_boxes = joined.corners[rows, None], joined.corners[others]
        areas = np.maximum(_find_areas(boxes), _SMALLEST)
        covers = _find_shared(boxes, other_boxes) / areas > _COVERED
        yields[rows] = is_cut[rows] & (covers & ~is_cut[others]).any(1)
        is_same = find_iou(boxes, other_boxes) > _SAME_IOU
        is_same &= joined.classes[rows, None] == joined.classes[others]
        is_same &= rank[rows, None] < rank[others]
        row, column = is_same.nonzero()
        edges.append(np.stack((rows[row], others[column])))
    stays = settle_drops(~yields, np.concatenate(edges, 1))
    return joined.take(order[stays[order]])


def _find_cut(boxes: NDArray[Any], frames: Ints, size_px: tuple[int, ...]) -> Bools:
    """Mark boxes [n, 4] that reach an edge of their windows [n, 4] inside the image."""
    ends = np.array(size_px[::-1])
    is_inner = np.concatenate((frames[:, :2] > 0, frames[:, 2:] < ends), 1)
    inward = (boxes - frames) * np.array([1, 1, -1, -1])
    is_cut: Bools = (is_inner & (inward <= _CUT_PX)).any(1)
    return is_cut


def _list_neighbours(counts: Ints, frames: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the numbers of the boxes of each window, and of the boxes of windows that overlap it."""
    ends = np.cumsum(counts)
    for window in np.flatnonzero(counts).tolist():
        low = np.maximum(frames[window, :2], frames[:, :2])
        high = np.minimum(frames[window, 2:], frames[:, 2:])
        meets = (low < high).all(1) & (counts > 0)
        meets[window] = False
        others = np.flatnonzero(meets.repeat(counts))
        if len(others):
            yield np.arange(ends[window] - counts[window], ends[window]), others
