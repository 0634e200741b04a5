"""`Geometry`: everything that moves pixels, as one matrix and one lookup for each sample."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.boxes import BoxLimits, box_corners, hull_boxes, move_points
from lit_data.augment.warping import Padding, Warp
from lit_data.core.checks import check_choice, check_fraction, check_share
from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Doubles, Floats, Size

_ROUNDING_PX = 1e-6
"""Rounding error that must not enlarge a margin by a pixel."""


Mover = Callable[[Tensor], Tensor]
_DRAWS = 12
_KEY = "augment_geometry"
_LARGEST_SHEAR_DEG = 40.0
_LARGEST_PERSPECTIVE = 0.3


class Geometry(Augmentation):
    """Flips, turns, shift, rotation, scale, shear, perspective and crop.

    Images, masks and boxes move alike. All moves are combined into one matrix for each sample, and
    the output, which may be a center crop, is looked up in the input once. If only whole pixels
    move (flips, turns, whole shifts, crops), values are copied unchanged; otherwise images are
    interpolated bilinearly. Masks always use nearest neighbor. With everything off and `crop_px`
    set, this is a center crop.

    Boxes become the axis-aligned hull of their moved corners, clipped to the crop. The limits
    follow ``box_candidates`` of ultralytics/yolov5. Flips and turns without a crop clip no box, so
    all boxes stay, and nothing waits for the device.

    Args:
        flip_left_right: Mirror left-right with probability 1/2.
        flip_top_bottom: Mirror top-bottom with probability 1/2.
        turn: Turn by a random multiple of 90 degrees, or of 180 if the input turned by 90 does not
            cover the output, such as a patch that is neither square nor cropped.
        shift_px: Largest shift along each axis, by whole pixels.
        subpixel: Shift by fractions of a pixel too.
        rotate_deg: Largest rotation about the center, either way.
        scale: Smallest and largest factor; a factor above 1 enlarges.
        shear_deg: Largest shear along each axis, either way, up to 40.
        perspective: Largest tilt: the fraction by which the distance at an edge of the output grows
            or shrinks, up to 0.3.
        probability: Probability that a sample is shifted, rotated, scaled, sheared and tilted;
            flips and turns have their own.
        crop_px: Size of the output, one number or (height, width); None keeps that of the input.
        padding: Values outside the input: `reflect` mirrors about the outermost pixels, `border`
            repeats them, `zeros` is 0.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output for the box to be kept.

    Raises:
        ConfigError: An argument is out of its range; later, the crop is larger than the input.
    """

    def __init__(
        self,
        *,
        flip_left_right: bool = False,
        flip_top_bottom: bool = False,
        turn: bool = False,
        shift_px: float = 0,
        subpixel: bool = False,
        rotate_deg: float = 0.0,
        scale: Sequence[float] = (1.0, 1.0),
        shear_deg: float = 0.0,
        perspective: float = 0.0,
        probability: float = 1.0,
        crop_px: int | Size | None = None,
        padding: Padding = "reflect",
        min_box_px: float = 2.0,
        min_box_visible: float = 0.1,
    ) -> None:
        super().__init__()
        self.flips = (flip_left_right, flip_top_bottom)
        self.turn = turn
        self.shift_px = shift_px
        self.subpixel = subpixel
        self.rotate_deg = rotate_deg
        self.scale = tuple(scale)
        self.shear_deg = shear_deg
        self.perspective = perspective
        self.probability = probability
        self.padding: Padding = padding
        self.crop_px = None if crop_px is None else pair_px("crop_px", crop_px)
        self.box_limits = BoxLimits(min_px=min_box_px, min_visible=min_box_visible)
        self._check()

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Key of ``augment_geometry`` [B, 11] float32; see `Moves`."""
        return (_KEY,)

    @property
    def takes_bytes(self) -> bool:
        """True if every value is copied; see `Augmentation`."""
        return self.moves_whole_pixels

    @property
    def moves_whole_pixels(self) -> bool:
        """Return True if every output pixel is a copy of one input pixel."""
        if self.rotate_deg or self.shear_deg or self.perspective or self.scale != (1.0, 1.0):
            return False
        return not (self.subpixel and self.shift_px)

    @property
    def is_still(self) -> bool:
        """Return True if nothing moves; there may still be a crop."""
        return self.moves_whole_pixels and not (any(self.flips) or self.turn or self.shift_px)

    def margin_px(self, patch_px: Size) -> Size:
        """Return the margin that must be read around a patch so that no padding is visible.

        The patch is the center of the larger one. The margin is a bound for shear and perspective,
        and otherwise the exact number, rounded up.

        Args:
            patch_px: (height, width) of the patch after the crop, see `crop_px`.

        Returns:
            Pixels above and below, and pixels left and right.

        Raises:
            ConfigError: The perspective is so strong that no margin is enough.
        """
        height, width = patch_px
        y, x = self._half_extents(patch_px, 0)
        vertical = _round_up(y - (height - 1) / 2)
        horizontal = _round_up(x - (width - 1) / 2)
        larger_px = height + 2 * vertical, width + 2 * horizontal
        if not (self.turn and turn_covers(larger_px, patch_px)):
            return vertical, horizontal
        # The larger patch can be turned by 90 degrees, so it must leave room for the other moves
        # after that turn as well. The crop is then half a pixel off center if one side is even and
        # the other odd.
        y, x = self._half_extents(patch_px, (height - width) % 2 / 2)
        vertical = max(vertical, _round_up(x - (height - 1) / 2))
        horizontal = max(horizontal, _round_up(y - (width - 1) / 2))
        return vertical, horizontal

    def _half_extents(self, patch_px: Size, off_centre_px: float) -> tuple[float, float]:
        """Return the visible extent of the input, vertically and horizontally from its center.

        The moves are inverted from the last to the first.
        """
        height, width = patch_px
        # The shift is the last move, so it is undone first; then tilt, rotation, scale and shear.
        shift_px = self.shift_px + off_centre_px
        y = (height - 1) / 2 + shift_px
        x = (width - 1) / 2 + shift_px
        distance = 1 - self.perspective * (x / (width / 2) + y / (height / 2))
        if distance <= 0:
            raise ConfigError(
                f"perspective={self.perspective} with shift_px={self.shift_px} reaches the horizon "
                f"of a patch of {height} x {width} px: choose smaller ones"
            )
        y, x = y / distance, x / distance
        y, x = _rotate(y, x, self.rotate_deg), _rotate(x, y, self.rotate_deg)
        y, x = y / self.scale[0], x / self.scale[0]
        slope = math.tan(math.radians(self.shear_deg))
        return (y + slope * x) / (1 - slope * slope), (x + slope * y) / (1 - slope * slope)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the moves of a batch; see `Augmentation.draw`."""
        draws = uniform(seed, Stream.GEOMETRY, index, epoch, _DRAWS)
        quarters = np.floor(draws[:, :1] * 4) * self.turn
        # Each move has its own columns, so that enabling one does not change the others.
        is_flipped = (draws[:, 1:3] < 0.5) & np.array(self.flips)
        mirror = np.where(is_flipped, np.float32(-1), np.float32(1))
        shift = self._shift(draws[:, 3:5])
        linear = self._linear(draws[:, 5:9].astype(np.float64)).reshape(-1, 4)
        tilt = self.perspective * (2 * draws[:, 9:11] - 1)
        stays = draws[:, 11] >= self.probability
        shift[stays] = 0
        linear[stays] = np.eye(2).reshape(-1)
        tilt[stays] = 0
        columns = np.concatenate((mirror, quarters, linear, tilt, shift), axis=1)
        return {_KEY: torch.from_numpy(columns.astype(np.float32))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Move everything by the matrix of its sample."""
        size = layers.size_px
        crop = self.crop_px or size
        if crop[0] > size[0] or crop[1] > size[1]:
            raise ConfigError(
                f"crop_px={crop} is larger than the images of {size[0]} x {size[1]} px"
            )
        if self.is_still and crop == size:
            return layers
        matrix = compose(Moves.unpack(draws[_KEY]), size, crop)
        take_images, take_masks = self._make_movers(matrix, size, crop)
        images, masks, boxes = layers.images, layers.masks, layers.boxes
        return Layers(
            take_images(images),
            None if masks is None else take_masks(masks),
            None if boxes is None else self._move_boxes(boxes, matrix, size, crop),
        )

    def _make_movers(self, matrix: Tensor, size: Size, crop: Size) -> tuple[Mover, Mover]:
        """Return the mover of images and the mover of masks, which adds no new values."""
        if self.is_still:
            cut = partial(_cut, crop=crop)
            return cut, cut
        warp = Warp(
            matrix,
            size,
            crop,
            self.padding,
            copies=self.moves_whole_pixels,
            tilted=self.perspective > 0,
        )
        return warp.take, partial(warp.take, nearest=True)

    def _move_boxes(self, boxes: Tensor, matrix: Tensor, size: Size, crop: Size) -> Tensor:
        corners = move_points(box_corners(boxes, size), matrix[boxes[:, 0].long()])
        # If nothing is clipped, all boxes stay, and nothing waits for the device.
        cuts = self.shift_px or not self.moves_whole_pixels or crop != size
        return hull_boxes(boxes, corners, crop, self.box_limits if cuts else None)

    def _linear(self, draws: Doubles) -> Doubles:
        """Return the product of rotation, scale and shear, [B, 2, 2]."""
        angle = np.radians(self.rotate_deg) * (2 * draws[:, 0] - 1)
        scale = self.scale[0] + draws[:, 1] * (self.scale[1] - self.scale[0])
        shear = np.tan(np.radians(self.shear_deg) * (2 * draws[:, 2:4] - 1))
        # The product of [[cos, -sin], [sin, cos]] and [[1, shear_x], [shear_y, 1]], written out.
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
        first = (cosine - sine * shear[:, 1], cosine * shear[:, 0] - sine)
        second = (sine + cosine * shear[:, 1], sine * shear[:, 0] + cosine)
        return np.stack((*first, *second), axis=-1).reshape(-1, 2, 2)

    def _shift(self, draws: Floats) -> Floats:
        if self.subpixel:
            return np.float32(self.shift_px) * (2 * draws - 1)
        # The product can round up to the next integer, which is one too large.
        steps = np.floor(draws * np.float32(2 * self.shift_px + 1))
        steps = np.minimum(steps, 2 * self.shift_px)
        shift: Floats = steps - np.float32(self.shift_px)
        return shift

    def _check(self) -> None:
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ConfigError(f"scale={list(self.scale)} must be [low, high] with 0 < low <= high")
        limits = {"shear_deg": _LARGEST_SHEAR_DEG, "perspective": _LARGEST_PERSPECTIVE}
        for name, largest in limits.items():
            check_fraction(name, getattr(self, name), largest)
        if self.shift_px < 0 or not 0 <= self.rotate_deg <= 180:
            raise ConfigError(
                f"shift_px={self.shift_px}, rotate_deg={self.rotate_deg}: need shift_px >= 0, 0 <= "
                "rotate_deg <= 180"
            )
        if not self.subpixel and self.shift_px != int(self.shift_px):
            raise ConfigError(
                f"shift_px={self.shift_px} is not whole: set subpixel=true to shift between pixels"
            )
        check_share("probability", self.probability)
        check_choice("padding", self.padding, get_args(Padding))


