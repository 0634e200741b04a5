"""`UNet`, and `CompareNet`: a small fully convolutional net that sees how the target differs from both references."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_count, check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.types import PathText
from lit_data.models.layers import DEEPEST, pad_sides, run_in_float32
from lit_data.models.weights import load_weights_file

_POOL_PX = 4
# Pooled pixels, so 36 px: several stripes, but local enough for a drift along the image.
_WINDOW = 9
_LARGEST_SHIFT_PX = 1.5
_FLOOR = 2e-4  # keeps flat regions, which say nothing about the shift, at shift 0
_FEATURES = 5
_SCALE = 30.0  # brings differences of a few hundredths to the order of 1


class Layers2d:
    """Layers of a `UNet` of images, and the format in which these lie."""

    convolution: ClassVar[type[nn.Conv2d | nn.Conv3d]] = nn.Conv2d
    norm: ClassVar[type[nn.BatchNorm2d | nn.BatchNorm3d]] = nn.BatchNorm2d
    finer: ClassVar[str] = "bilinear"
    memory_format: ClassVar[torch.memory_format] = torch.channels_last


class Layers3d(Layers2d):
    """Layers of a `UNet` of volumes."""

    convolution = nn.Conv3d
    norm = nn.BatchNorm3d
    finer = "trilinear"
    memory_format = torch.channels_last_3d


class UNet(nn.Module):
    """U-Net of two convolutions at each scale.

    Ronneberger et al., MICCAI 2015.

    Unlike the original, convolutions keep the size, strided convolutions halve the resolution, and
    upsampling is bilinear, which leaves no checkerboard. Sides that are not a multiple of 2^depth
    are padded by repeating the edge, and the padding is removed again. Weights are stored channels
    last, and the head runs in float32 even under autocast.

    Args:
        channels: Number of channels of the images.
        classes: Number of logits of each pixel, or names of classes, each of which has one logit,
            with one more for the background, for a softmax; None means 1.
        width: Channels at full resolution; each scale has twice those of the finer one.
        depth: Number of times that the resolution is halved.
        prior: Expected fraction of each class, which the untrained net gives; with names, of all
            together.
        standardise: Scale each channel to mean 0 and standard deviation 1 first, using running
            statistics of the training images. The zeros that convolutions pad with are then the
            mean and not black, which looks like the edge of a part.
        weights: File that the net starts from, see `load_weights_file`.

    Raises:
        ConfigError: A size is not positive, or the prior is no fraction.
    """

    layers: ClassVar = Layers2d

    def __init__(
        self,
        *,
        channels: int = 3,
        classes: int | Sequence[str] | None = 1,
        width: int = 16,
        depth: int = 3,
        prior: float = 0.1,
        standardise: bool = False,
        weights: PathText | None = None,
    ) -> None:
        super().__init__()
        bias = prior_logits(classes, prior)
        classes = len(bias)
        check_counts(channels=channels, classes=classes, width=width)
        check_count("depth", depth, 1, DEEPEST)
        self.depth = depth
        widths = [width * 2**scale for scale in range(depth + 1)]
        layers = self.layers
        self.standardise = layers.norm(channels, affine=False) if standardise else nn.Identity()
        self.stem = _convolve_twice(layers, channels, width)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.down.append(_convolve_twice(layers, fine, coarse, stride=2))
        for fine, coarse in reversed(list(pairwise(widths))):
            self.up.append(_convolve_twice(layers, fine + coarse, fine))
        self.head = layers.convolution(width, classes, 1)
        with torch.no_grad():
            self.head.bias.copy_(bias)  # type: ignore[union-attr]  # it has one
        # Of one channel torch cannot see how images lie: the weights decide the format of what
        # follows.
        self.to(memory_format=layers.memory_format)  # type: ignore[call-overload]
        load_weights_file(self, weights)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel.

        Args:
            images: [B, C, H, W] float32 in 0..1, with any H and W.

        Returns:
            Logits [B, classes, H, W].
        """
        sides = images.shape[2:]
        padded = pad_sides(images, 2**self.depth)
        padded = padded.contiguous(memory_format=self.layers.memory_format)
        features: Tensor = self.stem(self.standardise(padded))
        finer_features = []
        for layer in self.down:
            finer_features.append(features)
            features = layer(features)
        for layer in self.up:
            doubled = double_resolution(features, self.layers)
            features = layer(torch.cat((finer_features.pop(), doubled), dim=1))
        logits = run_in_float32(self.head, features)
        inside: tuple[Any, ...] = (..., *map(slice, sides))
        return logits[inside]


