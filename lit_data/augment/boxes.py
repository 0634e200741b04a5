"""Boxes that move by the matrix of their sample and are clipped to its crop."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Limits below which moved boxes are left out.

    Args:
        min_px: Smallest height and width of a box within the crop.
        min_visible: Smallest fraction of the moved box that lies in the crop, 0 to 1.

    Raises:
        ConfigError: A limit is outside its range.
    """

    min_px: float
    min_visible: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.min_px < 0 or not 0 <= self.min_visible <= 1:
            raise ConfigError(
                f"min_box_px={self.min_px}, min_box_visible={self.min_visible}: need min_box_px "
                ">= 0 and a fraction 0..1"
            )


def box_corners(boxes: Tensor, size: Size) -> Tensor:
    """Return the corners of boxes in coordinates with pixel centers at integers.

    Args:
        boxes: [N, 6] = (row, class, cx, cy, w, h), in fractions of the image size.
        size: (height, width) of the image.

    Returns:
        Corners [N, 4, 2] (x, y) in px.
    """
    cx, cy, width, height = boxes[:, 2:].unbind(dim=-1)
    x = torch.stack((cx - width / 2, cx + width / 2, cx + width / 2, cx - width / 2), dim=-1)
    y = torch.stack((cy - height / 2, cy - height / 2, cy + height / 2, cy + height / 2), dim=-1)
    return torch.stack((x * size[1] - 0.5, y * size[0] - 0.5), dim=-1)


def move_points(points: Tensor, matrix: Tensor) -> Tensor:
    """Return points [N, P, 2] (x, y), moved by the matrices [N, 3, 3]."""
    x, y = points[..., :1], points[..., 1:]
    rows = matrix[:, None]
    moved = rows[..., 0] * x + rows[..., 1] * y + rows[..., 2]
    return moved[..., :2] / moved[..., 2:]


def hull_boxes(boxes: Tensor, corners: Tensor, crop: Size, limits: BoxLimits | None) -> Tensor:
    """Return boxes around moved corners, clipped to the crop, without those below the limits.

    With limits this waits for the device, because the number of boxes changes.

    Args:
        boxes: [N, 6] with the rows and classes to use.
        corners: Moved corners [N, 4, 2] (x, y) in px, see `box_corners`.
        crop: (height, width) of the output.
        limits: Limits of the boxes to keep; None keeps all.

    Returns:
        Boxes [M, 6] of the same dtype and in the same order.
    """
    crop_height, crop_width = crop
    # From coordinates with pixel centers at integers to those with pixel edges at integers.
    low, high = corners.amin(dim=1) + 0.5, corners.amax(dim=1) + 0.5
    moved_area = (high - low).prod(dim=-1)
    left, right = low[:, 0].clamp(0, crop_width), high[:, 0].clamp(0, crop_width)
    top, bottom = low[:, 1].clamp(0, crop_height), high[:, 1].clamp(0, crop_height)
    width, height = right - left, bottom - top
    fractions = (
        (left + right) / (2 * crop_width),
        (top + bottom) / (2 * crop_height),
        width / crop_width,
        height / crop_height,
    )
    moved = torch.cat((boxes[:, :2], torch.stack(fractions, dim=-1).to(boxes.dtype)), dim=-1)
    if limits is None:
        return moved
    is_seen = (width > 0) & (height > 0)
    is_large = (width >= limits.min_px) & (height >= limits.min_px)
    is_visible = width * height >= limits.min_visible * moved_area
    return moved[is_seen & is_large & is_visible]