def _cut(planes: Tensor, crop: Size) -> Tensor:
    top = (planes.shape[-2] - crop[0]) // 2
    left = (planes.shape[-1] - crop[1]) // 2
    return planes[..., top : top + crop[0], left : left + crop[1]]


def _rotate(along: float, across: float, degrees: float) -> float:
    """Return the largest extent along an axis of a rectangle that is rotated either way."""
    angle = min(math.radians(degrees), math.atan2(across, along))
    return along * math.cos(angle) + across * math.sin(angle)


def _round_up(length_px: float) -> int:
    return max(math.ceil(length_px - _ROUNDING_PX), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Moves of each sample in the order of application, independent of the image size.

    Args:
        mirror: [B, 2] factors -1 or 1, along x and y.
        quarters: [B] int64 number of turns by 90 degrees, 0 to 3; x turns toward y.
        linear: [B, 2, 2] rotation, scale and shear about the center.
        tilt: [B, 2] fraction that perspective adds to the distance at the right and the lower edge
            of the output.
        shift: [B, 2] shifts along x and y, in px.
    """

    mirror: Tensor
    quarters: Tensor
    linear: Tensor
    tilt: Tensor
    shift: Tensor

    @classmethod
    def unpack(cls, columns: Tensor) -> "Moves":
        """Return the moves in [B, 11], with the columns in the order of the arguments."""
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

    The crop is the center of the turned input, at whole pixels. If a quarter turn would not cover
    the crop, only turns by 180 degrees are used.

    Args:
        moves: Moves of the samples.
        size: (height, width) of the input.
        crop: (height, width) of the output.

    Returns:
        Matrices [B, 3, 3] float32, which are exact if only whole pixels move.
    """
    quarters = moves.quarters
    if not turn_covers(size, crop):
        quarters = quarters // 2 * 2
    linear = _multiply(moves.linear, _turns(quarters) * moves.mirror[:, None, :])
    across, down = linear.unbind(dim=-1)
    # position to which the center of the input would move
    start = across * ((size[1] - 1) / 2) + down * ((size[0] - 1) / 2)
    upper = torch.cat((linear, -start[..., None]), dim=-1)
    tilt_x = moves.tilt[:, :1] / (crop[1] / 2)
    tilt_y = moves.tilt[:, 1:] / (crop[0] / 2)
    lower = tilt_x * upper[:, 0] + tilt_y * upper[:, 1]
    lower[:, 2] += 1
    # So far the center of the input is at 0; now it moves to its position in the crop.
    anchor = _crop_centres(quarters, size, crop) + moves.shift
    return torch.cat((upper + anchor[..., None] * lower[:, None], lower[:, None]), dim=1)


def _crop_centres(quarters: Tensor, size: Size, crop: Size) -> Tensor:
    """Return the center of each turned input in coordinates of its crop, [B, 2] (x, y) in px."""
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
    """Return the exact matrices of turns by 90 degrees, [B, 2, 2]."""
    # Integers from comparisons, because cosines would not be exact.
    cosine = (quarters == 0).float() - (quarters == 2).float()
    sine = (quarters == 1).float() - (quarters == 3).float()
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).view(-1, 2, 2)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the products [B, 2, 2].

    They are written out, because a library may round differently for another number of samples.
    """
    return left[:, :, :1] * right[:, :1] + left[:, :, 1:] * right[:, 1:]
