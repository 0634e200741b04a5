"""Pictures of volumes: central slices, and views of occupied voxels from outside."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from lit_data.core.types import Array, Floats, Spacing, Triple
from lit_data.predict.cells import colour_of_class, number_classes
from lit_data.predict.figures import CELL_INCHES, new_axes, save_figure
from lit_data.wings.volumes.files.hounsfield import Window

_SIDE_PX = 320  # of a view, at most; smaller volumes get about a pixel for each voxel
_MARK = (1.0, 0.23, 0.19, 0.45)  # of occupied voxels in a slice
_EMPTY = "#12233a"  # behind voxels: not a gray level, so that dark voxels are visible on it
_GREYS = matplotlib.colormaps["gray"].with_extremes(bad=_EMPTY)
_TILT = math.radians(20)
_LIGHT = np.array([-0.4, -0.5, 0.77], np.float32)  # from the upper left, a little in front
_TINT = 0.5  # opacity of labels
_MOST_NAMED = 16  # classes in a legend

PLANES = ("axial", "coronal", "sagittal")
"""Names of the slices across z, y and x."""


class VolumeShown(NamedTuple):
    """Data for drawing a volume, or a window of one.

    Attributes:
        name: Name above its pictures.
        shape: (z, y, x) voxels.
        spacing_mm: (z, y, x).
        coords: [N, 3] (z, y, x) of the occupied voxels.
        values: [N] float32 in 0..1 of the window.
        slices: Central slices across z, y and x in 0..1; None if only the occupied voxels are
            known.
    """

    name: str
    shape: Triple
    spacing_mm: Spacing
    coords: Array
    values: Floats
    slices: tuple[Array, Array, Array] | None = None


def show_slice(cell: Axes, volume: VolumeShown, axis: int, *, mark: bool) -> None:
    """Draw the central slice across an axis, with z pointing up if the slice includes it.

    Args:
        cell: Axes to draw into.
        volume: The volume.
        axis: 0 to 2, for z, y and x.
        mark: Tint the occupied voxels, for slices that show other voxels too.
    """
    occupied = _cut(volume, axis)
    image = occupied if volume.slices is None else volume.slices[axis]
    options = _orient(volume.spacing_mm, axis)
    cell.imshow(image, cmap=_GREYS, vmin=0, vmax=1, **options)
    if mark:
        tint = np.zeros((*occupied.shape, 4), np.float32)
        tint[np.isfinite(occupied)] = _MARK
        cell.imshow(tint, **options)


def _orient(spacing_mm: Spacing, axis: int) -> dict[str, Any]:
    """Return the options of `Axes.imshow` for a slice across an axis: in mm, with z pointing up."""
    height, width = (mm for number, mm in enumerate(spacing_mm) if number != axis)
    return {
        "origin": "upper" if axis == 0 else "lower",
        "aspect": height / width,
        "interpolation": "nearest",
    }


class LabelledSlices(NamedTuple):
    """Slices of a volume across z, y and x, with labels.

    Attributes:
        name: Name beside the slices.
        spacing_mm: (z, y, x).
        positions: (z, y, x) of the slices.
        planes: For each axis [2 or 3, H, W] float32: values in 0..1, labels, and for predicted
            labels the true ones, if they are known.
    """

    name: str
    spacing_mm: Spacing
    positions: Triple
    planes: tuple[Floats, Floats, Floats]


def cut_labelled(
    name: str,
    values: Array,
    labels: Array,
    true: Array | None,
    *,
    spacing_mm: Spacing,
    window: Window | None = None,
) -> LabelledSlices:
    """Cut the slices with the most voxels of true labels, or of `labels` if there are none.

    If several slices are equal, the middle one is cut.

    Args:
        name: Name of the volume.
        values: [Z, Y, X] in 0..1, or Hounsfield units.
        labels: [Z, Y, X] labels, predicted or those of a sample.
        true: [Z, Y, X] true labels if `labels` are predicted and the truth is known.
        spacing_mm: (z, y, x).
        window: Scales Hounsfield units to 0..1.
    """
    layers = [labels] if true is None else [labels, true]
    is_labelled = layers[-1] > 0
    if not is_labelled.any():
        is_labelled = labels > 0
    positions: list[int] = []
    planes: list[Floats] = []
    for axis, other_axes in enumerate(((1, 2), (0, 2), (0, 1))):
        counts = is_labelled.sum(other_axes)
        fullest = np.flatnonzero(counts == counts.max())
        positions.append(int(fullest[len(fullest) // 2]))
        image = np.take(values, positions[axis], axis)
        if window is not None:
            image = window.scale(image)
        slices = [np.take(layer, positions[axis], axis) for layer in layers]
        planes.append(np.stack([image, *slices]).astype(np.float32))
    z, y, x = positions
    axial, coronal, sagittal = planes
    return LabelledSlices(name, spacing_mm, (z, y, x), (axial, coronal, sagittal))


def draw_labelled(
    volumes: Sequence[LabelledSlices],
    classes: Sequence[str],
    path: Path,
    title: str,
    *,
    beside: str,
) -> None:
    """Draw volumes in rows: each slice with its true labels, and next to it with `labels`.

    Args:
        volumes: At least one volume.
        classes: Names of the labels 1, 2, ...
        path: The PNG to write.
        title: Title of the picture.
        beside: Heading of the slices with `labels`.
    """
    figure, cells = new_axes(len(volumes), 6, CELL_INCHES * len(volumes) + 0.9)
    numbers: set[int] = set()
    for axis, plane_name in enumerate(PLANES):
        cells[0][2 * axis].set_title(plane_name, fontsize=10)
        cells[0][2 * axis + 1].set_title(beside, fontsize=10)
    for volume, line in zip(volumes, cells, strict=True):
        for axis, (image, labels, *true) in enumerate(volume.planes):
            options = _orient(volume.spacing_mm, axis)
            for cell, layers in zip(line[2 * axis :], (true, [labels]), strict=False):
                cell.imshow(image, cmap="gray", vmin=0, vmax=1, **options)
                for layer in layers:
                    cell.imshow(_tint_labels(layer, len(classes)), **options)
                    numbers |= set(np.unique(layer).astype(int).tolist())
        z, y, x = volume.positions
        line[0].set_ylabel(f"{volume.name}\nz {z}, y {y}, x {x}", fontsize=8)
    named = sorted(numbers & set(range(1, len(classes) + 1)))[:_MOST_NAMED]
    legend = [number_classes(classes)[number - 1] for number in named]
    save_figure(figure, path, title, legend, [colour_of_class(number) for number in named])


def _tint_labels(labels: Floats, count: int) -> Floats:
    """Return an overlay with the colors of the classes 1 to `count`: [H, W, 4]."""
    tint = np.zeros((*labels.shape, 4), np.float32)
    for number in range(1, count + 1):
        tint[labels == number] = to_rgba(colour_of_class(number), _TINT)
    return tint


def show_view(cell: Axes, volume: VolumeShown, angle_deg: float) -> None:
    """Draw the occupied voxels from the front, rotated about the z axis by an angle."""
    cell.imshow(project(volume, angle_deg), cmap=_GREYS, vmin=0, vmax=1, interpolation="nearest")


def project(volume: VolumeShown, angle_deg: float) -> Floats:
    """Project the occupied voxels along parallel lines, from a little above.

    The nearest voxel hides the others. Shading comes from the depth picture only: light from the
    upper left on its slope, with near voxels brighter than far ones.

    Args:
        volume: The voxels.
        angle_deg: Rotation about the z axis; 0 looks along y, at the front.

    Returns:
        [H, W] float32 in 0..1; NaN for the background.
    """
    spacing = np.array(volume.spacing_mm, np.float32)
    size = np.array(volume.shape, np.float32) * spacing
    z, y, x = (
        (volume.coords.astype(np.float32) + 0.5) * spacing - size / 2
    ).T  # mm, 0 in the middle
    angles = (math.radians(angle_deg), _TILT)
    turn = np.array([[math.sin(angle), math.cos(angle)] for angle in angles], np.float32)
    radius = _measure_frame(size, turn)
    (sin, cos), (tilt_sin, tilt_cos) = turn
    # First the rotation about z, then the tilt about the horizontal axis of the picture.
    across = x * cos + y * sin
    towards = x * sin - y * cos
    up = z * tilt_cos - towards * tilt_sin
    near = towards * tilt_cos + z * tilt_sin
    side = int(min(_SIDE_PX, math.ceil(2 * radius / float(spacing.min()))))
    scale = side / (2 * radius)  # px by mm
    row = ((radius - up) * scale).astype(np.int64).clip(0, side - 1)
    column = ((across + radius) * scale).astype(np.int64).clip(0, side - 1)
    splat = max(1, math.ceil(float(spacing.max()) * scale))  # px of a voxel: surfaces have no holes
    depth = _draw_depth(row, column, near, side, splat)
    return _shade(depth, radius, scale)


def _draw_depth(row: Array, column: Array, near: Floats, side: int, splat: int) -> Floats:
    """Draw the depth of the nearest voxel in each pixel: [side, side]; -inf for the background."""
    depth = np.full((side + splat, side + splat), -np.inf, np.float32)
    # For equal pixels NumPy keeps the value written last, so the nearest voxels are written last.
    order = np.argsort(near)
    for down in range(splat):
        for right in range(splat):
            layer = np.full_like(depth, -np.inf)
            layer[row[order] + down, column[order] + right] = near[order]
            np.maximum(depth, layer, out=depth)
    return depth[:side, :side]


def _measure_frame(size: Floats, turn: Floats) -> float:
    """Return half the side of the square that contains the rotated volume, in mm."""
    depth, height, width = size
    (sin, cos), (tilt_sin, tilt_cos) = abs(turn)
    across = width * cos + height * sin
    upwards = depth * tilt_cos + (width * sin + height * cos) * tilt_sin
    return float(max(across, upwards)) / 2


def _shade(depth: Floats, radius: float, scale: float) -> Floats:
    """Shade a depth picture by the slope of its surface and by its depth; see `project`."""
    is_occupied = np.isfinite(depth)
    filled = np.where(is_occupied, depth, -radius)
    # mm per mm; clipped, because the edges of the volume are steeper than any surface in it.
    slope = np.stack([part * scale for part in np.gradient(filled)]).clip(-3, 3)
    length = np.sqrt(1 + (slope**2).sum(0))
    normal = np.stack((-slope[1], -slope[0], np.ones_like(filled))) / length
    light = np.einsum("c,chw->hw", _LIGHT, normal).clip(0, 1)
    nearness = ((filled + radius) / (2 * radius)).clip(0, 1)
    shade: Floats = (0.25 + 0.75 * light) * (0.25 + 0.75 * nearness)
    return np.where(is_occupied, shade, np.float32(np.nan)).astype(np.float32)


def _cut(volume: VolumeShown, axis: int) -> Floats:
    """Return the occupied voxels of the central slice across an axis; NaN elsewhere."""
    others = [number for number in range(3) if number != axis]
    image = np.full([volume.shape[number] for number in others], np.nan, np.float32)
    inside = volume.coords[:, axis] == volume.shape[axis] // 2
    image[tuple(volume.coords[inside][:, others].T)] = volume.values[inside]
    return image
