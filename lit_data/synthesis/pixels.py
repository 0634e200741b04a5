"""Pixels that the defects of one family touch, and the values that are computed for them alone."""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lit_data.synthesis.windows import Windows


class Pixels:
    """K pixels of the windows of n defects.

    On the CPU they are those of the image that are covered at all. On a device, where their number
    would have to be waited for, they are all pixels of all windows.

    Args:
        windows: The windows.
        cover: [n, h, w].

    Attributes:
        windows: Windows of the pixels.
        defect: [K] int64, number of the defect in the windows.
        at: The defect, and row and column in its window: [K] int64 each.
        y, x: [K] int64, row and column in the image; some may lie outside of it on a device.
        cover: [K] float32, fraction of the pixel that the defect covers, with a sign if it has a
            direction; 0 outside.
    """

    def __init__(self, windows: Windows, cover: Tensor) -> None:
        self.windows = windows
        cover = cover * windows.inside
        if windows.device.type == "cpu":
            self.at = torch.nonzero(cover, as_tuple=True)
            self.cover = cover[self.at]
        else:
            self.at = tuple(index.reshape(-1) for index in _number(cover))
            self.cover = cover.reshape(-1)
        self.defect, row, column = self.at
        self.y = row + windows.top[self.defect]
        self.x = column + windows.left[self.defect]

    @cached_property
    def row(self) -> Tensor:
        """[K] int64, sample of each pixel."""
        return self.windows.row[self.defect]

    @cached_property
    def strength(self) -> Tensor:
        """[K] float32, signed strength of the defect, in units of the 0..1 value range."""
        return self.windows.strength[self.defect]

    @cached_property
    def before(self) -> Tensor:
        """[K, C] float32 in 0..1: the pixels before anything is drawn."""
        return self.look(self.y, self.x)

    def look(self, y: Tensor, x: Tensor) -> Tensor:
        """Return pixels of the same samples elsewhere, reflected at the edges.

        Args:
            y: [K, ...] int64.
            x: [K, ...] int64.

        Returns:
            [K, ..., C] float32 in 0..1.
        """
        return self.windows.canvas.read_channels(self.row, y, x)

    def spread_out(self, values: Tensor) -> Tensor:
        """Return the root mean square over each pixel and its covered neighbours: [K, J].

        Args:
            values: [K, J].
        """
        shape = (len(self.windows.row), *self.windows.size_px, values.shape[1] + 1)
        windows = values.new_zeros(shape)
        covered = (self.cover != 0).to(values.dtype)[:, None]
        # The last channel counts the covered pixels: its mean is their fraction of the nine.
        windows[self.at] = torch.cat((values.square() * covered, covered), dim=1)
        means = avg_pool2d(windows.permute(0, 3, 1, 2), 3, stride=1, padding=1)
        means = means.permute(0, 2, 3, 1)[self.at]
        return (means[:, :-1] / means[:, -1:].clamp(min=1 / 9)).sqrt_()

    def of_each(self, values: Tensor) -> Tensor:
        """Return values of the defects, [n, ...], for each pixel: [K, ...]."""
        return values[self.defect]


def _number(cover: Tensor) -> list[Tensor]:
    """Return defect, row and column of every pixel, [n, h, w] each."""
    axes = [torch.arange(size, device=cover.device) for size in cover.shape]
    return list(torch.meshgrid(*axes, indexing="ij"))
