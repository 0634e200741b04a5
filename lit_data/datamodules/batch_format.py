"""Formats in which batches reach an existing module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX, Batch

BatchFormat = str | Mapping[str, str] | Sequence[str] | Callable[[Batch], Any]
"""`dict`; `classes`, `anomalib` (batches with masks), `torchvision` or `ultralytics` (batches with
boxes); a mapping from new keys to our keys; a sequence of our keys for a tuple in that order; or a
function of our batch."""


class _Preset(NamedTuple):
    make: Callable[[Batch], Any]
    needs: str
    """Key of the batch that the preset requires."""
    gives_dict: bool


def check_format(
    batch_format: BatchFormat, keys: Sequence[str], channels: Mapping[str, int]
) -> None:
    """Refuse a format that names unknown keys.

    Args:
        batch_format: Format to check.
        keys: Keys of the batch.
        channels: Names of single channels of ``image``, which can be used like keys.

    Raises:
        ConfigError: The format or a key is unknown.
    """
    if callable(batch_format):
        return
    if isinstance(batch_format, str):
        known = ["dict", *(name for name, preset in _PRESETS.items() if preset.needs in keys)]
        known += ["yolo"] if "boxes" in keys else []  # which `DetectionDataModule` spells out
        if batch_format not in known:
            raise ConfigError(
                f"batch_format={batch_format!r} is unknown here: choose {', '.join(known)}, a mapping, a sequence of "
                "keys or a function"
            )
        return
    asked = batch_format.values() if isinstance(batch_format, Mapping) else batch_format
    unknown = [key for key in asked if key not in keys and key not in channels]
    if unknown:
        raise ConfigError(
            f"batch_format names unknown keys {unknown}: choose from {[*keys, *channels]}"
        )


def gives_dict(batch_format: BatchFormat) -> bool:
    """Return True if batches of a format are dicts, so that a hook of the module can add keys."""
    if isinstance(batch_format, str):
        return batch_format == "dict" or _PRESETS[batch_format].gives_dict
    return isinstance(batch_format, Mapping)


def gives_fields(batch_format: BatchFormat) -> bool:
    """Return True if each tensor of a formatted batch holds all samples, and no list has one entry each."""
    return batch_format != "torchvision" and not callable(batch_format)


def names_parts(batch: Any, batch_format: BatchFormat) -> bool:  # noqa: ANN401 - any form
    """Return True if the parts of a batch have our keys, directly or through its format."""
    is_ours = isinstance(batch, Mapping) and "index" in batch
    makes_another = callable(batch_format) or batch_format in list(_PRESETS)
    return is_ours or not makes_another


def format_batch(batch: Batch, batch_format: BatchFormat, channels: Mapping[str, int]) -> Any:  # noqa: ANN401
    """Return a batch in the module's format; only masks of `classes` and boxes are copied.

    Args:
        batch: Our dict of tensors.
        batch_format: Format that has been checked.
        channels: Number of each channel name in ``image``; such a key gives [B, 1, H, W].

    Returns:
        The batch itself, a dict with renamed keys, a tuple, or the result of the preset or
        function. A mask that the stage does not have is left out.
    """
    if isinstance(batch_format, str):
        return batch if batch_format == "dict" else _PRESETS[batch_format].make(batch)
    if callable(batch_format):
        return batch_format(batch)
    keys = batch_format.values() if isinstance(batch_format, Mapping) else batch_format
    # A stage may lack a key, such as the mask when predicting.
    values = {key: _pick(batch, key, channels) for key in keys if key in batch or key in channels}
    if isinstance(batch_format, Mapping):
        return {new: values[key] for new, key in batch_format.items() if key in values}
    return tuple(values[key] for key in batch_format if key in values)


def to_classes(batch: Batch) -> Batch:
    """Return a batch with ``mask`` [B, H, W] int64 of class numbers, as cross entropy and torchgeo use."""
    if "mask" not in batch:
        return batch
    return batch | {"mask": batch["mask"][:, 0].long()}


def to_torchvision(batch: Batch) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images and targets in the form of torchvision's detectors.

    Returns:
        Images [C, H, W], and for each a dict of ``boxes`` [N, 4] float32 (left, top, right, bottom)
        in px, ``labels`` [N] int64, in which class 0 is 1 because 0 is the background, and
        ``image_id`` [1] int64.
    """
    images, boxes = batch["image"], batch["boxes"]
    height, width = images.shape[2:]
    size = torch.tensor([width, height] * 2, dtype=boxes.dtype, device=boxes.device)
    middle, half = boxes[:, 2:4], boxes[:, 4:6] / 2
    corners = torch.cat((middle - half, middle + half), dim=1) * size
    labels = boxes[:, 1].long() + 1  # 0 is the background
    counts = batch["boxes" + COUNT_SUFFIX].tolist()
    boxes_of_images = torch.split(corners, counts)
    labels_of_images = torch.split(labels, counts)
    targets = []
    for number in range(len(images)):
        targets.append(
            {
                "boxes": boxes_of_images[number],
                "labels": labels_of_images[number],
                "image_id": batch["image_index"][number : number + 1],
            }
        )
    return list(images), targets


def to_ultralytics(batch: Batch) -> dict[str, Any]:
    """Return the dict of Ultralytics' v8 losses.

    Returns:
        ``img`` [B, 3, H, W] float32 in 0..1, ``cls`` [N, 1], ``bboxes`` [N, 4] (cx, cy, w, h) in
        fractions of W and H and ``batch_idx`` [N], the image of each box, all float32; ``im_file``,
        B paths, and ``ori_shape``, B pairs of px.
    """
    boxes = batch["boxes"]
    return {
        "img": batch["image"],
        "cls": boxes[:, 1:2],
        "bboxes": boxes[:, 2:6],
        "batch_idx": boxes[:, 0],
        "im_file": list(map(str, batch["path"])),
        "ori_shape": tuple(map(tuple, batch["shape"].tolist())),
    }


def to_anomalib(batch: Batch) -> Any:  # noqa: ANN401 - its ImageBatch
    """Return Anomalib's ``ImageBatch``.

    It holds ``image`` [B, C, H, W], ``gt_mask`` [B, H, W] bool and ``gt_label`` [B] bool. For a
    split with unmarked defects it holds no ``gt_mask``, which cannot express them.

    Raises:
        ConfigError: Anomalib is not installed.
    """
    try:
        from anomalib.data import ImageBatch
    except ImportError as error:
        raise ConfigError(
            "batch_format=anomalib needs its package: pip install anomalib"
        ) from error
    if "mask" not in batch:
        return ImageBatch(image=batch["image"])
    masks = batch["mask"][:, 0] > 0.5
    labels = masks.flatten(1).any(dim=1)
    # The mask of an unmarked defect is 255, which is above 0.5.
    gt_mask = None if "unmarked" in batch else masks
    return ImageBatch(image=batch["image"], gt_mask=gt_mask, gt_label=labels)


_PRESETS: Mapping[str, _Preset] = {
    "classes": _Preset(to_classes, needs="mask", gives_dict=True),
    "anomalib": _Preset(to_anomalib, needs="mask", gives_dict=False),
    "torchvision": _Preset(to_torchvision, needs="boxes", gives_dict=False),
    "ultralytics": _Preset(to_ultralytics, needs="boxes", gives_dict=True),
}


def _pick(batch: Batch, key: str, channels: Mapping[str, int]) -> Tensor:
    if key in batch:
        return batch[key]
    number = channels[key]
    return batch["image"][:, number : number + 1]
