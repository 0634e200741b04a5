"""Draw a plan on the device of the images. Nothing random happens here."""

from functools import lru_cache

import torch
from torch import Tensor

from lit_data.synthesis.plan import SUBPIXELS, DefectPlan, SpotShape
from lit_data.synthesis.shapes import spot_kernels, window_start


@torch.no_grad()
def render(images: Tensor, plan: DefectPlan) -> tuple[Tensor, Tensor]:
    """Add the planned defects to a batch; only the pixels of each defect's window are touched.

    Windows that reach past the edge of a sample are cut there. A defect that would leave the value range at its centre
    in the target (a dark one on black, a bright one on white) gets the opposite sign: the mask never marks what
    cannot be seen.

    Args:
        images: [B, C, H, W] float32 in 0..1, contiguous; changed in place.
        plan: Defects for these B samples; arrays or tensors, moved to the device of the images if need be.

    Returns:
        images: the same tensor, [B, C, H, W] float32 in 0..1.
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

    amplitude = _turn_inwards(images, tensors)
    plane = tensors["row"][:, None] * channels + torch.arange(channels, device=images.device)
    values = kernels[:, None] * (amplitude[:, None] * tensors["channels"])[..., None, None]
    _add(images.view(-1), plane[..., None, None] * (height * width) + pixel[:, None], values)
    images.clamp_(0, 1)

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


def _turn_inwards(images: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """[N] amplitudes, negated where the peak would leave 0..1."""
    height, width = images.shape[-2:]
    y = torch.floor(tensors["y"] + 0.5).long().clamp(max=height - 1)
    x = torch.floor(tensors["x"] + 0.5).long().clamp(max=width - 1)
    amplitude = tensors["amplitude"]
    peak = images[tensors["row"], 0, y, x] + amplitude
    return torch.where((peak < 0) | (peak > 1), -amplitude, amplitude)


@lru_cache(maxsize=16)
def _tables(spots: tuple[SpotShape, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    starts = [[window_start(spot.height_px), window_start(spot.width_px)] for spot in spots]
    return torch.from_numpy(spot_kernels(spots)).to(device), torch.tensor(starts, device=device)


def _add(flat: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values where windows may overlap, in an order that is the same in every run."""
    if flat.is_cuda:
        # index_add_ adds in the order in which threads arrive; index_put_ sorts first.
        flat.index_put_((index.reshape(-1),), values.reshape(-1), accumulate=True)
    else:
        flat.index_add_(0, index.reshape(-1), values.reshape(-1))
