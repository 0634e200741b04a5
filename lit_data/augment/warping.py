"""Moves planes by a matrix with Kornia, or on a CPU with OpenCV and NumPy if they are faster."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, Self

import numpy as np
import torch
from kornia.geometry.transform import warp_perspective
from torch import Tensor

from lit_data.core.devices import change_each, reused, runs_on_cpu, widest_float
from lit_data.core.types import Array, Doubles, Ints, Size

Padding = Literal["reflect", "zeros", "border"]
_OPENCV_TYPES = (torch.uint8, torch.float32)
_KORNIA_PADDING = {"reflect": "reflection", "zeros": "zeros", "border": "border"}


@dataclass(frozen=True, eq=False)
class Warp:
    """Moves of the planes of each sample by a matrix.

    Attributes:
        matrix: [B, 3, 3] from input to output, for pixel centers (x, y, 1).
        size: (height, width) of the input.
        crop: (height, width) of the output.
        padding: Values outside the input.
        copies: True if only whole pixels move: flips, quarter turns and whole shifts.
        tilted: True if the last row of a matrix is not (0, 0, 1).
    """

    matrix: Tensor
    size: Size
    crop: Size
    padding: Padding
    copies: bool
    tilted: bool

    def take(self, planes: Tensor, *, nearest: bool = False) -> Tensor:
        """Move planes of any dtype from [B, C, H, W] to [B, C, h, w].

        Args:
            planes: Planes to move; they do not change.
            nearest: Use nearest neighbor, which keeps the values (int64 up to 2**53, on an Apple
                GPU 2**24), instead of bilinear interpolation. Copies always keep the values.
        """
        if runs_on_cpu(planes):
            if self.copies:
                return self._copied.take(planes)
            if planes.dtype in _OPENCV_TYPES and not self.tilted and opencv_is_exact():
                return self._take_planes(planes, nearest=nearest)
        return warp(planes, self.matrix, self.crop, self.padding, nearest=nearest or self.copies)

    @cached_property
    def _inverse(self) -> Tensor:
        return invert(self.matrix)

    @cached_property
    def _copied(self) -> "WholeMoves":
        return WholeMoves.of(self._inverse, self.size, self.crop, self.padding)

    def _take_planes(self, planes: Tensor, *, nearest: bool) -> Tensor:
        """Do the same on a CPU with OpenCV, plane by plane, in a third of the time.

        A position midway between two pixels may choose the other one as its nearest.
        """
        pixels = _make_empty(planes, self.crop)
        sources, targets = planes.numpy(), pixels.numpy()
        matrices = self._inverse[:, :2].double().numpy()

        def move(number: int) -> None:
            for plane, row in zip(sources[number], targets[number], strict=True):
                warp_plane(plane, matrices[number], row, self.padding, nearest=nearest)

        change_each(move, planes)
        return pixels


def warp(planes: Tensor, matrix: Tensor, crop: Size, padding: Padding, *, nearest: bool) -> Tensor:
    """Move planes on any device with Kornia; see `Warp.take`."""
    # float32 holds integers only up to 2**24.
    is_wide = planes.dtype in (torch.int32, torch.int64, torch.float64)
    exact = widest_float(planes.device) if is_wide else torch.float32
    moved: Tensor = warp_perspective(
        planes.to(exact),
        matrix.to(exact),
        crop,
        mode="nearest" if nearest else "bilinear",
        padding_mode=_KORNIA_PADDING[padding],
        align_corners=True,
    )
    return moved.to(planes.dtype)


def invert(matrix: Tensor) -> Tensor:
    """Return the inverse matrices, scaled so that the last entry is 1.

    They are computed from cofactors, because a solver would wait for the device.

    Args:
        matrix: [B, 3, 3].

    Returns:
        [B, 3, 3].
    """
    first, second, third = matrix.unbind(dim=1)
    cross = torch.linalg.cross
    columns = (cross(second, third), cross(third, first), cross(first, second))
    adjugate = torch.stack(columns, dim=-1)
    return adjugate / adjugate[:, 2:, 2:]


@dataclass(frozen=True, eq=False)
class WholeMoves:
    """Input pixel of each output pixel on a CPU, for flips, quarter turns and whole shifts only.

    A row of the output then follows one axis of the input, so two index vectors are enough.

    Attributes:
        turned: [B] bool, True where rows of the output are columns of the input.
        rows: [B, h] int64, the input row of each output row, or the input column if turned.
        columns: [B, w] int64, likewise for the other axis.
        inside: [B, h] and [B, w] bool, False in the padding; None if the padding copies pixels.
    """

    turned: Tensor
    rows: Tensor
    columns: Tensor
    inside: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, inverse: Tensor, size: Size, crop: Size, padding: Padding) -> Self:
        """Return the moves of matrices.

        Args:
            inverse: [B, 3, 3] from output to input.
            size: (height, width) of the input.
            crop: (height, width) of the output.
            padding: Values outside the input.
        """
        xx, xy, x0 = inverse[:, 0, :, None].unbind(dim=1)
        yx, yy, y0 = inverse[:, 1, :, None].unbind(dim=1)
        turned = xy != 0  # x of the input then changes down the output
        height, width = size
        down, right = torch.arange(crop[0]), torch.arange(crop[1])
        # The matrix of whole moves has entries 0 and +-1, so each output axis reads one input axis.
        by_row = torch.where(turned, xy * down + x0, yy * down + y0)
        by_column = torch.where(turned, yx * right + y0, xx * right + x0)
        rows, row_inside = _fold(by_row.long(), torch.where(turned, width, height), padding)
        columns, column_inside = _fold(
            by_column.long(), torch.where(turned, height, width), padding
        )
        inside = (row_inside, column_inside) if padding == "zeros" else None
        return cls(turned[:, 0], rows, columns, inside)

    def take(self, planes: Tensor) -> Tensor:
        """Return the moved pixels [B, C, h, w] of planes [B, C, H, W] of any dtype.

        They are copied from views of the input, which takes a fifth of the time of indexing. Pixels
        in a padding of zeros become 0.
        """
        pixels = _make_empty(planes, (self.rows.shape[1], self.columns.shape[1]))
        sources, targets = planes.numpy(), pixels.numpy()
        rows, columns = self.rows.numpy(), self.columns.numpy()
        is_of_opencv = planes.dtype in _OPENCV_TYPES
        for number, turned in enumerate(self.turned.tolist()):
            source = sources[number].transpose(0, 2, 1) if turned else sources[number]
            down, right = _as_slice(rows[number]), _as_slice(columns[number])
            first, last = columns[number, 0], columns[number, -1]
            runs_left = isinstance(right, slice) and last < first
            if is_of_opencv and runs_left and not turned:
                _mirror(source[:, down, last : first + 1], targets[number])
            else:
                # In two steps: NumPy would take two index arrays as pairs.
                targets[number] = source[:, down][:, :, right]
        if self.inside is None or all(axis.all() for axis in self.inside):
            return pixels
        rows_inside, columns_inside = self.inside
        is_inside = (rows_inside[:, :, None] & columns_inside[:, None])[:, None]
        return pixels.masked_fill_(~is_inside, 0)


def _make_empty(planes: Tensor, size: Size) -> Tensor:
    """Return unset planes of another size, [B, C, h, w], on a CPU."""
    shape = (*planes.shape[:2], *size)
    return reused(shape) if planes.dtype == torch.float32 else planes.new_empty(shape)


def _mirror(planes: Array, out: Array) -> None:
    """Mirror left-right with OpenCV, in a third of the time of NumPy."""
    import cv2

    for plane, row in zip(planes, out, strict=True):
        cv2.flip(plane, 1, dst=row)


def _as_slice(places: Ints) -> slice | Ints:
    """Return places as a slice if they are consecutive, ascending or descending."""
    first, last = int(places[0]), int(places[-1])
    step = 1 if last >= first else -1
    if not np.array_equal(places, np.arange(first, last + step, step)):
        return places
    stop = last + step
    return slice(first, None if stop < 0 else stop, step)


def warp_plane(
    plane: Array,
    matrix: Doubles,
    out: Array,
    padding: Padding,
    *,
    nearest: bool,
) -> None:
    """Warp a plane [H, W] into another one with OpenCV."""
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
    """Return True if this OpenCV interpolates in floating point.

    Releases before 5 used 32 steps between two pixels.
    """
    # a shift that 32 steps between two pixels would round to 0
    shift_px = 1 / 128
    ramp = np.tile(np.arange(32, dtype=np.float32), (8, 1))
    shifted = np.empty((8, 16), np.float32)
    warp_plane(ramp, np.array([[1, 0, shift_px], [0, 1, 0]]), shifted, "border", nearest=False)
    return bool(np.abs(shifted - ramp[:, :16] - shift_px).max() < 1e-4)


def _fold(places: Tensor, length: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """Map integer places [B, n] into 0 .. length - 1; also return which were inside already."""
    inside = (places >= 0) & (places < length)
    if padding != "reflect":
        # Zeros too are looked up at the edge first, and set afterwards.
        return torch.minimum(places.clamp(min=0), length - 1), inside
    period = (2 * (length - 1)).clamp(min=1)  # there and back, without the edges twice
    places = places.remainder(period)
    return torch.minimum(places, period - places), inside
