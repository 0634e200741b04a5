"""Textures that defects show: places of images in a folder, or smooth noise."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.readers import read_image
from lit_data.synthesis.fields import FIELD_PX, smooth_field

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TEXTURE_PX: Final = 256
_STRIDE: Final = 4
"""The smooth field is taken at every fourth pixel, else its bumps were larger than most defects."""


@lru_cache(maxsize=8)
def load_textures(folder: str | None) -> NDArray[np.float32]:
    """The middle of every image below a folder: first channel, mirrored where it is too small.

    Args:
        folder: Images of any depth; none gives smooth noise.

    Returns:
        [T, TEXTURE_PX, TEXTURE_PX] float32 with mean 0 and variance 1 each, in the order of the paths.

    Raises:
        DataError: The folder is missing or holds no image.
    """
    if folder is None:
        rows = np.arange(TEXTURE_PX) * _STRIDE % FIELD_PX
        return smooth_field()[rows[:, None], rows[None, :]][None]
    if not Path(folder).is_dir():
        raise DataError(f"textures_from={folder} is not a folder: give one that holds images")
    return np.stack([_standardise(read_image(path)[0]) for path in find_images(Path(folder)).paths])


@lru_cache(maxsize=8)
def textures_on(folder: str | None, device: "torch.device") -> "Tensor":
    """`load_textures` on a device."""
    import torch

    with torch.inference_mode(mode=False):
        return torch.from_numpy(load_textures(folder)).to(device)


def _standardise(image: NDArray[np.generic]) -> NDArray[np.float32]:
    pixels = image.astype(np.float32)
    for axis, length in enumerate(pixels.shape):
        start, index = max(0, length - TEXTURE_PX) // 2, np.arange(TEXTURE_PX)
        period = max(1, 2 * (length - 1))
        folded = (index + start) % period
        pixels = pixels.take(np.minimum(folded, period - folded), axis=axis)
    return np.asarray((pixels - pixels.mean()) / max(float(pixels.std()), 1e-6), np.float32)
