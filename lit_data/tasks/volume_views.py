"""Volumes drawn flat: central slices, and occupied voxels seen from outside."""

import math
from typing import Any, Final, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lit_data.types import Array

_SIDE_PX: Final = 320  # of a view, at most; smaller volumes get a pixel or so for each voxel
_MARK: Final = (1.0, 0.23, 0.19, 0.45)  # of occupied voxels in a slice
_EMPTY: Final = "#12233a"  # behind voxels: no grey level, so that dark voxels are seen on it
_GREYS: Final = matplotlib.colormaps["gray"].with_extremes(bad=_EMPTY)
_TILT: Final = math.radians(20)
_LIGHT: Final = np.array(
    [-0.4, -0.5, 0.77], np.float32
)  # from the upper left, a little in front of the volume

PLANES: Final = ("axial", "coronal", "sagittal")
"""The slices across z, y and x."""

Floats = NDArray[np.float32]


class VolumeShown(NamedTuple):
    """What is drawn of a volume or of a window of one.

    Attributes:
        name: Over its pictures.
        shape: (z, y, x) voxels.
        spacing_mm: (z, y, x).
        coords: [N, 3] (z, y, x) of the occupied voxels.
        values: [N] float32 in 0..1 of the window.
        slices: The central slices across z, y and x in 0..1; none where only the occupied voxels
            are known.
    """

    name: str
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    coords: Array
    values: Floats
    slices: tuple[Array, Array, Array] | None = None


def show_slice(cell: Axes, volume: VolumeShown, axis: int, *, mark: bool) -> None:
    """Draw the central slice across an axis, with z upwards where it is in the slice.

    Args:
        cell: Where to.
        volume: What of.
        axis: 0 to 2, for z, y and x.
        mark: Tint the occupied voxels, for slices that show other voxels too.
    """
    occupied = _cut(volume, axis)
    image = occupied if volume.slices is None else volume.slices[axis]
    height, width = (mm for number, mm in enumerate(volume.spacing_mm) if number != axis)
    options: dict[str, Any] = {
        "origin": "upper" if axis == 0 else "lower",
        "aspect": height / width,
        "interpolation": "nearest",
    }
    cell.imshow(image, cmap=_GREYS, vmin=0, vmax=1, **options)
    if mark:
        tint = np.zeros((*occupied.shape, 4), np.float32)
        tint[np.isfinite(occupied)] = _MARK
        cell.imshow(tint, **options)


def show_view(cell: Axes, volume: VolumeShown, angle_deg: float) -> None:
    """Draw the occupied voxels as seen from the front, turned about the z axis by an angle."""
    cell.imshow(project(volume, angle_deg), cmap=_GREYS, vmin=0, vmax=1, interpolation="nearest")


def project(volume: VolumeShown, angle_deg: float) -> Floats:
    """Project the occupied voxels from a little above along parallel lines.

    The nearest voxel hides the rest.

    Shading comes from the depth picture alone: light from the upper left on its slope, and near is
    brighter than far.

    Args:
        volume: The voxels.
        angle_deg: Turn about the z axis; 0 looks along y, at the front.

    Returns:
        [H, W] float32 in 0..1; not a number where there is nothing.
    """
    spacing = np.array(volume.spacing_mm, np.float32)
    size = np.array(volume.shape, np.float32) * spacing
    z, y, x = ((volume.coords.astype(np.float32) + 0.5) * spacing - size / 2).T
    turn = np.array(
        [[math.sin(angle), math.cos(angle)] for angle in (math.radians(angle_deg), _TILT)],
        np.float32,
    )
    radius = _measure_frame(size, turn)
    (sin, cos), (low, high) = turn
    across, near = x * cos + y * sin, x * sin - y * cos
    up, near = z * high - near * low, near * high + z * low
    side = int(min(_SIDE_PX, math.ceil(2 * radius / float(spacing.min()))))
    scale = side / (2 * radius)
    splat = max(
        1, math.ceil(float(spacing.max()) * scale)
    )  # pixels of a voxel, so that surfaces have no holes
    depth = np.full((side + splat, side + splat), -np.inf, np.float32)
    order = np.argsort(near)  # of equal pixels numpy keeps the last one written: the nearest
    row, column = (
        ((radius - up) * scale).astype(np.int64)[order],
        ((across + radius) * scale).astype(np.int64)[order],
    )
    for down in range(splat):
        for right in range(splat):
            layer = np.full_like(depth, -np.inf)
            layer[np.clip(row, 0, side - 1) + down, np.clip(column, 0, side - 1) + right] = near[
                order
            ]
            np.maximum(depth, layer, out=depth)
    return _shade(depth[:side, :side], radius, scale)


def _measure_frame(size: Floats, turn: Floats) -> float:
    """Half the side of the square that holds the turned volume, in mm."""
    depth, height, width = size
    (sin, cos), (low, high) = abs(turn)
    return (
        float(max(width * cos + height * sin, depth * high + (width * sin + height * cos) * low))
        / 2
    )


def _shade(depth: Floats, radius: float, scale: float) -> Floats:
    seen = np.isfinite(depth)
    filled = np.where(seen, depth, -radius)
    slope = np.stack([part * scale for part in np.gradient(filled)]).clip(-3, 3)
    normal = np.stack((-slope[1], -slope[0], np.ones_like(filled))) / np.sqrt(1 + (slope**2).sum(0))
    light = np.einsum("c,chw->hw", _LIGHT, normal).clip(0, 1)
    nearness = ((filled + radius) / (2 * radius)).clip(0, 1)
    shade: Floats = (0.25 + 0.75 * light) * (0.25 + 0.75 * nearness)
    return np.where(seen, shade, np.float32(np.nan)).astype(np.float32)


def _cut(volume: VolumeShown, axis: int) -> Floats:
    """The values of the occupied voxels in the central slice across an axis; not a number elsewhere."""
    others = [number for number in range(3) if number != axis]
    image = np.full([volume.shape[number] for number in others], np.nan, np.float32)
    inside = volume.coords[:, axis] == volume.shape[axis] // 2
    image[tuple(volume.coords[inside][:, others].T)] = volume.values[inside]
    return image
