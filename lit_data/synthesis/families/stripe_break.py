"""Pieces of a stripe that are missing, or gaps that are filled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.errors import ConfigError
from lit_data.synthesis.families.base import (
    Family,
    Floats,
    Parameters,
    Range,
    spread,
    square_window,
)
from lit_data.synthesis.outlines import stretch

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraStripe(Family):
    """A straight bright or dark band along the stripes, whose direction is found in the image.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        length_px: Along the stripes.
        width_px: Across them.
    """

    length_px: Range = (12.0, 56.0)
    width_px: Range = (1.0, 4.0)

    name: ClassVar[str] = "extra_stripe"
    parameters: ClassVar[tuple[str, ...]] = ("length_px", "width_px")
    turns_inwards: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        return {
            "length_px": spread(draws[:, 0], self.length_px),
            "width_px": spread(draws[:, 1], self.width_px),
        }

    @override
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
        return square_window(np.maximum(parameters["length_px"], parameters["width_px"]) / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        return stretch(windows, parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeBreak(Family):
    """A stretch of a stripe where the ground shows through.

    Bright stripes get the darkest value across, dark ones the brightest; their direction is found
    in the image.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        length_px: Along the stripes; more than the patch is long takes a stripe away.
        width_px: Across them.
        opacity: Fraction of the stripe that is gone.
        reach_px: Distance across in which the ground is looked for; at least half that of stripes.
    """

    length_px: Range = (3.0, 12.0)
    width_px: Range = (3.0, 12.0)
    opacity: Range = (0.5, 1.0)
    reach_px: int = 8

    name: ClassVar[str] = "stripe_break"
    parameters: ClassVar[tuple[str, ...]] = ("length_px", "width_px", "opacity")
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the reach too."""
        if self.reach_px < 1:
            raise ConfigError(f"stripe_break.reach_px={self.reach_px!r} must be at least 1")
        Family.__post_init__(self)

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        return {
            "length_px": spread(draws[:, 0], self.length_px),
            "width_px": spread(draws[:, 1], self.width_px),
            "opacity": spread(draws[:, 2], self.opacity),
        }

    @override
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
        return square_window(np.maximum(parameters["length_px"], parameters["width_px"]) / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        return stretch(windows, parameters)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        import torch

        runs_down = pixels.of_each(pixels.windows.runs_down)[:, None]
        across = torch.arange(-self.reach_px, self.reach_px + 1, device=pixels.y.device)
        y = pixels.y[:, None] + across * ~runs_down
        x = pixels.x[:, None] + across * runs_down
        # With the sign of the strength the largest value is the brightest, or the darkest.
        sign = pixels.strength.sign()[:, None]
        ground = (pixels.look(y, x) * sign[..., None]).amax(1) * sign
        opacity = pixels.cover * pixels.of_each(parameters["opacity"]).view(-1)
        return (ground - pixels.before) * opacity[:, None]
