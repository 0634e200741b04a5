"""Draw a plan on the device of the images. Nothing random happens here."""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from lit_data.synthesis.plan import SUBPIXELS, DefectPlan, SpotShape
from lit_data.synthesis.shapes import spot_kernels, window_starts
from lit_data.synthesis.values import ValueRange

UNIT: Final = ValueRange()


@torch.no_grad()
def render(images: Tensor, plan: DefectPlan, values: ValueRange = UNIT) -> tuple[Tensor, Tensor]:
    """Add the planned defects to a batch; only the pixels of each defect's window are touched.

    Windows that reach past the edge of a sample are cut there. A defect that would leave the value range at its centre
    in the target (a dark one on black, a bright one on white) gets the opposite sign: the mask never marks what
    cannot be seen.

    Args:
        images: [B, C, H, W] float32, contiguous; changed in place.
        plan: Defects for these B samples; arrays or tensors, moved to the device of the images if need be.
        values: The value range of the images, by default 0..1.

    Returns:
        images: the same tensor; what was touched lies within the range.
        masks: [B, 1, H, W] float32 in {0, 1}, 1 within the windows of true defects.
    """
    batch, channels, height, width = images.shape
    masks = images.new_zeros((batch, 1, height, width))
    if not len(plan):
        return images, masks
    tensors = {name: torch.as_tensor(value, device=images.device) for name, value in plan.arrays().items()}
    top, left, kernels = _place_kernels(tensors, plan.spots)
    rows = top[:, None] + torch.arange(kernels.shape[1], device=images.device)
    columns = left[:, None] + torch.arange(kernels.shape[2], device=images.device)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    kernels = kernels * inside
    pixel = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]

    steps = kernels * _turn_inwards(images, tensors, values)[:, None, None] * values.scale
    steps = torch.round(steps) if values.whole else steps
    plane = tensors["row"][:, None] * channels + torch.arange(channels, device=images.device)
    index = plane[..., None, None] * (height * width) + pixel[:, None]
    _add(
        images.view(-1), index.reshape(-1), (steps[:, None] * tensors["channels"][..., None, None]).reshape(-1), values
    )

    marked = (kernels > 0) & tensors["is_true"][:, None, None]
    position = tensors["row"][:, None, None] * (height * width) + pixel
    masks.view(-1).scatter_reduce_(0, position.view(-1), marked.view(-1).to(masks.dtype), "amax")
    return images, masks


def _place_kernels(tensors: dict[str, Tensor], spots: tuple[SpotShape, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Top and left of each window [N], and its kernel [N, Kh, Kw]."""
    y, x, spot = tensors["y"], tensors["x"], tensors["spot"]
    nearest_y, nearest_x = torch.floor(y + 0.5), torch.floor(x + 0.5)
    offset_y = ((y - nearest_y + 0.5) * SUBPIXELS).long()
    offset_x = ((x - nearest_x + 0.5) * SUBPIXELS).long()
    kernels, starts = _tables(spots, y.device)
    top, left = nearest_y.long() - starts[spot, 0], nearest_x.long() - starts[spot, 1]
    return top, left, kernels[spot, offset_y, offset_x]


def _turn_inwards(images: Tensor, tensors: dict[str, Tensor], values: ValueRange) -> Tensor:
    """[N] amplitudes, negated where the peak would leave the range."""
    height, width = images.shape[-2:]
    y = torch.floor(tensors["y"] + 0.5).long().clamp(max=height - 1)
    x = torch.floor(tensors["x"] + 0.5).long().clamp(max=width - 1)
    low, high = values.bounds
    amplitude = tensors["amplitude"]
    step = amplitude * values.scale
    peak = images[tensors["row"], 0, y, x].clamp(low, high) + (torch.round(step) if values.whole else step)
    return torch.where((peak < low) | (peak > high), -amplitude, amplitude)


@lru_cache(maxsize=16)
def _tables(spots: tuple[SpotShape, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(spot_kernels(spots)).to(device), torch.from_numpy(window_starts(spots)).to(device)


def _add(flat: Tensor, index: Tensor, steps: Tensor, values: ValueRange) -> None:
    """Add steps where windows may overlap, with a sum that is the same in every run; the bounds come last."""
    low, high = values.bounds
    flat[index] = flat[index].clamp(low, high)
    if flat.is_cuda and not values.whole:
        # index_add_ adds in the order in which threads arrive, which rounds differently; index_put_ sorts first.
        flat.index_put_((index,), steps, accumulate=True)
    else:
        flat.index_add_(0, index, steps)
    flat[index] = flat[index].clamp(low, high)
