"""Watermarks blended into their samples, on the device where these are."""

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.devices import constant
from lit_data.synthesis.watermarks.cover import find_lines
from lit_data.synthesis.watermarks.plan import WatermarkPlan

_BLOCK: Final = 8
_MCU_PX: Final = 16
"""Blocks of colour cover this many pixels along each axis."""
_UNIT: Final = 4096.0
"""Weights are whole multiples of 1 / _UNIT. Pixels are at most 128 and the magnitudes of the
weights of a coefficient add up to 8 at most; coefficients have at most the length 2048, the weights
of a pixel the length 1: all sums stay below 2^24."""

_LUMA: Final = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA: Final = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99, 99, 99, 99,
    *(99,) * 32,
)  # fmt: skip


@torch.no_grad()
def compress(images: Tensor, quality: Tensor) -> Tensor:
    """Images as they come out of JPEG files.

    Args:
        images: [J, 3, H, W] float32 in 0..1, R, G, B.
        quality: [J] 1 to 100, as libjpeg counts.

    Returns:
        [J, 3, H, W] float32, whole multiples of 1/255.
    """
    height, width = images.shape[-2:]
    right, below = -width % _MCU_PX, -height % _MCU_PX
    padded = F.pad(images, (0, right, 0, below), mode="replicate") if right or below else images
    luma, cb, cr = _split_colours(padded.mul(255).round_())
    luma = _quantise(luma[:, None], _scale_table(_LUMA, quality)).add_(128)[:, 0]
    halved = _quantise(torch.stack((cb, cr), dim=1), _scale_table(_CHROMA, quality))
    cb, cr = (
        F.interpolate(halved, scale_factor=2, mode="bilinear", align_corners=False)
        .round_()
        .unbind(1)
    )
    whole = torch.empty_like(padded)
    torch.add(luma, cr * 1.402, out=whole[:, 0])
    torch.sub(luma, (cb * 0.344136).add_(cr * 0.714136), out=whole[:, 1])
    torch.add(luma, cb * 1.772, out=whole[:, 2])
    return whole.round_().clamp_(0, 255).div_(255)[..., :height, :width]


def _split_colours(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y - 128 [J, h, w], and Cb - 128 and Cr - 128 [J, h/2, w/2], from whole numbers [J, 3, h, w]
    in 0..255.

    Weights of Y are whole numbers too, so that neither order nor fused arithmetic can turn a tie.
    """
    red, green, blue = images.unbind(1)
    luma = (red * 299).add_(green * 587).add_(blue * 114).div_(1000).round_()
    cb, cr = (
        _halve(colour - luma).div_(4 * unit).round_()
        for colour, unit in ((blue, 1.772), (red, 1.402))
    )
    return luma.sub_(128), cb, cr


def _halve(planes: Tensor) -> Tensor:
    """[J, h, w] to [J, h/2, w/2], the sums of four."""
    columns = planes[..., ::2] + planes[..., 1::2]
    return columns[:, ::2] + columns[:, 1::2]


def _quantise(planes: Tensor, tables: Tensor) -> Tensor:
    """[J, C, h, w] whole numbers in -128..127 after their coefficients were rounded to multiples of [J, 64]."""
    count, channels, height, width = planes.shape
    rows, columns = height // _BLOCK, width // _BLOCK
    exact = torch.float64 if planes.is_cuda else torch.float32  # TF32 on a GPU would not be exact
    weights, table = _transform(planes.device, exact), tables.to(exact)[:, None]
    blocks = (
        planes.reshape(count, channels, rows, _BLOCK, columns, _BLOCK).transpose(3, 4).to(exact)
    )
    flat = blocks.reshape(count, -1, _BLOCK * _BLOCK)
    coefficients = (flat @ weights.T).div_(table * _UNIT).round_().mul_(table)
    pixels = (coefficients @ weights).div_(_UNIT).round_().clamp_(-128, 127).to(planes.dtype)
    whole = pixels.reshape(count, channels, rows, columns, _BLOCK, _BLOCK).transpose(3, 4)
    return whole.reshape(planes.shape)


def _scale_table(table: tuple[int, ...], quality: Tensor) -> Tensor:
    """[J, 64]: the table for each quality, as ``jpeg_set_quality`` of libjpeg scales it."""
    scale = torch.where(quality < 50, torch.floor(5000 / quality), 200 - 2 * quality)[:, None]
    return torch.floor((constant(table, quality.device) * scale + 50) / 100).clamp_(1, 255)


@lru_cache(maxsize=8)
def _transform(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[64, 64]: the two-dimensional cosine transform of a block as one matrix of whole numbers, times `_UNIT`."""
    frequency, place = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    line = torch.cos((2 * place + 1) * frequency * math.pi / 16) / 2
    line[0] /= math.sqrt(2)
    return (torch.kron(line, line) * _UNIT).round().to(device, dtype)


_IN_CACHE: Final = 2
"""Samples that are blended at a time on a CPU, whose cache holds so many: in all, less than half the time."""


@dataclass(frozen=True, slots=True)
class Look:
    """How the watermarks of a batch look; a few numbers for each sample, which move to a device as
    a tensor does.

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
        moved = (
            getattr(self, item.name).to(device, non_blocking=non_blocking) for item in fields(self)
        )
        return Look(*moved)

    def slice_samples(self, start: int, stop: int) -> "Look":
        """The look of the samples from `start` to `stop` alone, which are counted from 0 then."""
        own = (self.compressed >= start) & (self.compressed < stop)
        here = slice(start, stop)
        compressed, quality = self.compressed[own] - start, self.quality[own]
        return Look(
            self.opacity[here],
            self.base[here],
            self.below[here],
            self.above[here],
            compressed,
            quality,
        )


@torch.no_grad()
def blend(images: Tensor, cover: Tensor, look: Look) -> Tensor:
    """Draw watermarks.

    Args:
        images: [B, 3, H, W] uint8.
        cover: [B, 1, H, W] uint8, how far each pixel is covered.
        look: Of these B samples.

    Returns:
        [B, 3, H, W] float32 in 0..1: whole multiples of 1/255, as files hold them, so that marks do
        not stand out by other values.
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