class VolumeUNet(UNet):
    """`UNet` of volumes, with three axes instead of two and trilinear upsampling.

    See Cicek et al., "3D U-Net", MICCAI 2016. It maps [B, C, D, H, W] to [B, classes, D, H, W].
    """

    layers: ClassVar = Layers3d


def double_resolution(features: Tensor, layers: type[Layers2d]) -> Tensor:
    """Upsample [B, C, H, W] to [B, C, 2 H, 2 W], with a gradient in channels-last format.

    The gradient of one part of a concatenation is a view with gaps, which torch would treat as
    another format and copy; the backward of the interpolation then takes five times as long on a
    CPU.
    """
    finer = F.interpolate(features, scale_factor=2.0, mode=layers.finer, align_corners=False)
    if finer.requires_grad and not torch.compiler.is_compiling():
        close_gaps = partial(_close_gaps, memory_format=layers.memory_format)
        finer.register_hook(close_gaps)  # type: ignore[no-untyped-call]
    return finer


def _close_gaps(gradient: Tensor | None, memory_format: torch.memory_format) -> Tensor | None:
    # None where autograd leaves a gradient undefined.
    return None if gradient is None else gradient.contiguous(memory_format=memory_format)


def prior_logits(classes: int | Sequence[str] | None, prior: float) -> Tensor:
    """Return the logits of each pixel before anything is learned.

    Args:
        classes: Number of logits, or names of classes, each of which has one logit, with one more
            for the background; None means one.
        prior: Expected fraction of each class; with names, of all together.

    Returns:
        Logits [K] float32.

    Raises:
        ConfigError: The prior is no fraction.
    """
    if not 0 < prior < 1:
        raise ConfigError(f"prior={prior}: need 0 < prior < 1")
    if isinstance(classes, int):
        count = max(classes, 0)
        named = 0
    else:
        named = len(classes or ())
        count = named + 1  # of the background too; without names it is the one of a defect
    bias = torch.full((count,), math.log(prior / (1 - prior) / max(1, named)))
    if named:
        bias[0] = 0
    return bias


def _convolve_twice(
    layers: type[Layers2d], inputs: int, outputs: int, *, stride: int = 1
) -> nn.Sequential:
    first = convolve(layers, inputs, outputs, stride)
    return nn.Sequential(*first, *convolve(layers, outputs, outputs, 1))


