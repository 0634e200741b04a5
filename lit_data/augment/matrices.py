"""The geometry of a sample as one matrix.

It maps pixel centers (x, y, 1) of the input to those of the output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Size


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Moves of each sample, before any image size is known; in the order of application.

    Args:
        mirror: [B, 2] -1 or 1, along x and y.
        quarters: [B] int64, turns by 90 degrees, 0 to 3; x turns towards y.
        linear: [B, 2, 2], rotation, scale and shear about the center.
        tilt: [B, 2], the fraction that perspective adds to the distance at the right and the lower
            edge of the output.
        shift: [B, 2] px, x and y.
    """

    mirror: Tensor
    quarters: Tensor
    linear: Tensor
    tilt: Tensor
    shift: Tensor

    @classmethod
    def unpack(cls, columns: Tensor) -> "Moves":
        """Make them of [B, 11], the columns in the order of the arguments."""
        return cls(
            mirror=columns[:, 0:2],
            quarters=columns[:, 2].long(),
            linear=columns[:, 3:7].reshape(-1, 2, 2),
            tilt=columns[:, 7:9],
            shift=columns[:, 9:11],
        )


def turn_covers(size: Size, crop: Size) -> bool:
    """Return True if an input (height, width) turned by 90 degrees covers the crop."""
    return crop[0] <= size[1] and crop[1] <= size[0]


def compose(moves: Moves, size: Size, crop: Size) -> Tensor:
    """Return the matrix of each sample.

    The crop lies in the middle of the turned input, at whole pixels. Where a quarter turn would not
    cover the crop, turns are by 180 degrees only.

    Args:
        moves: The moves of the samples.
        size: (height, width) of the input.
        crop: (height, width) of the output.

    Returns:
        [B, 3, 3] float32; exact where only whole pixels move.
    """
    quarters = moves.quarters
    if not turn_covers(size, crop):
        quarters = quarters // 2 * 2
    linear = _multiply(moves.linear, _turns(quarters) * moves.mirror[:, None, :])
    across, down = linear.unbind(dim=-1)
    # Place to which the centre of the input would move.
    start = across * ((size[1] - 1) / 2) + down * ((size[0] - 1) / 2)
    upper = torch.cat((linear, -start[..., None]), dim=-1)
    tilt_x = moves.tilt[:, :1] / (crop[1] / 2)
    tilt_y = moves.tilt[:, 1:] / (crop[0] / 2)
    lower = tilt_x * upper[:, 0] + tilt_y * upper[:, 1]
    lower[:, 2] += 1
    # So far the centre of the input lies at 0: now it moves to its place in the crop.
    anchor = _crop_centres(quarters, size, crop) + moves.shift
    return torch.cat((upper + anchor[..., None] * lower[:, None], lower[:, None]), dim=1)


def invert(matrix: Tensor) -> Tensor:
    """Return the inverse up to a factor that makes the last entry 1.

    It is made of cofactors: a solver would wait for the device.

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


def _crop_centres(quarters: Tensor, size: Size, crop: Size) -> Tensor:
    """Return the center of each turned input in the crop out of its middle: [B, 2] (x, y) px."""
    height, width = size
    is_turned = quarters % 2 == 1
    # Scalars, here and below: a small tensor made from a list would wait for the device.
    x = torch.where(is_turned, _centre_in_crop(height, crop[1]), _centre_in_crop(width, crop[1]))
    y = torch.where(is_turned, _centre_in_crop(width, crop[0]), _centre_in_crop(height, crop[0]))
    return torch.stack((x, y), dim=-1)


def _centre_in_crop(length_px: int, crop_px: int) -> float:
    first = (length_px - crop_px) // 2
    return (length_px - 1) / 2 - first


def _turns(quarters: Tensor) -> Tensor:
    """Return the matrices of turns by 90 degrees: [B, 2, 2], exact."""
    # Whole numbers by comparison: cosines would not be exact.
    cosine = (quarters == 0).float() - (quarters == 2).float()
    sine = (quarters == 1).float() - (quarters == 3).float()
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).view(-1, 2, 2)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return [B, 2, 2] products.

    They are written out: a library may round them otherwise for another number of samples.
    """
    return left[:, :, :1] * right[:, :1] + left[:, :, 1:] * right[:, 1:]


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
                f"min_box_px={self.min_px}, min_box_visible={self.min_visible}: need min_box_px >= "
                "0 and a share 0..1"
            )


def box_corners(boxes: Tensor, size: Size) -> Tensor:
    """Return the corners of boxes in coordinates whose whole numbers are pixel centers.

    Args:
        boxes: [N, 6] = (row, class, cx, cy, w, h), in fractions of the image size.
        size: (height, width) of the image.

    Returns:
        [N, 4, 2] (x, y) px.
    """
    cx, cy, width, height = boxes[:, 2:].unbind(dim=-1)
    x = torch.stack((cx - width / 2, cx + width / 2, cx + width / 2, cx - width / 2), dim=-1)
    y = torch.stack((cy - height / 2, cy - height / 2, cy + height / 2, cy + height / 2), dim=-1)
    return torch.stack((x * size[1] - 0.5, y * size[0] - 0.5), dim=-1)


def move_points(points: Tensor, matrix: Tensor) -> Tensor:
    """Return points [N, P, 2] (x, y) moved by a matrix each, [N, 3, 3]."""
    x, y = points[..., :1], points[..., 1:]
    rows = matrix[:, None]
    moved = rows[..., 0] * x + rows[..., 1] * y + rows[..., 2]
    return moved[..., :2] / moved[..., 2:]


def hull_boxes(boxes: Tensor, corners: Tensor, crop: Size, limits: BoxLimits | None) -> Tensor:
    """Return boxes around moved corners, cut to the crop, without those below the limits.

    With limits this waits for the device, because the number of boxes changes.

    Args:
        boxes: [N, 6], of which row and class are taken.
        corners: [N, 4, 2] (x, y) px, as of `box_corners`.
        crop: (height, width) of the output.
        limits: Limits of the boxes that stay; with None all stay.

    Returns:
        [M, 6] of the dtype of the boxes, in their order.
    """
    crop_height, crop_width = crop
    # From pixel centres, which are whole numbers there, to edges.
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
