"""Windows of the defects of one family, their clean surroundings, and the pixels that they touch."""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lit_data.core.devices import constant, widest_float
from lit_data.core.types import Size
from lit_data.synthesis.canvas import Canvas

_LATTICE_PX = (-11, -8, -5, -2, 1, 4, 8, 12)
"""Rows and columns of the 64 places around a defect at which its surroundings are measured.

They are not equally spaced, because equal steps would sample only a few phases of stripes whose
period is a multiple of the step. Among choices at least 3 px apart, these cover the most phases of
stripes of 4 to 32 px.
"""
_LAPLACIAN = (1.0, -2.0, 1.0, -2.0, 4.0, -2.0, 1.0, -2.0, 1.0)
"""Difference of two Laplacians, 3 x 3."""
LEAST_NOISE = 0.002
"""Half a gray level of 8 bits; less noise cannot be distinguished from none."""

SEARCH_PX = 6
"""Largest distance from a defect's center at which it searches for an edge."""
_TIE = 1e-6


class Surroundings:
    """Surroundings of n defects.

    Args:
        canvas: Pixels of the batch.
        row: [n] int64, the sample of each defect.
        centre_y: [n] float32, px.
        centre_x: [n] float32, px.

    Attributes:
        nearest_y, nearest_x: [n] int64, the pixel nearest to the center.
    """

    def __init__(self, canvas: Canvas, row: Tensor, centre_y: Tensor, centre_x: Tensor) -> None:
        self.canvas = canvas
        self.row = row
        self.centre_y = centre_y
        self.centre_x = centre_x
        self.nearest_y = torch.floor(centre_y + 0.5).long()
        self.nearest_x = torch.floor(centre_x + 0.5).long()

    @cached_property
    def runs_down(self) -> Tensor:
        """[n] bool, True for vertical stripes, across which gray values change more."""
        # Differences at distance 2 within each neighborhood, and between neighboring places.
        around = self._neighbourhoods
        across = _sum(around[..., 1, 2] - around[..., 1, 0]) + _sum(around[..., 1, 1].diff(dim=2))
        down = _sum(around[..., 2, 1] - around[..., 0, 1]) + _sum(around[..., 1, 1].diff(dim=1))
        return across >= down

    @cached_property
    def noise(self) -> Tensor:
        """[n] float32, standard deviation of the noise of the target, in units of 0..1.

        A difference of two Laplacians ignores slopes and straight edges (Immerkaer, "Fast noise
        variance estimation", CVIU 1996). Its median over 64 places ignores structures at a few of
        them.
        """
        weights = constant(_LAPLACIAN, self.row.device).view(3, 3)
        response = (self._neighbourhoods * weights).sum((-2, -1)).abs_().flatten(1)
        # `median` has no deterministic kernel on a GPU.
        middle = response.sort(1).values[:, (response.shape[1] - 1) // 2]
        return (middle / (6 * 0.6745)).clamp_(min=LEAST_NOISE)

    @cached_property
    def brightness(self) -> Tensor:
        """[n, C] float32 in 0..1, mean of each channel."""
        pixels = self.canvas.read_channels(self.row, *self._lattice)
        exact = pixels.to(widest_float(pixels.device))  # double sums are the same in any order
        return exact.mean((1, 2)).float()

    @cached_property
    def _lattice(self) -> tuple[Tensor, Tensor]:
        """Rows [n, 8, 1] and columns [n, 1, 8] of the places around each defect."""
        offset = constant(_LATTICE_PX, self.row.device, torch.int64)
        rows = self.nearest_y[:, None, None] + offset[:, None]
        columns = self.nearest_x[:, None, None] + offset
        return rows, columns

    @cached_property
    def _neighbourhoods(self) -> Tensor:
        """Target values in the 3 x 3 pixels at each place around each defect, [n, 8, 8, 3, 3]."""
        step = torch.arange(-1, 2, device=self.row.device)
        rows, columns = self._lattice
        return self.canvas.read_target(
            self.row, rows[..., None, None] + step[:, None], columns[..., None, None] + step
        )


def _sum(changes: Tensor) -> Tensor:
    # Sums in double are the same in any order.
    return changes.abs_().sum((-2, -1), dtype=widest_float(changes.device))


class Windows:
    """Windows of n defects, [h, w] pixels each.

    Args:
        surroundings: Surroundings of all defects of a plan.
        strength: Signed strengths of all these defects, in units of the 0..1 value range.
        chosen: Defects of these windows.
        size_px: (h, w) of the windows.

    Attributes:
        canvas: Pixels of the batch.
        row: [n] int64, the sample of each defect.
        top, left: [n] int64, the first pixel of each window, which may be outside the image.
        rows, columns: [n, h, 1] and [n, 1, w] int64, the pixels in the image; some may be outside.
        y, x: [n, h, 1] and [n, 1, w] float32, pixel coordinates relative to the center.
        strength: [n] float32, signed strengths.
    """

    def __init__(
        self, surroundings: Surroundings, strength: Tensor, chosen: slice, size_px: Size
    ) -> None:
        self._surroundings = surroundings
        self._chosen = chosen
        self.size_px = size_px
        self.canvas: Canvas = surroundings.canvas
        self.row = surroundings.row[chosen]
        self.strength = strength[chosen]
        self.centre_y = surroundings.centre_y[chosen]
        self.centre_x = surroundings.centre_x[chosen]
        self.nearest_y = surroundings.nearest_y[chosen]
        self.nearest_x = surroundings.nearest_x[chosen]
        # The center of an even window is to the left of and above the middle.
        self.top = self.nearest_y - (size_px[0] - 1) // 2
        self.left = self.nearest_x - (size_px[1] - 1) // 2
        self.rows, self.columns = self.find_pixels(0)
        self.y = self.rows - self.centre_y[:, None, None]
        self.x = self.columns - self.centre_x[:, None, None]

    @property
    def inside(self) -> Tensor:
        """[n, h, w] bool, True where a pixel is inside the image."""
        down = self.rows == self.rows.clamp(0, self.canvas.height_px - 1)
        return down & (self.columns == self.columns.clamp(0, self.canvas.width_px - 1))

    @property
    def device(self) -> torch.device:
        """Device of the pixels."""
        return self.canvas.device

    @property
    def runs_down(self) -> Tensor:
        """[n] bool, True for vertical stripes."""
        return self._surroundings.runs_down[self._chosen]

    @cached_property
    def edge(self) -> tuple[Tensor, Tensor]:
        """Offset from each center to where the target changes most, [n] float32 whole px each."""
        offset = torch.arange(-SEARCH_PX - 1, SEARCH_PX + 2, device=self.device)
        rows = (self.nearest_y[:, None] + offset)[:, :, None]
        columns = (self.nearest_x[:, None] + offset)[:, None, :]
        target = self.canvas.read_target(self.row, rows, columns)
        change_down = (target[:, 2:, 1:-1] - target[:, :-2, 1:-1]).abs_()
        change_across = (target[:, 1:-1, 2:] - target[:, 1:-1, :-2]).abs_()
        change = change_down + change_across
        side = 2 * SEARCH_PX + 1
        # Equal edges are common; the first of them is taken on every device.
        best = (change.flatten(1) - torch.arange(side**2, device=self.device) * _TIE).argmax(1)
        return (best // side - SEARCH_PX).float(), (best % side - SEARCH_PX).float()

    @property
    def noise(self) -> Tensor:
        """[n] float32, standard deviation of the noise around each defect."""
        return self._surroundings.noise[self._chosen]

    @property
    def brightness(self) -> Tensor:
        """[n, C] float32, mean of each channel around each defect."""
        return self._surroundings.brightness[self._chosen]

    def find_pixels(self, margin_px: int) -> tuple[Tensor, Tensor]:
        """Return the pixels of the windows with a margin around them.

        Returns:
            Rows [n, h + 2 margin, 1], and columns [n, 1, w + 2 margin].
        """
        height, width = self.size_px
        down = torch.arange(-margin_px, height + margin_px, device=self.device)
        across = torch.arange(-margin_px, width + margin_px, device=self.device)
        return self.top[:, None, None] + down[:, None], self.left[:, None, None] + across

    def turned(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Return coordinates along and across a direction from the center, [n, h, w] each, in px.

        Args:
            angle: [n, 1, 1] in rad, from the x axis toward the y axis.
        """
        cosine, sine = angle.cos(), angle.sin()
        return self.x * cosine + self.y * sine, self.y * cosine - self.x * sine

    def along_stripes(self) -> tuple[Tensor, Tensor]:
        """Return coordinates along and across the stripes, [n, h, w] each, in px."""
        down = self.runs_down[:, None, None]
        return torch.where(down, self.y, self.x), torch.where(down, self.x, self.y)


class Pixels:
    """K pixels of the windows of n defects.

    On the CPU these are the covered pixels inside the image. On a device they are all pixels of all
    windows, because counting the covered ones would wait for the device.

    Args:
        windows: Windows of n defects.
        cover: Coverage [n, h, w].

    Attributes:
        windows: Windows of the pixels.
        defect: [K] int64, number of the defect in the windows.
        at: Defect, and row and column in its window, [K] int64 each.
        y, x: [K] int64, row and column in the image; some may be outside of it on a device.
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
            axes = [torch.arange(size, device=cover.device) for size in cover.shape]
            indices = torch.meshgrid(*axes, indexing="ij")  # defect, row and column of every pixel
            self.at = tuple(index.reshape(-1) for index in indices)
            self.cover = cover.reshape(-1)
        self.defect, row, column = self.at
        self.y = row + self.of_each(windows.top)
        self.x = column + self.of_each(windows.left)

    @cached_property
    def row(self) -> Tensor:
        """[K] int64, sample of each pixel."""
        return self.of_each(self.windows.row)

    @cached_property
    def strength(self) -> Tensor:
        """[K] float32, signed strength of the defect, in units of the 0..1 value range."""
        return self.of_each(self.windows.strength)

    @cached_property
    def before(self) -> Tensor:
        """[K, C] float32 in 0..1, the pixels before anything is drawn."""
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
        """Return the root mean square over each pixel and its covered neighbors, [K, J].

        Args:
            values: [K, J].
        """
        shape = (len(self.windows.row), *self.windows.size_px, values.shape[1] + 1)
        windows = values.new_zeros(shape)
        covered = (self.cover != 0).to(values.dtype)[:, None]
        # The last channel counts the covered pixels; its mean is their fraction of the nine.
        windows[self.at] = torch.cat((values.square() * covered, covered), dim=1)
        # The kernel for channels-last memory is slow for two channels.
        planes = windows.permute(0, 3, 1, 2).contiguous()
        means = avg_pool2d(planes, 3, stride=1, padding=1)
        means = means.permute(0, 2, 3, 1)[self.at]
        return (means[:, :-1] / means[:, -1:].clamp(min=1 / 9)).sqrt_()

    def of_each(self, values: Tensor) -> Tensor:
        """Return the value of each pixel's defect, [K], of values [n] or [n, 1, 1]."""
        return values.reshape(-1).index_select(0, self.defect)

    def turn_into(self, source: Tensor, opacity: Tensor | float = 1.0) -> Tensor:
        """Return the numbers to add so that other pixels show wherever a defect covers.

        Args:
            source: [K, C] float32 in 0..1, or [K, 1].
            opacity: [K] float32, fraction of the source that shows.
        """
        return (source - self.before) * (self.cover * opacity)[:, None]
