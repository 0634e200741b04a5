"""Pixels of a batch of any dtype, which are read and changed by their number."""

import threading

import torch
from torch import Tensor

from lit_data.core.value_range import ValueRange, to_unit

_memory = threading.local()


class Canvas:
    """Pixels of a batch.

    Args:
        images: [B, C, H, W] uint8, uint16, int16 or float32, contiguous; `add` changes them in
            place.
        values: Value range of the images.

    Attributes:
        planes: [C] int64, number of the first pixel of each channel in a sample.
    """

    def __init__(self, images: Tensor, values: ValueRange) -> None:
        self.values = values
        self.device = images.device
        self.channels, self.height_px, self.width_px = images.shape[1:]
        # torch has few kernels for uint16, so its bits are moved as int16.
        self._unsigned16 = images.dtype == torch.uint16
        self._flat = (images.view(torch.int16) if self._unsigned16 else images).view(-1)
        self.planes = torch.arange(self.channels, device=self.device) * (
            self.height_px * self.width_px
        )

    def read(self, index: Tensor) -> Tensor:
        """Return pixel values within the value range, float32 in the shape of the index."""
        stored = self._flat.index_select(0, index.reshape(-1)).view(index.shape)
        if self._unsigned16:
            stored = stored.to(torch.int32) & 0xFFFF  # without the sign that int16 gave it
        return stored.to(torch.float32).clamp_(*self.values.bounds)

    def read_target(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Return the target in 0..1, reflected at the edges.

        Args:
            row: [n] sample numbers.
            y: [n, ...] rows of the pixels.
            x: [n, ...] columns of the pixels.

        Returns:
            Values as float32, in the shape of y and x.
        """
        return to_unit(self.read(self.find(row, y, x)), self.values)

    def read_channels(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Return all channels in 0..1, reflected at the edges; arguments as for `read_target`.

        Returns:
            [..., C] float32.
        """
        return to_unit(self.read(self.find(row, y, x)[..., None] + self.planes), self.values)

    def find(self, row: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Return the numbers of pixels of the target; arguments as for `read_target`."""
        pixel = mirror(y, self.height_px) * self.width_px + mirror(x, self.width_px)
        # Channel 0 of a sample is the target.
        first = row * (self.channels * self.height_px * self.width_px)
        return first.view(-1, *[1] * (pixel.ndim - 1)) + pixel

    def add(self, index: Tensor, steps: Tensor) -> None:
        """Add to pixels, which may occur several times.

        All steps are summed first, and the result is clipped last.

        Args:
            index: [K] int64 pixel numbers.
            steps: [K] float32 pixel values; integers if the stored values are, so that sums are
                exact.
        """
        before = self.read(index)
        if self._flat.dtype == torch.float32:
            # Clipped first, because float pixels may be out of range.
            self._flat[index] = before
            self._accumulate(self._flat, index, steps)
            self._flat[index] = self.read(index)
            return
        # Integers are summed in a plane of float32, because a sum may exceed the range of the dtype.
        sums = _zeros(self._flat.numel(), self.device)
        self._accumulate(sums, index, steps)
        after = (before + sums[index]).clamp_(*self.values.bounds)
        sums[index] = 0
        if self._unsigned16:
            after = after.to(torch.int32)  # whose lower bits then become an int16
        self._flat[index] = after.to(self._flat.dtype)

    def _accumulate(self, flat: Tensor, index: Tensor, steps: Tensor) -> None:
        if self.device.type == "cuda" and not self.values.whole:
            # index_add_ adds in the order in which threads arrive, which rounds differently;
            # index_put_ sorts first.
            flat.index_put_((index,), steps, accumulate=True)
        else:
            flat.index_add_(0, index, steps)


def mirror(index: Tensor, length_px: int) -> Tensor:
    """Return rows or columns reflected into an image, without repeating its edge."""
    last = length_px - 1
    return last - (last - index.abs()).abs_().clamp_(max=last)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Return zeros that this thread keeps, which callers must leave zero.

    Clearing planes as large as the batch would take longer than drawing.
    """
    if device.type != "cpu":
        return torch.zeros(size, device=device)
    zeros: Tensor | None = getattr(_memory, "zeros", None)
    if zeros is None or zeros.numel() < size:
        with torch.inference_mode(mode=False):  # else they could not be written outside of it
            zeros = _memory.zeros = torch.zeros(size)
    return zeros
