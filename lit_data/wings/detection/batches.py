"""Batches of images with boxes: the scale and padding of each image, and slices of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from lit_data.core.types import Batch, Ints
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.wings.detection.dataset import DetectionDataset

IGNORED_KEY = "ignored"
"""Key of a batch with regions, in the form of ``boxes``, in which objects of their class do not count."""


def describe_fit(dataset: DetectionDataset, batch: Batch) -> list[Any]:
    """Return the scale and padding of each image in its sample, in the form YOLO trainers use.

    Returns:
        For each sample ``((height, width), ((scale of y, scale of x), (left, top)))``: the size in
        px of the image on the disk, or of the window, and the px of padding before the image in the
        sample; ``None`` if mosaics are made.
    """
    if dataset.mosaic_of(int(batch["epoch"][0])) is not None:
        return [None] * len(batch["index"])
    numbers = batch["index"].numpy()
    places_px = dataset.find_places(numbers)
    pairs = zip(dataset.original_px[numbers], places_px, strict=True)
    return [_describe_one(original_px, place_px) for original_px, place_px in pairs]


def cut_batch(batch: Any, batch_format: BatchFormat, start: int, stop: int) -> Any:  # noqa: ANN401 - the user's format
    """Return some samples of a batch.

    Args:
        batch: Batch in the given format, or a finished dict of lit_data.
        batch_format: Format, spelled out.
        start: First sample.
        stop: End of the samples, excluded.
    """
    if isinstance(batch, tuple):
        names = cast(Sequence[str], batch_format)
        return tuple(_cut(part, name, start, stop) for name, part in zip(names, batch, strict=True))
    ours = batch_format if isinstance(batch_format, Mapping) else {}
    return {key: _cut(part, ours.get(key, key), start, stop) for key, part in batch.items()}


def _describe_one(
    original_px: Ints, place_px: Ints
) -> tuple[tuple[int, ...], tuple[tuple[float, ...], tuple[int, ...]]]:
    scale = (place_px[2:] - place_px[:2]) / original_px
    top, left = place_px[:2].tolist()
    return tuple(original_px.tolist()), (tuple(scale.tolist()), (left, top))


def _cut(part: Any, name: str, start: int, stop: int) -> Any:  # noqa: ANN401 - a tensor, or a list
    if name not in ("boxes", IGNORED_KEY):
        return part[start:stop]
    # One tensor holds the boxes of all images; its first column is the row of the image.
    boxes = part[(part[:, 0] >= start) & (part[:, 0] < stop)]
    return torch.cat((boxes[:, :1] - start, boxes[:, 1:]), dim=1)
