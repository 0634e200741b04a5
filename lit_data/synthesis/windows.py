"""The windows in which the defects of one family are drawn, and what is around each before anything is drawn."""

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from lit_data.devices import constant, widest_float
from lit_data.synthesis.canvas import Canvas

_LATTICE_PX: Final = (-11, -8, -5, -2, 1, 4, 8, 12)
"""Rows and columns of the 64 places around a defect that tell about its surroundings.

Not equally far apart: stripes whose period is a multiple of the step would be seen at few of their
phases. Of all with 3 px between them these see most phases of stripes of 4 to 32 px.
"""
_LAPLACIAN: Final = (
    1.0,
    -2.0,
    1.0,
    -2.0,
    4.0,
    -2.0,
    1.0,
    -2.0,
    1.0,
)  # of two, their difference: 3 x 3
LEAST_NOISE: Final = 0.002
"""Half a grey level of 8 bits: less noise than that cannot be told from none."""


class Surroundings:
    """The surroundings of n defects.

    Args:
        canvas: The pixels.
        row: [n] int64, the sample of each defect.
        centre_y: [n] float32, px.
        centre_x: [n] float32, px.

    Attributes:
        nearest_y, nearest_x: [n] int64, the pixel nearest to the centre.
    """

    def __init__(self, canvas: Canvas, row: Tensor, centre_y: Tensor, centre_x: Tensor) -> None:
        self.canvas, self.row, self.centre_y, self.centre_x = canvas, row, centre_y, centre_x
        self.nearest_y, self.nearest_x = (
            torch.floor(centre_y + 0.5).long(),
            torch.floor(centre_x + 0.5).long(),
        )

    @cached_property
    def runs_down(self) -> Tensor:
        """[n] bool, whether stripes run down the image there: grey values change more from left to right."""
        around = self._neighbourhoods
        across = _sum(around[..., 1, 2] - around[..., 1, 0]) + _sum(around[..., 1, 1].diff(dim=2))
        down = _sum(around[..., 2, 1] - around[..., 0, 1]) + _sum(around[..., 1, 1].diff(dim=1))
        return across >= down

    @cached_property
    def noise(self) -> Tensor:
        """[n] float32, standard deviation of the noise of the target, in units of the 0..1 value
        range.

        A difference of two Laplacians is blind to slopes and straight edges (Immerkaer, "Fast noise
        variance estimation", CVIU 1996); its median over 64 places is blind to what few of them
        see.
        """
        weights = constant(_LAPLACIAN, self.row.device).view(3, 3)
        response = (self._neighbourhoods * weights).sum((-2, -1)).abs_().flatten(1)
        middle = response.sort(1).values[
            :, (response.shape[1] - 1) // 2
        ]  # `median` has no deterministic kernel
        return (middle / (6 * 0.6745)).clamp_(min=LEAST_NOISE)

    @cached_property
    def brightness(self) -> Tensor:
        """[n, C] float32 in 0..1, mean of each channel."""
        read = self.canvas.read_channels(self.row, *self._lattice)
        return (
            read.to(widest_float(read.device)).mean((1, 2)).float()
        )  # in double: the same in any order

    @cached_property
    def _lattice(self) -> tuple[Tensor, Tensor]:
        """Rows [n, 8, 1] and columns [n, 1, 8] of the places around each defect."""
        offset = constant(_LATTICE_PX, self.row.device, torch.int64)
        return self.nearest_y[:, None, None] + offset[:, None], self.nearest_x[
            :, None, None
        ] + offset

    @cached_property
    def _neighbourhoods(self) -> Tensor:
        """The target at the 3 x 3 pixels of the places around each defect: [n, 8, 8, 3, 3]."""
        step = torch.arange(-1, 2, device=self.row.device)
        rows, columns = self._lattice
        return self.canvas.read_target(
            self.row, rows[..., None, None] + step[:, None], columns[..., None, None] + step
        )


def _sum(changes: Tensor) -> Tensor:
    return changes.abs_().sum(
        (-2, -1), dtype=widest_float(changes.device)
    )  # in double: the same in any order


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
    change = (target[:, 2:, 1:-1] - target[:, :-2, 1:-1]).abs_() + (
        target[:, 1:-1, 2:] - target[:, 1:-1, :-2]
    ).abs_()
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
        rows, columns: [n, h, 1] and [n, 1, w] int64: the pixels in the image; some may lie outside
            of it.
        y, x: [n, h, 1] and [n, 1, w] float32: pixels measured from the centre.
        strength: [n] float32.
    """

    def __init__(
        self, surroundings: Surroundings, strength: Tensor, chosen: slice, size_px: tuple[int, int]
    ) -> None:
        self._surroundings, self._chosen, self.size_px = surroundings, chosen, size_px
        self.canvas: Canvas = surroundings.canvas
        self.row, self.strength = surroundings.row[chosen], strength[chosen]
        self.centre_y, self.centre_x = surroundings.centre_y[chosen], surroundings.centre_x[chosen]
        self.nearest_y, self.nearest_x = (
            surroundings.nearest_y[chosen],
            surroundings.nearest_x[chosen],
        )
        self.top, self.left = (
            self.nearest_y - (size_px[0] - 1) // 2,
            self.nearest_x - (size_px[1] - 1) // 2,
        )
        self.rows, self.columns = self.find_pixels(0)
        self.y, self.x = (
            self.rows - self.centre_y[:, None, None],
            self.columns - self.centre_x[:, None, None],
        )

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
        rows, columns = (
            torch.arange(-margin_px, size + margin_px, device=self.device) for size in self.size_px
        )
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
