"""Drawing of samples, and generation of new images, and of new objects from all sides."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.pictures import (
    check_sampling,
    draw_grid,
    sample,
    sweep,
    sweeps_views,
    turns,
)
from lit_data.core.progress import track
from lit_data.core.types import Array, Batch, Stage
from lit_data.images.writing import write_png
from lit_data.predict.answers import check_probabilities
from lit_data.predict.cells import show_pixels
from lit_data.predict.figures import CELL_INCHES, new_axes, open_figure, save_figure
from lit_data.predict.options import Predicted, PredictOptions, PredictRun, Use
from lit_data.predict.task import Task
from lit_data.wings.gan.datamodule import GANDataModule

log = logging.getLogger(__name__)


_COLUMNS = 8
SEED = 0
OBJECTS = 4
"""Number of objects that are shown from all sides."""
_PANEL_INCHES = 5.0
_TITLE_INCHES = 0.3
_COUNT = 64
_BATCH = 16
_SHOWN = 64
_OBJECTS = 8


class GenerateTask(Task[GANDataModule]):
    """Task of images and objects to learn from, and of generated ones."""

    predicts = "images"
    method = "sample_images"
    unexported = "lit_inspect scores images and does not generate them: predict does"
    uses = Use.GENERATION | Use.FINDING
    shares = False  # one stream of random numbers makes all of them

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw samples with their labels, and beside each all views of its object if there are any."""
        length = len(batch["image"])
        spread = np.linspace(0, length - 1, min(length, count))
        rows: list[int] = np.unique(spread.astype(np.int64)).tolist()
        if self.datamodule.poses is None:
            self._draw_grid(batch, rows, path, title)
        else:
            self._draw_views(batch, rows, path, title, stage)
        return rows

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        draw_generated(model, batch, self.datamodule.poses, path, title, count=count)
        return True

    @override
    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        options.refuse_unused("generated images", self.uses)
        options.refuse("generated images", "threads")
        return generate(self.datamodule, model, run, options)

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        """Return lines about a sample: its image or object, its label, its pose."""
        if "object" in batch:
            lines = [f"object {int(batch['object'][row])}"]
        else:
            lines = [f"image {int(batch['image_index'][row])}"]
        if self.datamodule.num_labels:
            label = int(batch["label"][row])
            classes = self.datamodule.table.classes
            lines.append(classes[label] if classes else f"label {label}")
        if "pose" in batch:
            view = int(batch["view"][row])
            azimuth, elevation = torch.rad2deg(batch["pose"][row]).tolist()
            lines.append(f"view {view}: {azimuth:.0f}, {elevation:.0f} deg")
        return "\n".join(lines)

    def _draw_grid(self, batch: Batch, rows: Sequence[int], path: Path, title: str) -> None:
        grid_rows = -(-len(rows) // _COLUMNS)
        height_inches = (CELL_INCHES + 0.25) * grid_rows + 0.5
        figure, axes = new_axes(grid_rows, min(len(rows), _COLUMNS), height_inches)
        cells: list[Any] = list(axes.flat)
        for cell in cells[len(rows) :]:
            cell.set_axis_off()
        for cell, row in zip(cells, rows, strict=False):
            show_pixels(cell, batch["image"][row])
            cell.set_title(self.describe_sample(batch, row), fontsize=8)
        save_figure(figure, path, title, ())

    def _draw_views(
        self, batch: Batch, rows: Sequence[int], path: Path, title: str, stage: Stage
    ) -> None:
        inspection = self.datamodule.inspect(stage)
        figure, axes = open_figure(len(rows), ("sample", "all views of its object"))
        for cells, row in zip(axes, rows, strict=True):
            show_pixels(cells[0], batch["image"][row])
            cells[0].set_ylabel(self.describe_sample(batch, row), fontsize=8)
            show_pixels(cells[1], tile_views(inspection.views_of(int(batch["object"][row]))))
        save_figure(figure, path, title, ())


def tile_views(views: Tensor) -> Tensor:
    """Join k * k views [V, C, h, w] to one sheet [C, k * h, k * w], row by row."""
    count, channels, height, width = views.shape
    side = round(count**0.5)
    sheet = views.reshape(side, side, channels, height, width).permute(2, 0, 3, 1, 4)
    return sheet.reshape(channels, side * height, side * width)


def draw_generated(
    model: LightningModule,
    batch: Batch,
    poses: Tensor | None,
    path: Path,
    title: str,
    *,
    count: int,
) -> None:
    """Draw real images beside generated ones, and some generated objects from all sides below.

    Args:
        model: A module with `sample_images`, and `sweep_views` for the sides.
        batch: A finished batch of real images, on the host.
        poses: [V, 2] rad of the sides; None shows no sides.
        path: The PNG to write.
        title: Title of the picture.
        count: Maximum number of images along each side of a panel.
    """
    real = batch["image"][: count * count]
    generated = sample(model, len(real), seed=SEED, batch_size=len(real))
    views = sweep_objects(model, poses, OBJECTS, seed=SEED)
    width_inches = 2 * _PANEL_INCHES
    height_inches = _PANEL_INCHES + 2 * _TITLE_INCHES
    if views is None:
        figure, axes = new_axes(1, 2, height_inches, width_inches=width_inches)
    else:
        # A row for each object, whose views share the width of both panels.
        objects, sides = views.shape[:2]
        views_inches = width_inches * objects / sides + _TITLE_INCHES
        figure, axes = new_axes(2, 2, height_inches + views_inches, width_inches=width_inches)
        grid = axes[1, 0].get_gridspec()
        grid.set_height_ratios((_PANEL_INCHES, views_inches))
        for cell in axes[1]:
            cell.remove()
        wide_cell = figure.add_subplot(grid[1, :], xticks=[], yticks=[])
        _show(wide_cell, views.flatten(0, 1), "generated objects, multi-view", columns=sides)
    _show(axes[0, 0], real, "real")
    _show(axes[0, 1], generated, "generated")
    save_figure(figure, path, title, ())


def sweep_objects(
    model: LightningModule, poses: Tensor | None, count: int, *, seed: int
) -> Tensor | None:
    """Return generated objects from all sides, [count, V, C, H, W] in 0..1.

    It returns None if the model or the data have no poses.
    """
    if poses is None or not sweeps_views(model):
        return None
    views = sweep(model, count, poses, seed=seed)
    return views if turns(views) else None


def _show(cell: Axes, images: Tensor, name: str, *, columns: int | None = None) -> None:
    cell.imshow(draw_grid(images, columns=columns), interpolation="nearest")
    cell.set_title(name, fontsize=10)


def generate(
    datamodule: GANDataModule, model: LightningModule, run: PredictRun, options: PredictOptions
) -> Predicted:
    """Write images that a model generates; the same seed, weights and count give the same images.

    The folder gets ``images/<number>.png``, and ``predictions.png`` with the first 64. If the data
    and the model have poses, it also gets ``views/<object>.png``, sheets that the datamodule can
    read again, and ``views.png`` with a row for each of these objects.

    Args:
        datamodule: A prepared and opened datamodule, which has the poses.
        model: A module with `sample_images`.
        run: Output folder and identity of the run.
        options: Number of images, and batch size.

    Returns:
        Number of images and of objects.

    Raises:
        ConfigError: The module generates no images.
    """
    check_sampling(model, "predict")
    model.to(run.trainer.strategy.root_device)
    # The poses to choose from; in training the setup of the model sets them.
    model_with_poses: Any = model
    model_with_poses.poses = datamodule.poses
    count = options.count or _COUNT
    seed = int(run.identity["seed"] or 0)
    images = sample(model, count, seed=seed, batch_size=options.batch_size or _BATCH)
    for number, image in enumerate(track(images, "writing images", count)):
        write_png(run.folder / "images" / f"{number:06d}.png", _to_pixels(image))
    write_png(run.folder / "predictions.png", draw_grid(images[:_SHOWN]))
    log.info("picture: %s", run.folder / "predictions.png")
    views = sweep_objects(model, datamodule.poses, min(count, _OBJECTS), seed=seed)
    if views is not None:
        _write_views(views, run.folder)
    objects = 0 if views is None else len(views)
    return Predicted({"predict/images": count, "predict/objects": objects})


def _write_views(views: Tensor, folder: Path) -> None:
    """Write a sheet for each object, and a picture with a row for each of them."""
    for number, sides in enumerate(views):
        write_png(folder / "views" / f"{number:06d}.png", _to_pixels(tile_views(sides)))
    path = folder / "views.png"
    write_png(path, draw_grid(views.flatten(0, 1), columns=views.shape[1]))
    log.info("picture: %s", path)


def _to_pixels(image: Tensor) -> Array:
    """Return an image [C, H, W] in 0..1 as [H, W, 3] uint8, or as [H, W] if it is gray."""
    check_probabilities(image.clamp(0, 1))  # which leaves NaN as it is
    pixels: Array = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
