"""`Albumentations` and `Torchvision`: transforms of other libraries for single samples in workers."""

import os
import pickle
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.external import ExternalTransform, seeded
from lit_data.core.errors import ConfigError, first_line
from lit_data.core.rng import Stream, random_words
from lit_data.core.types import COUNT_SUFFIX, Array, FieldSpec, Ints, RowWriter, Stage

_KEY = "augment_host"
_WHOLE = {"uint8": 255.0, "uint16": 65535.0}
_CPU = torch.device("cpu")


class HostTransform(Augmentation):
    """A transform that changes each sample in the worker that reads it, before the batch is made.

    Nothing is left to do on the device. The transform draws from global generators, which are
    seeded for each sample by (seed, epoch, index). A sample is therefore the same in any worker,
    batch and rank, and after a resume.

    Args:
        transforms: Transforms to run, which are pickled if workers are not forked.

    Raises:
        ConfigError: The transforms cannot be pickled.
    """

    def __init__(self, transforms: object) -> None:
        super().__init__()
        try:
            pickle.dumps(transforms)
        except Exception as error:  # of many kinds
            raise ConfigError(
                "augment: the transforms cannot be sent to worker processes "
                f"({first_line(error)}): put functions and classes into a module instead of "
                "lambdas"
            ) from error

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Key that no batch has; it limits a pipeline to one such step."""
        return (_KEY,)

    @property
    @override
    def host_steps(self) -> "tuple[HostTransform, ...]":
        return (self,)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw nothing for the device."""
        return {}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Return a batch unchanged, because its samples have been changed already."""
        return layers

    @abstractmethod
    def change(
        self, image: Array, mask: Array | None, boxes: Array | None, seed: int
    ) -> tuple[Any, Any, Any]:
        """Transform a sample.

        Args:
            image: [C, H, W] uint8 in 0..255 or float32 in 0..1.
            mask: [K, H, W], or None.
            boxes: [N, 5] float32 (class, cx, cy, w, h), the last four in fractions; or None.
            seed: Seed of all draws; global generators have already been seeded with it.

        Returns:
            The transformed image, mask and boxes.
        """


class HostRows:
    """Samples of a dataset that a `HostTransform` changes as they are written; see `RowWriter`.

    Args:
        dataset: Dataset that writes the samples.
        step: Transform of the samples.
        seed: Seed, 0 <= seed < 2**64.

    Attributes:
        isolated: True, because the transform draws from global generators, which threads must not
            share.

    Raises:
        ConfigError: Samples have no pixels yet, or some that the transform would not change.
    """

    isolated = True

    def __init__(self, dataset: RowWriter, step: HostTransform, seed: int) -> None:
        self.dataset = dataset
        self._step = step
        self._seed = seed
        _check_fields(dataset.fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the dataset has
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the dataset."""
        return self.dataset.fields

    def __len__(self) -> int:
        return len(self.dataset)

    def write_into(
        self, rows: Mapping[str, Array], indices: Ints, epoch: int
    ) -> Mapping[str, list[Any]] | None:
        """Write samples, and transform each with its own random stream."""
        texts = self.dataset.write_into(rows, indices, epoch)
        streams = rows["draw"] if "draw" in rows else rows["index"]
        # The first two words of this stream seed custom datasets.
        words = random_words(self._seed, Stream.USER, streams, epoch, 4)[:, 2:].astype(np.uint64)
        seeds = (words[:, 0] | words[:, 1] << np.uint64(32)).tolist()
        for number, seed in enumerate(seeds):
            with seeded(seed, _CPU):
                self._change(rows, number, seed)
        return texts

    def _change(self, rows: Mapping[str, Array], number: int, seed: int) -> None:
        row: dict[str, Any] = {name: values[number] for name, values in rows.items()}
        stored, boxes = row["image"], None
        if "boxes" in row:
            boxes = row["boxes"][: row["boxes" + COUNT_SUFFIX], 1:].copy()
        is_wide = stored.dtype == np.uint16
        image, mask = stored.copy(), None
        if is_wide:
            image = stored.astype(np.float32) / _WHOLE["uint16"]
        if "mask" in row:
            mask = row["mask"].copy()
        image, mask, boxes = self._step.change(image, mask, boxes, seed)
        if is_wide:
            image = (np.clip(image, 0, 1) * _WHOLE["uint16"]).round().astype(np.uint16)
        _check_result("image", image, stored)
        rows["image"][number] = image
        if "mask" in row:
            _check_result("mask", mask, row["mask"])
            rows["mask"][number] = mask
        if boxes is not None:
            rows["boxes"][number, : len(boxes), 1:] = boxes
            rows["boxes" + COUNT_SUFFIX][number] = len(boxes)


