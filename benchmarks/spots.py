"""Spots one at a time, as people draw them: on the whole image, or each in its own window."""

import math
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lit_data.synthesis import DefectPlan, SpotShape
from lit_data.synthesis.families.spot import Spot, window_start

Floats = NDArray[np.float32]


class PlacedSpot(NamedTuple):
    """A planned spot on a canvas.

    Attributes:
        spot: Its shape.
        y: Row of its centre, in px.
        x: Column of its centre, in px.
        top: First row of its window.
        left: First column of its window.
        amplitude: Signed height.
        channels: [C] bool, those it is drawn into.
        is_true: The mask shows it.
    """

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
    """Find the defects of a patch on the canvas it lies in, with the renderer's signs.

    Args:
        target: The patch before anything is drawn, [h, w] in 0..1, of the target alone.
        plan: Spots of many patches.
        numbers: Those of this patch.
        top: First row of the patch on the canvas.
        left: First column of the patch on the canvas.
    """
    spots = []
    shapes = cast(Spot, plan.spec.members[0]).spots
    last_row, last_column = target.shape[0] - 1, target.shape[1] - 1
    for number in numbers:
        shape = shapes[int(plan.values[number, 0])]
        y, x = float(plan.y[number]), float(plan.x[number])
        nearest_y, nearest_x = math.floor(y + 0.5), math.floor(x + 0.5)
        amplitude = plan.amplitude[number]
        peak = target[min(nearest_y, last_row), min(nearest_x, last_column)] + amplitude
        if not 0 <= peak <= 1:  # a spot that would saturate is turned round, as the renderer does
            amplitude = -amplitude
        spot = PlacedSpot(
            spot=shape,
            y=top + y,
            x=left + x,
            top=top + nearest_y - window_start(shape.height_px),
            left=left + nearest_x - window_start(shape.width_px),
            amplitude=amplitude,
            channels=plan.channels[number],
            is_true=bool(plan.is_true[number]),
        )
        spots.append(spot)
    return spots


def draw_everywhere(image: Floats, spots: Iterable[PlacedSpot]) -> NDArray[np.bool_]:
    """Draw defects by arithmetic on whole images.

    Args:
        image: [C, H, W] in 0..1, changed in place.
        spots: The defects.

    Returns:
        [1, H, W], the windows of true defects.
    """
    height, width = image.shape[1:]
    rows = np.arange(height, dtype=np.float32)[:, None]
    columns = np.arange(width, dtype=np.float32)[None, :]
    mask = np.zeros((1, height, width), dtype=np.bool_)
    for spot in spots:
        shape = spot.spot
        down = (rows - spot.y) ** 2 / (2 * shape.sigma_y_px**2)
        across = (columns - spot.x) ** 2 / (2 * shape.sigma_x_px**2)
        in_rows = (rows >= spot.top) & (rows < spot.top + shape.height_px)
        in_columns = (columns >= spot.left) & (columns < spot.left + shape.width_px)
        in_window = in_rows & in_columns
        blob = np.exp(-(down + across))
        image += spot.channels[:, None, None] * (spot.amplitude * blob * in_window)
        if spot.is_true:
            mask |= in_window
    np.clip(image, 0, 1, out=image)
    return mask


def draw_in_windows(image: Floats, spots: Iterable[PlacedSpot]) -> NDArray[np.bool_]:
    """Draw defects in their windows alone; arguments and result as in `draw_everywhere`."""
    height, width = image.shape[1:]
    mask = np.zeros((1, height, width), dtype=np.bool_)
    for spot in spots:
        shape = spot.spot
        top = max(spot.top, 0)
        left = max(spot.left, 0)
        bottom = min(spot.top + shape.height_px, height)
        right = min(spot.left + shape.width_px, width)
        down = np.exp(-((np.arange(top, bottom) - spot.y) ** 2) / (2 * shape.sigma_y_px**2))
        across = np.exp(-((np.arange(left, right) - spot.x) ** 2) / (2 * shape.sigma_x_px**2))
        blob = (spot.amplitude * down[:, None] * across).astype(np.float32)
        image[spot.channels, top:bottom, left:right] += blob
        if spot.is_true:
            mask[:, top:bottom, left:right] = True
    np.clip(image, 0, 1, out=image)
    return mask
