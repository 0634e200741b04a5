"""`PatchStitcher`: overlapping patch predictions become one map for each image."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lit_data.grid import PatchGrid

Map = NDArray[np.float32]


class PatchStitcher:
    """Blends patches as they arrive and hands out each image when its last patch is in.

    Where patches overlap, their values are averaged with weights that fall linearly towards a patch's border, so no
    seam shows. Memory holds only images that are under way.

    Args:
        grid: The patches of all images.
    """

    def __init__(self, grid: PatchGrid) -> None:
        self._grid = grid
        self._weight = _tent(grid.patch_px[0])[:, None] * _tent(grid.patch_px[1])
        self._open: dict[int, tuple[Map, Map]] = {}
        self._missing: dict[int, int] = {}

    def add(self, patches: Tensor, image_index: Tensor, position: Tensor) -> Iterator[tuple[int, Map]]:
        """Take a batch of patches.

        Args:
            patches: [B, 1, h, w] values.
            image_index: [B] int64, number of each patch's image.
            position: [B, 2] int64, (y, x) of each patch in its image, px.

        Yields:
            For each image that is now complete its number and its [H, W] float32 map.
        """
        values = patches.detach().float().cpu().numpy()[:, 0]
        for value, image, (top, left) in zip(values, image_index.tolist(), position.tolist(), strict=True):
            self._blend(value, image, top, left)
            self._missing[image] -= 1
            if self._missing[image] == 0:
                del self._missing[image]
                total, weight = self._open.pop(image)
                # Pixels that no patch covers (edges=drop) stay 0.
                yield image, np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)

    def _blend(self, value: Map, image: int, top: int, left: int) -> None:
        if image not in self._open:
            size = int(self._grid.heights_px[image]), int(self._grid.widths_px[image])
            self._open[image] = np.zeros(size, np.float32), np.zeros(size, np.float32)
            self._missing[image] = len(self._grid.patches_of(image))
        total, weight = self._open[image]
        part = np.s_[top : top + value.shape[0], left : left + value.shape[1]]
        height, width = total[part].shape  # smaller than the patch where it reaches past the edge (edges=pad)
        total[part] += value[:height, :width] * self._weight[:height, :width]
        weight[part] += self._weight[:height, :width]


def _tent(length: int) -> Map:
    steps = np.arange(length)
    return (np.minimum(steps, steps[::-1]) + 1).astype(np.float32)
