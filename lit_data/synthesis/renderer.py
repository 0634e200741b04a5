"""Renderer of a plan into images, on the device where they are; nothing random happens here."""

from typing import Final

import torch
from torch import Tensor

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.plan import DefectPlan
from lit_data.synthesis.touches import Touches, find_touches
from lit_data.synthesis.values import ValueRange

UNIT: Final = ValueRange()


def render(images: Tensor, plan: DefectPlan, values: ValueRange = UNIT) -> tuple[Tensor, Tensor]:
    """Add the planned defects to a batch; only the pixels of each defect's window are touched.

    Every defect changes the images as they were before any was drawn, and the changes of all are
    added, so that their order is of no matter. A defect that would leave the value range at its
    centre in the target (a dark one on black, a bright one on white) gets the opposite sign: the
    mask never marks what cannot be seen.

    Args:
        images: [B, C, H, W] float32, contiguous; changed in place.
        plan: Defects for these B samples; moved to the device of the images if need be.
        values: The value range of the images, by default 0..1.

    Returns:
        images: the same tensor; touched pixels lie within the range.
        masks: [B, 1, H, W] float32 in {0, 1}, 1 where true defects change the target.
    """
    batch, _, height, width = images.shape
    masks = images.new_zeros((batch, 1, height, width))
    draw(images, masks, plan, values)
    return images, masks


@torch.no_grad()
def draw(images: Tensor, masks: Tensor, plan: DefectPlan, values: ValueRange) -> None:
    """Do the same as `render` into existing masks, for images of any dtype of the value range.

    Args:
        images: [B, C, H, W] uint8, uint16, int16 or float32, contiguous; changed in place.
        masks: [B, 1, H, W] of any dtype, all 0, contiguous; set to 1.
        plan: Defects for these B samples.
        values: The value range of the images.
    """
    if not len(plan):
        return
    canvas = Canvas(images, values)
    plan = plan.to(images.device)
    touches = find_touches(canvas, plan)
    _mark(masks, canvas, plan, touches)
    carried = plan.channels[touches.defect]
    if canvas.device.type == "cpu":
        touch, channel = torch.nonzero(carried, as_tuple=True)
        canvas.add(touches.pixel[touch] + canvas.planes[channel], touches.steps[touch, channel])
    else:
        # The number of those pixels would have to be waited for: 0 is added to the others.
        index = touches.pixel[:, None] + canvas.planes
        canvas.add(index.view(-1), (touches.steps * carried).view(-1))


def _mark(masks: Tensor, canvas: Canvas, plan: DefectPlan, touches: Touches) -> None:
    """Set the masks where true defects show; a mask has one channel in place of all."""
    other_channels_px = (canvas.channels - 1) * canvas.height_px * canvas.width_px
    index = touches.pixel - plan.row[touches.defect] * other_channels_px
    marked = touches.shows[:, 0] & plan.is_true[touches.defect]
    if canvas.device.type == "cpu":
        masks.view(-1)[index[marked]] = 1
    else:
        masks.view(-1).scatter_reduce_(0, index, marked.to(masks.dtype), "amax")
