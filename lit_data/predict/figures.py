"""Parts of all pictures: a grid of cells, images, masks, outlines, circles, a legend."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from torch import Tensor

from lit_data.core.files import explaining, replacing
from lit_data.core.types import IGNORED, Array, Batch, Bools, Size, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.predict.predictor import find_defects
from lit_inspect.regions import Defect

log = logging.getLogger(__name__)


TRUE_COLOUR = "#ff3b30"
DISTRACTOR_COLOUR = "#34aadc"
FOUND_COLOUR = "#4cd964"
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
UNCHANGED = "unchanged"
"""Key of a planned batch with its samples before workers augmented them."""
CELL_INCHES = 2.1
_LONGEST_SHAPE = 2.0  # long side by short side: longer images are cropped
_MOST_CENTRES = 50  # defects around which a part of a strip is looked for
_LONGEST_NAME = 24  # characters that fit over a cell
PERCENTILES = (0.5, 99.5)  # of the grey values that become black and white
ShowSample = Callable[[Sequence[Axes], Batch, int], None]
"""Fills one cell for each column with a sample of a batch."""


def open_figure(
    rows: int, titles: Sequence[str], cell_inches: float = CELL_INCHES
) -> tuple[Figure, NDArray[np.object_]]:
    """Return a grid of cells with a title over each column."""
    width_inches = cell_inches * len(titles)
    height_inches = cell_inches * rows + 0.7
    figure, axes = new_axes(rows, len(titles), height_inches, width_inches=width_inches)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    return figure, axes


def new_axes(
    rows: int, columns: int, height_inches: float, *, width_inches: float | None = None
) -> tuple[Figure, NDArray[np.object_]]:
    """Return a grid of empty cells without ticks."""
    size_inches = (width_inches or CELL_INCHES * columns, height_inches)
    figure = Figure(figsize=size_inches, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself; pyplot's global state stays untouched
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure, axes


def show_images(cells: Sequence[Axes], image: Tensor) -> None:
    """Show target and references on one grey scale, so that they can be compared."""
    black, white = np.percentile(image.numpy(), PERCENTILES)
    white = max(white, black + 1e-3)  # of an image of one value too
    for cell, channel in zip(cells, image, strict=False):
        cell.imshow(channel.numpy(), cmap="gray", vmin=black, vmax=white, interpolation="nearest")


def show_pixels(cell: Axes, image: Tensor) -> None:
    """Show [C, H, W] in 0..1: three channels in their colours, otherwise the first one in grey."""
    if len(image) == 3:  # matplotlib wants the channels last
        cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
    else:
        cell.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def show_stored(cell: Axes, pixels: Array) -> None:
    """Show stored pixels [C, H, W] of any range from their darkest to their brightest.

    Three channels are shown in their colours, otherwise the first one in grey.
    """
    image = np.moveaxis(pixels, 0, -1) if len(pixels) == 3 else pixels[0]
    low, high = np.percentile(image, PERCENTILES)
    stretched = (image.astype(np.float32) - low) / max(high - low, 1e-3)
    cell.imshow(stretched.clip(0, 1), cmap="gray", vmin=0, vmax=1)


def show_probability(
    cell: Axes, probability: Array, *, interpolation: Literal["nearest"] | None = None
) -> None:
    """Show [H, W] in 0..1; without an `interpolation` as matplotlib's settings say."""
    cell.imshow(probability, cmap="magma", vmin=0, vmax=1, interpolation=interpolation)


def show_mask(cell: Axes, mask: Tensor, *, classes: int = 0) -> None:
    """Show [H, W] in 0..1 in black and white, or numbers of classes in their colours.

    Pixels that are ignored are grey.
    """
    values = mask.numpy()
    colours = np.repeat(values[..., None].clip(0, 1), 3, axis=-1)
    for number in range(1, classes + 1):
        colours[values == number] = to_rgb(colour_of_class(number))
    colours[values == IGNORED] = 0.5
    cell.imshow(colours, interpolation="nearest")


