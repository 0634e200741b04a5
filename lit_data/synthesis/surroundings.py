"""What is around each defect before anything is drawn: its noise, its brightness, the way of its stripes."""

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from lit_data.devices import constant, widest_float
from lit_data.synthesis.canvas import Canvas

_LATTICE_PX: Final = (-11, -8, -5, -2, 1, 4, 8, 12)
"""Rows and columns of the 64 places around a defect that tell about its surroundings.

Not equally far apart: stripes whose period is a multiple of the step would be seen at few of their phases. Of all with
3 px between them these see most phases of stripes of 4 to 32 px.
"""
_LAPLACIAN: Final = (1.0, -2.0, 1.0, -2.0, 4.0, -2.0, 1.0, -2.0, 1.0)  # of two, their difference: 3 x 3
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
        self.nearest_y, self.nearest_x = torch.floor(centre_y + 0.5).long(), torch.floor(centre_x + 0.5).long()

    @cached_property
    def runs_down(self) -> Tensor:
        """[n] bool, whether stripes run down the image there: grey values change more from left to right."""
        around = self._neighbourhoods
        across = _sum(around[..., 1, 2] - around[..., 1, 0]) + _sum(around[..., 1, 1].diff(dim=2))
        down = _sum(around[..., 2, 1] - around[..., 0, 1]) + _sum(around[..., 1, 1].diff(dim=1))
        return across >= down

    @cached_property
    def noise(self) -> Tensor:
        """[n] float32, standard deviation of the noise of the target, in units of the 0..1 value range.

        A difference of two Laplacians is blind to slopes and straight edges (Immerkaer, "Fast noise variance
        estimation", CVIU 1996); its median over 64 places is blind to what few of them see.
        """
        weights = constant(_LAPLACIAN, self.row.device).view(3, 3)
        response = (self._neighbourhoods * weights).sum((-2, -1)).abs_().flatten(1)
        middle = response.sort(1).values[:, (response.shape[1] - 1) // 2]  # `median` has no deterministic kernel
        return (middle / (6 * 0.6745)).clamp_(min=LEAST_NOISE)

    @cached_property
    def brightness(self) -> Tensor:
        """[n, C] float32 in 0..1, mean of each channel."""
        read = self.canvas.read_channels(self.row, *self._lattice)
        return read.to(widest_float(read.device)).mean((1, 2)).float()  # in double: the same in any order

    @cached_property
    def _lattice(self) -> tuple[Tensor, Tensor]:
        """Rows [n, 8, 1] and columns [n, 1, 8] of the places around each defect."""
        offset = constant(_LATTICE_PX, self.row.device, torch.int64)
        return self.nearest_y[:, None, None] + offset[:, None], self.nearest_x[:, None, None] + offset

    @cached_property
    def _neighbourhoods(self) -> Tensor:
        """The target at the 3 x 3 pixels of the places around each defect: [n, 8, 8, 3, 3]."""
        step = torch.arange(-1, 2, device=self.row.device)
        rows, columns = self._lattice
        return self.canvas.read_target(self.row, rows[..., None, None] + step[:, None], columns[..., None, None] + step)


def _sum(changes: Tensor) -> Tensor:
    return changes.abs_().sum((-2, -1), dtype=widest_float(changes.device))  # in double: the same in any order
