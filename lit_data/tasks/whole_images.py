"""Whole images as ``predict`` reads them, and the probability of each of their pixels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lit_data.inference.sources import ImagePixels
from lit_data.io.images.image_source import ImageBank
from lit_data.io.images.scaling import OriginalSizes
from lit_data.io.store.store import StoredImages

SLAB_PX: Final = 2**22


@dataclass(frozen=True, kw_only=True)
class WholeImages:
    """Images of any sizes, with what is done to their pixels.

    Args:
        bank: Stored pixels [C, H, W].
        names: Path of each image below the root, with forward slashes.
        channels: For each channel that a model gets the one of a tile.
        value_range: Pixel values that become 0 and 1; None: the whole range of the dtype, and
            floats as they are.
        classes: Names of the kinds of defects that are told apart.
        finish: Makes the input of the model, [C, H, W], from the number of an image; None: stored
            pixels are that input, but for the range.
        original_sizes: Of the files, where stored images are scaled: what is predicted is brought
            back to them.
    """

    bank: ImageBank
    names: Sequence[str]
    channels: tuple[int, ...]
    value_range: tuple[float, float] | None
    classes: Sequence[str] = ()
    finish: Callable[[int], Tensor] | None = None
    original_sizes: OriginalSizes | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tile_channels(self) -> int:
        """Number of channels of a tile."""
        return self.bank.channels if self.finish is None else len(self.channels)

    def load(self, number: int) -> ImagePixels | Tensor:
        """Return an image as it goes to the predictor: [C, H, W], read by slices.

        Raises:
            DataError: Its file is bad.
        """
        if self.finish is not None:
            return self.finish(number)
        if isinstance(self.bank, StoredImages):
            return self.bank.open_image(number)
        return self.bank[number]

    def count_px(self, number: int) -> int:
        """Return the pixels of an image; where it is stored scaled, of the larger of both sizes."""
        stored_px = int(self.bank.heights_px[number] * self.bank.widths_px[number])
        if self.original_sizes is None:
            return stored_px
        height, width = self.original_sizes.of(number)
        return max(stored_px, height * width)

    def restore(self, number: int, values: NDArray[Any]) -> NDArray[Any]:
        """Scale the prediction of an image to the size of its file: [K, h, w] to [K, H, W]."""
        if self.original_sizes is None:
            return values
        return self.original_sizes.restore(number, values)

    def show(self, number: int) -> NDArray[Any]:
        """Return stored pixels at the size of the file, for pictures: [C, H, W]."""
        return self.restore(number, self.bank[number])

    def exceed(self, size_px: tuple[int, int]) -> bool:
        """Return True if any image is higher or wider."""
        height_px, width_px = size_px
        is_higher = self.bank.heights_px > height_px
        is_wider = self.bank.widths_px > width_px
        return bool((is_higher | is_wider).any())


@dataclass(frozen=True, slots=True)
class ProbabilityMap:
    """Probability of each pixel of an image.

    Args:
        values: [H, W] float32 in 0..1, or uint16 where 65535 is 1, which may be mapped from a file.
        kinds: [K - 1, H, W] the same of each class behind the background; None where none are told
            apart.
    """

    values: NDArray[Any]
    kinds: NDArray[Any] | None = None

    @classmethod
    def of(cls, predicted: NDArray[Any]) -> "ProbabilityMap":
        """Make a map of [1 + classes, H, W], the probability of any defect first."""
        kinds = predicted[1:] if len(predicted) > 1 else None
        return cls(predicted[0], kinds)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, px."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, part: slice) -> NDArray[np.float32]:
        """Return some rows, [h, W] float32 in 0..1."""
        values = self.values[part]
        scale = np.float32(1 if values.dtype == np.float32 else 65535)
        unit: NDArray[np.float32] = np.divide(values, scale, dtype=np.float32)
        return unit

    def number_kinds(self, threshold: float) -> NDArray[np.uint8] | None:
        """Return the most probable class of each pixel that reaches a threshold.

        Returns:
            [H, W] numbers from 1, and 0 below the threshold; None without classes.
        """
        if self.kinds is None:
            return None
        numbers = np.empty(self.shape, np.uint8)
        for part in slabs(self.shape):
            most_probable = 1 + self.kinds[:, part].argmax(0)
            numbers[part] = np.where(self.rows(part) >= threshold, most_probable, 0)
        return numbers

    def encode(self, part: slice, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
        """Return some rows as whole numbers, [h, W]; the largest of the dtype is probability 1."""
        if self.values.dtype == dtype:
            return self.values[part]
        scaled = self.rows(part) * np.float32(np.iinfo(dtype).max)
        encoded: NDArray[Any] = np.rint(scaled).astype(dtype)
        return encoded


def slabs(shape: tuple[int, int]) -> Iterator[slice]:
    """Yield the rows of an image in parts of at most `SLAB_PX`; most images are one part."""
    height, width = shape
    step = max(1, SLAB_PX // width)
    for top in range(0, height, step):
        yield slice(top, min(top + step, height))