def convolve(
    layers: type[Layers2d], inputs: int, outputs: int, stride: int
) -> tuple[nn.Module, ...]:
    """Return a 3 x 3 convolution with its normalization and activation."""
    # Batch normalisation, because in evaluation it is local: a tile of an image gets what the whole
    # image would.
    convolution = layers.convolution(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return convolution, layers.norm(outputs), nn.ReLU(inplace=True)


def normalise_contrast(images: Tensor) -> Tensor:
    """Subtract each channel's local mean, and give references the target's local contrast."""
    images = images - smooth(images)
    energy = smooth(images * images).add(1e-4).sqrt()
    return images * (energy[:, :1] / energy)


def align(target: Tensor, references: Tensor) -> Tensor:
    """Return references shifted by up to 1.5 px onto the target.

    Args:
        target: [B, 1, H, W] float32.
        references: [B, R, H, W] float32.

    Returns:
        [B, R, H, W] float32.
    """
    gx, gy = _gradients(references)
    # Differences too large for a shift are defects; they are clipped so as not to bias the estimate.
    reach = _LARGEST_SHIFT_PX * (gx.abs() + gy.abs()) + 0.02
    difference = (target - references).clamp(-reach, reach)
    # Least squares of the gradients in each window: two equations for the shift, solved by Cramer.
    products = (gx * gx, gy * gy, gx * gy, gx * difference, gy * difference)
    sums = smooth(torch.cat(products, dim=1), upsample=False)
    xx, yy, xy, xd, yd = sums.chunk(5, dim=1)
    xx = xx + _FLOOR
    yy = yy + _FLOOR
    determinant = (xx * yy - xy * xy).repeat(1, 2, 1, 1)
    shift = torch.cat((yy * xd - xy * yd, xx * yd - xy * xd), dim=1) / determinant
    u, v = _upsample(shift.clamp(-_LARGEST_SHIFT_PX, _LARGEST_SHIFT_PX), references).chunk(2, dim=1)
    return _warp(references, u, v)


def smooth(images: Tensor, *, upsample: bool = True) -> Tensor:
    """Return the mean over about 36 x 36 px, computed at a quarter of the resolution.

    Args:
        images: Images [B, C, H, W].
        upsample: Return the result at full resolution; otherwise [B, C, ceil(H / 4), ceil(W / 4)].
    """
    pooled = F.avg_pool2d(images, _POOL_PX, ceil_mode=True, count_include_pad=False)
    pad = _WINDOW // 2
    pooled = F.avg_pool2d(pooled, (_WINDOW, 1), 1, (pad, 0), count_include_pad=False)
    pooled = F.avg_pool2d(pooled, (1, _WINDOW), 1, (0, pad), count_include_pad=False)
    return _upsample(pooled, images) if upsample else pooled


def _upsample(pooled: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape[-2:]
    full = F.interpolate(pooled, scale_factor=_POOL_PX, mode="bilinear", align_corners=False)
    return full[..., :height, :width]


def _gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    gx = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    gy = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    return gx, gy


def _warp(images: Tensor, u: Tensor, v: Tensor) -> Tensor:
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    x = (columns + u + 0.5) * 2 / width - 1
    y = (rows + v + 0.5) * 2 / height - 1
    places = torch.stack((x, y), dim=-1)
    flat = images.reshape(batch * channels, 1, height, width)
    moved = F.grid_sample(flat, places.flatten(0, 1), padding_mode="border", align_corners=False)
    return moved.view_as(images)


class CompareNet(nn.Module):
    """Computes differences first, then applies a few convolutions at full resolution.

    A net with raw images as input has to learn to subtract them. Here the references are registered
    to the target (up to 1.5 px), and the convolutions see only the difference to each reference and
    what both have in common. They therefore learn what a difference looks like, not what the
    stripes look like.

    There is no normalization layer, because the input is already normalized. The result for a
    sample therefore does not depend on its batch, in training as well as in micro-batches.

    Args:
        width: Number of channels of each layer.
        depth: Number of 3 x 3 convolutions before the last one.
        prior: Expected fraction of defect pixels, which the untrained net gives.
        weights: File that the net starts from, see `load_weights_file`.

    Raises:
        ConfigError: A size is not positive, or the prior is no fraction.
    """

    def __init__(
        self,
        *,
        width: int = 16,
        depth: int = 3,
        prior: float = 1e-3,
        weights: PathText | None = None,
    ) -> None:
        super().__init__()
        check_counts(width=width, depth=depth)
        layers: list[nn.Module] = []
        for inputs in (_FEATURES, *[width] * (depth - 1)):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, 1, 1)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # a Conv2d without bias has None
        self.head.bias = nn.Parameter(prior_logits(1, prior))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, weights)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of defect pixels.

        Args:
            images: [B, 3, H, W] float32 in 0..1, with target, ref1, ref2 and any H and W.

        Returns:
            Logits [B, 1, H, W].
        """
        # Few channels at full resolution: channels last saves a quarter of a training step on the
        # CPU.
        features = compare(images).contiguous(memory_format=torch.channels_last)
        features = features.to(images.dtype)  # that of the weights, if not of autocast
        return run_in_float32(self.head, self.layers(features))


@torch.no_grad()
def compare(images: Tensor) -> Tensor:
    """Compare the target with its references, in float32 regardless of the run's precision.

    Args:
        images: [B, 3, H, W] float32 in 0..1: target, ref1, ref2.

    Returns:
        [B, 5, H, W] float32: plain difference to each reference, difference to each registered
        reference, and the smallest of the four if all have the same sign.
    """
    with torch.autocast(images.device.type, enabled=False):
        normal = normalise_contrast(images.float())
        target = normal[:, :1]
        references = normal[:, 1:]
        plain = target - references
        registered = target - align(target, references)
        registered = registered - smooth(registered.clamp(-0.05, 0.05))
        both = torch.cat((plain, registered), dim=1)
        agreed = F.relu(both.amin(1, keepdim=True)) - F.relu((-both).amin(1, keepdim=True))
        return _SCALE * torch.cat((both, agreed), dim=1)
