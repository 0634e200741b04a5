"""`ExternalTransform`: a module of yours, which draws from the global generators."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from kornia.augmentation import AugmentationBase2D, AugmentationSequential, MixAugmentationBaseV2
from numpy.typing import ArrayLike
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.boxes import BoxLimits, box_corners, hull_boxes
from lit_data.augment.foreign import (
    Layer,
    find_unmoved,
    is_kornia,
    is_torchvision,
    list_steps,
    move_along,
    moves_along,
)
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words, unchanged_generators

SeedPer = Literal["batch", "sample"]
_KEY = "augment_external"


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore them afterwards.

    Args:
        seed: Any integer, of which the lowest 64 bits are used.
        device: Device of the code; the generator of a CUDA device is seeded as well.
    """
    seed %= 2**64
    devices = [device] if device.type == "cuda" else []
    with unchanged_generators(), torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed unused devices, which are not restored.
        torch.default_generator.manual_seed(seed)
        for cuda_device in devices:
            torch.cuda.default_generators[cuda_device.index or 0].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's module may draw from it
        yield


class ExternalTransform(Augmentation):
    """Runs a module with seeded global generators, whose states are restored afterwards.

    Kornia's augmentations, even in an ``nn.Sequential``, get images, masks (nearest neighbor) and
    boxes together through an ``AugmentationSequential``. Their numbers are drawn on the host, so
    they are the same for any device. Boxes are moved as the points of their corners. Transforms of
    ``torchvision.transforms.v2`` also get all layers; each draws once for a batch, so use
    ``seed_per="sample"`` if samples should differ. Any other module is called with (images, masks)
    if its ``forward`` takes two arguments, else only with images.

    A module that may move pixels but not masks or boxes is refused if there are any.

    The seeds are copied to the host before the call, so this waits for the device once per batch,
    unlike the other augmentations.

    Args:
        module: A Kornia augmentation or container, a list of augmentations to run in turn, or any
            other module.
        seed_per: `batch` uses one seed from (seed, epoch, the indices of the batch), so a sample's
            result depends on its batch; the parts of a split batch have the seed of the whole.
            `sample` augments each sample separately, with a seed from (seed, epoch, its index),
            which is slower but gives the same result for any number of ranks, any batch size and
            after a resume.
        moves_pixels: False declares that an unknown module changes only values, so masks and boxes
            need not move.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output for the box to be kept.

    Raises:
        ConfigError: An argument has the wrong type; later, masks or boxes cannot be moved, or a
            result has a wrong shape or type.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        seed_per: SeedPer = "batch",
        moves_pixels: bool = True,
        min_box_px: float = 2.0,
        min_box_visible: float = 0.1,
    ) -> None:
        super().__init__()
        check_choice("seed_per", seed_per, get_args(SeedPer))
        self.module = _wrap(module)
        self.seed_per = seed_per
        self.box_limits = BoxLimits(min_px=min_box_px, min_visible=min_box_visible)
        self.moves_pixels = moves_pixels
        self._checked: set[tuple[bool, bool]] = set()
        self._device: torch.device | None = None

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Key of ``augment_external`` [B] int64, the seeds."""
        return (_KEY,)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the seeds; see `Augmentation.draw`."""
        # The first two words of this stream seed custom datasets.
        words = random_words(seed, Stream.USER, index, epoch, 4)[:, 2:].astype(np.uint64)
        seeds = words[:, 0] | words[:, 1] << np.uint64(32)
        if self.seed_per == "batch":
            # The sum, which wraps, does not depend on the order of the samples.
            seeds = np.full_like(seeds, seeds.sum())
        return {_KEY: torch.from_numpy(seeds.view(np.int64))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Run the module under the drawn seeds."""
        device = layers.images.device
        self._settle(device)
        seeds = draws[_KEY].tolist()
        if self.seed_per == "batch":
            with seeded(seeds[0], device):
                return self.run(layers)
        results = []
        for row, seed in enumerate(seeds):
            with seeded(seed, device):
                results.append(self.run(_take_row(layers, row)))
        return _join(results)

    def _settle(self, device: torch.device) -> None:
        """Move the module to the device of the batch; Kornia's numbers stay on the host."""
        if device == self._device:
            return
        self.module.to(device)
        for child in self.module.modules():
            if isinstance(child, AugmentationBase2D | MixAugmentationBaseV2):
                child.set_rng_device_and_dtype(torch.device("cpu"), torch.float32)
        self._device = device

    @override
    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        if (masks, boxes) in self._checked:
            return
        for step in list_steps(self.module):
            if masks and not _takes_two(step):
                self._refuse_unmoved(step, "masks")
            if boxes:
                self._refuse_unmoved(step, "boxes")
        self._checked.add((masks, boxes))

    def _refuse_unmoved(self, step: object, layer: Layer) -> None:
        part = find_unmoved(step, layer, is_trusted=not self.moves_pixels)
        if part is None:
            return
        cure = ""
        if not is_kornia(part) and not is_torchvision(part):
            cure = ", or moves_pixels=false if it changes only values"
            if layer == "masks":
                cure = f"{cure}, or let its forward take (images, masks)"
        raise ConfigError(
            f"augment: {_describe(part)} may move pixels, and would not move {layer} with them: "
            "use a transform of lit_data.augment, kornia.augmentation or "
            f"torchvision.transforms.v2 that moves {layer}{cure}"
        )

    def run(self, layers: Layers) -> Layers:
        """Run the module with the global generators as they are."""
        self.check_layers(masks=layers.masks is not None, boxes=layers.boxes is not None)
        if is_kornia(self.module):
            return self._run_kornia(layers)
        steps = list_steps(self.module)
        if any(moves_along(step) or _takes_two(step) for step in steps):
            for step in steps:
                layers = self._run_step(step, layers)
            images = layers.images
        else:
            images = self.module(layers.images)
        return replace(layers, images=images.to(torch.float32))

    def _run_step(self, step: Callable[..., Any], layers: Layers) -> Layers:
        if moves_along(step):
            return move_along(step, layers, self.box_limits)
        if _takes_two(step):
            images, masks = step(layers.images, layers.masks)
            return replace(layers, images=images.to(torch.float32), masks=masks)
        return replace(layers, images=step(layers.images))

    def _run_kornia(self, layers: Layers) -> Layers:
        inputs: dict[str, Tensor] = {"input": layers.images}
        if layers.masks is not None:
            inputs["mask"] = layers.masks
        if layers.boxes is not None:
            # Each sample moves the corners of all boxes, and only its own are used afterwards,
            # which avoids padding to equal counts.
            corners = box_corners(layers.boxes, layers.size_px)
            inputs["keypoints"] = corners.reshape(1, -1, 2).expand(len(layers.images), -1, -1)
        results = self.module(*inputs.values(), data_keys=list(inputs))
        if len(inputs) == 1:  # Kornia returns no list in this case
            results = [results]
        moved = dict(zip(inputs, results, strict=True))
        after = Layers(moved["input"].to(torch.float32), moved.get("mask"))
        if layers.boxes is None:
            return after
        rows = layers.boxes[:, 0].long()
        each = torch.arange(len(rows), device=rows.device)
        corners = moved["keypoints"].view(len(layers.images), len(rows), 4, 2)[rows, each]
        boxes = hull_boxes(layers.boxes, corners, after.size_px, self.box_limits)
        return replace(after, boxes=boxes)


