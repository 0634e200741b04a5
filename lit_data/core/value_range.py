"""Pixel values that represent 0 and 1, and the conversion of stored pixels to that range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lit_data.core.devices import divided
from lit_data.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Pixel values that represent 0 and 1, and whether pixels are integers.

    For integers, each defect adds an integer to each pixel, as in images of a camera. Drawn pixels
    then have no values that real pixels cannot have, and sums are exact: byte-identical in any
    order, on any device.

    Attributes:
        low: Pixel value that becomes 0.
        high: Pixel value that becomes 1.
        whole: True if pixels are integers.
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


def find_unit_range(
    dtype: "np.dtype[np.generic]", value_range: Sequence[float] | None
) -> ValueRange:
    """Return the pixel values that become 0 and 1.

    Args:
        dtype: Dtype of the pixels.
        value_range: (low, high), or None for the full range of an unsigned dtype, and 0..1 for
            float32 and bool.

    Raises:
        ConfigError: low >= high, or the dtype has no natural range.
    """
    if value_range is not None:
        low, high = (float(value) for value in value_range)
        if not low < high:
            raise ConfigError(
                f"value_range={list(value_range)} must be [low, high] with low < high"
            )
        return ValueRange(low, high, whole=dtype.kind != "f")
    if dtype.kind == "u":
        return ValueRange(0.0, float(np.iinfo(dtype.name).max), whole=True)
    if dtype.kind in "fb":
        return ValueRange()
    raise ConfigError(f"{dtype.name} pixels have no natural range: set data.value_range=[low,high]")


def to_unit(images: "Tensor", values: ValueRange) -> "Tensor":
    """Return pixels of any shape as float32 in 0..1; those of floats in 0..1 themselves, as they are.

    It takes as few passes as the range allows: one where the dtype keeps within it.
    """
    import torch

    if values == ValueRange():
        return images.to(torch.float32)
    # Bytes lie within their range, so that no clamp is needed.
    if images.dtype == torch.uint8 and (values.low, values.high) == (0.0, 255.0):
        return divided(images, values.high)
    return images.to(torch.float32).sub(values.low).div_(values.scale).clamp_(0, 1)
