"""Value range of images, on whose whole numbers defects are drawn."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The pixel values that mean 0 and 1, and whether there are values between whole numbers.

    On whole numbers each defect adds a whole number to each pixel, as a camera would deliver it. So
    drawn pixels do not stand out by values that no real pixel has, and sums are exact: the same to
    the byte in any order, on any device.

    Attributes:
        low: Becomes 0.
        high: Becomes 1.
        whole: Pixels are integers.
    """

    low: float = 0.0
    high: float = 1.0
    whole: bool = False

    @property
    def scale(self) -> float:
        """Pixel values in the range 0..1."""
        return self.high - self.low

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value that a drawn pixel may take."""
        return (math.ceil(self.low), math.floor(self.high)) if self.whole else (self.low, self.high)
