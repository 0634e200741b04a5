"""Families that change a region of a surface, and their outlines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import (
    Family,
    Floats,
    Parameters,
    Range,
    spread,
    square_window,
)
from lit_data.synthesis.outlines import WOBBLE, blob, real_shape

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Family):
    """A region with a wavy outline, or that of a real defect.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        size_px: Longer side.
        elongation: Longer side over shorter one, for wavy outlines.
        shapes_from: Folder of masks of real defects, whose pieces are the outlines; none draws wavy
            ones.
    """

    size_px: Range = (6.0, 28.0)
    elongation: Range = (1.0, 2.5)
    shapes_from: str | None = None

    outline: ClassVar[tuple[str, ...]] = ("half_px", "half_across_px", "angle", "seed_y", "seed_x")
    soft: ClassVar[float] = 0.0
    """Width of the edge in fractions of the shorter half axis."""

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        half = spread(draws[:, 0], self.size_px) / 2
        return {
            "half_px": half,
            "half_across_px": half / spread(draws[:, 1], self.elongation),
            "angle": draws[:, 2] * np.float32(2 * np.pi),
            "seed_y": draws[:, 3],
            "seed_x": draws[:, 4],
        }

    @override
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
        if self.shapes_from is not None:
            return square_window(parameters["half_px"] * np.float32(np.sqrt(2)))
        half_px = parameters["half_px"]
        # An edge of a pixel across is stretched along with the ellipse.
        edge_px = np.maximum(half_px * self.soft, half_px / parameters["half_across_px"])
        return square_window(half_px * np.float32(1 + 2 * WOBBLE) + edge_px / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        if self.shapes_from is None:
            return blob(windows, parameters, self.soft)
        return real_shape(windows, parameters, self.shapes_from)


REACH_PX: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Blur(Region):
    """A region seen through a Gaussian, which is cut at `REACH_PX`.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `sigma_px`.
        contrast: Not used.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        sigma_px: Standard deviation of the Gaussian.
    """

    sigma_px: Range = (0.7, 1.5)

    name: ClassVar[str] = "blur"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "sigma_px")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        sigma = {"sigma_px": spread(draws[:, 5], self.sigma_px)}
        return super(Blur, self).sample(draws, variant) | sigma

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        import torch

        windows = pixels.windows
        offset = torch.arange(2 * REACH_PX + 1, device=windows.device) - REACH_PX
        weights = (-(offset.square() / (2 * parameters["sigma_px"].square()))).exp_()
        weights = weights / weights.sum(2, keepdim=True)
        # Whole windows: neighbours share nearly all that is read for them.
        blurred = windows.canvas.read_channels(windows.row, *windows.find_pixels(REACH_PX))
        for axis, length in enumerate(windows.size_px, start=1):
            total = blurred.new_zeros(())
            for n in range(len(offset)):
                total = total + blurred.narrow(axis, n, length) * weights[:, :, n, None, None]
            blurred = total
        return (blurred[pixels.at] - pixels.before) * pixels.cover[:, None]


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
        distance_px: Distance of that place, along any direction.
    """

    distance_px: Range = (10.0, 48.0)

    name: ClassVar[str] = "cut_paste"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "shift_y", "shift_x")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        direction = draws[:, 5] * np.float32(2 * np.pi)
        distance = spread(draws[:, 6], self.distance_px)
        shift = {
            "shift_y": np.rint(distance * np.sin(direction)),
            "shift_x": np.rint(distance * np.cos(direction)),
        }
        return super(CutPaste, self).sample(draws, variant) | shift

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        shift_y = pixels.of_each(parameters["shift_y"]).view(-1).long()
        shift_x = pixels.of_each(parameters["shift_x"]).view(-1).long()
        source = pixels.look(pixels.y + shift_y, pixels.x + shift_x)
        return (source - pixels.before) * pixels.cover[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift(CutPaste):
    """A region that was printed a few pixels out of place; arguments as for `CutPaste`."""

    size_px: Range = (12.0, 40.0)
    distance_px: Range = (1.5, 4.0)

    name: ClassVar[str] = "shift"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stain(Region):
    """A region with a soft edge, brighter or darker; the arguments are those of `Region`."""

    name: ClassVar[str] = "stain"
    parameters: ClassVar[tuple[str, ...]] = Region.outline
    turns_inwards: ClassVar[bool] = True
    soft: ClassVar[float] = 0.8
