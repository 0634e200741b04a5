"""`WholeMasks`: defects of whole images, for evaluation on patches, and AUPIMO."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lit_data.core.grid import PatchGrid
from lit_data.core.types import IGNORED, Array, Doubles, Ints, Size
from lit_data.models.scored import BINS

PIMO_RATES = (1e-5, 1e-4)
_OPEN_IMAGES = 4
"""Number of cached masks; the patches of an image follow each other."""


class Regions(NamedTuple):
    """Marked pixels of a mask.

    Attributes:
        width_px: Width of the mask.
        pixel: [n] numbers of the pixels, row by row.
        weight: [n] one over the number of pixels in each pixel's region (8 neighbors).
        counted_px: Number of pixels of the mask that are not ignored.
    """

    width_px: int
    pixel: Ints
    weight: Doubles
    counted_px: int

    def cut(self, y: int, x: int, shape: Size) -> Doubles:
        """Return the weights of a patch, [h, w]; 0 where nothing is marked."""
        height, width = shape
        ends = y * self.width_px, (y + height) * self.width_px
        first, end = np.searchsorted(self.pixel, ends)
        rows, columns = np.divmod(self.pixel[first:end], self.width_px)
        is_inside = (columns >= x) & (columns < x + width)
        weights = np.zeros(shape)
        weights[rows[is_inside] - y, columns[is_inside] - x] = self.weight[first:end][is_inside]
        return weights


def find_regions(mask: Array) -> Regions:
    """Return the marked pixels of a mask [H, W], with one over the size of their regions."""
    import cv2

    is_marked = (mask > 0.5) & (mask != IGNORED)
    marked_rows = np.flatnonzero(is_marked.any(1))
    width_px = mask.shape[1]
    pixels = [np.zeros(0, np.int64)]
    weights = [np.zeros(0)]
    # No region crosses a row without a mark, and numbers of regions take four bytes a pixel.
    for rows in np.split(marked_rows, np.flatnonzero(np.diff(marked_rows) > 1) + 1):
        if not len(rows):
            continue
        band = is_marked[rows[0] : rows[-1] + 1]
        _, labels = cv2.connectedComponents(band.view(np.uint8), connectivity=8)
        of_pixel = labels[band]
        pixels.append(np.flatnonzero(band) + rows[0] * width_px)
        weights.append(1 / np.bincount(of_pixel)[of_pixel])
    counted_px = int((mask != IGNORED).sum())
    return Regions(width_px, np.concatenate(pixels), np.concatenate(weights), counted_px)


class WholeMasks:
    """Masks of whole images, and the choice of the patch that counts each pixel.

    Args:
        grid: Positions of the patches.
        sizes_px: [images, 2] int64 (height, width) of each image.
        read_mask: Function that returns the mask of an image [H, W], of that size; None without one.
    """

    def __init__(
        self, grid: PatchGrid, sizes_px: Tensor, read_mask: Callable[[int], Array | None]
    ) -> None:
        self._grid = grid
        self._sizes_px = sizes_px.numpy()
        self._read_mask = read_mask
        self.regions_of = lru_cache(_OPEN_IMAGES)(self._find_regions)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a module is scored on the same data

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a file of a module holds none of the data

    @classmethod
    def of(cls, datamodule: object) -> "WholeMasks | None":
        """Return the masks of a datamodule that has those of whole images, else None."""
        parts: list[Any] = []
        for name in ("grid", "image_sizes_px", "read_stored_mask"):
            parts.append(getattr(datamodule, name, None))
        return None if any(part is None for part in parts) else cls(*parts)

    def find_shared(self, images: Tensor, positions: Tensor) -> Tensor:
        """Return True for pixels of patches that another patch counts, or that no image has.

        Args:
            images: [B] int64, the number of each patch's image.
            positions: [B, 2] int64 (y, x) of the patch in its image, in px.

        Returns:
            [B, 1, h, w] bool on the device of the images.
        """
        image = images.cpu().numpy()
        corner = positions.cpu().numpy()
        rows, columns = self._grid.find_owned(image, corner[:, 0], corner[:, 1])
        rest = self._sizes_px[image] - corner
        rows &= np.arange(rows.shape[1]) < rest[:, :1]
        columns &= np.arange(columns.shape[1]) < rest[:, 1:]
        is_counted = rows[:, None, :, None] & columns[:, None, None, :]
        return torch.from_numpy(~is_counted).to(images.device)

    def weigh(self, image: int, corner: tuple[int, int], mask: Array) -> Doubles:
        """Return the weights of the marked pixels of a patch by the regions of their image.

        If the patch shows other defects than the mask of its image, such as synthetic ones, its own
        regions are used.

        Args:
            image: Number of the image.
            corner: (y, x) of the patch in px.
            mask: [h, w] of the patch; 255 also where another patch counts the pixel.

        Returns:
            Weights [n] of the marked pixels, row by row.
        """
        weights = self.regions_of(image).cut(*corner, mask.shape)
        weights[mask == IGNORED] = 0
        is_marked = weights > 0
        if np.array_equal(is_marked, (mask > 0.5) & (mask != IGNORED)):
            return weights[is_marked]
        return find_regions(mask).weight

    def _find_regions(self, image: int) -> Regions:
        mask = self._read_mask(image)
        height, width = self._sizes_px[image].tolist()
        return find_regions(np.zeros((height, width), np.uint8) if mask is None else mask)


def count_bins(images: Tensor, bins: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the counts of equal pairs of an image and a bin.

    Args:
        images: [n] int64 numbers.
        bins: [n] int64 in 0..8191.
        counts: [n] int64.

    Returns:
        Ascending [m] ``image * 8192 + bin``, and their counts, both int64.
    """
    keys, pair_of = torch.unique(images * BINS + bins, return_inverse=True)
    return keys, torch.zeros_like(keys).index_add_(0, pair_of, counts)


