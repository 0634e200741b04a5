"""Dead and hot lines of a camera."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.errors import ConfigError
from lit_data.synthesis.families.base import Family, Floats, Parameters, Range, spread
from lit_data.synthesis.outlines import band

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows

Along = Literal["rows", "columns", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Family):
    """Whole rows or columns that are drawn towards black (dead) or white (hot).

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        along: `rows`, `columns` or `both`; those of a line camera are columns.
        width_px: Lines side by side, whole.
        opacity: 1 is fully dead or hot.
    """

    along: Along = "both"
    width_px: tuple[int, int] = (1, 2)
    opacity: Range = (0.15, 0.6)

    name: ClassVar[str] = "line"
    parameters: ClassVar[tuple[str, ...]] = ("is_column", "width_px", "opacity")

    def __post_init__(self) -> None:
        """Check the direction too, and that widths are whole."""
        check_choice("line.along", self.along, get_args(Along))
        Family.__post_init__(self)
        if any(width < 1 or width % 1 for width in self.width_px):
            raise ConfigError(f"line.width_px={list(self.width_px)} must be whole numbers from 1")

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        columns = {"rows": 0.0, "columns": 1.0, "both": 0.5}[self.along]
        low, high = self.width_px
        return {
            "is_column": (draws[:, 0] < columns).astype(np.float32),
            "width_px": low + np.floor(draws[:, 1] * np.float32(high - low + 1)),
            "opacity": spread(draws[:, 2], self.opacity),
        }

    @override
    def window_px(self, parameters: dict[str, Floats], shape_px: tuple[int, int]) -> NDArray[np.int64]:
        thick = np.full(len(parameters["width_px"]), self.width_px[1] + 2)
        is_column = parameters["is_column"] > 0
        return np.stack(
            (np.where(is_column, shape_px[0] + 1, thick), np.where(is_column, thick, shape_px[1] + 1)), axis=1
        )

    @override
    def place(
        self, y: Floats, x: Floats, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> tuple[Floats, Floats]:
        is_column = parameters["is_column"] > 0
        middle_y, middle_x = (np.float32(length // 2) for length in shape_px)
        # A line of even width lies between two pixels.
        half = np.where(parameters["width_px"] % 2 == 0, np.float32(0.5), np.float32(0))
        return (
            np.where(is_column, middle_y, np.floor(y) + half),
            np.where(is_column, np.floor(x) + half, middle_x),
        )

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        distance = windows.x.where(parameters["is_column"] > 0, windows.y)
        return band(distance, parameters["width_px"] / 2)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        level = (pixels.strength > 0).to(pixels.cover.dtype)[:, None]
        share = pixels.cover * pixels.of_each(parameters["opacity"]).view(-1)
        return (level - pixels.before) * share[:, None]