def colour_of_class(number: int) -> str:
    """Return the colour of a class by its number in masks, from 1."""
    return CLASS_COLOURS[(number - 1) % len(CLASS_COLOURS)]


def number_classes(classes: Sequence[str]) -> list[str]:
    """Return names of classes with their numbers in masks and maps, from 1, for a legend."""
    return [f"{number} {name}" for number, name in enumerate(classes, 1)]


def outline_mask(
    cell: Axes, mask: Tensor, *, classes: int = 0, colour: str = TRUE_COLOUR, width: float = 1.0
) -> None:
    """Draw a line around what a mask marks by half of its largest value at least.

    Args:
        cell: Shows an image of the same size.
        mask: [H, W] in 0..1, or numbers of classes from 1; 255 where pixels are ignored.
        classes: Classes that the mask tells apart, each in its colour; 0: none.
        colour: Of the line without classes.
        width: Of the line, points.
    """
    values = mask.numpy()
    values = np.where(values == IGNORED, 0, values)  # nobody knows what is there
    for number in range(1, classes + 1):
        draw_outline(cell, values == number, colour=colour_of_class(number), width=width)
    if not classes:
        is_marked = (values > 0) & (values >= values.max() / 2)
        draw_outline(cell, is_marked, colour=colour, width=width)


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
    _fit_cell(cell, shape)


def _fit_cell(cell: Axes, shape: tuple[int, ...]) -> None:
    cell.set_xlim(-0.5, shape[1] - 0.5)
    cell.set_ylim(shape[0] - 0.5, -0.5)


def crop_strip(shape: Size, defects: Sequence[Defect]) -> tuple[slice, slice]:
    """Return the rows and columns of an image to draw: all of it, or a part of a long strip.

    The part is twice as long as the strip is wide, and shows as many defects as it can.

    Args:
        shape: (height, width) of the image, px.
        defects: In the image; without any the part lies in the middle.
    """
    height, width = shape
    longest = round(_LONGEST_SHAPE * min(shape))
    surest = sorted(defects, key=lambda defect: -defect.score)[:_MOST_CENTRES]
    centres = [(defect.y, defect.x) for defect in surest] or [(height / 2, width / 2)]
    parts = []
    for y, x in centres:
        parts.append((_cut_around(y, height, longest), _cut_around(x, width, longest)))
    return max(parts, key=lambda part: _count_inside(part, defects))  # the surest of equal ones


def _count_inside(part: tuple[slice, slice], defects: Sequence[Defect]) -> int:
    rows, columns = part
    count = 0
    for defect in defects:
        is_inside = rows.start <= defect.y < rows.stop and columns.start <= defect.x < columns.stop
        count += is_inside
    return count


def _cut_around(centre: float, length: int, longest: int) -> slice:
    """Return up to `longest` pixels around a centre, moved inwards where they reach beyond."""
    size = min(length, longest)
    start = min(max(round(centre - size / 2), 0), length - size)
    return slice(start, start + size)


def shorten_name(name: str) -> str:
    """Return the path of an image as it fits over a cell: of a long one the end of the file's name."""
    if len(name) <= _LONGEST_NAME:
        return name
    file = Path(name).name
    return file if len(file) <= _LONGEST_NAME else f"…{file[1 - _LONGEST_NAME :]}"


class ShownImage(NamedTuple):
    """A whole image with its predicted defects.

    Attributes:
        name: Of the image.
        pixels: [C, H, W] as stored.
        probability: [H, W] in 0..1.
        defects: Predicted ones.
    """

    name: str
    pixels: Array
    probability: Array
    defects: Sequence[Defect]


