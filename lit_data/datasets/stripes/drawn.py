"""Defects that a worker draws while it writes samples."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.synthesis import DefectPlan, DefectSpec, SpotShape, sample_plan
from lit_data.synthesis.drawing import draw_spots
from lit_data.synthesis.families.spot import Spot
from lit_data.synthesis.kernels import window_start
from lit_data.synthesis.renderer import draw
from lit_data.synthesis.values import ValueRange
from lit_data.types import Array

Floats = NDArray[np.float32]


class PlacedSpot(NamedTuple):
    """A planned defect on a canvas: its shape, centre and first row and column of its window in px, signed height."""

    spot: SpotShape
    y: float
    x: float
    top: int
    left: int
    amplitude: np.float32
    channels: NDArray[np.bool_]
    is_true: bool


def place_spots(
    target: Floats, plan: DefectPlan, numbers: Iterable[int], top: int, left: int
) -> list[PlacedSpot]:
    """Find the defects of a patch on the canvas it lies in, with the sign that the renderer gives
    them.

    Args:
        target: The patch before anything is drawn, [h, w] in 0..1, of the target alone.
        plan: Spots of many patches.
        numbers: Which of them are those of this patch.
        top: First row of the patch on the canvas.
        left: First column of the patch on the canvas.
    """
    placed, shapes = [], cast(Spot, plan.spec.members[0]).spots
    for number in numbers:
        shape = shapes[int(plan.values[number, 0])]
        y, x, amplitude = float(plan.y[number]), float(plan.x[number]), plan.amplitude[number]
        nearest_y, nearest_x = math.floor(y + 0.5), math.floor(x + 0.5)
        peak = (
            target[min(nearest_y, target.shape[0] - 1), min(nearest_x, target.shape[1] - 1)]
            + amplitude
        )
        placed.append(
            PlacedSpot(
                spot=shape,
                y=top + y,
                x=left + x,
                top=top + nearest_y - window_start(shape.height_px),
                left=left + nearest_x - window_start(shape.width_px),
                amplitude=amplitude if 0 <= peak <= 1 else -amplitude,
                channels=plan.channels[number],
                is_true=bool(plan.is_true[number]),
            )
        )
    return placed


def draw_everywhere(image: Floats, spots: Iterable[PlacedSpot]) -> NDArray[np.bool_]:
    """Draw defects by arithmetic on whole images.

    Args:
        image: [C, H, W] in 0..1, changed in place.
        spots: What to draw.

    Returns:
        [1, H, W], the windows of true defects.
    """
    height, width = image.shape[1:]
    rows, columns = (
        np.arange(height, dtype=np.float32)[:, None],
        np.arange(width, dtype=np.float32)[None, :],
    )
    mask = np.zeros((1, height, width), dtype=np.bool_)
    for spot in spots:
        shape = spot.spot
        blob = np.exp(
            -(
                (rows - spot.y) ** 2 / (2 * shape.sigma_y_px**2)
                + (columns - spot.x) ** 2 / (2 * shape.sigma_x_px**2)
            )
        )
        inside = (rows >= spot.top) & (rows < spot.top + shape.height_px)
        inside = inside & (columns >= spot.left) & (columns < spot.left + shape.width_px)
        image += spot.channels[:, None, None] * (spot.amplitude * blob * inside)
        if spot.is_true:
            mask |= inside
    np.clip(image, 0, 1, out=image)
    return mask


def draw_in_windows(image: Floats, spots: Iterable[PlacedSpot]) -> NDArray[np.bool_]:
    """Draw defects in their windows alone; arguments and result as in `draw_everywhere`."""
    height, width = image.shape[1:]
    mask = np.zeros((1, height, width), dtype=np.bool_)
    for spot in spots:
        shape = spot.spot
        top, left = max(spot.top, 0), max(spot.left, 0)
        bottom, right = (
            min(spot.top + shape.height_px, height),
            min(spot.left + shape.width_px, width),
        )
        down = np.exp(-((np.arange(top, bottom) - spot.y) ** 2) / (2 * shape.sigma_y_px**2))
        across = np.exp(-((np.arange(left, right) - spot.x) ** 2) / (2 * shape.sigma_x_px**2))
        blob = (spot.amplitude * down[:, None] * across).astype(np.float32)
        image[spot.channels, top:bottom, left:right] += blob
        if spot.is_true:
            mask[:, top:bottom, left:right] = True
    np.clip(image, 0, 1, out=image)
    return mask


@dataclass(frozen=True, slots=True)
class DefectWriter:
    """Draws each sample's defects into its row; the same as drawn on the device, to the byte.

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        values: Value range of the pixels, of whole numbers.
    """

    spec: DefectSpec
    seed: int
    values: ValueRange

    def write_into(self, images: Array, masks: Array, index: NDArray[np.int64], epoch: int) -> None:
        """Draw.

        Args:
            images: [M, C, H, W] written samples of an integer dtype, changed in place.
            masks: [M, 1, H, W] uint8, written.
            index: [M] numbers of the samples' random streams.
            epoch: The epoch they are drawn for.
        """
        plan = sample_plan(self.spec, self.seed, epoch, index, images.shape[1:])
        masks[...] = 0
        if self.spec.has_plain_spots_only:
            draw_spots(images, masks, plan, self.values)
        else:
            draw(torch.from_numpy(images), torch.from_numpy(masks), plan, self.values)
