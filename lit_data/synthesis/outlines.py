"""Outlines of regions: how much of each pixel of a window a defect covers."""

from typing import TYPE_CHECKING

from lit_data.synthesis.fields import CELL_PX, look_up
from lit_data.synthesis.shape_bank import BORDER, TILE_PX, shapes_on

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.families.base import Parameters
    from lit_data.synthesis.windows import Windows

WOBBLE = 0.25
"""How far the edge of a blob strays, in shares of its radius."""


def band(distance_px: "Tensor", half_width_px: "Tensor") -> "Tensor":
    """Coverage of a band around a line, with an edge of one pixel: 1 inside, 0 outside."""
    return (half_width_px + 0.5 - distance_px.abs()).clamp_(0, 1)


def stretch(windows: "Windows", p: "Parameters") -> "Tensor":
    """A rectangle along the stripes.

    Args:
        windows: The windows of n defects.
        p: ``length_px`` along the stripes, and ``width_px`` across them.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.along_stripes()
    return band(along, p["length_px"] / 2) * band(across, p["width_px"] / 2)


def blob(windows: "Windows", p: "Parameters", soft: float) -> "Tensor":
    """An ellipse with a wavy edge.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` and ``half_across_px`` (of the axes), ``angle``, ``seed_y`` and ``seed_x``.
        soft: Width of the edge in shares of the smaller half axis; 0 is an edge of one pixel.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.turned(p["angle"])
    radius = ((along / p["half_px"]).square() + (across / p["half_across_px"]).square()).sqrt_()
    waves = look_up(windows, p["seed_y"], p["seed_x"], CELL_PX / p["half_px"])
    edge_px = (p["half_across_px"] * soft).clamp(min=1.0)
    return ((1 + WOBBLE * waves.clamp_(-2, 2) - radius) * p["half_across_px"] / edge_px + 0.5).clamp_(0, 1)


def real_shape(windows: "Windows", p: "Parameters", folder: str) -> "Tensor":
    """The outline of a real defect, turned and scaled.

    Args:
        windows: The windows of n defects.
        p: ``half_px`` (of the longer side), ``angle``, and ``seed_y``, which chooses the shape.
        folder: Of masks, see `lit_data.synthesis.shape_bank.load_shapes`.

    Returns:
        [n, h, w] in 0..1.
    """
    shapes = shapes_on(folder, windows.device)
    along, across = windows.turned(p["angle"])
    column, row = ((way * BORDER / p["half_px"] + 1) * (TILE_PX / 2) for way in (along, across))
    inside = (column >= 0) & (column < TILE_PX) & (row >= 0) & (row < TILE_PX)
    chosen = (p["seed_y"] * len(shapes)).long()
    return shapes[chosen, row.long().clamp_(0, TILE_PX - 1), column.long().clamp_(0, TILE_PX - 1)] * inside
