"""Scores of images: the mean of their highest pixels, collected from patches or slabs."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import IGNORED, Ints

SCORE_FRACTION = 0.0005
_NOWHERE = -1
_SIDE_PX = 2**31  # no image is wider


class TopPixels(NamedTuple):
    """Some of the highest pixels of images.

    Attributes:
        image: [n] int64 number of the image.
        pixel: [n] int64 number of the pixel in the image; -1 if it is not known.
        score: [n] float32 in 0..1.
    """

    image: Tensor
    pixel: Tensor
    score: Tensor


def take_highest(
    scores: Tensor,
    masks: Tensor,
    images: Tensor,
    positions: Tensor | None,
    sizes_px: Tensor | None,
    count: int,
) -> TopPixels:
    """Return the highest pixels of patches, without ignored and reflect-padded ones.

    Args:
        scores: [B, 1, H, W] float in 0..1.
        masks: The same shape; 255 where pixels are ignored.
        images: [B] int64, the number of each patch's image.
        positions: [B, 2] int64 (y, x) of the patch in its image, in px; None leaves the pixels
            without numbers.
        sizes_px: [images, 2] int64 (height, width); None treats all pixels as part of the image.
        count: Number of pixels to return for each patch.
    """
    height, width = scores.shape[-2:]
    counts = masks != IGNORED
    if positions is not None and sizes_px is not None:
        # Rows and columns from the corner to the edges.
        rest = sizes_px.to(scores.device)[images] - positions
        rows, columns = (torch.arange(length, device=scores.device) for length in (height, width))
        counts &= (rows < rest[:, :1])[:, None, :, None] & (columns < rest[:, 1:])[:, None, None, :]
    counted = scores.detach().float().masked_fill(~counts, -1).flatten(1)
    highest = counted.topk(min(count, height * width))
    pixel = torch.full_like(highest.indices, _NOWHERE)
    if positions is not None:
        y = highest.indices // width + positions[:, :1]
        x = highest.indices % width + positions[:, 1:]
        pixel = y * _SIDE_PX + x
    is_counted = highest.values >= 0
    of_image = images[:, None].expand_as(pixel)
    return TopPixels(of_image[is_counted], pixel[is_counted], highest.values[is_counted])


def keep_highest(top: TopPixels, limits: int | Ints) -> TopPixels:
    """Return the highest pixels of each image, each pixel once.

    If several patches show a pixel, its highest score counts.

    Args:
        top: Pixels of any patches, on any device.
        limits: Number of pixels to keep for an image, or [images] numbers by image.

    Returns:
        Pixels on the host, sorted by image and descending score.
    """
    image, pixel, score = (part.cpu().numpy() for part in top)
    order = np.lexsort((-score, pixel, image))
    image = image[order]
    pixel = pixel[order]
    score = score[order]
    is_same = (image[1:] == image[:-1]) & (pixel[1:] == pixel[:-1]) & (pixel[1:] != _NOWHERE)
    is_first = np.append(True, ~is_same)[: len(image)]
    image = image[is_first]
    pixel = pixel[is_first]
    score = score[is_first]
    order = np.lexsort((-score, image))
    image = image[order]
    pixel = pixel[order]
    score = score[order]
    rank = np.arange(len(image)) - np.searchsorted(image, image)
    is_kept = rank < (limits if isinstance(limits, int) else limits[image])
    return TopPixels(*(torch.from_numpy(part[is_kept]) for part in (image, pixel, score)))


def mean_by_image(top: TopPixels, count: int) -> Tensor:
    """Return the mean of the pixels of each image.

    Args:
        top: Pixels of `keep_highest`.
        count: Number of images.

    Returns:
        Means [count] float64 on the host, so that they are the same for every device; 0 for an
        image without pixels.
    """
    pixels = torch.bincount(top.image, minlength=count)
    return torch.bincount(top.image, top.score.double(), count) / pixels.clamp(min=1)
