"""Stripes where there should be none."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Family, Floats, Parameters, Range, spread, square_window
from lit_data.synthesis.outlines import stretch

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraStripe(Family):
    """A straight bright or dark band along the stripes, whose way is found in the image.

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
        return {"length_px": spread(draws[:, 0], self.length_px), "width_px": spread(draws[:, 1], self.width_px)}

    @override
    def window_px(self, parameters: dict[str, Floats], shape_px: tuple[int, int]) -> NDArray[np.int64]:
        return square_window(np.maximum(parameters["length_px"], parameters["width_px"]) / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        return stretch(windows, parameters)
