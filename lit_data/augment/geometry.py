"""`Geometry`: everything that moves pixels, as one matrix and one look-up for each sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.matrices import (
    BoxLimits,
    Moves,
    Size,
    box_corners,
    compose,
    hull_boxes,
    invert,
    move_points,
    turn_covers,
)
from lit_data.augment.warping import Padding, Warp, WholeMoves
from lit_data.checks import check_choice, check_share
from lit_data.errors import ConfigError
from lit_data.grid import pair_px
from lit_data.rng import Stream, uniform

_ROUNDING_PX = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The largest moves of a geometry.

    Args:
        shift_px: Along each axis.
        rotate_deg: Either way.
        least_scale: The smallest factor; below 1 more of the input is seen.
        shear_deg: Along each axis, either way.
        perspective: Largest tilt, as a share.
        turn: Whether it turns by 90 degrees.
    """

    shift_px: float
    rotate_deg: float
    least_scale: float
    shear_deg: float
    perspective: float
    turn: bool

    def margin_px(self, patch_px: Size) -> Size:
        """Pixels that a patch must be read larger by on each side.

        The patch comes out of the middle of what was read. For shear and perspective this is a
        bound, for the rest the exact number, rounded up.

        Args:
            patch_px: (height, width) of the patch.

        Returns:
            Pixels above and below, and left and right.

        Raises:
            ConfigError: The perspective is so strong that no margin is enough.
        """
        height, width = patch_px
        y, x = self._half_extents(patch_px, 0)
        margin = _round_up(y - (height - 1) / 2), _round_up(x - (width - 1) / 2)
        read = height + 2 * margin[0], width + 2 * margin[1]
        if not (self.turn and turn_covers(read, patch_px)):
            return margin
        # What was read is large enough to be turned by 90 degrees, so it must be so for the other
        # moves as well; the crop then lies half a pixel off the centre where one side is even and
        # the other odd.
        y, x = self._half_extents(patch_px, (height - width) % 2 / 2)
        return (
            max(margin[0], _round_up(x - (height - 1) / 2)),
            max(margin[1], _round_up(y - (width - 1) / 2)),
        )

    def _half_extents(self, patch_px: Size, off_centre_px: float) -> tuple[float, float]:
        """How far from its centre the input is seen, down and across: the moves undone from the last to the first."""
        height, width = patch_px
        shift_px = self.shift_px + off_centre_px
        y, x = (height - 1) / 2 + shift_px, (width - 1) / 2 + shift_px
        distance = 1 - self.perspective * (x / (width / 2) + y / (height / 2))
        if distance <= 0:
            raise ConfigError(
                f"perspective={self.perspective} with shift_px={self.shift_px} reaches the horizon of a patch of "
                f"{height} x {width} px: choose smaller ones"
            )
        y, x = y / distance, x / distance
        y, x = _rotate(y, x, self.rotate_deg), _rotate(x, y, self.rotate_deg)
        y, x = y / self.least_scale, x / self.least_scale
        slope = math.tan(math.radians(self.shear_deg))
        return (y + slope * x) / (1 - slope * slope), (x + slope * y) / (1 - slope * slope)


def _rotate(along: float, across: float, degrees: float) -> float:
    """The largest extent along an axis of a rectangle that is rotated by up to so many degrees."""
    angle = min(math.radians(degrees), math.atan2(across, along))
    return along * math.cos(angle) + across * math.sin(angle)


def _round_up(length_px: float) -> int:
    return max(math.ceil(length_px - _ROUNDING_PX), 0)


_DRAWS: Final = 12
_KEY: Final = "augment_geometry"
_LARGEST_SHEAR_DEG: Final = 40.0
_LARGEST_PERSPECTIVE: Final = 0.3


