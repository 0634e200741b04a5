"""Effects of Kornia's, torchvision's and your own transforms on masks and boxes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from kornia.augmentation import (
    AugmentationBase2D,
    IntensityAugmentationBase2D,
    MixAugmentationBaseV2,
    PatchSequential,
    RandomTransplantation,
    RigidAffineAugmentationBase2D,
)
from kornia.augmentation.auto.operations import OperationBase
from kornia.augmentation.container.base import ImageSequentialBase
from torch import Tensor, nn

from lit_data.augment.augmentation import Layers
from lit_data.augment.boxes import BoxLimits, box_corners, hull_boxes

Layer = Literal["masks", "boxes"]

_KORNIA = (AugmentationBase2D, ImageSequentialBase, MixAugmentationBaseV2)
_KORNIA_HOOKS = {"masks": "apply_transform_mask", "boxes": "apply_transform_keypoint"}
_OLD = "torchvision.transforms.transforms"
_NEW = "torchvision.transforms.v2"
# Transforms of torchvision, old and new, that change only values.
_PHOTOMETRIC = frozenset(
    {
        "ColorJitter",
        "ConvertImageDtype",
        "GaussianBlur",
        "GaussianNoise",
        "Grayscale",
        "Identity",
        "JPEG",
        "Normalize",
        "RGB",
        "RandomAdjustSharpness",
        "RandomAutocontrast",
        "RandomChannelPermutation",
        "RandomEqualize",
        "RandomErasing",
        "RandomGrayscale",
        "RandomInvert",
        "RandomPhotometricDistort",
        "RandomPosterize",
        "RandomSolarize",
        "ToDtype",
        "ToImage",
        "ToPureTensor",
    }
)
# Transforms of torchvision.transforms.v2 that take no masks, or change the values of masks too.
_IMAGES_ALONE = frozenset(
    {
        "AugMix",
        "AutoAugment",
        "CutMix",
        "FiveCrop",
        "Lambda",
        "LinearTransformation",
        "MixUp",
        "RandAugment",
        "SanitizeBoundingBoxes",
        "TenCrop",
        "TrivialAugmentWide",
    }
)

_HALF_PX = 0.5  # torchvision counts from the edge of a pixel, we from its center


def is_kornia(part: object) -> bool:
    """Return True for one of Kornia's augmentations or containers."""
    return isinstance(part, _KORNIA)


def list_steps(module: nn.Module) -> list[Any]:
    """Return the steps that a module runs in turn: only itself if it is not a plain sequence."""
    if type(module) is nn.Sequential:
        parts: Sequence[Any] = list(module)
    elif _is_new(module) and type(module).__name__ == "Compose":
        parts = getattr(module, "transforms", ())
    else:
        return [module]
    steps = []
    for part in parts:
        steps += list_steps(part) if isinstance(part, nn.Module) else [part]
    return steps


def find_unmoved(step: object, layer: Layer, *, is_trusted: bool) -> object | None:
    """Return the first part of a step that may move pixels without moving a layer.

    Args:
        step: One of `list_steps`, which runs with the images and the layer.
        layer: Kind of the layer on the images.
        is_trusted: True if you declared that unknown parts change only values.
    """
    is_carried = moves_along(step)
    for part in _list_parts(step):
        if _moves_in_patches(part):
            return part
        if _changes_values(part) or isinstance(part, ImageSequentialBase | OperationBase):
            continue
        if is_kornia(part):
            is_left = not is_kornia(step) or not _kornia_moves(part, layer)
        elif is_torchvision(part):
            is_left = not is_carried or not _carries(part)
        else:
            is_left = is_carried or not is_trusted
        if is_left:
            return part
    return None


def moves_along(step: object) -> bool:
    """Return True for a step of torchvision.transforms.v2 that moves pixels."""
    if not _is_new(step):
        return False
    return any(_is_new(part) and not _changes_values(part) for part in _list_parts(step))


def move_along(step: Callable[..., Any], layers: Layers, limits: BoxLimits) -> Layers:
    """Run a step of torchvision.transforms.v2 on images, masks and boxes together.

    Args:
        step: Transform, which draws once for the whole batch.
        layers: Layers of the batch.
        limits: Limits of the boxes that are kept.
    """
    from torchvision import tv_tensors  # installed in your project

    inputs: dict[str, Tensor] = {"images": tv_tensors.Image(layers.images)}
    if layers.masks is not None:
        inputs["masks"] = tv_tensors.Mask(layers.masks)
    if layers.boxes is not None:
        corners = box_corners(layers.boxes, layers.size_px)[:, ::2]
        inputs["boxes"] = tv_tensors.BoundingBoxes(
            corners.reshape(-1, 4) + _HALF_PX,
            format="XYXY",
            canvas_size=layers.size_px,
            clamping_mode=None,  # the visible fraction refers to the whole box
        )
    moved = step(inputs)
    tensors = {name: tensor.as_subclass(Tensor) for name, tensor in moved.items()}
    after = Layers(tensors["images"], tensors.get("masks"))
    if layers.boxes is None:
        return after
    corners = tensors["boxes"].view(-1, 2, 2) - _HALF_PX
    boxes = hull_boxes(layers.boxes, corners, after.size_px, limits)
    return replace(after, boxes=boxes)


def is_torchvision(part: object) -> bool:
    """Return True for one of torchvision's own transforms, as a subclass may do anything."""
    return _is_new(part) or type(part).__module__ == _OLD


def _is_new(part: object) -> bool:
    return type(part).__module__.startswith(_NEW)


def _list_parts(step: object) -> Iterator[object]:
    """Yield the parts of a step that do something, with Kornia's containers before their parts."""
    inner: Sequence[object] = ()
    if isinstance(step, ImageSequentialBase | OperationBase):
        yield step
        inner = list(step.children())
    elif is_torchvision(step):
        inner = getattr(step, "transforms", ())
    if not inner and not isinstance(step, ImageSequentialBase):
        yield step
    for part in inner:
        yield from _list_parts(part)


def _changes_values(part: object) -> bool:
    """Return True for a part that is known to move no pixel."""
    if type(part) is nn.Sequential:
        return all(_changes_values(child) for child in part)
    if is_torchvision(part):
        return type(part).__name__ in _PHOTOMETRIC
    return isinstance(part, nn.Identity | IntensityAugmentationBase2D)


def _moves_in_patches(part: object) -> bool:
    return isinstance(part, PatchSequential) and not part.is_intensity_only()


def _kornia_moves(part: object, layer: Layer) -> bool:
    """Return True if Kornia moves a layer as it moves the images."""
    if isinstance(part, RandomTransplantation):
        return layer == "masks"
    # Kornia does not move points if a warp has no matrix.
    if layer == "boxes" and not isinstance(part, RigidAffineAugmentationBase2D):
        return False
    base = AugmentationBase2D if isinstance(part, AugmentationBase2D) else MixAugmentationBaseV2
    hook = _KORNIA_HOOKS[layer]
    return getattr(type(part), hook) is not getattr(base, hook)


def _carries(part: object) -> bool:
    return _is_new(part) and type(part).__name__ not in _IMAGES_ALONE
