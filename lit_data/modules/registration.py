"""References brought into register with the target, so that what is left over is a difference and not a shift.

Lucas and Kanade, "An iterative image registration technique with an application to stereo vision", IJCAI 1981: within a
window, the shift (u, v) minimises the sum of (target - reference - u * gx - v * gy)^2. All functions take
[B, C, H, W] float32 of any H and W and work on the device of their input.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

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