def augment_rows(
    dataset: RowWriter, options: Mapping[str, Any], stage: Stage, seed: int
) -> RowWriter:
    """Return a dataset whose samples are augmented in the workers, if its augmentation runs there.

    Args:
        dataset: Dataset of the stage.
        options: Options with ``augment``, the augmentation of each stage that has one.
        stage: Stage of the samples.
        seed: Seed of the samples.

    Raises:
        ConfigError: The samples cannot be augmented in workers.
    """
    augment = options.get("augment")
    if not isinstance(augment, Mapping) or not isinstance(augment.get(stage), Augmentation):
        return dataset
    step = augment[stage]
    for host_step in step.host_steps:
        dataset = HostRows(dataset, host_step, seed)
    return dataset


class Albumentations(HostTransform):
    """Transforms of albumentations, which move images, masks and boxes together.

    This needs ``pip install albumentations``, or the extra ``augment``.

    Args:
        transforms: A list of transforms, a pipeline as ``A.to_dict`` gives it, or a YAML or JSON
            file that ``A.save`` wrote. The ``bbox_params`` of a ``Compose`` decide which boxes are
            kept.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output for the box to be kept.

    Raises:
        ConfigError: Albumentations is not installed or cannot read the transforms, or these cannot
            be pickled.
    """

    def __init__(
        self,
        transforms: Sequence[Any] | Mapping[str, Any] | str,
        *,
        min_box_px: float = 2.0,
        min_box_visible: float = 0.1,
    ) -> None:
        library = _open_albumentations()
        loaded = _read_pipeline(library, transforms)
        steps = list(loaded.transforms if isinstance(loaded, library.Compose) else loaded)
        boxes: dict[str, Any] = {"min_width": min_box_px, "min_height": min_box_px}
        boxes |= {"min_visibility": min_box_visible}
        processor = getattr(loaded, "processors", {}).get("bboxes")
        if processor is not None:
            boxes = processor.params.to_dict_private()
        boxes |= {"format": "albumentations", "label_fields": ["box_classes"], "clip": True}
        for step in steps:
            if not isinstance(step, library.BasicTransform | library.BaseCompose):
                raise ConfigError(
                    f"augment: {step!r:.80} is not a transform of albumentations: write "
                    "{_target_: albumentations.HorizontalFlip, p: 0.5}"
                )
        super().__init__(steps)
        self._compose = partial(library.Compose, steps, p=float(getattr(loaded, "p", 1.0)))
        self._plain = self._compose()
        self._boxed = None
        self._box_params = library.BboxParams(**boxes)
        self._moving = [
            leaf for leaf in _list_leaves(steps) if isinstance(leaf, library.DualTransform)
        ]

    @override
    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        for target, is_there in (("MASK", masks), ("BBOXES", boxes)):
            for leaf in self._moving if is_there else ():
                known = {each.name for each in getattr(leaf, "_targets", ())}
                if known and target not in known:
                    raise ConfigError(
                        f"augment: {type(leaf).__name__} of albumentations moves pixels but not "
                        f"{target.lower()}: remove it"
                    )
        if boxes and self._moving:
            self._boxed = self._compose(bbox_params=self._box_params)

    @override
    def change(
        self, image: Array, mask: Array | None, boxes: Array | None, seed: int
    ) -> tuple[Any, Any, Any]:
        values: dict[str, Any] = {"image": np.ascontiguousarray(image.transpose(1, 2, 0))}
        if mask is not None:
            values["mask"] = np.ascontiguousarray(mask.transpose(1, 2, 0))
        pipeline = self._plain
        if boxes is not None and self._boxed is not None:
            pipeline = self._boxed
            values["bboxes"] = _as_edges(boxes)
            values["box_classes"] = boxes[:, 0]
        # One pair for all: with `set_random_seed`, two flips of p=0.5 would always coincide.
        pipeline.set_random_state(np.random.default_rng(seed), random.Random(seed))
        changed = pipeline(**values)
        image = _as_planes(changed["image"])
        if mask is not None:
            mask = _as_planes(changed["mask"])
        if boxes is not None and self._boxed is not None:
            edges = np.asarray(changed["bboxes"], np.float32).reshape(-1, 4)
            boxes = _as_fractions(np.asarray(changed["box_classes"], np.float32), edges)
        return image, mask, boxes


class Torchvision(HostTransform):
    """Transforms of ``torchvision.transforms.v2``, which move images, masks and boxes together.

    They see ``tv_tensors``: images of float32 in 0..1, masks, and boxes as corners.

    Args:
        transforms: Transforms to run in turn, or any modules that `ExternalTransform` takes.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output for the box to be kept.

    Raises:
        ConfigError: The transforms are not modules, or cannot be pickled; later, masks or boxes
            would not move with the image.
    """

    def __init__(
        self,
        transforms: Sequence[nn.Module] | nn.Module,
        *,
        min_box_px: float = 2.0,
        min_box_visible: float = 0.1,
    ) -> None:
        super().__init__(transforms)
        self._inner = ExternalTransform(
            transforms, min_box_px=min_box_px, min_box_visible=min_box_visible
        )

    @override
    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        self._inner.check_layers(masks=masks, boxes=boxes)

    @override
    def change(
        self, image: Array, mask: Array | None, boxes: Array | None, seed: int
    ) -> tuple[Any, Any, Any]:
        layers = Layers(torch.from_numpy(image)[None]).in_floats()
        if mask is not None:
            layers = replace(layers, masks=torch.from_numpy(mask)[None])
        if boxes is not None:
            rows = np.pad(boxes, ((0, 0), (1, 0)))
            layers = replace(layers, boxes=torch.from_numpy(rows))
        with torch.no_grad():
            changed = self._inner.run(layers)
        pixels = changed.images[0].numpy()
        if image.dtype == np.uint8:
            pixels = (np.clip(pixels, 0, 1) * _WHOLE["uint8"]).round().astype(np.uint8)
        if changed.masks is not None:
            mask = changed.masks[0].numpy()
        if changed.boxes is not None:
            boxes = changed.boxes[:, 1:].numpy()
        return pixels, mask, boxes


