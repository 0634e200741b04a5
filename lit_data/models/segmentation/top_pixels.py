"""The score of an image: the mean of its highest pixels, of which patches or slabs each hold some."""

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
        pixel: [n] int64 number of the pixel in it; -1 where it is not known.
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
    """Highest pixels of patches, without those that are ignored or were reflect-padded.

    Args:
        scores: [B, 1, H, W] float in 0..1.
        masks: The same shape; 255 where pixels are ignored.
        images: [B] int64, the number of each patch's image.
        positions: [B, 2] int64 (y, x) of the patch in its image, px; None leaves the pixels without
            numbers.
        sizes_px: [images, 2] int64 (height, width); None takes all pixels as those of the image.
        count: How many of each patch.
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
    """Highest pixels of each image, each pixel once.

    Where several patches show it, the highest score counts.

    Args:
        top: Of any patches, on any device.
        limits: How many of an image are kept; or [images] for each number of an image.

    Returns:
        Those on the host, by image and falling score.
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
    """Mean of the pixels of each image.

    Args:
        top: As `keep_highest` gives them.
        count: Images.

    Returns:
        [count] float64 on the host, so that it is the same on every device; 0 where an image has no
        pixels.
    """
    pixels = torch.bincount(top.image, minlength=count)
    return torch.bincount(top.image, top.score.double(), count) / pixels.clamp(min=1)
