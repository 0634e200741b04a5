"""`CompareNet`: a small fully convolutional net that sees how the target differs from both references."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_data.errors import ConfigError

_POOL_PX: Final = 4
_WINDOW: Final = 9  # pooled pixels, so 36 px: several stripes, but local enough for a drift along the image
_LARGEST_SHIFT_PX: Final = 1.5
_FLOOR: Final = 2e-4  # keeps flat regions, which say nothing about the shift, at shift 0


def normalise_contrast(images: Tensor) -> Tensor:
    """Take away each channel's local mean, and give references the target's local contrast."""
    images = images - smooth(images)
    energy = smooth(images * images).add(1e-4).sqrt()
    return images * (energy[:, :1] / energy)


def align(target: Tensor, references: Tensor) -> Tensor:
    """References moved by up to 1.5 px onto the target.

    Args:
        target: [B, 1, H, W] float32.
        references: [B, R, H, W] float32.

    Returns:
        [B, R, H, W] float32.
    """
    gx, gy = _gradients(references)
    # Larger differences than a shift can explain are defects; cut, they do not pull the estimate.
    reach = _LARGEST_SHIFT_PX * (gx.abs() + gy.abs()) + 0.02
    difference = (target - references).clamp(-reach, reach)
    sums = smooth(torch.cat((gx * gx, gy * gy, gx * gy, gx * difference, gy * difference), dim=1), upsample=False)
    xx, yy, xy, xd, yd = sums.chunk(5, dim=1)
    xx, yy = xx + _FLOOR, yy + _FLOOR
    shift = torch.cat((yy * xd - xy * yd, xx * yd - xy * xd), dim=1) / (xx * yy - xy * xy).repeat(1, 2, 1, 1)
    u, v = _upsample(shift.clamp(-_LARGEST_SHIFT_PX, _LARGEST_SHIFT_PX), references).chunk(2, dim=1)
    return _warp(references, u, v)


def smooth(images: Tensor, *, upsample: bool = True) -> Tensor:
    """Mean over about 36 x 36 px, computed at a quarter of the resolution.

    Args:
        images: [B, C, H, W].
        upsample: Give the result at full resolution; otherwise [B, C, ceil(H / 4), ceil(W / 4)].
    """
    pooled = F.avg_pool2d(images, _POOL_PX, ceil_mode=True, count_include_pad=False)
    pad = _WINDOW // 2
    pooled = F.avg_pool2d(pooled, (_WINDOW, 1), 1, (pad, 0), count_include_pad=False)
    pooled = F.avg_pool2d(pooled, (1, _WINDOW), 1, (0, pad), count_include_pad=False)
    return _upsample(pooled, images) if upsample else pooled


def _upsample(pooled: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape[-2:]
    whole = F.interpolate(pooled, scale_factor=_POOL_PX, mode="bilinear", align_corners=False)
    return whole[..., :height, :width]


def _gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    gx = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    gy = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    return gx, gy


def _warp(images: Tensor, u: Tensor, v: Tensor) -> Tensor:
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    places = torch.stack(((columns + u + 0.5) * 2 / width - 1, (rows + v + 0.5) * 2 / height - 1), dim=-1)
    flat = images.reshape(batch * channels, 1, height, width)
    moved = F.grid_sample(flat, places.flatten(0, 1), padding_mode="border", align_corners=False)
    return moved.view_as(images)


_FEATURES = 5
_SCALE = 30.0  # brings differences of a few hundredths to the order of 1


class CompareNet(nn.Module):
    """Differences first, then a few convolutions at full resolution.

    A net that is fed raw images spends its training on finding out that it should subtract. Here the references are
    registered to the target (up to 1.5 px) and the differences to each, and what both agree on, are all that the
    convolutions see; so they learn what a difference looks like, not what the stripes look like.

    There is no normalisation layer: the input is normalised already, and the result for a sample then does not depend
    on its batch, whether in training or in micro-batches.

    Args:
        width: Channels of each layer.
        depth: 3 x 3 convolutions before the last one.
        prior: Expected share of defect pixels, the output of the untrained net.

    Raises:
        ConfigError: A size is not positive, or the prior is no share.
    """

    def __init__(self, *, width: int = 16, depth: int = 3, prior: float = 1e-3) -> None:
        super().__init__()
        if width < 1 or depth < 1 or not 0 < prior < 1:
            raise ConfigError(f"width={width}, depth={depth}, prior={prior}: need width, depth >= 1 and 0 < prior < 1")
        inputs = [_FEATURES] + [width] * (depth - 1)
        self.layers = nn.Sequential(
            *(layer for count in inputs for layer in (nn.Conv2d(count, width, 3, padding=1), nn.ReLU(inplace=True)))
        )
        self.head = nn.Conv2d(width, 1, 1)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # a Conv2d without bias has None
        nn.init.constant_(self.head.bias, math.log(prior / (1 - prior)))  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Logits of defect pixels.

        Args:
            images: [B, 3, H, W] float32 in 0..1: target, ref1, ref2; any H and W.

        Returns:
            [B, 1, H, W] logits.
        """
        # Few channels at full resolution: channels last saves a quarter of a training step on the CPU.
        features = compare(images).contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.layers(features))
        return logits


@torch.no_grad()
def compare(images: Tensor) -> Tensor:
    """How the target differs from its references, in float32 whatever the precision of the run.

    Args:
        images: [B, 3, H, W] float32 in 0..1: target, ref1, ref2.

    Returns:
        [B, 5, H, W] float32: plain difference to each reference, difference to each registered reference, and the
        smallest of the four where all have the same sign.
    """
    with torch.autocast(images.device.type, enabled=False):
        normal = normalise_contrast(images.float())
        target, references = normal[:, :1], normal[:, 1:]
        plain = target - references
        registered = target - align(target, references)
        registered = registered - smooth(registered.clamp(-0.05, 0.05))
        both = torch.cat((plain, registered), dim=1)
        agreed = F.relu(both.amin(1, keepdim=True)) - F.relu((-both).amin(1, keepdim=True))
        return _SCALE * torch.cat((both, agreed), dim=1)
