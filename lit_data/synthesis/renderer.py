"""Renderer of a plan, which draws or annotates its effects on the device of the images."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_data.core.value_range import ValueRange
from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.plan import DefectPlan, Group
from lit_data.synthesis.windows import Pixels, Surroundings, Windows

UNIT = ValueRange()
WORTH_PX = 2**15
"""Number of pixels that a CPU computes in the time of a group's overhead."""
_STANDS_OUT = 3.0
"""Smallest change that stands out from noise, in standard deviations of the noise."""
CACHED_PX = 2**18
"""Number of pixels above which they leave the caches of a CPU and take twice the time each."""


@dataclass(frozen=True, slots=True)
class Touches:
    """K pixels that the defects of a plan touch; several defects may touch one pixel.

    Attributes:
        defect: [K] int64, number of the defect in the plan.
        pixel: [K] int64, number of the pixel in the target, see `Canvas.find`.
        steps: [K, C] float32, pixel values that the defect adds.
        change: [K, J] float32, change after clipping, in units of the 0..1 value range.
        shows: [K, J] bool, True if the change is visible, so that the pixel is in a mask.
    """

    defect: Tensor
    pixel: Tensor
    steps: Tensor
    change: Tensor
    shows: Tensor


def find_touches(canvas: Canvas, plan: DefectPlan, *, judged: slice = slice(0, 1)) -> Touches:
    """Return the effects of a plan without drawing them.

    Args:
        canvas: Pixels of the images.
        plan: N > 0 defects, with tensors on the device of the images.
        judged: Channels J whose visible changes are found; by default the target.
    """
    # Measured before anything is drawn, because all defects refer to the clean image.
    surroundings = Surroundings(canvas, plan.row, plan.y, plan.x)
    strengths = _find_strengths(surroundings, plan)
    if canvas.device.type == "cpu":
        groups = list(split_windows(merge_windows(plan.groups, most_px=WORTH_PX)))
    else:
        groups = merge_windows(plan.groups, most_px=sys.maxsize)
    # Groups are small enough for the caches of a CPU; a device uses as few as possible.
    parts = [_touch(surroundings, strengths, plan, group, judged) for group in groups]
    return Touches(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _find_strengths(surroundings: Surroundings, plan: DefectPlan) -> tuple[Tensor, Tensor]:
    """Return signed strengths [N] in units of 0..1, both as planned and turned inward.

    Turned inward means negated if the center of the target would leave the value range.
    """
    canvas = surroundings.canvas
    strength = plan.amplitude
    relative = plan.spec.relative
    if relative.any():
        in_noise = torch.from_numpy(relative).to(canvas.device)[plan.family]
        strength = torch.where(in_noise, strength * surroundings.noise, strength)
    y = surroundings.nearest_y.clamp(max=canvas.height_px - 1)
    x = surroundings.nearest_x.clamp(max=canvas.width_px - 1)
    step = strength * canvas.values.scale
    if canvas.values.whole:
        step = torch.round(step)
    peak = canvas.read(canvas.find(plan.row, y, x)) + step
    low, high = canvas.values.bounds
    return strength, torch.where((peak < low) | (peak > high), -strength, strength)


def _touch(
    surroundings: Surroundings,
    strengths: tuple[Tensor, Tensor],
    plan: DefectPlan,
    group: Group,
    judged: slice,
) -> tuple[Tensor, ...]:
    """Return the columns of `Touches` for one group."""
    family = plan.spec.members[group.family]
    members = slice(group.start, group.stop)
    size_px = group.height_px, group.width_px
    windows = Windows(surroundings, strengths[family.turns_inwards], members, size_px)
    columns = plan.values[members].T[:, :, None, None]
    parameters = dict(zip(family.parameters, columns, strict=False))
    pixels = Pixels(windows, family.cover(windows, parameters))
    canvas = windows.canvas
    values = canvas.values
    steps = family.change(pixels, parameters).expand(-1, canvas.channels) * values.scale
    if values.whole:
        steps = steps.round_()
    pixel = canvas.find(pixels.row, pixels.y, pixels.x)
    before = canvas.read(pixel[:, None] + canvas.planes[judged])
    after = (before + steps[:, judged]).clamp_(*values.bounds)
    change = (after - before).abs_().div_(values.scale)
    shows = _see(family, pixels, change, plan.spec.least_change)
    return pixels.defect + group.start, pixel, steps, change, shows


def _see(family: Family, pixels: Pixels, change: Tensor, least_change: float) -> Tensor:
    """Return True for the pixels that show their defect, [K, J] bool."""
    # A device computes all pixels of the windows, even uncovered ones.
    covered = (pixels.cover != 0)[:, None]
    if family.marks_all:
        return covered.expand_as(change)
    shows = covered & (change >= least_change)
    if not family.replaces:
        return shows
    # Replacing noise by other noise changes pixels by 1.4 of its standard deviations (root mean
    # square).
    noise = pixels.of_each(pixels.windows.noise)[:, None]
    return shows & (pixels.spread_out(change) >= _STANDS_OUT * noise)


def merge_windows(groups: Sequence[Group], most_px: int) -> list[Group]:
    """Merge groups of square windows of one family if that adds at most `most_px` pixels.

    On a device, computing more pixels is always faster than starting more kernels.
    """
    merged: list[Group] = []
    for group in groups:
        if merged and _can_merge(merged[-1], group, most_px):
            last = merged[-1]
            side_px = max(last.height_px, group.height_px)
            merged[-1] = group._replace(height_px=side_px, width_px=side_px, start=last.start)
        else:
            merged.append(group)
    return merged


def _can_merge(last: Group, group: Group, most_px: int) -> bool:
    are_square = last.height_px == last.width_px and group.height_px == group.width_px
    if last.family != group.family or not are_square:
        return False
    side_px = max(last.height_px, group.height_px)
    added_px = 0
    for part in (last, group):
        added_px += (side_px**2 - part.height_px**2) * (part.stop - part.start)
    return added_px <= most_px


def split_windows(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield the same defects in groups of at most `CACHED_PX` pixels, or of one window."""
    for group in groups:
        step = max(1, CACHED_PX // (group.height_px * group.width_px))
        for start in range(group.start, group.stop, step):
            yield group._replace(start=start, stop=min(start + step, group.stop))


@dataclass(frozen=True, slots=True)
class Annotations:
    """Effects of a plan on a batch.

    Attributes:
        labels: [B, C, H, W] int32, for each channel the number in the plan, counted from 1, of the
            defect that visibly changes the pixel; 0 for none, the last one if there are several.
        change: [N] float32, mean change of the pixels that show the defect, in units of the 0..1
            value range.
        severity: [N] float32, that change in standard deviations of the noise around the defect.
    """

    labels: Tensor
    change: Tensor
    severity: Tensor


@torch.no_grad()
def annotate(images: Tensor, plan: DefectPlan, values: ValueRange) -> Annotations:
    """Return the changes that `render` would make, without drawing them.

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
    index = touches.pixel[:, None] + canvas.planes
    shows = touches.shows & plan.channels[touches.defect]
    # The largest number is kept, regardless of the order of a device's threads.
    number = ((touches.defect + 1)[:, None] * shows).to(torch.int32)
    labels.view(-1).scatter_reduce_(0, index.view(-1), number.view(-1), "amax")
    pixels = torch.zeros_like(change).index_add_(0, touches.defect, shows.sum(1).float())
    change.index_add_(0, touches.defect, (touches.change * shows).sum(1)).div_(pixels.clamp_(min=1))
    noise = Surroundings(canvas, plan.row, plan.y, plan.x).noise
    return Annotations(labels, change, change / noise)


def render(images: Tensor, plan: DefectPlan, values: ValueRange = UNIT) -> tuple[Tensor, Tensor]:
    """Add the planned defects to a batch; only the pixels of each defect's window are touched.

    Every defect is computed from the clean images, and all changes are added, so their order does
    not matter. A defect that would leave the value range at its center in the target (a dark one on
    black, a bright one on white) gets the opposite sign, so the mask never marks what is not
    visible.

    Args:
        images: [B, C, H, W] float32, contiguous; changed in place.
        plan: Defects for these B samples; moved to the device of the images if needed.
        values: The value range of the images, by default 0..1.

    Returns:
        images: the same tensor; changed pixels are within the range.
        masks: [B, 1, H, W] float32 in {0, 1}, 1 where true defects change the target.
    """
    batch, _, height, width = images.shape
    masks = images.new_zeros((batch, 1, height, width))
    draw(images, masks, plan, values)
    return images, masks


@torch.no_grad()
def draw(images: Tensor, masks: Tensor, plan: DefectPlan, values: ValueRange) -> None:
    """Do the same as `render` with existing masks, for images of any supported dtype.

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
    _add_steps(canvas, plan, touches)


@torch.no_grad()
def draw_boxes(images: Tensor, plan: DefectPlan, values: ValueRange) -> Tensor:
    """Draw like `draw`, and return the box of the pixels that show each defect in the target.

    Args:
        images: [B, C, H, W] uint8, uint16, int16 or float32, contiguous; changed in place.
        plan: N > 0 defects for these B samples.
        values: The value range of the images.

    Returns:
        Boxes [N, 4] int64 (left, top, right, bottom) in px, ends excluded; right and bottom are 0
        if no pixel shows the defect.
    """
    canvas = Canvas(images, values)
    plan = plan.to(images.device)
    touches = find_touches(canvas, plan)
    _add_steps(canvas, plan, touches)
    shows = touches.shows[:, 0]
    pixel = touches.pixel[shows] % (canvas.height_px * canvas.width_px)
    column_row = torch.stack((pixel % canvas.width_px, pixel // canvas.width_px), dim=1)
    defect = touches.defect[shows, None].expand(-1, 2)
    low = pixel.new_full((len(plan), 2), sys.maxsize).scatter_reduce(0, defect, column_row, "amin")
    high = pixel.new_zeros((len(plan), 2)).scatter_reduce(0, defect, column_row + 1, "amax")
    return torch.cat((low, high), dim=1)


def _add_steps(canvas: Canvas, plan: DefectPlan, touches: Touches) -> None:
    """Add the defects to the channels that show them."""
    carried = plan.channels[touches.defect]
    if canvas.device.type == "cpu":
        touch, channel = torch.nonzero(carried, as_tuple=True)
        canvas.add(touches.pixel[touch] + canvas.planes[channel], touches.steps[touch, channel])
    else:
        # Selecting those pixels would wait for their number, so 0 is added to the others.
        index = touches.pixel[:, None] + canvas.planes
        canvas.add(index.view(-1), (touches.steps * carried).view(-1))


def _mark(masks: Tensor, canvas: Canvas, plan: DefectPlan, touches: Touches) -> None:
    """Set the masks where true defects are visible; a mask has one channel for all channels."""
    other_channels_px = (canvas.channels - 1) * canvas.height_px * canvas.width_px
    index = touches.pixel - plan.row[touches.defect] * other_channels_px
    marked = touches.shows[:, 0] & plan.is_true[touches.defect]
    if canvas.device.type == "cpu":
        masks.view(-1)[index[marked]] = 1
    else:
        masks.view(-1).scatter_reduce_(0, index, marked.to(masks.dtype), "amax")
