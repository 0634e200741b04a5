"""Weights of overlapping tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

Blend = Literal["constant", "gaussian"]
Weights = np.ndarray[tuple[int], np.dtype[np.float64]]

_SIGMA: Final = 0.125
"""Standard deviation of the bell in tiles; MONAI's default, after nnU-Net."""


@dataclass(frozen=True, slots=True)
class Seams:
    """How neighbours share what both cover.

    Attributes:
        blend: `constant` counts all that is not in a margin alike, `gaussian` less with the distance from the middle.
        margin_px: Pixels next to a seam-side border that count nothing. None: half of what both cover for `constant`,
            a quarter for `gaussian`.
    """

    blend: Blend
    margin_px: int | None

    def margins(self, shared_px: int) -> tuple[int, int]:
        """Margins of the tile before and of that behind a seam where they share so many pixels."""
        if self.margin_px is not None:
            return self.margin_px, self.margin_px
        if self.blend == "constant":
            return shared_px // 2, shared_px - shared_px // 2  # each pixel from one tile
        return shared_px // 4, shared_px // 4


def weigh_tiles(starts: Sequence[int], tile_px: int, seams: Seams) -> list[Weights]:
    """Weights along one axis; a tile's weight at a pixel is the product of those of both axes.

    Near a seam-side border a net sees zeros (or a reflection) where the image goes on, as far as it reaches: half its
    receptive field. Such pixels count nothing as long as they lie within the margin, and the neighbour covers them.
    Borders of the image itself have no margin, as there the net sees what it would see in the whole image.
    So if the margin is at least the reach, every pixel that counts is that of the whole image, and so is any average:

    - `constant`, margins by default: where the overlap is at least the receptive field;
    - `gaussian`: there too if ``margin_px`` is the reach, which `TiledPredictor` measures; with margins by default
      where it is at least twice as large;
    - nets whose output depends on all of the tile (attention, norms that average over it): never, and there `gaussian`
      hides the seams.

    Args:
        starts: First pixel of each tile, ascending.
        tile_px: Length of each.
        seams: The rule.

    Returns:
        For each tile [tile_px] weights that sum to 1 at each pixel.
    """
    raw = [_shape(tile_px, seams.blend) for _ in starts]
    for tile in range(len(starts) - 1):
        before, behind = seams.margins(starts[tile] + tile_px - starts[tile + 1])
        raw[tile][tile_px - before :] = 0
        raw[tile + 1][:behind] = 0
    total = np.zeros(starts[-1] + tile_px)
    for start, weights in zip(starts, raw, strict=True):
        total[start : start + tile_px] += weights
    return [weights / total[start : start + tile_px] for start, weights in zip(starts, raw, strict=True)]


def _shape(tile_px: int, blend: Blend) -> Weights:
    if blend == "constant":
        return np.ones(tile_px)
    places = (np.arange(tile_px, dtype=np.float64) - (tile_px - 1) / 2) / (_SIGMA * tile_px)
    return np.exp(-0.5 * places**2)
