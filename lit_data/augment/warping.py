"""Moving planes by a matrix: by index where whole pixels move, else by one bilinear warp of the input to the crop."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_data.augment.matrices import Size
from lit_data.devices import reused, runs_on_cpu, widest_float

Padding = Literal["reflect", "zeros", "border"]
_SAMPLER_PADDING: Final = {"reflect": "reflection", "zeros": "zeros", "border": "border"}


@dataclass(frozen=True, eq=False)
class WholeMoves:
    """Which input pixel each output pixel is, where only flips, quarter turns and whole shifts are on.

    A row of the output then runs along one axis of the input, so the places are those of the two axes of the output.

    Attributes:
        turned: [B] bool, whether rows of the output run down the input.
        rows: [B, h] int64, for each row of the output that of the input, or its column where it is turned.
        columns: [B, w] int64, the other axis.
        inside: [B, h] and [B, w] bool, what is not padding; none where the padding has no value of its own.
        width_px: Of the input.
    """

    turned: Tensor
    rows: Tensor
    columns: Tensor
    inside: tuple[Tensor, Tensor] | None
    width_px: int

    @classmethod
    def of(cls, inverse: Tensor, size: Size, crop: Size, padding: Padding) -> Self:
        """From matrices.

        Args:
            inverse: [B, 3, 3], output to input.
            size: (height, width) of the input.
            crop: (height, width) of the output.
            padding: What lies outside the input.
        """
        (xx, xy, x0), (yx, yy, y0) = (row[:, :, None].unbind(dim=1) for row in inverse[:, :2].unbind(dim=1))
        turned = xy != 0
        height, width = size
        down = torch.arange(crop[0], device=inverse.device)
        right = torch.arange(crop[1], device=inverse.device)
        by_row = torch.where(turned, xy * down + x0, yy * down + y0)
        by_column = torch.where(turned, yx * right + y0, xx * right + x0)
        rows, row_inside = _fold(by_row.long(), torch.where(turned, width, height), padding)
        columns, column_inside = _fold(by_column.long(), torch.where(turned, height, width), padding)
        inside = (row_inside, column_inside) if padding == "zeros" else None
        return cls(turned[:, 0], rows, columns, inside, width)

    def take(self, planes: Tensor) -> Tensor:
        """The pixels: from [B, C, H, W] of any dtype [B, C, h, w]; those outside become 0 where they are told apart."""
        if runs_on_cpu(planes):
            taken = self._slice(planes)
        else:
            spread = self._index.view(len(planes), 1, -1).expand(-1, planes.shape[1], -1)
            taken = planes.flatten(2).gather(2, spread).view(*planes.shape[:2], *self._index.shape[1:])
        if self.inside is None:
            return taken
        rows, columns = self.inside
        if runs_on_cpu(planes) and rows.all() and columns.all():  # elsewhere to ask would wait for the device
            return taken
        return taken.masked_fill_(~(rows[:, :, None] & columns[:, None])[:, None], 0)

    @cached_property
    def _index(self) -> Tensor:
        """[B, h, w] int64 into the flat input plane."""
        turned = self.turned[:, None]
        by_row = self.rows * torch.where(turned, 1, self.width_px)
        return by_row[:, :, None] + (self.columns * torch.where(turned, self.width_px, 1))[:, None]

    def _slice(self, planes: Tensor) -> Tensor:
        """On a CPU views of the input are copied, which takes a fifth of the time of an index."""
        shape = *planes.shape[:2], self.rows.shape[1], self.columns.shape[1]
        taken = reused(shape) if planes.dtype == torch.float32 else planes.new_empty(shape)
        moves = zip(planes.numpy(), self.turned.tolist(), self.rows.numpy(), self.columns.numpy(), strict=True)
        for row, (plane, turned, rows, columns) in zip(taken.numpy(), moves, strict=True):
            view = plane.transpose(0, 2, 1) if turned else plane
            row[...] = view[:, _as_slice(rows)][:, :, _as_slice(columns)]
        return taken


def _as_slice(places: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Places as a slice, if they follow each other up or down."""
    first, last = int(places[0]), int(places[-1])
    step = 1 if last >= first else -1
    if not np.array_equal(places, np.arange(first, last + step, step)):
        return places
    stop = last + step
    return slice(first, None if stop < 0 else stop, step)


def sampling_grid(inverse: Tensor, size: Size, crop: Size, *, tilted: bool) -> Tensor:
    """Where in the input each output pixel lies.

    Args:
        inverse: [B, 3, 3], output to input.
        size: (height, width) of the input.
        crop: (height, width) of the output.
        tilted: Whether the last row is more than (0, 0, 1).

    Returns:
        [B, h, w, 2] (x, y) float32, -1 and 1 on the centres of the outermost pixels.
    """
    x, y, last = inverse.unbind(dim=1)
    x, y = x / (max(size[1] - 1, 1) / 2) - last, y / (max(size[0] - 1, 1) / 2) - last
    rows = torch.stack((x, y, last) if tilted else (x, y), dim=1)
    right, down = (torch.arange(length, device=inverse.device, dtype=inverse.dtype) for length in crop[::-1])
    along, across = rows[..., :1] * right, rows[..., 1:2] * down + rows[..., 2:]
    places = across[..., :, None] + along[..., None, :]
    if tilted:
        places = places[:, :2] / places[:, 2:]
    return places.permute(0, 2, 3, 1)


def sample(planes: Tensor, grid: Tensor, padding: Padding, *, nearest: bool = False) -> Tensor:
    """Look up planes at places between pixels.

    Args:
        planes: [B, C, H, W]; of any dtype for nearest neighbour, whose values stay what they were (int64
            up to 2**53, on an Apple GPU 2**24).
        grid: [B, h, w, 2] of `sampling_grid`.
        padding: What lies outside the input.
        nearest: Nearest neighbour instead of bilinear.

    Returns:
        [B, C, h, w] of the dtype of the planes.
    """
    whole = planes.dtype in (torch.int32, torch.int64, torch.float64)
    exact = widest_float(planes.device) if whole else torch.float32
    looked_up: Tensor = F.grid_sample(
        planes.to(exact),
        grid.to(exact),
        mode="nearest" if nearest else "bilinear",
        padding_mode=_SAMPLER_PADDING[padding],
        align_corners=True,
    )
    return looked_up.to(planes.dtype)


def _fold(places: Tensor, length: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """Whole places [B, n] brought into 0 .. length - 1, and which of them were there already."""
    inside = (places >= 0) & (places < length)
    if padding != "reflect":
        return torch.minimum(places.clamp(min=0), length - 1), inside
    period = (2 * (length - 1)).clamp(min=1)
    places = places.remainder(period)
    return torch.minimum(places, period - places), inside
