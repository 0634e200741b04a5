"""All the geometry of a sample as one matrix that maps pixel centres (x, y, 1) of the input to those of the output."""

from dataclasses import dataclass

import torch
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What was drawn for each sample, before any image size is known; in the order of application.

    Args:
        mirror: [B, 2] -1 or 1, along x and y.
        quarters: [B] int64, turns by 90 degrees, 0 to 3; x turns towards y.
        linear: [B, 2, 2], rotation, scale and shear about the centre.
        tilt: [B, 2], what perspective adds to the distance at the right and the lower edge of the output, as a share.
        shift: [B, 2] px, x and y.
    """

    mirror: Tensor
    quarters: Tensor
    linear: Tensor
    tilt: Tensor
    shift: Tensor

    @classmethod
    def unpack(cls, columns: Tensor) -> "Moves":
        """From [B, 11], the columns in the order of the arguments."""
        return cls(
            mirror=columns[:, 0:2],
            quarters=columns[:, 2].long(),
            linear=columns[:, 3:7].reshape(-1, 2, 2),
            tilt=columns[:, 7:9],
            shift=columns[:, 9:11],
        )


def turn_covers(size: Size, crop: Size) -> bool:
    """Whether an input (height, width) turned by 90 degrees covers the crop."""
    return crop[0] <= size[1] and crop[1] <= size[0]


def compose(moves: Moves, size: Size, crop: Size) -> Tensor:
    """The matrix of each sample.

    The crop lies in the middle of the turned input, at whole pixels. Where a quarter turn would not cover the crop,
    turns are by 180 degrees only.

    Args:
        moves: What was drawn.
        size: (height, width) of the input.
        crop: (height, width) of the output.

    Returns:
        [B, 3, 3] float32; exact where only whole pixels move.
    """
    quarters = moves.quarters if turn_covers(size, crop) else moves.quarters // 2 * 2
    linear = _multiply(moves.linear, _turns(quarters) * moves.mirror[:, None, :])
    across, down = linear.unbind(dim=-1)
    start = across * ((size[1] - 1) / 2) + down * ((size[0] - 1) / 2)
    upper = torch.cat((linear, -start[..., None]), dim=-1)
    tilt_x, tilt_y = moves.tilt[:, :1] / (crop[1] / 2), moves.tilt[:, 1:] / (crop[0] / 2)
    lower = tilt_x * upper[:, 0] + tilt_y * upper[:, 1]
    lower[:, 2] += 1
    anchor = _crop_centres(quarters, size, crop) + moves.shift
    return torch.cat((upper + anchor[..., None] * lower[:, None], lower[:, None]), dim=1)


def invert(matrix: Tensor) -> Tensor:
    """Inverse up to a factor that makes the last entry 1, from cofactors: no solver, which would wait for the device.

    Args:
        matrix: [B, 3, 3].

    Returns:
        [B, 3, 3].
    """
    first, second, third = matrix.unbind(dim=1)
    columns = [torch.linalg.cross(a, b) for a, b in ((second, third), (third, first), (first, second))]
    adjugate = torch.stack(columns, dim=-1)
    return adjugate / adjugate[:, 2:, 2:]


def _crop_centres(quarters: Tensor, size: Size, crop: Size) -> Tensor:
    """Where the centre of each turned input lies in the crop out of its middle: [B, 2] (x, y) px."""
    turned = quarters % 2 == 1
    # Scalars, here and below: a small tensor made from a list would wait for the device.
    y, x = (
        torch.where(turned, (other - 1) / 2 - (other - part) // 2, (whole - 1) / 2 - (whole - part) // 2)
        for whole, other, part in zip(size, size[::-1], crop, strict=True)
    )
    return torch.stack((x, y), dim=-1)


def _turns(quarters: Tensor) -> Tensor:
    cosine = (quarters == 0).float() - (quarters == 2).float()
    sine = (quarters == 1).float() - (quarters == 3).float()
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).view(-1, 2, 2)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """[B, 2, 2] products written out: a library may round them otherwise for another number of samples."""
    return left[:, :, :1] * right[:, :1] + left[:, :, 1:] * right[:, 1:]
