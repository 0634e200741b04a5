"""Draw a mosaic plan into rows of a batch, on the host.

Each tile is drawn once, straight to where it is seen.

A warp of any matrix costs three times what scaling costs, whose cut of the tile and whose drawing
are whole pixels. So each side of a tile is moved to the nearest whole pixel of the output: less
than half a pixel, most often far less.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.detection.labels import LabelTable
from lit_data.io.images.image_source import ImageBank
from lit_data.mosaic import FILL, Ints, MosaicPlan, MosaicSpec, move_boxes
from lit_data.types import Array


def find_boxes(
    labels: LabelTable,
    plan: MosaicPlan,
    images: Ints,
    *,
    sizes_px: Ints,
    size_px: tuple[int, int],
    samples: int,
    limits: MosaicSpec,
) -> tuple[NDArray[np.float32], Ints]:
    """The boxes of samples, moved and cut as their tiles are.

    Args:
        labels: The boxes of all images.
        plan: The tiles.
        images: [T] whose boxes each tile has.
        sizes_px: [I, 2] (height, width) of the images that the plan counts.
        size_px: (H, W) of a sample.
        samples: B, how many there are.
        limits: Which boxes are kept.

    Returns:
        [N, 6] (row, class, cx, cy, w, h), the last four in shares of H and W, in the order of the
        rows; and how many boxes each sample has [B].
    """
    starts = np.where(images > 0, labels.ends[images - 1], 0)
    counts = labels.ends[images] - starts
    tile = np.repeat(np.arange(len(plan)), counts)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    boxes = labels.boxes[np.repeat(starts, counts) + within].astype(np.float64)
    edges, is_visible = move_boxes(boxes[:, 1:], tile, plan, sizes_px, limits)
    low, high = edges[:, :2] / size_px, edges[:, 2:] / size_px
    row = plan.row[tile[is_visible]]  # ascends, as tiles do
    columns = (row, boxes[is_visible, 0], *((low + high) / 2).T[::-1], *(high - low).T[::-1])
    return np.stack(columns, axis=1).astype(np.float32), np.bincount(row, minlength=samples)


_CUTS: Final = np.arange(5)
"""Tiles may be cut this many pixels further out, where that edge comes closer to a whole pixel of the output."""
_CLOSE_PX: Final = 0.1
"""An edge that is as close needs no other cut."""
_BEYOND_PX: Final = 8.0
"""How far beyond its window a tile is drawn for a closer edge, in the output."""


def draw_tiles(rows: Array, plan: MosaicPlan, bank: ImageBank) -> None:
    """Fill samples with their tiles; what none covers becomes grey.

    Args:
        rows: [M, C, H, W] uint8, written.
        plan: The tiles.
        bank: The images, [C, h, w] uint8 each.
    """
    import cv2

    seen = np.flatnonzero((plan.window[:, 2:] > plan.window[:, :2]).all(1))
    uncovered = _find_uncovered(rows, plan, seen)
    images = [bank[image] for image in plan.image[seen].tolist()]
    sizes_px = np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)
    cuts, drawn = _choose_cuts(plan, seen, sizes_px)
    room = np.empty((drawn[:, 2:] - drawn[:, :2]).prod(1).max(initial=0), np.uint8)
    places = zip(
        plan.row[seen].tolist(),
        plan.window[seen].tolist(),
        cuts.tolist(),
        drawn.tolist(),
        strict=True,
    )
    for image, (row, (top, left, bottom, right), cut, (up, before, down, after)) in zip(
        images, places, strict=True
    ):
        if row in uncovered:
            rows[row] = FILL  # just before its tiles: it is still in the core's cache then
            uncovered.remove(row)
        part, target = (
            image[:, cut[0] : cut[2], cut[1] : cut[3]],
            rows[row, :, top:bottom, left:right],
        )
        window = slice(top - up, bottom - up), slice(left - before, right - before)
        height, width = down - up, after - before
        if part.shape[1:] == (height, width):
            target[...] = part[:, *window]
            continue
        scaled = room[: height * width].reshape(
            height, width
        )  # small enough to stay in the core's own cache
        for source, plane in zip(part, target, strict=True):
            cv2.resize(source, (width, height), scaled, 0, 0, cv2.INTER_LINEAR)
            plane[...] = scaled[window]
    for row in uncovered:
        rows[row] = FILL


def _find_uncovered(rows: Array, plan: MosaicPlan, seen: NDArray[np.int64]) -> set[int]:
    """Samples that their tiles, which never overlap, do not fill."""
    areas = (plan.window[seen, 2:] - plan.window[seen, :2]).prod(1)
    covered = np.bincount(plan.row[seen], areas, minlength=len(rows))
    return set(np.flatnonzero(covered < rows.shape[2] * rows.shape[3]).tolist())


def _choose_cuts(
    plan: MosaicPlan, seen: NDArray[np.int64], sizes_px: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose the part of each tile that is scaled, and its target: a rectangle that holds its window.

    Args:
        plan: The tiles.
        seen: [T] which of them.
        sizes_px: [T, 2] (height, width) of their images.

    Returns:
        [T, 4] (top, left, bottom, right) in px of the tile, and in px of the output.
    """
    scale, origin = plan.scale[seen, None, None], plan.origin[seen][:, :, None]
    window, sizes = plan.window[seen][:, :, None], sizes_px[:, :, None]
    # Half a pixel of the tile more than is shown: its pixels lie between two of their neighbours.
    first = np.floor(window[:, :2] / scale - origin - 0.5) - _CUTS
    last = np.ceil(window[:, 2:] / scale - origin + 0.5) + _CUTS
    edges = np.concatenate((np.maximum(first, 0), np.minimum(last, sizes)), axis=1)  # [T, 4, cuts]
    exact = (edges + np.tile(origin, (1, 2, 1))) * scale
    nearest = np.ceil(
        exact - 0.5 - 1e-6
    )  # as windows are rounded; half a pixel that was computed otherwise goes down
    off_px = np.where((_CUTS > 0) & (_CUTS * scale > _BEYOND_PX), np.inf, np.abs(exact - nearest))
    best = np.maximum(off_px, _CLOSE_PX).argmin(2, keepdims=True)
    cuts, drawn = (
        np.take_along_axis(values, best, 2)[..., 0].astype(np.int64) for values in (edges, nearest)
    )
    low, high = (
        np.minimum(drawn[:, :2], window[:, :2, 0]),
        np.maximum(drawn[:, 2:], window[:, 2:, 0]),
    )
    return cuts, np.concatenate((low, high), axis=1)
