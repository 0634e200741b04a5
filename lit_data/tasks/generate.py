"""Generated images: what a model learns from, what it makes, and new objects from all sides."""

import logging
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.imaging.pictures import draw_grid
from lit_data.callbacks.imaging.sampling import check_sampling, sample, sweep, sweeps_views, turns
from lit_data.datamodules import GANDataModule
from lit_data.io.images.writing import write_png
from lit_data.io.progress import track
from lit_data.tasks.base import Task, register
from lit_data.tasks.figures import CELL_INCHES, new_axes, open_figure, save_figure, show_pixels
from lit_data.tasks.options import (
    TILE_OPTIONS,
    VERDICT_OPTIONS,
    Predicted,
    PredictOptions,
    PredictRun,
)
from lit_data.types import Array, Batch, Stage

log = logging.getLogger(__name__)


_COLUMNS: Final = 8


@register(GANDataModule)
class GenerateTask(Task[GANDataModule]):
    """Images and objects to learn from, and generated ones."""

    predicts = "images"
    method = "sample_images"
    unused = (*TILE_OPTIONS, *VERDICT_OPTIONS, "clean", "resume", "threads")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_image_samples(self.datamodule, batch, path, title, stage=stage, count=count)

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        draw_generated(model, batch, self.datamodule.poses, path, title, count=count)
        return True

    @override
    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        options.refuse("generated images", *self.unused)
        return generate(self.datamodule, model, run, options)


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
    rows: list[int] = np.unique(
        np.linspace(0, length - 1, min(length, count)).astype(np.int64)
    ).tolist()
    draw = _draw_grid if datamodule.poses is None else _draw_views
    draw(datamodule, {key: value[rows] for key, value in batch.items()}, path, title, stage)
    return rows


def tile_views(views: Tensor) -> Tensor:
    """Put k * k views [V, C, h, w] into one sheet [C, k * h, k * w], row by row."""
    count, channels, height, width = views.shape
    side = round(count**0.5)
    sheet = views.reshape(side, side, channels, height, width).permute(2, 0, 3, 1, 4)
    return sheet.reshape(channels, side * height, side * width)


