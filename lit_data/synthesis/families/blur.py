"""Regions that are out of focus, or smeared."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Floats, Parameters, Range, spread
from lit_data.synthesis.families.region import Region

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels

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
        return super(Blur, self).sample(draws, variant) | {"sigma_px": spread(draws[:, 5], self.sigma_px)}

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        import torch

        windows, (height, width) = pixels.windows, pixels.windows.size_px
        offset = torch.arange(2 * REACH_PX + 1, device=windows.device) - REACH_PX
        weights = (-(offset.square() / (2 * parameters["sigma_px"].square()))).exp_()
        weights = weights / weights.sum(2, keepdim=True)
        # Whole windows: neighbours share nearly all that is read for them.
        blurred = windows.canvas.read_channels(windows.row, *windows.find_pixels(REACH_PX))
        for axis, length in ((1, height), (2, width)):
            shifted = (blurred.narrow(axis, n, length) * weights[:, :, n, None, None] for n in range(len(offset)))
            blurred = sum(shifted, start=blurred.new_zeros(()))
        return (blurred[pixels.at] - pixels.before) * pixels.cover[:, None]
