"""Moving planes by a matrix: by index where whole pixels move, else by one bilinear warp of the input to the crop."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_data.augment.matrices import Size
from lit_data.devices import change_each, reused, runs_on_cpu, widest_float

Padding = Literal["reflect", "zeros", "border"]
_OPENCV_TYPES: Final = (torch.uint8, torch.float32)
_SAMPLER_PADDING: Final = {"reflect": "reflection", "zeros": "zeros", "border": "border"}


@dataclass(frozen=True, eq=False)
class WholeMoves:
    """Which input pixel each output pixel is, where only flips, quarter turns and whole shifts are
    on.

    A row of the output then runs along one axis of the input, so the places are those of the two
    axes of the output.

    Attributes:
        turned: [B] bool, whether rows of the output run down the input.
        rows: [B, h] int64, for each row of the output that of the input, or its column where it is
            turned.
        columns: [B, w] int64, the other axis.
        inside: [B, h] and [B, w] bool, what is not padding; none where the padding has no value of
            its own.
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
        (xx, xy, x0), (yx, yy, y0) = (
            row[:, :, None].unbind(dim=1) for row in inverse[:, :2].unbind(dim=1)
        )
        turned = xy != 0
        height, width = size
        down = torch.arange(crop[0], device=inverse.device)
        right = torch.arange(crop[1], device=inverse.device)
        by_row = torch.where(turned, xy * down + x0, yy * down + y0)
        by_column = torch.where(turned, yx * right + y0, xx * right + x0)
        rows, row_inside = _fold(by_row.long(), torch.where(turned, width, height), padding)
        columns, column_inside = _fold(
            by_column.long(), torch.where(turned, height, width), padding
        )
        inside = (row_inside, column_inside) if padding == "zeros" else None
        return cls(turned[:, 0], rows, columns, inside, width)

    def take(self, planes: Tensor) -> Tensor:
        """The pixels: from [B, C, H, W] of any dtype [B, C, h, w]; those outside become 0 where they are told apart."""
        if runs_on_cpu(planes):
            taken = self._slice(planes)
        else:
            spread = self._index.view(len(planes), 1, -1).expand(-1, planes.shape[1], -1)
            taken = (
                planes.flatten(2).gather(2, spread).view(*planes.shape[:2], *self._index.shape[1:])
            )
        if self.inside is None:
            return taken
        rows, columns = self.inside
        if (
            runs_on_cpu(planes) and rows.all() and columns.all()
        ):  # elsewhere to ask would wait for the device
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
        moves = zip(
            planes.numpy(),
            self.turned.tolist(),
            self.rows.numpy(),
            self.columns.numpy(),
            strict=True,
        )
        mirrors = planes.dtype in _OPENCV_TYPES
        for out, (sample_planes, turned, rows, columns) in zip(taken.numpy(), moves, strict=True):
            view = sample_planes.transpose(0, 2, 1) if turned else sample_planes
            if (
                mirrors
                and not turned
                and isinstance(_as_slice(columns), slice)
                and columns[-1] < columns[0]
            ):
                _mirror(view[:, _as_slice(rows), columns[-1] : columns[0] + 1], out)
            else:
                out[...] = view[:, _as_slice(rows)][:, :, _as_slice(columns)]
        return taken


def _mirror(planes: NDArray[Any], out: NDArray[Any]) -> None:
    """Left and right exchanged by OpenCV, in a third of the time of NumPy."""
    import cv2

    for plane, row in zip(planes, out, strict=True):
        cv2.flip(plane, 1, dst=row)


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
    right, down = (
        torch.arange(length, device=inverse.device, dtype=inverse.dtype) for length in crop[::-1]
    )
    along, across = rows[..., :1] * right, rows[..., 1:2] * down + rows[..., 2:]
    places = across[..., :, None] + along[..., None, :]
    if tilted:
        places = places[:, :2] / places[:, 2:]
    return places.permute(0, 2, 3, 1)


@dataclass(frozen=True, eq=False)
class Warp:
    """One look-up of each output pixel at a place between input pixels.

    Attributes:
        inverse: [B, 3, 3], output to input.
        size: (height, width) of the input.
        crop: (height, width) of the output.
        padding: What lies outside the input.
        tilted: Whether the last row of a matrix is more than (0, 0, 1).
    """

    inverse: Tensor
    size: Size
    crop: Size
    padding: Padding
    tilted: bool

    def take(self, planes: Tensor, *, nearest: bool = False) -> Tensor:
        """The pixels: from [B, C, H, W] those of [B, C, h, w], see `sample`."""
        if (
            self.tilted
            or not runs_on_cpu(planes)
            or planes.dtype not in _OPENCV_TYPES
            or not opencv_is_exact()
        ):
            return sample(planes, self._grid, self.padding, nearest=nearest)
        return self._take_planes(planes, nearest=nearest)

    @cached_property
    def _grid(self) -> Tensor:
        return sampling_grid(self.inverse, self.size, self.crop, tilted=self.tilted)

    def _take_planes(self, planes: Tensor, *, nearest: bool) -> Tensor:
        """The same on a CPU, plane by plane: a third of the time. A place midway may have the other nearest pixel."""
        shape = *planes.shape[:2], *self.crop
        taken = reused(shape) if planes.dtype == torch.float32 else planes.new_empty(shape)
        sources, targets, matrices = (
            planes.numpy(),
            taken.numpy(),
            self.inverse[:, :2].double().numpy(),
        )

        def warp(number: int) -> None:
            for plane, row in zip(sources[number], targets[number], strict=True):
                warp_plane(plane, matrices[number], row, self.padding, nearest=nearest)

        change_each(warp, planes)
        return taken


def warp_plane(
    plane: NDArray[Any],
    matrix: NDArray[np.float64],
    out: NDArray[Any],
    padding: Padding,
    *,
    nearest: bool,
) -> None:
    """Warp a plane, [H, W], into another by OpenCV."""
    import cv2

    edges = {
        "reflect": cv2.BORDER_REFLECT_101,
        "zeros": cv2.BORDER_CONSTANT,
        "border": cv2.BORDER_REPLICATE,
    }
    flags = cv2.WARP_INVERSE_MAP | (cv2.INTER_NEAREST if nearest else cv2.INTER_LINEAR)
    cv2.warpAffine(plane, matrix, out.shape[::-1], dst=out, flags=flags, borderMode=edges[padding])


@cache
def opencv_is_exact() -> bool:
    """Whether this OpenCV interpolates in floating point: releases before 5 knew 32 steps between two pixels."""
    ramp, found = np.tile(np.arange(32, dtype=np.float32), (8, 1)), np.empty((8, 16), np.float32)
    warp_plane(ramp, np.array([[1, 0, 1 / 128], [0, 1, 0]]), found, "border", nearest=False)
    return bool(np.abs(found - ramp[:, :16] - 1 / 128).max() < 1e-4)


def sample(planes: Tensor, grid: Tensor, padding: Padding, *, nearest: bool = False) -> Tensor:
    """Look up planes at places between pixels.

    Args:
        planes: [B, C, H, W]; of any dtype for nearest neighbour, whose values stay what they were
            (int64 up to 2**53, on an Apple GPU 2**24).
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
