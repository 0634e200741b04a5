"""Boxes moved by a matrix: the axis-aligned hull of the moved corners, cut to the crop."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.augment.matrices import Size
from lit_data.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Which moved boxes are kept.

    Args:
        min_px: Smallest height and width of what is left in the crop.
        min_visible: Smallest share of the moved box that lies in the crop, 0 to 1.

    Raises:
        ConfigError: A limit is outside its range.
    """

    min_px: float
    min_visible: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.min_px < 0 or not 0 <= self.min_visible <= 1:
            raise ConfigError(
                f"min_box_px={self.min_px}, min_box_visible={self.min_visible}: need min_box_px >= 0 and a share 0..1"
            )


def box_corners(boxes: Tensor, size: Size) -> Tensor:
    """Corners of boxes in coordinates whose whole numbers are pixel centres.

    Args:
        boxes: [N, 6] = (row, class, cx, cy, w, h), in shares of the image size.
        size: (height, width) of the image.

    Returns:
        [N, 4, 2] (x, y) px.
    """
    cx, cy, width, height = boxes[:, 2:].unbind(dim=-1)
    x = torch.stack((cx - width / 2, cx + width / 2, cx + width / 2, cx - width / 2), dim=-1)
    y = torch.stack((cy - height / 2, cy - height / 2, cy + height / 2, cy + height / 2), dim=-1)
    return torch.stack((x * size[1] - 0.5, y * size[0] - 0.5), dim=-1)


def move_points(points: Tensor, matrix: Tensor) -> Tensor:
    """Points [N, P, 2] (x, y) moved by a matrix each, [N, 3, 3]."""
    x, y = points[..., :1], points[..., 1:]
    rows = matrix[:, None]
    moved = rows[..., 0] * x + rows[..., 1] * y + rows[..., 2]
    return moved[..., :2] / moved[..., 2:]


def hull_boxes(boxes: Tensor, corners: Tensor, crop: Size, limits: BoxLimits | None) -> Tensor:
    """Boxes around moved corners, cut to the crop; those that fall below the limits are left out.

    With limits this waits for the device, because the number of boxes changes.

    Args:
        boxes: [N, 6], of which row and class are taken.
        corners: [N, 4, 2] (x, y) px, as of `box_corners`.
        crop: (height, width) of the output.
        limits: Which boxes are kept; none keeps all.

    Returns:
        [M, 6] of the dtype of the boxes, in their order.
    """
    low, high = corners.amin(dim=1) + 0.5, corners.amax(dim=1) + 0.5
    whole = (high - low).prod(dim=-1)
    bounds = [edge[:, axis].clamp(0, crop[1 - axis]) for axis in (0, 1) for edge in (low, high)]
    left, right, top, bottom = bounds
    width, height = right - left, bottom - top
    shares = ((left + right) / (2 * crop[1]), (top + bottom) / (2 * crop[0]), width / crop[1], height / crop[0])
    moved = torch.cat((boxes[:, :2], torch.stack(shares, dim=-1).to(boxes.dtype)), dim=-1)
    if limits is None:
        return moved
    kept = (width > 0) & (height > 0) & (width >= limits.min_px) & (height >= limits.min_px)
    return moved[kept & (width * height >= limits.min_visible * whole)]