def _open_albumentations() -> Any:  # noqa: ANN401 - a module
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # its import would contact a server
    os.environ.setdefault("ALBUMENTATIONS_NO_TELEMETRY", "1")
    try:
        import albumentations
    except ImportError as error:
        raise ConfigError(
            "augment needs albumentations: pip install 'lit-data-inspect[augment]'"
        ) from error
    return albumentations


def _read_pipeline(library: Any, transforms: Sequence[Any] | Mapping[str, Any] | str) -> Any:  # noqa: ANN401 - of the library
    """Return transforms, or the pipeline that a file or a dict describes."""
    try:
        if isinstance(transforms, str):
            kind = "json" if Path(transforms).suffix == ".json" else "yaml"
            return library.load(transforms, data_format=kind)
        if isinstance(transforms, Mapping):
            return library.from_dict(dict(transforms))
    except Exception as error:  # of many kinds
        source = transforms if isinstance(transforms, str) else "the pipeline"
        raise ConfigError(
            f"augment: albumentations cannot read {source} ({type(error).__name__}: "
            f"{first_line(error)}): write it with albumentations.save(PIPELINE, FILE, 'yaml')"
        ) from error
    return transforms


def _list_leaves(steps: Sequence[Any]) -> list[Any]:
    """Return all transforms, including those inside groups such as ``OneOf``."""
    leaves = []
    for step in steps:
        inner = getattr(step, "transforms", None)
        if inner is None:
            leaves.append(step)
        else:
            leaves += _list_leaves(inner)
    return leaves


def _as_edges(boxes: Array) -> Array:
    """Return [N, 4] (left, top, right, bottom) in fractions, of boxes (class, cx, cy, w, h)."""
    centres, halves = boxes[:, 1:3], boxes[:, 3:] / 2
    edges: Array = np.clip(np.hstack((centres - halves, centres + halves)), 0, 1)
    return edges


def _as_fractions(classes: Array, edges: Array) -> Array:
    """Return [N, 5] (class, cx, cy, w, h) of edges in fractions."""
    low, high = edges[:, :2], edges[:, 2:]
    boxes: Array = np.hstack((classes[:, None], (low + high) / 2, high - low))
    return boxes


def _as_planes(pixels: Any) -> Any:  # noqa: ANN401 - what a transform returns
    """Return [C, H, W] of pixels [H, W, C] or [H, W]; anything else is returned to be refused."""
    if not isinstance(pixels, np.ndarray):
        return pixels
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _check_fields(fields: Mapping[str, FieldSpec]) -> None:
    image = fields.get("image")
    if image is None or len(image.shape) != 3:
        raise ConfigError(
            "augment: transforms that run in the workers need the pixels there: set "
            "data.cache=store, or use an augmentation on the device, such as "
            "augment=segmentation"
        )
    if image.dtype not in (*_WHOLE, "float32"):
        raise ConfigError(
            f"augment: transforms do not accept {image.dtype}: set data.read.as_float=true"
        )
    for name, field in fields.items():
        if name not in ("image", "mask") and len(field.shape) > 1:
            raise ConfigError(
                f"augment: transforms that run in the workers would not move '{name}' with the "
                "image: use an augmentation on the device, such as augment=flips"
            )


def _check_result(name: str, changed: Any, stored: Array) -> None:  # noqa: ANN401 - what a transform returns
    """Refuse a result that does not fit the rows of a batch.

    Raises:
        ConfigError: The size or dtype is wrong.
    """
    if not isinstance(changed, np.ndarray) or changed.dtype != stored.dtype:
        kind = getattr(changed, "dtype", type(changed).__name__)
        raise ConfigError(
            f"augment: a transform makes {name}s {kind}, which were {stored.dtype}: remove "
            "Normalize, ToFloat and ToTensorV2, because batches are scaled to 0..1 and become "
            "tensors anyway"
        )
    if changed.shape != stored.shape:
        sizes = [" x ".join(map(str, shape)) for shape in (changed.shape, stored.shape)]
        height, width = stored.shape[1:]
        raise ConfigError(
            f"augment: a transform makes {name}s of {sizes[0]} (channels x height x width), and a batch has "
            f"{sizes[1]}: end with Resize, RandomCrop or PadIfNeeded to {height} x {width}, and keep channels"
        )