def _wrap(module: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Put Kornia's modules into an ``AugmentationSequential``; others stay as they are."""
    if not isinstance(module, nn.Module):
        module = _join_parts(module)
    is_chain = isinstance(module, AugmentationSequential)
    steps = list_steps(module)
    if not is_chain and any(is_kornia(step) for step in steps):
        chain: nn.Module = AugmentationSequential(*steps)
        return chain
    return module


def _join_parts(parts: Sequence[nn.Module]) -> nn.Sequential:
    is_list = isinstance(parts, Sequence) and len(parts) > 0
    if not is_list or not all(isinstance(part, nn.Module) for part in parts):
        raise ConfigError(
            f"{parts!r} is not an augmentation: give a torch module or a list of them"
        )
    return nn.Sequential(*parts)


def _takes_two(step: object) -> bool:
    """Return True if `forward` takes images and masks.

    It does if it has two positional arguments and the second has no default, or None.
    """
    if not isinstance(step, nn.Module) or is_kornia(step):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step.forward).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    if len(positional) != 2:
        return False
    return positional[1].default in (inspect.Parameter.empty, None)


def _describe(part: object) -> str:
    name = type(part).__name__
    return f"{type(part).__module__}.{name}" if isinstance(part, nn.Module) else repr(part)


def _take_row(layers: Layers, row: int) -> Layers:
    """Return one sample as a batch."""
    images, masks, boxes = layers.images[row : row + 1], layers.masks, layers.boxes
    if masks is not None:
        masks = masks[row : row + 1]
    if boxes is not None:
        boxes = boxes[boxes[:, 0] == row].clone()
        boxes[:, 0] = 0
    return Layers(images, masks, boxes)


def _join(results: Sequence[Layers]) -> Layers:
    # Random crops may differ in size from sample to sample, which a batch cannot hold.
    sizes = {result.size_px for result in results}
    if len(sizes) > 1:
        raise ConfigError(
            f"samples came out in different sizes ({sorted(sizes)}): end with a crop or resize"
        )
    masks = [result.masks for result in results if result.masks is not None]
    boxes = [result.boxes for result in results if result.boxes is not None]
    for row, part in enumerate(boxes):
        part[:, 0] = row
    return Layers(
        torch.cat([result.images for result in results]),
        torch.cat(masks) if masks else None,
        torch.cat(boxes) if boxes else None,
    )
