"""Blending of watermarks into their samples, on the samples' device."""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.core.devices import constant
from lit_data.wings.watermarks.cover import find_lines
from lit_data.wings.watermarks.plan import WatermarkPlan

_BLOCK = 8
_MCU_PX = 16
"""Number of pixels along each axis of a block of color."""
_UNIT = 4096.0
"""Weights are integer multiples of 1 / _UNIT. Pixels are at most 128 and the magnitudes of the
weights of a coefficient add up to 8 at most; coefficients have a length of at most 2048, and the
weights of a pixel have length 1: all sums stay below 2^24."""

_LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99, 99, 99, 99,
    *(99,) * 32,
)  # fmt: skip

_IN_CACHE = 2
"""Number of samples blended at a time on a CPU, which fit into its cache: this halves the time."""


@torch.no_grad()
def compress(images: Tensor, quality: Tensor) -> Tensor:
    """Return images as they look after JPEG compression.

    Args:
        images: [J, 3, H, W] float32 in 0..1, R, G, B.
        quality: [J] 1 to 100, as in libjpeg.

    Returns:
        [J, 3, H, W] float32, integer multiples of 1/255.
    """
    height, width = images.shape[-2:]
    right, below = -width % _MCU_PX, -height % _MCU_PX
    padded = images
    if right or below:
        padded = F.pad(images, (0, right, 0, below), mode="replicate")
    luma, cb, cr = _split_colours(padded.mul(255).round_())
    luma = _quantise(luma[:, None], _scale_table(_LUMA, quality)).add_(128)[:, 0]
    halved = _quantise(torch.stack((cb, cr), dim=1), _scale_table(_CHROMA, quality))
    chroma = F.interpolate(halved, scale_factor=2, mode="bilinear", align_corners=False)
    cb, cr = chroma.round_().unbind(1)
    pixels = torch.empty_like(padded)
    torch.add(luma, cr * 1.402, out=pixels[:, 0])
    torch.sub(luma, (cb * 0.344136).add_(cr * 0.714136), out=pixels[:, 1])
    torch.add(luma, cb * 1.772, out=pixels[:, 2])
    return pixels.round_().clamp_(0, 255).div_(255)[..., :height, :width]


