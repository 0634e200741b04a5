"""A batch of images with boxes: its mosaics, what YOLO trainers want to know, and pieces of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, cast, get_args

import torch
from typing_extensions import override

from lit_data.augment import Layers, draw_tiles, pack_tiles
from lit_data.checks import check_choice
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.detection.dataset import DetectionDataset
from lit_data.mosaic import Ints
from lit_data.types import COUNT_SUFFIX, Batch

MosaicPlace = Literal["worker", "device"]
MOSAIC_KEY: Final = "mosaic"
"""Key of a planned batch with the tiles that its device draws."""
SHAPES_KEY: Final = "shapes"
"""Key of a batch for a YOLO trainer with scale and padding of each image in its sample."""

_YOLO: Final = ("image", "boxes", "path", SHAPES_KEY)


def check_place(mosaic_on: str) -> bool:
    """Return True if workers draw mosaics.

    Raises:
        ConfigError: The place is unknown.
    """
    check_choice("mosaic_on", mosaic_on, get_args(MosaicPlace))
    return mosaic_on == "worker"


def spell_out(batch_format: BatchFormat) -> BatchFormat:
    """`yolo` as the keys of its tuple; any other format as it is."""
    return _YOLO if batch_format == "yolo" else batch_format


def wants_shapes(batch_format: BatchFormat) -> bool:
    """Return True if a spelled-out format holds scale and padding of each image."""
    return (
        isinstance(batch_format, Sequence | Mapping)
        and not isinstance(batch_format, str)
        and SHAPES_KEY in batch_format
    )


def plan_mosaics(dataset: DetectionDataset, batch: Batch) -> Batch:
    """The tiles and boxes of mosaics that the device draws; nothing where workers do, or the epoch has none."""
    epoch = int(batch["epoch"][0])
    spec = dataset.mosaic_of(epoch)
    if spec is None or dataset.draws_mosaics:
        return {}
    mosaics = dataset.plan_batch(batch["image_index"].numpy(), spec, epoch)
    return {
        MOSAIC_KEY: pack_tiles(mosaics.plan, mosaics.places_px, spec.tiles),
        "boxes": torch.from_numpy(mosaics.boxes),
        "boxes" + COUNT_SUFFIX: torch.from_numpy(mosaics.counts),
    }


def to_layers(batch: Batch) -> Layers:
    """Images and boxes of a planned batch, its mosaics drawn."""
    images = batch["image"]
    return Layers(
        draw_tiles(images, batch[MOSAIC_KEY]) if MOSAIC_KEY in batch else images,
        boxes=batch["boxes"],
    )


def describe_fit(dataset: DetectionDataset, batch: Batch) -> list[Any]:
    """Return scale and padding of each image in its sample, as YOLO trainers know it.

    Returns:
        For each sample ``((height, width), ((scale of y, scale of x), (left, top)))``: px of the
        image on the disk, and px of the sample that lie before it; ``None`` for each sample where
        mosaics are made.
    """
    if dataset.mosaic_of(int(batch["epoch"][0])) is not None:
        return [None] * len(batch["image_index"])
    original_px, places_px = (
        batch["shape"].numpy(),
        dataset.find_places(batch["image_index"].numpy()),
    )
    return [_describe_one(*pair) for pair in zip(original_px, places_px, strict=True)]


def cut_batch(batch: Any, batch_format: BatchFormat, start: int, stop: int) -> Any:  # noqa: ANN401 - the user's format
    """Some samples of a batch.

    Args:
        batch: A batch in its format, or a finished dict of ours.
        batch_format: The format, spelled out.
        start: The first sample.
        stop: The one behind the last.
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
    if name != "boxes":
        return part[start:stop]
    boxes = part[(part[:, 0] >= start) & (part[:, 0] < stop)]
    return torch.cat((boxes[:, :1] - start, boxes[:, 1:]), dim=1)


class DetectionVisuals(Visuals):
    """See `Visuals`.

    Args:
        finish: Finishes planned samples without augmenting them; none where nothing is augmented.
    """

    def __init__(self, finish: Callable[[Batch], Batch] | None) -> None:
        self._finish = finish

    @override
    def draw(self, batch: Batch) -> Batch | None:
        return self._finish(batch) if self._finish else None
