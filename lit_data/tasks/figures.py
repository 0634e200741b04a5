"""The parts that all pictures are made of: a grid of cells, images, masks, circles, a legend."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from torch import Tensor

from lit_data.datamodules.base import BaseDataModule
from lit_data.files import explaining, replacing
from lit_data.inference import Defect, find_defects
from lit_data.types import IGNORED, Batch, Stage

log = logging.getLogger(__name__)


TRUE_COLOUR: Final = "#ff3b30"
DISTRACTOR_COLOUR: Final = "#34aadc"
CLASS_COLOURS: Final = (
    "#ff3b30",
    "#34aadc",
    "#4cd964",
    "#ffcc00",
    "#af52de",
    "#ff9500",
    "#5ac8fa",
    "#ff2d92",
)
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
        cell.imshow(
            channel.numpy(),
            cmap="gray",
            vmin=low,
            vmax=max(high, low + 1e-3),
            interpolation="nearest",
        )


def show_pixels(cell: Axes, image: Tensor) -> None:
    """[C, H, W] in 0..1: three channels in their colours, otherwise the first one in grey."""
    if len(image) == 3:
        cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
    else:
        cell.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def show_mask(cell: Axes, mask: Tensor, *, classes: int = 0) -> None:
    """[H, W] in 0..1, black and white; numbers of classes in their colours; grey where pixels are ignored."""
    shown = np.repeat(mask.numpy()[..., None].clip(0, 1), 3, axis=-1)
    for number in range(1, classes + 1):
        shown[mask.numpy() == number] = to_rgb(CLASS_COLOURS[(number - 1) % len(CLASS_COLOURS)])
    shown[mask.numpy() == IGNORED] = 0.5
    cell.imshow(shown, interpolation="nearest")


def circle_mask(cell: Axes, mask: Tensor, colour: str) -> None:
    """Circle every connected piece of a mask, [H, W]."""
    circle(cell, find_defects(mask.numpy()), tuple(mask.shape), colour)


def circle(cell: Axes, defects: Sequence[Defect], shape: tuple[int, ...], colour: str) -> None:
    """Circle defects, and show no more of the cell than an image of `shape`."""
    angle = np.linspace(0, 2 * np.pi, 40)
    for defect in defects:
        radius = max(defect.height_px, defect.width_px) / 2 + 3
        cell.plot(
            defect.x + radius * np.cos(angle),
            defect.y + radius * np.sin(angle),
            color=colour,
            linewidth=1.2,
        )
    cell.set_xlim(-0.5, shape[1] - 0.5)
    cell.set_ylim(shape[0] - 0.5, -0.5)


def save_figure(
    figure: Figure,
    path: Path,
    title: str,
    legend: Sequence[str],
    colours: Sequence[str] = (TRUE_COLOUR, DISTRACTOR_COLOUR),
) -> None:
    """Write a figure with its title, and with a legend of circles in some colours if there are any."""
    handles = [
        Line2D([], [], color=colour, marker="o", markerfacecolor="none", linestyle="", label=label)
        for colour, label in zip(colours, legend, strict=False)
    ]
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".") or "png")
    log.info("picture: %s", path)


ShowSample = Callable[[Sequence[Axes], Batch, int], None]
"""Fills one cell for each column with a sample of a batch."""


def draw_before_after(
    datamodule: BaseDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
    show: ShowSample,
    columns: Sequence[str] = ("",),
    cell_inches: float = CELL_INCHES,
) -> bool:
    """Draw samples before and after augmentation.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch on the host.
        rows: Which of its samples.
        path: The PNG to write.
        stage: Whose samples.
        show: Fills the cells of a sample.
        columns: Titles of these.
        cell_inches: Side of a cell.

    Returns:
        Whether it was drawn: the stage may have no augmentation.
    """
    before, after = datamodule.inspect(stage).draw(planned), datamodule.finish_batch(planned, stage)
    if before is None:
        return False
    titles = [f"{name} {moment}".strip() for moment in ("before", "after") for name in columns]
    size_inches = cell_inches * len(rows) + 0.7, cell_inches * len(titles)
    figure, axes = new_axes(len(rows), len(titles), size_inches[0], width_inches=size_inches[1])
    for cell, title in zip(axes[0], titles, strict=True):
        cell.set_title(title, fontsize=10)
    for cells, row in zip(axes.tolist(), rows, strict=True):
        for first, batch in ((0, before), (len(columns), after)):
            show(cells[first : first + len(columns)], batch, row)
    save_figure(figure, path, f"{stage} samples before and after augmentation", ())
    return True
