"""Watermarks blended into their samples, on the device where these are."""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lit_data.synthesis.watermarks.jpeg import compress
from lit_data.synthesis.watermarks.plan import WatermarkPlan
from lit_data.synthesis.watermarks.visible import find_lines

_IN_CACHE: Final = 2
"""Samples that are blended at a time on a CPU, whose cache holds so many: in all, less than half the time."""


@dataclass(frozen=True, slots=True)
class Look:
    """How the watermarks of a batch look; a few numbers for each sample, which move to a device as a tensor does.

    Attributes:
        opacity: [B] float32.
        base: [B, 3] float32, see `find_lines`.
        below: [B, 3] float32.
        above: [B, 3] float32.
        compressed: [J] int64, the samples that are compressed.
        quality: [J] float32, theirs.
    """

    opacity: Tensor
    base: Tensor
    below: Tensor
    above: Tensor
    compressed: Tensor
    quality: Tensor

    @classmethod
    def of(cls, plan: WatermarkPlan) -> "Look":
        """The look of planned watermarks."""
        rows = np.flatnonzero(plan.quality)
        parts = (plan.opacity, *find_lines(plan.colour, plan.mode), rows, plan.quality[rows])
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "Look":
        """The same on a device."""
        moved = (getattr(self, item.name).to(device, non_blocking=non_blocking) for item in fields(self))
        return Look(*moved)

    def slice_samples(self, start: int, stop: int) -> "Look":
        """The look of the samples from `start` to `stop` alone, which are counted from 0 then."""
        own = (self.compressed >= start) & (self.compressed < stop)
        here = slice(start, stop)
        compressed, quality = self.compressed[own] - start, self.quality[own]
        return Look(self.opacity[here], self.base[here], self.below[here], self.above[here], compressed, quality)


@torch.no_grad()
def blend(images: Tensor, cover: Tensor, look: Look) -> Tensor:
    """Draw watermarks.

    Args:
        images: [B, 3, H, W] uint8.
        cover: [B, 1, H, W] uint8, how far each pixel is covered.
        look: Of these B samples.

    Returns:
        [B, 3, H, W] float32 in 0..1: whole multiples of 1/255, as files hold them, so that marks do not stand out by
        other values.
    """
    if images.device.type != "cpu":
        return _blend(images, cover, (look.opacity, look.base, look.below, look.above))
    blended = torch.empty(images.shape)
    for first in range(0, len(images), _IN_CACHE):
        rows = slice(first, first + _IN_CACHE)
        numbers = look.opacity[rows], look.base[rows], look.below[rows], look.above[rows]
        blended[rows] = _blend(images[rows], cover[rows], numbers)
    return blended


@torch.no_grad()
def degrade(images: Tensor, look: Look) -> Tensor:
    """Compress the samples that are to be, as JPEG files do.

    Args:
        images: [B, 3, H, W] float32 in 0..1; changed in place.
        look: Of these B samples.
    """
    if len(look.compressed):
        images[look.compressed] = compress(images[look.compressed], look.quality)
    return images


def _blend(images: Tensor, cover: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
    """Products and sums are operations of their own: fused ones would round by the place of a pixel in the batch."""
    opacity, base, below, above = (part[..., None, None] for part in numbers)
    ground = torch.div(images, 255.0)
    marked = ground.clamp(max=0.5).mul_(below).add_(base)
    marked.add_((ground - 0.5).clamp_(min=0).mul_(above)).sub_(ground)
    marked.mul_(cover * (opacity / 255)[:, None])
    return ground.add_(marked).mul_(255).round_().div_(255)
