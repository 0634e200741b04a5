"""Pictures of the images that a generative model learns from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from lit_data.commands.before_after import draw_before_after
from lit_data.commands.figures import CELL_INCHES, new_axes, open_figure, save_figure
from lit_data.datamodules import GANDataModule
from lit_data.types import Batch, Stage

_COLUMNS: Final = 8


def draw_image_samples(
    datamodule: GANDataModule, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
) -> list[int]:
    """Draw samples with their labels, and beside each all views of its object where there are any.

    Args:
        datamodule: A prepared and opened datamodule.
        batch: A finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        stage: Whose samples.
        count: Samples of the picture.

    Returns:
        Which samples of the batch are shown: some from its whole length.
    """
    length = len(batch["image"])
    rows: list[int] = np.unique(np.linspace(0, length - 1, min(length, count)).astype(np.int64)).tolist()
    draw = _draw_grid if datamodule.poses is None else _draw_views
    draw(datamodule, {key: value[rows] for key, value in batch.items()}, path, title, stage)
    return rows


def draw_augmented_images(
    datamodule: GANDataModule, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
) -> bool:
    """Draw samples before and after augmentation; see `draw_before_after`."""

    def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
        show_pixels(cells[0], batch["image"][row])

    return draw_before_after(datamodule, planned, rows, path, stage=stage, show=show)


def tile_views(views: Tensor) -> Tensor:
    """Put k * k views [V, C, h, w] into one sheet [C, k * h, k * w], row by row."""
    count, channels, height, width = views.shape
    side = round(count**0.5)
    sheet = views.reshape(side, side, channels, height, width).permute(2, 0, 3, 1, 4)
    return sheet.reshape(channels, side * height, side * width)


def show_pixels(cell: Axes, image: Tensor) -> None:
    """[C, H, W] in 0..1: three channels in their colours, otherwise the first one in grey."""
    if len(image) == 3:
        cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
    else:
        cell.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _draw_grid(datamodule: GANDataModule, batch: Batch, path: Path, title: str, stage: Stage) -> None:
    count = len(batch["image"])
    lines = -(-count // _COLUMNS)
    figure, axes = new_axes(lines, min(count, _COLUMNS), (CELL_INCHES + 0.25) * lines + 0.5)
    for cell in axes.flat[count:]:
        cell.set_axis_off()
    for number, cell in enumerate(axes.flat[:count]):
        show_pixels(cell, batch["image"][number])
        cell.set_title("\n".join(_describe(datamodule, batch, number)), fontsize=8)
    save_figure(figure, path, title, ())


def _draw_views(datamodule: GANDataModule, batch: Batch, path: Path, title: str, stage: Stage) -> None:
    inspection = datamodule.inspect(stage)
    figure, axes = open_figure(len(batch["image"]), ("sample", "all views of its object"))
    for number, cells in enumerate(axes):
        show_pixels(cells[0], batch["image"][number])
        cells[0].set_ylabel("\n".join(_describe(datamodule, batch, number)), fontsize=8)
        show_pixels(cells[1], tile_views(inspection.views_of(int(batch["object"][number]))))
    save_figure(figure, path, title, ())


def _describe(datamodule: GANDataModule, batch: Batch, number: int) -> list[str]:
    """Lines about a sample: its image or object, its label, its pose."""
    values = {key: int(batch[key][number]) for key in ("label", "view", "object", "image_index") if key in batch}
    classes = datamodule.table.classes
    lines = [f"object {values['object']}" if "object" in values else f"image {values['image_index']}"]
    if datamodule.num_labels:
        lines.append(classes[values["label"]] if classes else f"label {values['label']}")
    if "pose" in batch:
        azimuth, elevation = torch.rad2deg(batch["pose"][number]).tolist()
        lines.append(f"view {values['view']}: {azimuth:.0f}, {elevation:.0f} deg")
    return lines
