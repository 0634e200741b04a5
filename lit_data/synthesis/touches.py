"""Effects of a plan on the pixels: each defect's family finds them from the clean images."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.pixels import Pixels
from lit_data.synthesis.plan import DefectPlan, Group
from lit_data.synthesis.values import ValueRange
from lit_data.synthesis.windows import Surroundings, Windows

WORTH_PX: Final = 2**15
"""Pixels that are computed in the time that a group takes beyond its pixels, on a CPU."""
_STANDS_OUT: Final = 3.0
"""Change that stands out from noise, in standard deviations of it."""
CACHED_PX: Final = 2**18
"""More pixels at once do not stay in the caches of a CPU, and take twice the time each."""


@dataclass(frozen=True, slots=True)
class Touches:
    """K pixels that the defects of a plan touch; one pixel may be touched by several.

    Attributes:
        defect: [K] int64, number of the defect in the plan.
        pixel: [K] int64, number of the pixel in the target, see `Canvas.find`.
        steps: [K, C] float32 that the defect adds, in pixel values.
        change: [K, J] float32 in units of the 0..1 value range: the change within the value range.
        shows: [K, J] bool, True where the change can be seen, so that a mask holds the pixel.
    """

    defect: Tensor
    pixel: Tensor
    steps: Tensor
    change: Tensor
    shows: Tensor


def find_touches(canvas: Canvas, plan: DefectPlan, *, judged: slice = slice(0, 1)) -> Touches:
    """Find the effects of a plan; nothing is written.

    Args:
        canvas: The images.
        plan: N > 0 defects, with tensors on the device of the images.
        judged: The channels J whose visible changes are found; by default the target.
    """
    surroundings = Surroundings(canvas, plan.row, plan.y, plan.x)
    strengths = _find_strengths(surroundings, plan)
    if canvas.device.type == "cpu":
        groups = list(split_windows(merge_windows(plan.groups, most_px=WORTH_PX)))
    else:
        groups = merge_windows(plan.groups, most_px=sys.maxsize)
    parts = [_touch(surroundings, strengths, plan, group, judged) for group in groups]
    return Touches(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _find_strengths(surroundings: Surroundings, plan: DefectPlan) -> tuple[Tensor, Tensor]:
    """Return [N] signed strengths in units of 0..1: as planned, and turned inwards.

    Turned inwards means negated where the centre of the target would leave the value range.
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
    """Return which pixels show their defect: [K, J] bool."""
    # A device computes all pixels of the windows, also those that nothing covers.
    covered = (pixels.cover != 0)[:, None]
    if family.marks_all:
        return covered.expand_as(change)
    shows = covered & (change >= least_change)
    if not family.replaces:
        return shows
    # One noise in place of another changes pixels by 1.4 of its standard deviations, root mean
    # square.
    noise = pixels.of_each(pixels.windows.noise)[:, None]
    return shows & (pixels.spread_out(change) >= _STANDS_OUT * noise)


def merge_windows(groups: Sequence[Group], most_px: int) -> list[Group]:
    """Merge groups of square windows of one family that then have at most `most_px` pixels more.

    A device would always rather compute more pixels than start more kernels.
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
    """Yield the same in groups of at most `CACHED_PX` pixels, or one window."""
    for group in groups:
        step = max(1, CACHED_PX // (group.height_px * group.width_px))
        for start in range(group.start, group.stop, step):
            yield group._replace(start=start, stop=min(start + step, group.stop))


@dataclass(frozen=True, slots=True)
class Annotations:
    """Effects of a plan on a batch.

    Attributes:
        labels: [B, C, H, W] int32: for each channel the number of the defect in the plan, counted
            from 1, that visibly changes the pixel; 0 for none, the last one where several do.
        change: [N] float32, mean change of the pixels that show the defect, in units of the 0..1
            value range.
        severity: [N] float32, the same in standard deviations of the noise around the defect.
    """

    labels: Tensor
    change: Tensor
    severity: Tensor


@torch.no_grad()
def annotate(images: Tensor, plan: DefectPlan, values: ValueRange) -> Annotations:
    """Find the changes that `render` would make; nothing is drawn.

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
    number = ((touches.defect + 1)[:, None] * shows).to(torch.int32)
    labels.view(-1).scatter_reduce_(0, index.view(-1), number.view(-1), "amax")
    pixels = torch.zeros_like(change).index_add_(0, touches.defect, shows.sum(1).float())
    change.index_add_(0, touches.defect, (touches.change * shows).sum(1)).div_(pixels.clamp_(min=1))
    noise = Surroundings(canvas, plan.row, plan.y, plan.x).noise
    return Annotations(labels, change, change / noise)
