"""Defects along a line: dead lines of a camera, scratches, and pieces of stripes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_choice, check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.types import Floats, Ints, Size
from lit_data.synthesis.families.base import (
    Drawn,
    Family,
    Parameters,
    Range,
    band,
    find_extreme,
    spread,
    square_window,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Pixels, Windows


Along = Literal["rows", "columns", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Family):
    """Whole rows or columns that are drawn toward black (dead) or white (hot).

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        along: `rows`, `columns` or `both`; a line camera has columns.
        width_px: Whole number of adjacent lines.
        opacity: Opacity of the line; 1 is fully dead or hot.
    """

    along: Along = "both"
    width_px: tuple[int, int] = (1, 2)
    opacity: Range = (0.15, 0.6)

    name: ClassVar[str] = "line"
    parameters: ClassVar[tuple[str, ...]] = ("is_column", "width_px", "opacity")

    def __post_init__(self) -> None:
        """Also check the direction, and that widths are integers."""
        check_choice("line.along", self.along, get_args(Along))
        Family.__post_init__(self)
        if any(width < 1 or width % 1 for width in self.width_px):
            raise ConfigError(f"line.width_px={list(self.width_px)} must be whole numbers from 1")

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        column_fraction = {"rows": 0.0, "columns": 1.0, "both": 0.5}[self.along]
        low, high = self.width_px
        return {
            "is_column": (draws[:, 0] < column_fraction).astype(np.float32),
            "width_px": low + np.floor(draws[:, 1] * np.float32(high - low + 1)),
            "opacity": spread(draws[:, 2], self.opacity),
        }

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        is_column = parameters["is_column"] > 0
        thickness_px = self.width_px[1] + 2
        height = np.where(is_column, shape_px[0] + 1, thickness_px)
        width = np.where(is_column, thickness_px, shape_px[1] + 1)
        return np.stack((height, width), axis=1)

    @override
    def place(
        self, y: Floats, x: Floats, parameters: Drawn, shape_px: Size
    ) -> tuple[Floats, Floats]:
        is_column = parameters["is_column"] > 0
        middle_y, middle_x = np.float32(shape_px[0] // 2), np.float32(shape_px[1] // 2)
        # A line of even width has its center between two pixels.
        half = np.where(parameters["width_px"] % 2 == 0, np.float32(0.5), np.float32(0))
        centre_y = np.where(is_column, middle_y, np.floor(y) + half)
        centre_x = np.where(is_column, np.floor(x) + half, middle_x)
        return centre_y, centre_x

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        distance = windows.x.where(parameters["is_column"] > 0, windows.y)
        return band(distance, parameters["width_px"] / 2)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        level = (pixels.strength > 0).to(pixels.cover.dtype)[:, None]  # white or black
        return pixels.turn_into(level, pixels.of_each(parameters["opacity"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch(Family):
    """A curve whose width tapers toward its ends, solid or interrupted.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        length_px: Length from end to end.
        width_px: Width in the middle.
        bend_rad: Largest change of direction from end to end.
        taper: Fraction of the width that is lost at the ends, 0 to 1.
        interrupted: Fraction of scratches with gaps.
        beat_px: Length of one piece of these scratches with its gap.
    """

    length_px: Range = (10.0, 56.0)
    width_px: Range = (1.0, 2.5)
    bend_rad: Range = (0.0, 1.2)
    taper: Range = (0.2, 0.9)
    interrupted: float = 0.3
    beat_px: Range = (5.0, 12.0)

    name: ClassVar[str] = "scratch"
    parameters: ClassVar[tuple[str, ...]] = (
        "length_px",
        "width_px",
        "angle",
        "bend",
        "swing",
        "taper",
        "beat_px",
    )
    turns_inwards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Also check the fraction."""
        check_fraction("scratch.interrupted", self.interrupted)
        Family.__post_init__(self)

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        is_solid = draws[:, 6] >= self.interrupted
        side = np.where(draws[:, 4] < 0.5, np.float32(-1), np.float32(1))
        return {
            "length_px": spread(draws[:, 0], self.length_px),
            "width_px": spread(draws[:, 1], self.width_px),
            "angle": draws[:, 2] * np.float32(np.pi),
            "bend": side * spread(draws[:, 3], self.bend_rad),
            # The next bits of the draw that chose the side.
            "swing": (draws[:, 4] * 4 % 2 - 1) * np.float32(self.bend_rad[1] / 2),
            "taper": spread(draws[:, 5], self.taper),
            "beat_px": np.where(is_solid, np.float32(0), spread(draws[:, 7], self.beat_px)),
        }

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        # distance of the ends from the center, in lengths
        end_distance = np.hypot(np.float32(0.5), parameters["bend"] / 8)
        return square_window(parameters["length_px"] * end_distance + parameters["width_px"] / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        p = parameters
        along, across = windows.turned(p["angle"])
        t = along / p["length_px"]  # -1/2 and 1/2 at the ends
        squared = t.square()
        # A parabola for the bend, and a cubic for an S shape: close to arcs, with a cheap closed
        # form.
        middle = p["length_px"] * (p["bend"] * squared / 2 + p["swing"] * t * (squared - 0.25))
        slope = p["bend"] * t + p["swing"] * (3 * squared - 0.25)
        distance = (across - middle) / (1 + slope.square()).sqrt_()
        half_width = p["width_px"] / 2 * (1 - p["taper"] * (4 * squared).clamp_(max=1))
        cover = band(distance, half_width) * band(along, p["length_px"] / 2)
        phase = along * (2 * np.pi) / p["beat_px"].clamp(min=1)
        wave = phase.cos_().mul_(1.5).add_(0.5).clamp_(0, 1)
        return cover * wave.where(p["beat_px"] > 0, wave.new_ones(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraStripe(Family):
    """A straight bright or dark band along the stripes, whose direction is found in the image.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        length_px: Length along the stripes.
        width_px: Width across the stripes.
    """

    length_px: Range = (12.0, 56.0)
    width_px: Range = (1.0, 4.0)

    name: ClassVar[str] = "extra_stripe"
    parameters: ClassVar[tuple[str, ...]] = ("length_px", "width_px")
    turns_inwards: ClassVar[bool] = True

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        return square_window(np.maximum(parameters["length_px"], parameters["width_px"]) / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        along, across = windows.along_stripes()
        return band(along, parameters["length_px"] / 2) * band(across, parameters["width_px"] / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeBreak(ExtraStripe):
    """A part of a stripe where the background shows through.

    Bright stripes get the darkest value across the stripes, dark ones the brightest. The direction
    of the stripes is found in the image.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `opacity`.
        contrast: Not used.
        length_px: Length along the stripes; one larger than the patch removes a whole stripe.
        width_px: Width across the stripes.
        opacity: Fraction of the stripe's contrast that is removed.
        reach_px: Distance across the stripes in which the background is searched; at least half the
            distance between stripes.
    """

    length_px: Range = (3.0, 12.0)
    width_px: Range = (3.0, 12.0)
    opacity: Range = (0.5, 1.0)
    reach_px: int = 8

    name: ClassVar[str] = "stripe_break"
    parameters: ClassVar[tuple[str, ...]] = (*ExtraStripe.parameters, "opacity")
    turns_inwards: ClassVar[bool] = False  # the sign chooses between darkest and brightest
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Also check the reach."""
        if self.reach_px < 1:
            raise ConfigError(f"stripe_break.reach_px={self.reach_px!r} must be at least 1")
        Family.__post_init__(self)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        import torch

        runs_down = pixels.of_each(pixels.windows.runs_down)[:, None]
        across = torch.arange(-self.reach_px, self.reach_px + 1, device=pixels.y.device)
        y = pixels.y[:, None] + across * ~runs_down
        x = pixels.x[:, None] + across * runs_down
        ground = find_extreme(pixels.look(y, x), pixels.strength)
        return pixels.turn_into(ground, pixels.of_each(parameters["opacity"]))
