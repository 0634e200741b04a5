"""Moving planes by a matrix: by index where whole pixels move, else by one bilinear warp of the input to the crop."""

from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.augment.matrices import Size
from lit_data.devices import widest_float

Padding = Literal["reflect", "zeros", "border"]
_SAMPLER_PADDING: Final = {"reflect": "reflection", "zeros": "zeros", "border": "border"}


def whole_index(inverse: Tensor, size: Size, crop: Size, padding: Padding) -> tuple[Tensor, Tensor | None]:
    """Which input pixel each output pixel is, where only flips, quarter turns and whole shifts are on.

    A row of the output then runs along one axis of the input, so the index is a sum over the two axes of the output.

    Args:
        inverse: [B, 3, 3], output to input.
        size: (height, width) of the input.
        crop: (height, width) of the output.
        padding: What lies outside the input.

    Returns:
        index: [B, h, w] int64 into the flat input plane.
        inside: [B, h, w] bool, or none where the padding has no value of its own.
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
    index = (rows * torch.where(turned, 1, width))[:, :, None] + (columns * torch.where(turned, width, 1))[:, None]
    return index, row_inside[:, :, None] & column_inside[:, None] if padding == "zeros" else None


def gather(planes: Tensor, index: Tensor, inside: Tensor | None) -> Tensor:
    """Take pixels by index.

    Args:
        planes: [B, C, H, W] of any dtype.
        index: [B, h, w] int64 into the flat plane.
        inside: [B, h, w] bool; pixels outside become 0. Or none.

    Returns:
        [B, C, h, w].
    """
    batch, channels = planes.shape[:2]
    spread = index.view(batch, 1, -1).expand(-1, channels, -1)
    taken = planes.flatten(2).gather(2, spread).view(batch, channels, *index.shape[1:])
    return taken if inside is None else taken.masked_fill_(~inside[:, None], 0)


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
