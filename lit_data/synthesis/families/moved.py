"""Regions that show another place of the same image: cut and pasted, or printed out of place."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Floats, Parameters, Range, spread
from lit_data.synthesis.families.region import Region

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPaste(Region):
    """A region that was cut from another place of the image (Li et al., "CutPaste", CVPR 2021).

    Args:
        weight: See `Family`.
        amplitude: Not used: the other place is what it is.
        contrast: Not used.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        distance_px: How far away that place is, along any direction.
    """

    distance_px: Range = (10.0, 48.0)

    name: ClassVar[str] = "cut_paste"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "shift_y", "shift_x")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        way, distance = draws[:, 5] * np.float32(2 * np.pi), spread(draws[:, 6], self.distance_px)
        shift = {"shift_y": np.rint(distance * np.sin(way)), "shift_x": np.rint(distance * np.cos(way))}
        return super(CutPaste, self).sample(draws, variant) | shift

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        shift_y, shift_x = (pixels.of_each(parameters[name]).view(-1).long() for name in ("shift_y", "shift_x"))
        return (pixels.look(pixels.y + shift_y, pixels.x + shift_x) - pixels.before) * pixels.cover[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift(CutPaste):
    """A region that was printed a few pixels out of place; the arguments are those of `CutPaste`."""

    size_px: Range = (12.0, 40.0)
    distance_px: Range = (1.5, 4.0)

    name: ClassVar[str] = "shift"