class Geometry(Augmentation):
    """Flips, turns, shift, rotation, scale, shear, perspective and crop, the same for images, masks
    and boxes.

    All that was drawn becomes one matrix for each sample, and the output, which may be a crop from
    the middle, is looked up in the input once. While only whole pixels move (flips, turns, whole
    shifts, crops) values are copied and keep their set; otherwise images are bilinear. Masks are
    always looked up by nearest neighbour. With everything off and `crop_px` given this is a centre
    crop.

    Boxes become the axis-aligned hull of their moved corners, cut to the crop. Limits from
    ``box_candidates`` of ultralytics/yolov5. Flips and turns without a crop cut no box, so all are
    kept, and the device is not waited for.

    Args:
        flip_left_right: Mirror left-right with probability 1/2.
        flip_top_bottom: Mirror top-bottom with probability 1/2.
        turn: Turn by a random multiple of 90 degrees; of 180 where the input turned by 90 does not
            cover the output, as for a patch that is not square and not cropped.
        shift_px: Largest shift along each axis, by whole pixels.
        subpixel: Shift between pixels too.
        rotate_deg: Largest rotation about the centre, either way.
        scale: Smallest and largest factor; above 1 things become larger.
        shear_deg: Largest shear along each axis, either way, up to 40.
        perspective: Largest tilt: the share by which the distance at an edge of the output grows or
            shrinks, up to 0.3.
        probability: Of a sample to be shifted, rotated, scaled, sheared and tilted; flips and turns
            have their own.
        crop_px: Size of the output, one number or (height, width); none keeps that of the input.
        padding: What lies outside the input: `reflect` mirrors about the outermost pixels, `border`
            repeats them.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest share of a moved box that lies in the output, for it to be kept.

    Raises:
        ConfigError: An argument is out of its range; later, that the crop is larger than the input.
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
        crop_px: int | tuple[int, int] | None = None,
        padding: Padding = "reflect",
        min_box_px: float = 2.0,
        min_box_visible: float = 0.1,
    ) -> None:
        super().__init__()
        self.flips, self.turn = (flip_left_right, flip_top_bottom), turn
        self.shift_px, self.subpixel = shift_px, subpixel
        self.rotate_deg, self.shear_deg, self.perspective = rotate_deg, shear_deg, perspective
        self.scale, self.probability = tuple(scale), probability
        self.padding: Padding = padding
        self.crop_px = None if crop_px is None else pair_px("crop_px", crop_px)
        self.box_limits = BoxLimits(min_px=min_box_px, min_visible=min_box_visible)
        self._check()

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """``augment_geometry`` [B, 11] float32, see `Moves`."""
        return (_KEY,)

    @property
    def takes_bytes(self) -> bool:
        """Where every value is copied; see `Augmentation`."""
        return self.moves_whole_pixels

    @property
    def moves_whole_pixels(self) -> bool:
        """Whether every output pixel is a copy of one input pixel."""
        bent = self.rotate_deg or self.shear_deg or self.perspective or self.scale != (1.0, 1.0)
        return not bent and not (self.subpixel and self.shift_px)

    @property
    def is_still(self) -> bool:
        """Whether nothing moves; a crop may still be taken."""
        return self.moves_whole_pixels and not (any(self.flips) or self.turn or self.shift_px)

    def margin_px(self, patch_px: Size) -> Size:
        """Pixels (above and below, left and right) that a patch must be read larger by, so that no
        padding is seen.

        Args:
            patch_px: (height, width) that shall come out, by `crop_px`.
        """
        reach = Reach(
            shift_px=self.shift_px,
            rotate_deg=self.rotate_deg,
            least_scale=self.scale[0],
            shear_deg=self.shear_deg,
            perspective=self.perspective,
            turn=self.turn,
        )
        return reach.margin_px(patch_px)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the moves of a batch; see `Augmentation.draw`."""
        draws = uniform(seed, Stream.GEOMETRY, index, epoch, _DRAWS)
        quarters = np.floor(draws[:, :1] * 4) * self.turn
        mirror = np.where(
            (draws[:, 1:3] < 0.5) & np.array(self.flips), np.float32(-1), np.float32(1)
        )
        linear = self._linear(draws[:, 5:9].astype(np.float64)).reshape(-1, 4)
        tilt = self.perspective * (2 * draws[:, 9:11] - 1)
        shift = self._shift(draws[:, 3:5])
        stays = draws[:, 11] >= self.probability
        linear[stays], tilt[stays], shift[stays] = np.eye(2).reshape(-1), 0, 0
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
        boxes = None if layers.boxes is None else self._move_boxes(layers.boxes, matrix, size, crop)
        return Layers(*self._move(layers, matrix, crop), boxes)

    def _move(self, layers: Layers, matrix: Tensor, crop: Size) -> tuple[Tensor, Tensor | None]:
        images, masks, size = layers.images, layers.masks, layers.size_px
        if self.is_still:
            return _cut(images, crop), None if masks is None else _cut(masks, crop)
        inverse = invert(matrix)
        if self.moves_whole_pixels:
            moves = WholeMoves.of(inverse, size, crop, self.padding)
            return moves.take(images), None if masks is None else moves.take(masks)
        warp = Warp(inverse, size, crop, self.padding, tilted=self.perspective > 0)
        return warp.take(images), None if masks is None else warp.take(masks, nearest=True)

    def _move_boxes(self, boxes: Tensor, matrix: Tensor, size: Size, crop: Size) -> Tensor:
        corners = move_points(box_corners(boxes, size), matrix[boxes[:, 0].long()])
        cuts = self.shift_px or not self.moves_whole_pixels or crop != size
        return hull_boxes(boxes, corners, crop, self.box_limits if cuts else None)

    def _linear(self, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rotation times scale times shear: [B, 2, 2]."""
        angle = np.radians(self.rotate_deg) * (2 * draws[:, 0] - 1)
        scale = self.scale[0] + draws[:, 1] * (self.scale[1] - self.scale[0])
        shear = np.tan(np.radians(self.shear_deg) * (2 * draws[:, 2:4] - 1))
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
        first = (cosine - sine * shear[:, 1], cosine * shear[:, 0] - sine)
        second = (sine + cosine * shear[:, 1], sine * shear[:, 0] + cosine)
        return np.stack((*first, *second), axis=-1).reshape(-1, 2, 2)

    def _shift(self, draws: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.subpixel:
            return np.float32(self.shift_px) * (2 * draws - 1)
        # The product can round up to the next whole number, which is one too many.
        steps = np.floor(draws * np.float32(2 * self.shift_px + 1))
        shift: NDArray[np.float32] = np.minimum(steps, 2 * self.shift_px) - np.float32(
            self.shift_px
        )
        return shift

    def _check(self) -> None:
        low, high = self.scale if len(self.scale) == 2 else (0.0, 0.0)
        if not 0 < low <= high:
            raise ConfigError(f"scale={list(self.scale)} must be [low, high] with 0 < low <= high")
        for name, largest in (
            ("shear_deg", _LARGEST_SHEAR_DEG),
            ("perspective", _LARGEST_PERSPECTIVE),
        ):
            if not 0 <= getattr(self, name) <= largest:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must lie between 0 and {largest}"
                )
        if self.shift_px < 0 or not 0 <= self.rotate_deg <= 180:
            raise ConfigError(
                f"shift_px={self.shift_px}, rotate_deg={self.rotate_deg}: need shift_px >= 0, 0 <= rotate_deg <= 180"
            )
        if not self.subpixel and self.shift_px != int(self.shift_px):
            raise ConfigError(
                f"shift_px={self.shift_px} is not whole: set subpixel=true to shift between pixels"
            )
        check_share("probability", self.probability)
        check_choice("padding", self.padding, get_args(Padding))


def _cut(planes: Tensor, crop: Size) -> Tensor:
    top, left = (planes.shape[-2] - crop[0]) // 2, (planes.shape[-1] - crop[1]) // 2
    return planes[..., top : top + crop[0], left : left + crop[1]]