def draw_whole_images(images: Sequence[ShownImage], path: Path, title: str, least: float) -> None:
    """Draw whole images, each beside its probability, with outlined defects.

    Wide images are stacked, image and probability side by side; others stand in a row, each above
    its probability. Of a long strip the part with the most defects is shown.

    Args:
        images: At least one.
        path: The PNG to write.
        title: Of the picture.
        least: Probability from which a pixel is outlined.
    """
    parts = [crop_strip(image.probability.shape, image.defects) for image in images]
    # Wide or tall as most of what is shown, and not of what the images are.
    shapes = [image.probability[part].shape for image, part in zip(images, parts, strict=True)]
    height, width = np.max(shapes, axis=0)
    if width > height:
        row_inches = 2 * CELL_INCHES * height / width + 0.4
        height_inches = row_inches * len(images) + 0.7
        figure, axes = new_axes(len(images), 2, height_inches, width_inches=4 * CELL_INCHES)
    else:
        height_inches = 2 * CELL_INCHES * height / width + 1.1
        figure, axes = new_axes(2, len(images), height_inches)
        axes = axes.T  # a row of cells for each image again
    for image, part, cells in zip(images, parts, axes, strict=True):
        _draw_whole_image(cells, image, part, least)
    save_figure(figure, path, title, ("predicted",), (FOUND_COLOUR,))


def _draw_whole_image(
    cells: Sequence[Axes], image: ShownImage, part: tuple[slice, slice], least: float
) -> None:
    probability = image.probability[part]
    show_stored(cells[0], image.pixels[:, *part])
    count = len(image.defects)
    description = "1 defect" if count == 1 else f"{count} defects"
    if probability.shape != image.probability.shape:  # cropped
        rows, columns = part
        description += f", from y {rows.start}, x {columns.start}"
    cells[0].set_title(f"{shorten_name(image.name)}\n{description}", fontsize=8)
    show_probability(cells[1], probability)
    cells[1].set_title(f"highest {float(image.probability.max()):.2f}", fontsize=8)
    for cell in cells if image.defects else ():
        draw_outline(cell, probability >= least, colour=FOUND_COLOUR)


def save_figure(
    figure: Figure,
    path: Path,
    title: str,
    legend: Sequence[str],
    colours: Sequence[str] = (TRUE_COLOUR, DISTRACTOR_COLOUR),
) -> None:
    """Write a figure with its title, and a legend of rings in some colours if there are any."""
    handles = []
    for colour, label in zip(colours, legend, strict=False):
        ring = Line2D([], [], color=colour, label=label)
        ring.set(marker="o", markerfacecolor="none", linestyle="")
        handles.append(ring)
    _leave_out_empty(figure)
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:  # nobody sees half of a picture
            figure.savefig(file, format=path.suffix.removeprefix(".") or "png")
    log.info("picture: %s", path)


def _leave_out_empty(figure: Figure) -> None:
    """Take edges without ticks and labels out of the layout, where they cost a third of the time."""
    for cell in figure.axes:
        for edge in (cell.xaxis, cell.yaxis):
            edge.set_visible(bool(edge.get_label_text() or len(edge.get_majorticklocs())))


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
        rows: Its samples to draw.
        path: The PNG to write.
        stage: Whose samples.
        show: Fills the cells of a sample.
        columns: Titles of these.
        cell_inches: Side of a cell.

    Returns:
        True if it was drawn; False if the stage has no augmentation.
    """
    unchanged: Any = planned.get(UNCHANGED, planned)
    before = datamodule.inspect(stage).draw(unchanged)
    if before is None:
        return False
    after = datamodule.finish_batch(planned, stage)
    titles = []
    for moment in ("before", "after"):
        titles += [f"{name} {moment}".strip() for name in columns]
    figure, axes = open_figure(len(rows), titles, cell_inches)
    for cells, row in zip(axes, rows, strict=True):
        show(cells[: len(columns)], before, row)
        show(cells[len(columns) :], after, row)
    save_figure(figure, path, f"{stage} samples before and after augmentation", ())
    return True
