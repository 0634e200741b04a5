"""Boxes of the images that a mosaic plan shows."""

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.detection_labels import LabelTable
from lit_data.mosaic import Ints, MosaicPlan, MosaicSpec, move_boxes


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
        [N, 6] (row, class, cx, cy, w, h), the last four in shares of H and W, in the order of the rows; and how many
        boxes each sample has [B].
    """
    starts = np.where(images > 0, labels.ends[images - 1], 0)
    counts = labels.ends[images] - starts
    tile = np.repeat(np.arange(len(plan)), counts)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    boxes = labels.boxes[np.repeat(starts, counts) + within].astype(np.float64)
    edges, kept = move_boxes(boxes[:, 1:], tile, plan, sizes_px, limits)
    low, high = edges[:, :2] / size_px, edges[:, 2:] / size_px
    row = plan.row[tile[kept]]  # ascends, as tiles do
    columns = (row, boxes[kept, 0], *((low + high) / 2).T[::-1], *(high - low).T[::-1])
    return np.stack(columns, axis=1).astype(np.float32), np.bincount(row, minlength=samples)
