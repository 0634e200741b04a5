"""Pixels of a batch, of any dtype, read and added to by their place."""

import threading
from typing import Final

import torch
from torch import Tensor

from lit_data.synthesis.values import ValueRange

_memory: Final = threading.local()


class Canvas:
    """The pixels of a batch.

    Args:
        images: [B, C, H, W], contiguous; changed in place by `add`. uint8, uint16, int16 or
            float32.
        values: Their value range.

    Attributes:
        planes: [C] int64, number of the first pixel of each channel of a sample.
    """

    def __init__(self, images: Tensor, values: ValueRange) -> None:
        self.values, self.device = values, images.device
        self.channels, self.height_px, self.width_px = images.shape[1:]
        # torch has few kernels for uint16: its bits are moved as int16.
        self._unsigned16 = images.dtype == torch.uint16
        self._flat = (images.view(torch.int16) if self._unsigned16 else images).view(-1)
        self.planes = torch.arange(self.channels, device=self.device) * (
            self.height_px * self.width_px
        )

    def read(self, index: Tensor) -> Tensor:
        """Pixel values within the value range: float32, of the shape of the index."""
        stored = self._flat[index]
        if self._unsigned16:
            stored = stored.to(torch.int32) & 0xFFFF
        return stored.to(torch.float32).clamp_(*self.values.bounds)

    def read_target(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """The target in 0..1, mirrored at the edges.

        Args:
            row: [n] samples.
            y: [n, ...] rows of pixels.
            x: [n, ...] columns.

        Returns:
            float32 of the shape of y and x.
        """
        return self._to_unit(self.read(self.find(row, y, x)))

    def read_channels(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """All channels in 0..1, mirrored at the edges; the arguments are those of `read_target`.

        Returns:
            [..., C] float32.
        """
        return self._to_unit(self.read(self.find(row, y, x)[..., None] + self.planes))

    def find(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Numbers of pixels of the target; the arguments are those of `read_target`."""
        pixel = mirror(y, self.height_px) * self.width_px + mirror(x, self.width_px)
        first = row * (self.channels * self.height_px * self.width_px)
        return first.view(-1, *[1] * (pixel.ndim - 1)) + pixel

    def add(self, index: Tensor, steps: Tensor) -> None:
        """Add to pixels, which may occur several times: the sum over all of them first, the bounds
        last.

        Args:
            index: [K] int64.
            steps: [K] float32 pixel values; whole numbers where the values are whole, so that sums
                are exact.
        """
        before = self.read(index)
        if self._flat.dtype == torch.float32:
            self._flat[index] = before
            self._accumulate(self._flat, index, steps)
            self._flat[index] = self.read(index)
            return
        zeros = _zeros(self._flat.numel(), self.device)
        self._accumulate(zeros, index, steps)
        after = (before + zeros[index]).clamp_(*self.values.bounds)
        zeros[index] = 0
        self._flat[index] = (after.to(torch.int32) if self._unsigned16 else after).to(
            self._flat.dtype
        )

    def _to_unit(self, pixels: Tensor) -> Tensor:
        return pixels.sub_(self.values.low).div_(self.values.scale)

    def _accumulate(self, flat: Tensor, index: Tensor, steps: Tensor) -> None:
        if self.device.type == "cuda" and not self.values.whole:
            # index_add_ adds in the order in which threads arrive, which rounds differently;
            # index_put_ sorts first.
            flat.index_put_((index,), steps, accumulate=True)
        else:
            flat.index_add_(0, index, steps)


def mirror(index: Tensor, length_px: int) -> Tensor:
    """Rows or columns outside of an image as those inside that they mirror, without the edge itself."""
    last = length_px - 1
    return last - (last - index.abs()).abs_().clamp_(max=last)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeros that this thread keeps, and leaves zero: clearing whole images would cost more than drawing."""
    if device.type != "cpu":
        return torch.zeros(size, device=device)
    zeros: Tensor | None = getattr(_memory, "zeros", None)
    if zeros is None or zeros.numel() < size:
        with torch.inference_mode(mode=False):  # else they could not be written outside of it
            zeros = _memory.zeros = torch.zeros(size)
    return zeros
