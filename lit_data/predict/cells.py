"""Content of the cells of a picture: images, masks and outlines."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from torch import Tensor

from lit_data.core.types import IGNORED, Array, Bools
from lit_data.predict.figures import PERCENTILES, TRUE_COLOUR, stretch

CLASS_COLOURS = (
    "#ff3b30",
    "#34aadc",
    "#4cd964",
    "#ffcc00",
    "#af52de",
    "#ff9500",
    "#5ac8fa",
    "#ff2d92",
)


def show_images(cells: Sequence[Axes], image: Tensor) -> None:
    """Show target and references on the same gray scale, so that they can be compared."""
    black, white = np.percentile(image.numpy(), PERCENTILES)
    white = max(white, black + 1e-3)  # of an image of one value too
    for cell, channel in zip(cells, image, strict=False):
        cell.imshow(channel.numpy(), cmap="gray", vmin=black, vmax=white, interpolation="nearest")


def show_pixels(cell: Axes, image: Tensor) -> None:
    """Show [C, H, W] in 0..1: three channels in color, otherwise the first channel in gray."""
    if len(image) == 3:  # matplotlib wants the channels last
        cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
    else:
        cell.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def show_stored(cell: Axes, pixels: Array) -> None:
    """Show stored pixels [C, H, W] of any range, stretched from the darkest to the brightest."""
    cell.imshow(np.moveaxis(stretch(pixels), 0, -1))


def show_mask(cell: Axes, mask: Tensor, *, classes: int = 0) -> None:
    """Show [H, W] in 0..1 in black and white, or class numbers in the colors of the classes.

    Ignored pixels are gray.
    """
    values = mask.numpy()
    colours = np.repeat(values[..., None].clip(0, 1), 3, axis=-1)
    for number in range(1, classes + 1):
        colours[values == number] = to_rgb(colour_of_class(number))
    colours[values == IGNORED] = 0.5
    cell.imshow(colours, interpolation="nearest")


def colour_of_class(number: int) -> str:
    """Return the color of a class from its number in masks, which counts from 1."""
    return CLASS_COLOURS[(number - 1) % len(CLASS_COLOURS)]


def number_classes(classes: Sequence[str]) -> list[str]:
    """Return class names with their numbers in masks and maps, which count from 1, for a legend."""
    return [f"{number} {name}" for number, name in enumerate(classes, 1)]


def outline_mask(cell: Axes, mask: Tensor, *, classes: int = 0, width: float = 1.0) -> None:
    """Draw a line around the pixels of a mask that have at least half of its largest value.

    Args:
        cell: Shows an image of the same size.
        mask: [H, W] in 0..1, or numbers of classes from 1; 255 where pixels are ignored.
        classes: Number of classes in the mask, each drawn in its color; 0: the mask has no classes.
        width: Line width, points.
    """
    values = mask.numpy()
    values = np.where(values == IGNORED, 0, values)  # nobody knows what is there
    for number in range(1, classes + 1):
        draw_outline(cell, values == number, colour=colour_of_class(number), width=width)
    if not classes:
        is_marked = (values > 0) & (values >= values.max() / 2)
        draw_outline(cell, is_marked, colour=TRUE_COLOUR, width=width)


def draw_outline(cell: Axes, is_marked: Bools, *, colour: str, width: float = 1.0) -> None:
    """Draw a line along the border of the marked pixels, [H, W]."""
    if not is_marked.any():
        return
    height, width_px = is_marked.shape
    # A border of nothing closes the lines around what touches an edge of the image.
    padded = np.pad(is_marked, 1).astype(np.float32)
    lines = cell.contour(
        np.arange(-1, width_px + 1),
        np.arange(-1, height + 1),
        padded,
        levels=[0.5],
        colors=[colour],
        linewidths=width,
    )
    # A line along an edge of the image lies above the frame, which would hide it.
    lines.set(clip_on=False, zorder=3)
    _fit_cell(cell, (height, width_px))


def _fit_cell(cell: Axes, shape: tuple[int, ...]) -> None:
    cell.set_xlim(-0.5, shape[1] - 0.5)
    cell.set_ylim(shape[0] - 0.5, -0.5)