def find_aupimo(good: Doubles, keys: Ints, counts: Ints) -> float:
    """Return the mean area under the overlap of each defective image over low false positive rates.

    The rate is the mean over good images of the fraction of their pixels above a threshold, from
    1e-5 to 1e-4 on a logarithmic axis; the overlap is the fraction of the marked pixels of an image
    above it (Bertoldo et al., "AUPIMO: Redefining visual anomaly detection benchmarks with high
    speed and low tolerance", BMVC 2024).

    Args:
        good: [8192] fractions of good images by the bins of their pixels, summed over images.
        keys: Keys of `count_bins` for marked pixels.
        counts: Counts of `count_bins` for marked pixels.

    Returns:
        The area in 0..1; NaN without good or defective images, or if no threshold has a rate of
        1e-4. Rates below the lowest one have the overlap of the scores above all good pixels.
    """
    if not len(keys) or not good.any():
        return math.nan
    rates = good[::-1].cumsum() / good.sum()
    first = int(np.argmax(rates > 0))
    low, high = (math.log(rate) for rate in PIMO_RATES)
    rate_logs = np.log(rates[first:])
    if rate_logs[0] > high:
        return math.nan
    rate_logs = np.r_[min(low, rate_logs[0]), rate_logs[0], rate_logs]
    inside = (rate_logs >= low) & (rate_logs <= high)
    x = np.r_[low, rate_logs[inside], high]
    image_ends = np.flatnonzero(np.diff(keys // BINS)) + 1
    bins_of_images = np.split(keys % BINS, image_ends)
    areas = []
    for bins, pixels in zip(bins_of_images, np.split(counts, image_ends), strict=True):
        histogram = np.bincount(bins, pixels, BINS)
        overlap = histogram[::-1].cumsum() / histogram.sum()
        highest = overlap[first - 1] if first else 0.0
        curve = np.r_[highest, highest, overlap[first:]]
        ends = np.interp((low, high), rate_logs, curve)
        areas.append(np.trapezoid(np.r_[ends[0], curve[inside], ends[1]], x))
    return float(np.mean(areas)) / (high - low)
