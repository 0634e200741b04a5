"""Files of a prediction: whole or absent, also where an image is larger than memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SLAB_PX: Final = 2**22


@dataclass(frozen=True, slots=True)
class ProbabilityMap:
    """Probability of each pixel of an image.

    Args:
        values: [H, W] float32 in 0..1, or uint16 where 65535 is 1, which may be mapped from a file.
    """

    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) px."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, part: slice) -> NDArray[np.float32]:
        """Some rows: [h, W] float32 in 0..1."""
        values = self.values[part]
        scale = np.float32(1 if values.dtype == np.float32 else 65535)
        unit: NDArray[np.float32] = np.divide(values, scale, dtype=np.float32)
        return unit

    def encode(self, part: slice, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
        """Some rows as whole numbers: [h, W], the largest of the dtype is 1."""
        if self.values.dtype == dtype:
            return self.values[part]
        whole: NDArray[Any] = np.rint(self.rows(part) * np.float32(np.iinfo(dtype).max)).astype(dtype)
        return whole


def slabs(shape: tuple[int, int]) -> Iterator[slice]:
    """The rows of an image in parts of bounded size; most images are one part."""
    step = max(1, _SLAB_PX // shape[1])
    return (slice(top, min(top + step, shape[0])) for top in range(0, shape[0], step))
