"""Images and plans that tests of defects share."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import Bools, Bytes, Floats
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import FAMILIES, DefectPlan, DefectSpec, render, sample_plan
from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.renderer import find_touches
from lit_data.synthesis.windows import Surroundings

NAMES = tuple(FAMILIES)
GREY = ValueRange(0, 255, whole=True)
RANGES = {
    "uint8": (np.uint8, GREY),
    "uint16": (np.uint16, ValueRange(1000, 60_000, whole=True)),
    "float32": (np.float32, ValueRange()),
}
BATCHES = ((1, (3, 24, 24)), (2, (1, 40, 9)), (7, (5, 8, 48)), (384, (3, 6, 6)))
"""Sizes of batches with a shape of patches each: square, tall, wide, tiny."""


def only(name: str, amplitude: tuple[float, float] = (0.2, 0.2), **options: Any) -> DefectSpec:
    """One true defect of one family in each sample."""
    one = {"probability": 1, "count": (1, 1), "true_count": (1, 1)}
    return DefectSpec(**one, amplitude=amplitude, families={name: options}, bright_fraction=1)


def many(*names: str, **options: Any) -> DefectSpec:
    """Several defects in each sample, of given families or of all."""
    return DefectSpec(probability=1, families={name: {} for name in names or NAMES}, **options)


def plan_of(
    spec: DefectSpec, batch: int = 1, shape: tuple[int, int, int] = (3, 64, 64), seed: int = 3
) -> DefectPlan:
    return sample_plan(spec, seed, 0, np.arange(batch), shape)


def move(plan: DefectPlan, y: float, x: float) -> DefectPlan:
    """All defects at one place."""
    return replace(plan, y=np.full_like(plan.y, y), x=np.full_like(plan.x, x))


def with_values(plan: DefectPlan, **values: float) -> DefectPlan:
    """A plan of one family with given parameters, and windows that hold them."""
    changed = plan.values.copy()
    for name, value in values.items():
        changed[:, plan.spec.members[0].parameters.index(name)] = value
    member, group = plan.spec.members[0], plan.groups[0]
    parameters = dict(zip(member.parameters, changed.T, strict=False))
    height, width = member.window_px(parameters, (0, 0)).max(0).tolist()
    return replace(
        plan,
        values=changed,
        groups=(group._replace(height_px=height, width_px=width, stop=len(plan)),),
    )


def turn_around(plan: DefectPlan) -> DefectPlan:
    """The same defects, the last one first."""
    sizes = [group.stop - group.start for group in reversed(plan.groups)]
    stops = list(accumulate(sizes))
    groups = [
        group._replace(start=stop - size, stop=stop)
        for group, size, stop in zip(reversed(plan.groups), sizes, stops, strict=True)
    ]
    arrays = {name: array[::-1].copy() for name, array in plan.arrays().items()}
    return replace(plan, **arrays, groups=tuple(groups))


def scene(batch: int, shape: tuple[int, int, int], seed: int = 0) -> Bytes:
    """Stripes of two grey levels, slightly slanted, with noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[: shape[1], : shape[2]]
    stripes = 80 + 80 * ((columns + rows // 5) % 10 < 5)
    return np.clip(stripes + rng.normal(0, 6, (batch, *shape)), 0, 255).astype(np.uint8)


def as_dtype(grey: Bytes, kind: str) -> Tensor:
    """Grey levels stored in another dtype, with every value possible between them."""
    dtype, values = RANGES[kind]
    fine = (grey + np.random.default_rng(1).random(grey.shape)) / 256
    stored = values.low + fine * values.scale
    return torch.from_numpy((np.floor(stored) if values.whole else stored).astype(dtype))


def drawn(grey: Bytes, plan: DefectPlan) -> tuple[Floats, Bools]:
    """Change of each pixel in grey levels [B, C, H, W], and masks [B, H, W]."""
    images = torch.from_numpy(grey.astype(np.float32))
    after, masks = render(images.clone(), plan, GREY)
    return (after - images).numpy(), masks[:, 0].bool().numpy()


def see_slowly(
    images: Tensor, plan: DefectPlan, change: np.ndarray, values: ValueRange
) -> np.ndarray:
    """Where a defect is seen that changes images by so much: [B, C, H, W] of each.

    Args:
        images: Before it was drawn.
        plan: This defect alone in each of its samples, all of one family.
        change: How much it changes them, in units of the 0..1 value range.
        values: The value range of the images.
    """
    family = plan.spec.members[plan.family[0]]
    assert not family.marks_all
    if not family.replaces:
        return change >= np.float32(plan.spec.least_change)
    canvas, tensors = Canvas(images.contiguous(), values), plan.to("cpu")
    flat = torch.zeros(images.numel(), dtype=torch.bool)
    flat[find_touches(canvas, tensors).pixel] = True
    covered = flat.view(images.shape)[:, :1].expand(images.shape).numpy()
    total, count = np.zeros(images.shape), np.zeros(images.shape)
    height, width = images.shape[2:]
    padded, there = (
        np.pad(one, ((0, 0), (0, 0), (1, 1), (1, 1)))
        for one in (change**2 * covered, covered * 1.0)
    )
    for y in range(3):
        for x in range(3):
            total += padded[:, :, y : y + height, x : x + width]
            count += there[:, :, y : y + height, x : x + width]
    noise = np.zeros(len(images))
    noise[plan.row] = Surroundings(canvas, tensors.row, tensors.y, tensors.x).noise.numpy()
    spread = np.sqrt(total / np.maximum(count, 1))
    is_seen = covered & (change >= np.float32(plan.spec.least_change))
    return is_seen & (spread >= 3 * noise[:, None, None, None])
