"""Defects that workers draw into stored pixels, with NumPy alone for spots.

`lit_data.datasets.patches.PatchWriter` describes writers.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.core.types import Array, FieldSpec, Floats, Ints, Size
from lit_data.core.value_range import ValueRange
from lit_data.synthesis.families.spot import SUBPIXELS, spot_kernels, window_start
from lit_data.synthesis.plan import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.renderer import draw

_memory = threading.local()


@dataclass(frozen=True, slots=True)
class DefectWriter:
    """Draws defects into patches of an integer dtype, byte-identical to those drawn on a device.

    Samples hold ``mask`` [1, h, w] uint8.

    Args:
        spec: Distribution of the defects.
        seed: Seed, 0 <= seed < 2**64.
        values: Value range of the pixels, in integers.
    """

    spec: DefectSpec
    seed: int
    values: ValueRange

    def describe(self, size_px: Size) -> Mapping[str, FieldSpec]:
        """Return the fields that samples of (height, width) hold besides ``image``."""
        return {"mask": FieldSpec((1, *size_px), "uint8")}

    def write_into(self, rows: Mapping[str, Array], index: Ints, epoch: int) -> None:
        """Draw into ``image`` and ``mask`` of samples, using their own random streams."""
        images, masks = rows["image"], rows["mask"]
        plan = sample_plan(self.spec, self.seed, epoch, index, images.shape[1:])
        masks[...] = 0  # rows are reused from batch to batch
        if self.spec.has_plain_spots_only:
            draw_spots(images, masks, plan, self.values)
        else:
            draw(torch.from_numpy(images), torch.from_numpy(masks), plan, self.values)


def draw_spots(images: Array, masks: Array, plan: DefectPlan, values: ValueRange) -> None:
    """Draw planned spots, byte-identical to those of `lit_data.synthesis.render`.

    Args:
        images: [M, C, H, W] of an integer dtype, contiguous; changed in place.
        masks: [M, 1, H, W] uint8, all 0, contiguous; set to 1 within the windows of true defects.
        plan: Defects for these M samples, all of the family `Spot`.
        values: Value range of the images, in integers.
    """
    if not len(plan):
        return
    _, channels, height, width = images.shape
    top, left, kernels = _place_kernels(plan)
    rows = top[:, None] + np.arange(kernels.shape[1])
    columns = left[:, None] + np.arange(kernels.shape[2])
    row_inside = (rows >= 0) & (rows < height)
    column_inside = (columns >= 0) & (columns < width)
    # A kernel is 0 outside its own window, which may be smaller than the largest one.
    touched = row_inside[:, :, None] & column_inside[:, None, :] & (kernels > 0)
    pixel = rows[:, :, None] * width + columns[:, None, :]

    amplitude = _turn_inwards(images, plan, values)
    steps = np.rint(kernels * amplitude[:, None, None] * np.float32(values.scale)).astype(np.int32)
    # Once for each channel that shows the defect.
    defect, channel = np.nonzero(plan.channels)
    plane = (plan.row[defect] * channels + channel) * (height * width)
    index = plane[:, None, None] + pixel[defect]
    drawn = touched[defect]
    _add(images.reshape(-1), index[drawn], steps[defect][drawn], values)

    mask_plane = plan.row * (height * width)
    mask_index = mask_plane[:, None, None] + pixel
    marked = touched & plan.is_true[:, None, None]
    masks.reshape(-1)[mask_index[marked]] = 1


def _place_kernels(
    plan: DefectPlan,
) -> tuple[Ints, Ints, Floats]:
    """Return top and left of each window [N], and its kernel [N, Kh, Kw]."""
    nearest_y = np.floor(plan.y + np.float32(0.5))
    nearest_x = np.floor(plan.x + np.float32(0.5))
    offset_y = ((plan.y - nearest_y + np.float32(0.5)) * SUBPIXELS).astype(np.int64)
    offset_x = ((plan.x - nearest_x + np.float32(0.5)) * SUBPIXELS).astype(np.int64)
    spot: Any = plan.spec.members[0]
    kernels = spot_kernels(spot.shapes)
    height, width = kernels.shape[3:]
    top = nearest_y.astype(np.int64) - window_start(height)
    left = nearest_x.astype(np.int64) - window_start(width)
    shape = plan.values[:, 0].astype(np.int64)
    return top, left, kernels[shape, offset_y, offset_x]


def _turn_inwards(images: Array, plan: DefectPlan, values: ValueRange) -> Floats:
    """Return amplitudes [N], negated if the peak would leave the value range."""
    height, width = images.shape[-2:]
    # At the pixel nearest to the centre, which may lie half a pixel behind the last one.
    y = np.minimum(np.floor(plan.y + np.float32(0.5)).astype(np.int64), height - 1)
    x = np.minimum(np.floor(plan.x + np.float32(0.5)).astype(np.int64), width - 1)
    low, high = values.bounds
    amplitude: Floats = plan.amplitude
    step = np.rint(amplitude * np.float32(values.scale))
    peak = np.clip(images[plan.row, 0, y, x], low, high) + step
    return np.where((peak < low) | (peak > high), -amplitude, amplitude)


def _add(flat: Array, index: Ints, steps: NDArray[np.int32], values: ValueRange) -> None:
    """Add steps of windows that may overlap; all steps are summed first, and clipped last."""
    low, high = int(values.bounds[0]), int(values.bounds[1])
    sums = _zeros(flat.size)
    np.add.at(sums, index, steps)
    before = np.clip(flat[index], low, high).astype(np.int32)
    flat[index] = np.clip(before + sums[index], low, high)
    sums[index] = 0


def _zeros(size: int) -> NDArray[np.int32]:
    """Return zeros that this thread keeps, which callers must leave zero.

    Clearing planes as large as the batch would take longer than drawing.
    """
    zeros: NDArray[np.int32] | None = getattr(_memory, "zeros", None)
    if zeros is None or zeros.size < size:
        zeros = _memory.zeros = np.zeros(size, np.int32)
    return zeros
