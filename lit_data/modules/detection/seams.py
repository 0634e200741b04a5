"""Objects of a large image, joined from what was found in windows of it that overlap."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lit_data.datasets.detection.windows import WholeImage
from lit_data.modules.detection.boxes import Objects, box_iou, find_covered, settle_drops
from lit_data.types import Batch, Size

SAME_IOU = 0.4
"""Boxes of one class in two windows that overlap more are one object: of 8 px, they may lie 2 px apart."""
_CUT_PX = 2.0
"""Boxes that come as near to an edge inside the image may be cut there."""
_COVERED = 0.5
"""Fraction of the area of a cut box that a box of another window covers, which then shows the rest too."""


class WindowObjects:
    """Objects that are found in windows, until all windows of an image are there.

    Attributes:
        parts: For each image that is not complete the objects of its windows, in px of the image, by
            (left, top) of the window.
    """

    def __init__(self) -> None:
        self.parts: dict[int, dict[tuple[int, ...], Objects]] = {}

    def add(self, objects: Sequence[Objects], batch: Batch) -> None:
        """Add the objects of the windows of a batch, in px of these."""
        images = batch["image_index"].tolist()
        corners = batch["window"].flip(1).cpu()
        for image, corner, in_window in zip(images, corners, objects, strict=True):
            moved = {name: values.cpu() for name, values in in_window.items()}
            moved["boxes"] = moved["boxes"] + corner.repeat(2)
            self.parts.setdefault(image, {})[tuple(corner.tolist())] = moved

    def gather(self) -> None:
        """Exchange windows between ranks, each of which goes on with some of the images."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        ranks = dist.get_world_size()
        parts_of_ranks: list[dict[int, dict[tuple[int, ...], Objects]]] = [{}] * ranks
        dist.all_gather_object(parts_of_ranks, self.parts)
        self.parts = {}
        for parts in parts_of_ranks:
            for image, of_image in parts.items():
                if image % ranks == dist.get_rank():
                    self.parts.setdefault(image, {}).update(of_image)

    def take(self, image: int, whole: WholeImage) -> Objects | None:
        """Return the objects of an image; none while windows are missing."""
        parts = self.parts[image]
        if len(parts) < len(whole.frames):
            return None
        del self.parts[image]
        height, width = whole.size_px
        limits = torch.tensor([width, height] * 2)
        objects = []
        for left, top, _, _ in whole.frames.tolist():
            part = parts[left, top]
            objects.append(part | {"boxes": part["boxes"].minimum(limits)})
        return join_windows(objects, torch.from_numpy(whole.frames), whole.size_px)


def join_windows(parts: Sequence[Objects], frames: Tensor, size_px: Size) -> Objects:
    """Join the objects of the windows of an image, each found once.

    A box that touches the edge of its window, inside the image, yields to one of another window that
    covers half of it and is not cut itself. Of boxes of one class in two windows that overlap by
    more than `SAME_IOU`, the one with the higher score stays. Boxes of one window never drop each
    other.

    Args:
        parts: For each window ``boxes`` [n, 4] corners in px of the image, ``classes`` [n] and
            ``scores`` [n].
        frames: [windows, 4] corners of the windows in the image.
        size_px: (height, width) of the image.

    Returns:
        The same of the image, the highest score first.
    """
    joined = {}
    for name in parts[0]:
        joined[name] = torch.cat([part[name] for part in parts])
    counts = torch.tensor([len(part["scores"]) for part in parts])
    order = joined["scores"].argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    cut = _find_cut(joined["boxes"], frames.repeat_interleave(counts, 0), size_px)
    yields = torch.zeros_like(cut)
    edges = [torch.zeros(2, 0, dtype=torch.int64)]
    boxes, classes = joined["boxes"], joined["classes"]
    for rows, others in _list_neighbours(counts, frames):
        covered = find_covered(boxes[rows, None], boxes[others]) > _COVERED
        yields[rows] = cut[rows] & (covered & ~cut[others]).any(1)
        is_same = box_iou(boxes[rows, None], boxes[others]) > SAME_IOU
        is_same &= classes[rows, None] == classes[others]
        is_same &= rank[rows, None] < rank[others]
        row, column = is_same.nonzero(as_tuple=True)
        edges.append(torch.stack((rows[row], others[column])))
    stays = settle_drops(~yields, torch.cat(edges, dim=1))
    remaining = order[stays[order]]
    return {name: values[remaining] for name, values in joined.items()}


def _find_cut(boxes: Tensor, frames: Tensor, size_px: Size) -> Tensor:
    """Mark boxes [n, 4] that reach an edge of their windows [n, 4] inside the image: [n] bool."""
    height, width = size_px
    ends = torch.tensor([width, height])
    is_before = frames[:, :2] > 0
    is_behind = frames[:, 2:] < ends
    is_inner = torch.cat((is_before, is_behind), dim=1)
    inward = (boxes - frames) * torch.tensor([1, 1, -1, -1])
    return (is_inner & (inward <= _CUT_PX)).any(1)


def _list_neighbours(counts: Tensor, frames: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each window the numbers of its boxes, and of those of the windows it overlaps."""
    numbers = torch.arange(int(counts.sum()))
    rows = torch.split(numbers, counts.tolist())
    neighbours = []
    for window in counts.nonzero().flatten().tolist():
        low = torch.maximum(frames[window, :2], frames[:, :2])
        high = torch.minimum(frames[window, 2:], frames[:, 2:])
        meets = (low < high).all(1) & (counts > 0)
        meets[window] = False
        others = meets.nonzero().flatten().tolist()
        if others:
            joined = torch.cat([rows[other] for other in others])
            neighbours.append((rows[window], joined))
    return neighbours
