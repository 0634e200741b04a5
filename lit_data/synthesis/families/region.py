"""What the families share that change a region of a surface: its outline."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Family, Floats, Parameters, Range, spread, square_window
from lit_data.synthesis.outlines import WOBBLE, blob, real_shape

if TYPE_CHECKING:
    from torch import Tensor

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
        shapes_from: Folder of masks of real defects, whose pieces are the outlines; none draws wavy ones.
    """

    size_px: Range = (6.0, 28.0)
    elongation: Range = (1.0, 2.5)
    shapes_from: str | None = None

    outline: ClassVar[tuple[str, ...]] = ("half_px", "half_across_px", "angle", "seed_y", "seed_x")
    soft: ClassVar[float] = 0.0
    """Width of the edge in shares of the shorter half axis."""

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
    def window_px(self, parameters: dict[str, Floats], shape_px: tuple[int, int]) -> NDArray[np.int64]:
        if self.shapes_from is not None:
            return square_window(parameters["half_px"] * np.float32(np.sqrt(2)))
        edge_px = np.maximum(parameters["half_px"] * self.soft, parameters["half_px"] / parameters["half_across_px"])
        return square_window(parameters["half_px"] * np.float32(1 + 2 * WOBBLE) + edge_px / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        if self.shapes_from is None:
            return blob(windows, parameters, self.soft)
        return real_shape(windows, parameters, self.shapes_from)
