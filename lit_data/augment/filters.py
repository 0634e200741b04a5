"""Blur, mean and power whose results for a sample do not depend on the batch around it, to the byte on a CPU."""

import math
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_TRUNCATE: Final = 3.0
"""Standard deviations that a kernel reaches; the rest of the Gaussian is 0.3 %."""
_STEPS: Final = 65536


def gaussian_weights(sigma_px: NDArray[np.float32], largest_px: float) -> NDArray[np.float32]:
    """Kernels along one axis, all as long as the widest needs.

    Args:
        sigma_px: [...] standard deviations; 0 leaves an image as it is.
        largest_px: The largest that may occur.

    Returns:
        [..., taps] float32 with sum 1.
    """
    radius = math.ceil(_TRUNCATE * largest_px)
    distance = np.arange(-radius, radius + 1)
    sigma = np.maximum(sigma_px.astype(np.float64), 1e-3)[..., None]
    weights = np.exp(-(distance**2) / (2 * sigma**2))
    normalised: NDArray[np.float32] = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return normalised


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Convolve each image with a kernel of its own along both axes; the edge is repeated.

    Args:
        images: [B, C, H, W] float32.
        weights: [B, C, taps] float32, taps odd.

    Returns:
        [B, C, H, W] float32.
    """
    height, width = images.shape[-2:]
    taps = weights.shape[-1]
    planes, kernels = images.reshape(1, -1, height, width), weights.reshape(-1, 1, taps)
    count = planes.shape[1]
    if count == 1:  # a single plane would not be a grouped convolution, and be summed in another order
        planes, kernels = planes.expand(1, 2, -1, -1), kernels.expand(2, -1, -1)
    planes = F.pad(planes, [taps // 2] * 4, mode="replicate")
    planes = F.conv2d(planes, kernels[..., None], groups=len(kernels))
    planes = F.conv2d(planes, kernels[:, :, None], groups=len(kernels))
    return planes[:, :count].reshape(images.shape)


def plane_means(images: Tensor) -> Tensor:
    """Mean of each image.

    A row is summed by itself; the rows as whole numbers, whose sum is the same in any order.

    Args:
        images: [B, C, H, W] float32 in 0..1.

    Returns:
        [B, C, 1, 1] float32, within 1 / 65536 of the mean.
    """
    rows = images.sum(dim=3, keepdim=True)
    sums = (rows * _STEPS).to(torch.int64).sum(dim=2, keepdim=True)
    return sums.to(torch.float32) / (_STEPS * images.shape[2] * images.shape[3])


def power(images: Tensor, exponents: Tensor) -> Tensor:
    """Raise each image to its own power.

    Args:
        images: [B, C, H, W] float32, not negative.
        exponents: [B, C, 1, 1] float32.

    Returns:
        [B, C, H, W] float32.
    """
    if images.device.type != "cpu":
        return images.pow(exponents)
    # On a CPU torch rounds the last pixels of each thread's share in another way than the rest; NumPy does not.
    return torch.from_numpy(np.power(images.numpy(), exponents.numpy()))
