"""The windows in which the defects of one family are drawn."""

from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.surroundings import Surroundings

if TYPE_CHECKING:
    from torch import Tensor


SEARCH_PX: Final = 6
"""How far from where it was put a defect looks for an edge."""
_TIE: Final = 1e-6


def find_edge(windows: "Windows") -> tuple["Tensor", "Tensor"]:
    """Where the target changes most, from the centre of each defect: [n] float32 whole px each."""
    import torch

    offset = torch.arange(-SEARCH_PX - 1, SEARCH_PX + 2, device=windows.device)
    rows = (windows.nearest_y[:, None] + offset)[:, :, None]
    columns = (windows.nearest_x[:, None] + offset)[:, None, :]
    target = windows.canvas.read_target(windows.row, rows, columns)
    change = (target[:, 2:, 1:-1] - target[:, :-2, 1:-1]).abs_() + (target[:, 1:-1, 2:] - target[:, 1:-1, :-2]).abs_()
    side = 2 * SEARCH_PX + 1
    # Equal edges are common; the first of them is taken on every device.
    best = (change.flatten(1) - torch.arange(side**2, device=windows.device) * _TIE).argmax(1)
    return (best // side - SEARCH_PX).float(), (best % side - SEARCH_PX).float()


class Windows:
    """The windows of n defects, [h, w] pixels each.

    Args:
        surroundings: Of all defects of a plan.
        strength: Of all of them, signed, in units of the 0..1 value range.
        chosen: Those that the windows are of.
        size_px: (h, w).

    Attributes:
        canvas: The pixels.
        row: [n] int64, the sample of each defect.
        top, left: [n] int64, the first pixel of each window; it may lie outside of the image.
        rows, columns: [n, h, 1] and [n, 1, w] int64: the pixels in the image; some may lie outside of it.
        y, x: [n, h, 1] and [n, 1, w] float32: pixels measured from the centre.
        strength: [n] float32.
    """

    def __init__(self, surroundings: Surroundings, strength: Tensor, chosen: slice, size_px: tuple[int, int]) -> None:
        self._surroundings, self._chosen, self.size_px = surroundings, chosen, size_px
        self.canvas: Canvas = surroundings.canvas
        self.row, self.strength = surroundings.row[chosen], strength[chosen]
        self.centre_y, self.centre_x = surroundings.centre_y[chosen], surroundings.centre_x[chosen]
        self.nearest_y, self.nearest_x = surroundings.nearest_y[chosen], surroundings.nearest_x[chosen]
        self.top, self.left = self.nearest_y - (size_px[0] - 1) // 2, self.nearest_x - (size_px[1] - 1) // 2
        self.rows, self.columns = self.find_pixels(0)
        self.y, self.x = self.rows - self.centre_y[:, None, None], self.columns - self.centre_x[:, None, None]

    @property
    def inside(self) -> Tensor:
        """[n, h, w] bool, whether each pixel lies in the image."""
        down = self.rows == self.rows.clamp(0, self.canvas.height_px - 1)
        return down & (self.columns == self.columns.clamp(0, self.canvas.width_px - 1))

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.canvas.device

    @property
    def runs_down(self) -> Tensor:
        """[n] bool, whether stripes run down the image there."""
        return self._surroundings.runs_down[self._chosen]

    @cached_property
    def edge(self) -> tuple[Tensor, Tensor]:
        """The strongest edge near each defect, measured from its centre: [n] float32 whole px each."""
        return find_edge(self)

    @property
    def noise(self) -> Tensor:
        """[n] float32, standard deviation of the noise around each defect."""
        return self._surroundings.noise[self._chosen]

    @property
    def brightness(self) -> Tensor:
        """[n, C] float32, mean of each channel around each defect."""
        return self._surroundings.brightness[self._chosen]

    def find_pixels(self, margin_px: int) -> tuple[Tensor, Tensor]:
        """Rows [n, h + 2 margin, 1] and columns [n, 1, w + 2 margin] of the windows with a margin around them."""
        rows, columns = (torch.arange(-margin_px, size + margin_px, device=self.device) for size in self.size_px)
        return self.top[:, None, None] + rows[:, None], self.left[:, None, None] + columns

    def turned(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates along and across a direction, from the centre: [n, h, w] each, px.

        Args:
            angle: [n, 1, 1] rad, from the x axis towards the y axis.
        """
        cosine, sine = angle.cos(), angle.sin()
        return self.x * cosine + self.y * sine, self.y * cosine - self.x * sine

    def along_stripes(self) -> tuple[Tensor, Tensor]:
        """Coordinates along and across the stripes, [n, h, w] each, px."""
        down = self.runs_down[:, None, None]
        return torch.where(down, self.y, self.x), torch.where(down, self.x, self.y)
