"""The parts that all pictures are made of: a grid of cells, images, masks, circles, a legend."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from torch import Tensor

from lit_data.files import explaining, replacing
from lit_data.inference import Defect, find_defects

log = logging.getLogger(__name__)

TRUE_COLOUR: Final = "#ff3b30"
DISTRACTOR_COLOUR: Final = "#34aadc"
CELL_INCHES: Final = 2.1


def open_figure(rows: int, titles: Sequence[str]) -> tuple[Figure, NDArray[np.object_]]:
    """A grid of cells with a title over each column."""
    figure, axes = new_axes(rows, len(titles), CELL_INCHES * rows + 0.7)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    return figure, axes


def new_axes(
    rows: int, columns: int, height_inches: float, *, width_inches: float | None = None
) -> tuple[Figure, NDArray[np.object_]]:
    """A grid of empty cells without ticks."""
    size_inches = width_inches or CELL_INCHES * columns, height_inches
    figure = Figure(figsize=size_inches, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure, axes


def show_images(cells: Sequence[Axes], image: Tensor) -> None:
    """Target and references on one grey scale, so that they can be compared."""
    low, high = np.percentile(image.numpy(), (0.5, 99.5))
    for cell, channel in zip(cells, image, strict=False):
        cell.imshow(channel.numpy(), cmap="gray", vmin=low, vmax=max(high, low + 1e-3), interpolation="nearest")


def show_mask(cell: Axes, mask: Tensor) -> None:
    """[H, W] in 0..1, black and white."""
    cell.imshow(mask.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def circle_mask(cell: Axes, mask: Tensor, colour: str) -> None:
    """Circle every connected piece of a mask, [H, W]."""
    circle(cell, find_defects(mask.numpy()), tuple(mask.shape), colour)


def circle(cell: Axes, defects: Sequence[Defect], shape: tuple[int, ...], colour: str) -> None:
    """Circle defects, and show no more of the cell than an image of `shape`."""
    angle = np.linspace(0, 2 * np.pi, 40)
    for defect in defects:
        radius = max(defect.height_px, defect.width_px) / 2 + 3
        cell.plot(defect.x + radius * np.cos(angle), defect.y + radius * np.sin(angle), color=colour, linewidth=1.2)
    cell.set_xlim(-0.5, shape[1] - 0.5)
    cell.set_ylim(shape[0] - 0.5, -0.5)


def save_figure(figure: Figure, path: Path, title: str, legend: Sequence[str]) -> None:
    """Write a figure with its title, and with a legend of circles if there are any."""
    colours = (TRUE_COLOUR, DISTRACTOR_COLOUR)
    handles = [
        Line2D([], [], color=colour, marker="o", markerfacecolor="none", linestyle="", label=label)
        for colour, label in zip(colours, legend, strict=False)
    ]
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    with explaining(path), replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png")
    log.info("picture: %s", path)
