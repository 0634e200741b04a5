"""How much larger a patch must be read so that a geometry shows none of its padding."""

import math
from dataclasses import dataclass

from lit_data.augment.matrices import Size, turn_covers
from lit_data.errors import ConfigError

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

        The patch comes out of the middle of what was read. For shear and perspective this is a bound, for the rest the
        exact number, rounded up.

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
        # What was read is large enough to be turned by 90 degrees, so it must be so for the other moves as well; the
        # crop then lies half a pixel off the centre where one side is even and the other odd.
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