def _draw_grid(
    datamodule: GANDataModule, batch: Batch, path: Path, title: str, stage: Stage
) -> None:
    count = len(batch["image"])
    lines = -(-count // _COLUMNS)
    figure, axes = new_axes(lines, min(count, _COLUMNS), (CELL_INCHES + 0.25) * lines + 0.5)
    for cell in axes.flat[count:]:
        cell.set_axis_off()
    for number, cell in enumerate(axes.flat[:count]):
        show_pixels(cell, batch["image"][number])
        cell.set_title("\n".join(_describe(datamodule, batch, number)), fontsize=8)
    save_figure(figure, path, title, ())


def _draw_views(
    datamodule: GANDataModule, batch: Batch, path: Path, title: str, stage: Stage
) -> None:
    inspection = datamodule.inspect(stage)
    figure, axes = open_figure(len(batch["image"]), ("sample", "all views of its object"))
    for number, cells in enumerate(axes):
        show_pixels(cells[0], batch["image"][number])
        cells[0].set_ylabel("\n".join(_describe(datamodule, batch, number)), fontsize=8)
        show_pixels(cells[1], tile_views(inspection.views_of(int(batch["object"][number]))))
    save_figure(figure, path, title, ())


def _describe(datamodule: GANDataModule, batch: Batch, number: int) -> list[str]:
    """Lines about a sample: its image or object, its label, its pose."""
    values = {
        key: int(batch[key][number])
        for key in ("label", "view", "object", "image_index")
        if key in batch
    }
    classes = datamodule.table.classes
    lines = [
        f"object {values['object']}" if "object" in values else f"image {values['image_index']}"
    ]
    if datamodule.num_labels:
        lines.append(classes[values["label"]] if classes else f"label {values['label']}")
    if "pose" in batch:
        azimuth, elevation = torch.rad2deg(batch["pose"][number]).tolist()
        lines.append(f"view {values['view']}: {azimuth:.0f}, {elevation:.0f} deg")
    return lines


SEED: Final = 0
OBJECTS: Final = 4
"""Objects that are shown from all sides."""
_PANEL_INCHES: Final = 5.0
_TITLE_INCHES: Final = 0.3


def draw_generated(
    model: L.LightningModule,
    batch: Batch,
    poses: Tensor | None,
    path: Path,
    title: str,
    *,
    count: int,
) -> None:
    """Draw real images beside generated ones, and below some generated objects from all sides.

    Args:
        model: A module with `sample_images`, and `sweep_views` for the sides.
        batch: A finished batch of real images, on the host.
        poses: [V, 2] rad of the sides; none shows none.
        path: The PNG to write.
        title: Of the picture.
        count: Images along each side of a panel, at most.

    """
    real = batch["image"][: count * count]
    generated = sample(model, len(real), seed=SEED, batch_size=len(real))
    views = sweep_objects(model, poses, OBJECTS, seed=SEED)
    below_inches = (
        0.0 if views is None else 2 * _PANEL_INCHES * len(views) / views.shape[1] + _TITLE_INCHES
    )
    figure, axes = new_axes(
        1 if views is None else 2,
        2,
        _PANEL_INCHES + below_inches + 2 * _TITLE_INCHES,
        width_inches=2 * _PANEL_INCHES,
    )
    for cell, name, images in zip(axes[0], ("real", "generated"), (real, generated), strict=True):
        _show(cell, images, name)
    if views is not None:
        grid = axes[1, 0].get_gridspec()
        grid.set_height_ratios((_PANEL_INCHES, below_inches))
        for cell in axes[1]:
            cell.remove()
        wide = figure.add_subplot(grid[1, :], xticks=[], yticks=[])
        _show(wide, views.flatten(0, 1), "generated objects from all sides", columns=views.shape[1])
    save_figure(figure, path, title, ())


def sweep_objects(
    model: L.LightningModule, poses: Tensor | None, count: int, *, seed: int
) -> Tensor | None:
    """Objects from all sides, [count, V, C, H, W] in 0..1; none where the model or the data know no sides."""
    if poses is None or not sweeps_views(model):
        return None
    views = sweep(model, count, poses, seed=seed)
    return views if turns(views) else None


def _show(cell: Axes, images: Tensor, name: str, *, columns: int | None = None) -> None:
    cell.imshow(draw_grid(images, columns=columns), interpolation="nearest")
    cell.set_title(name, fontsize=10)


_COUNT: Final = 64
_BATCH: Final = 16
_SHOWN: Final = 64
_OBJECTS: Final = 8


def generate(
    datamodule: GANDataModule, model: L.LightningModule, run: PredictRun, options: PredictOptions
) -> Predicted:
    """Write images that a model generates; the same seed, weights and count give the same images.

    Into the folder go ``images/<number>.png``; ``predictions.png`` with the first 64; and, where
    the data and the model know sides, ``views/<object>.png``, sheets that the datamodule can read
    again, and ``views.png`` with a row for each of these objects.

    Args:
        datamodule: A prepared and opened datamodule, which knows the sides.
        model: A module with `sample_images`.
        run: Where to write.
        options: How many.

    Returns:
        Number of images and of objects.

    Raises:
        ConfigError: The module generates no images.
    """
    check_sampling(model, "predict")
    model.to(run.make_trainer([]).strategy.root_device)
    sided: Any = model
    sided.poses = datamodule.poses  # the sides to choose from; in training its own setup does that
    count, seed = options.count or _COUNT, int(run.identity["seed"] or 0)
    images = sample(model, count, seed=seed, batch_size=options.batch_size or _BATCH)
    for number, image in enumerate(track(images, "writing images", count)):
        write_png(run.folder / "images" / f"{number:06d}.png", _to_pixels(image))
    write_png(run.folder / "predictions.png", draw_grid(images[:_SHOWN]))
    log.info("picture: %s", run.folder / "predictions.png")
    views = sweep_objects(model, datamodule.poses, min(count, _OBJECTS), seed=seed)
    if views is not None:
        for number, sides in enumerate(views):
            write_png(run.folder / "views" / f"{number:06d}.png", _to_pixels(tile_views(sides)))
        write_png(run.folder / "views.png", draw_grid(views.flatten(0, 1), columns=views.shape[1]))
        log.info("picture: %s", run.folder / "views.png")
    return Predicted(
        {"predict/images": count, "predict/objects": 0 if views is None else len(views)}
    )


def _to_pixels(image: Tensor) -> Array:
    """[H, W, 3] uint8, or [H, W] of a grey image [1, H, W] in 0..1."""
    pixels: Array = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