def _split_colours(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y - 128 [J, h, w], and Cb - 128 and Cr - 128 [J, h/2, w/2].

    Weights of Y are integers too, so that neither order nor fused arithmetic can change a tie.

    Args:
        images: [J, 3, h, w], whole numbers in 0..255.
    """
    red, green, blue = images.unbind(1)
    luma = (red * 299).add_(green * 587).add_(blue * 114).div_(1000).round_()
    # Colors at half the resolution, as files have them (4:2:0).
    cb = _halve(blue - luma).div_(4 * 1.772).round_()
    cr = _halve(red - luma).div_(4 * 1.402).round_()
    return luma.sub_(128), cb, cr


def _halve(planes: Tensor) -> Tensor:
    """Return the sums of four pixels each: [J, h, w] becomes [J, h/2, w/2]."""
    columns = planes[..., ::2] + planes[..., 1::2]
    return columns[:, ::2] + columns[:, 1::2]


def _quantise(planes: Tensor, tables: Tensor) -> Tensor:
    """Round the coefficients of blocks to multiples of their tables, as JPEG does.

    Args:
        planes: [J, C, h, w] whole numbers in -128..127.
        tables: [J, 64].

    Returns:
        [J, C, h, w] whole numbers in -128..127.
    """
    count, channels, height, width = planes.shape
    rows, columns = height // _BLOCK, width // _BLOCK
    exact = torch.float64 if planes.is_cuda else torch.float32  # TF32 on a GPU would not be exact
    weights = _transform(planes.device, exact)
    table = tables.to(exact)[:, None]
    # Blocks of 8 x 8 pixels, each as a row of 64.
    blocks = planes.reshape(count, channels, rows, _BLOCK, columns, _BLOCK).transpose(3, 4)
    flat = blocks.to(exact).reshape(count, -1, _BLOCK * _BLOCK)
    coefficients = (flat @ weights.T).div_(table * _UNIT).round_().mul_(table)
    pixels = (coefficients @ weights).div_(_UNIT).round_().clamp_(-128, 127).to(planes.dtype)
    blocks = pixels.reshape(count, channels, rows, columns, _BLOCK, _BLOCK)
    return blocks.transpose(3, 4).reshape(planes.shape)


def _scale_table(table: tuple[int, ...], quality: Tensor) -> Tensor:
    """Return the table for each quality, [J, 64], scaled like ``jpeg_set_quality`` of libjpeg."""
    scale = torch.where(quality < 50, torch.floor(5000 / quality), 200 - 2 * quality)[:, None]
    return torch.floor((constant(table, quality.device) * scale + 50) / 100).clamp_(1, 255)


@lru_cache(maxsize=8)
def _transform(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the cosine transform of a block as one matrix of whole numbers, times `_UNIT`.

    Returns:
        [64, 64].
    """
    frequency, pixel = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    # DCT-II along one axis; the transform of a block is the product of two.
    line = torch.cos((2 * pixel + 1) * frequency * math.pi / 16) / 2
    line[0] /= math.sqrt(2)
    return (torch.kron(line, line) * _UNIT).round().to(device, dtype)


@dataclass(frozen=True, slots=True)
class Look:
    """Look of the watermarks of a batch: a few numbers for each sample.

    It can be moved to a device like a tensor.

    Attributes:
        opacity: [B] float32.
        base: [B, 3] float32, see `find_lines`.
        below: [B, 3] float32.
        above: [B, 3] float32.
        compressed: [J] int64, the samples to compress.
        quality: [J] float32, qualities of these samples.
    """

    opacity: Tensor
    base: Tensor
    below: Tensor
    above: Tensor
    compressed: Tensor
    quality: Tensor

    @classmethod
    def of(cls, plan: WatermarkPlan) -> "Look":
        """Make the look of planned watermarks."""
        rows = np.flatnonzero(plan.quality)
        parts = (plan.opacity, *find_lines(plan.colour, plan.mode), rows, plan.quality[rows])
        return cls(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "Look":
        """Return the same look on a device."""
        tensors = [getattr(self, field.name) for field in fields(self)]
        return Look(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))

    def slice_samples(self, start: int, stop: int) -> "Look":
        """Return the look of the samples from `start` to `stop`, counted from 0."""
        samples = slice(start, stop)
        in_slice = (self.compressed >= start) & (self.compressed < stop)
        return Look(
            opacity=self.opacity[samples],
            base=self.base[samples],
            below=self.below[samples],
            above=self.above[samples],
            compressed=self.compressed[in_slice] - start,
            quality=self.quality[in_slice],
        )


@torch.no_grad()
def blend(images: Tensor, cover: Tensor, look: Look) -> Tensor:
    """Draw watermarks into images.

    Args:
        images: [B, 3, H, W] uint8.
        cover: [B, 1, H, W] uint8, coverage of each pixel.
        look: Look of these B samples.

    Returns:
        [B, 3, H, W] float32 in 0..1, integer multiples of 1/255 as in files, so that marks cannot
        be recognized by other values.
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
    """Compress the samples that the look lists, as JPEG files do.

    Args:
        images: [B, 3, H, W] float32 in 0..1; changed in place.
        look: Look of these B samples.
    """
    if len(look.compressed):
        images[look.compressed] = compress(images[look.compressed], look.quality)
    return images


def _blend(images: Tensor, cover: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
    # Products and sums are separate operations: fused ones would round depending on the position of
    # a pixel in the batch.
    opacity, base, below, above = (part[..., None, None] for part in numbers)
    ground = torch.div(images, 255.0)
    marked = ground.clamp(max=0.5).mul_(below).add_(base)
    marked.add_((ground - 0.5).clamp_(min=0).mul_(above)).sub_(ground)
    marked.mul_(cover * (opacity / 255)[:, None])
    return ground.add_(marked).mul_(255).round_().div_(255)
