"""Collects the objects of a large image until all of its windows are scored."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lit_data.core.types import Array, Batch
from lit_data.wings.detection.model.boxes import Objects
from lit_data.wings.detection.windows import WholeImage
from lit_inspect import boxes as windows


class WindowObjects:
    """Objects found in windows, kept until all windows of an image are complete.

    Attributes:
        parts: For each incomplete image the objects of its windows, in px of the image, by (left,
            top) of the window.
    """

    def __init__(self) -> None:
        self.parts: dict[int, dict[tuple[int, ...], Objects]] = {}

    def add(self, objects: Sequence[Objects], batch: Batch) -> None:
        """Add the objects of the windows of a batch, in px of the windows."""
        images = batch["image_index"].tolist()
        corners = batch["window"].flip(1).cpu()
        for image, corner, in_window in zip(images, corners, objects, strict=True):
            moved = {name: values.cpu() for name, values in in_window.items()}
            moved["boxes"] = moved["boxes"] + corner.repeat(2)
            self.parts.setdefault(image, {})[tuple(corner.tolist())] = moved

    def gather(self) -> None:
        """Exchange windows between ranks, so that each rank continues with some of the images."""
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

    def take(self, image: int, whole: WholeImage) -> tuple[Objects, float] | None:
        """Return the objects of an image and its score; None while windows are missing."""
        parts = self.parts[image]
        if len(parts) < len(whole.frames):
            return None
        del self.parts[image]
        height, width = whole.size_px
        limits = torch.tensor([width, height] * 2)
        objects = []
        for left, top, _, _ in whole.frames.tolist():
            part = parts[left, top]
            objects.append(_to_objects(part | {"boxes": part["boxes"].minimum(limits)}))
        joined = windows.join_windows(objects, whole.frames, whole.size_px)
        corners, classes, scores = map(torch.from_numpy, joined)
        score = windows.score_image(objects)
        return {"boxes": corners, "classes": classes, "scores": scores}, score


def score_objects(objects: Objects) -> float:
    """Return the score of an image from its objects, in px of the image or of its sample."""
    parts = {name: values.cpu() for name, values in objects.items()}
    return windows.score_image([_to_objects(parts)])


def _to_objects(part: Objects) -> windows.Objects:
    return windows.Objects(
        _to_array(part["boxes"]), part["classes"].numpy(), _to_array(part["scores"])
    )


def _to_array(values: Tensor) -> Array:
    array: Array = (values.float() if values.itemsize < 4 else values).numpy()
    return array
