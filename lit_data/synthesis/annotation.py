"""Where each defect of a plan shows, and how strongly: for pictures and exported annotations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.plan import DefectPlan
from lit_data.synthesis.surroundings import Surroundings
from lit_data.synthesis.touches import find_touches
from lit_data.synthesis.values import ValueRange


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a plan does to a batch.

    Attributes:
        labels: [B, C, H, W] int32: for each channel the number of the defect in the plan, counted from 1, that
            visibly changes the pixel; 0 for none, the last one where several do.
        change: [N] float32, mean change of the pixels that show the defect, in units of the 0..1 value range.
        severity: [N] float32, the same in standard deviations of the noise around the defect.
    """

    labels: Tensor
    change: Tensor
    severity: Tensor


@torch.no_grad()
def annotate(images: Tensor, plan: DefectPlan, values: ValueRange) -> Annotations:
    """Find out what `render` would change; nothing is drawn.

    Args:
        images: [B, C, H, W] clean images of any dtype that holds the value range, contiguous.
        plan: Defects for these B samples.
        values: The value range of the images.
    """
    labels = torch.zeros(images.shape, dtype=torch.int32, device=images.device)
    change = torch.zeros(len(plan), device=images.device)
    if not len(plan):
        return Annotations(labels, change, change)
    canvas, plan = Canvas(images, values), plan.to(images.device)
    touches = find_touches(canvas, plan, judged=slice(None))
    place = touches.place[:, None] + canvas.planes
    shows = touches.shows & plan.channels[touches.defect]
    number = ((touches.defect + 1)[:, None] * shows).to(torch.int32)
    labels.view(-1).scatter_reduce_(0, place.view(-1), number.view(-1), "amax")
    pixels = torch.zeros_like(change).index_add_(0, touches.defect, shows.sum(1).float())
    change.index_add_(0, touches.defect, (touches.change * shows).sum(1)).div_(pixels.clamp_(min=1))
    return Annotations(labels, change, change / Surroundings(canvas, plan.row, plan.y, plan.x).noise)
