"""Tasks of images with masks: patches, predictions of them, and predictions of whole images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import torch
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import TypeVar, override

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.image import ImageDataModule
from lit_data.tasks.answers import ask_step, read_kinds, read_probability, read_threshold
from lit_data.tasks.base import Task
from lit_data.tasks.figures import (
    CLASS_COLOURS,
    FOUND_COLOUR,
    TRUE_COLOUR,
    draw_before_after,
    number_classes,
    open_figure,
    outline_mask,
    save_figure,
    show_mask,
    show_pixels,
)
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.tiles import ImageWriter, predict_images
from lit_data.types import IGNORED, Array, Batch, Stage

_NAME: Final = 24  # characters of a file's name
_UNMARKED: Final = 2  # samples without a mark in a picture, where there are enough with one
Images = TypeVar("Images", bound=ImageDataModule)


class PixelTask(Task[Images]):
    """Images with masks; a model gives the probability of each pixel.

    A subclass has the writer of its predictions.
    """

    predicts = "dict with `probability`"
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}, "mask_splits": []}

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        classes = self.datamodule.classes or ()
        return draw_mark_samples(self.datamodule, batch, path, title, count=count, classes=classes)

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        classes = self.datamodule.classes or ()
        return draw_mark_predictions(
            self.datamodule, model, batch, path, title, count=count, classes=classes
        )

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        count = len(self.datamodule.classes or ())
        draw_augmented_marks(self.datamodule, planned, rows, path, stage=stage, classes=count)

    def writer(self, run: PredictRun, options: PredictOptions) -> ImageWriter:
        """Return the writer of the predictions of whole images."""
        raise NotImplementedError

    @override
    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return predict_images(self.datamodule, model, self.writer(run, options), run, options)


def name_sample(datamodule: BaseDataModule, batch: Batch, row: int) -> str:
    """Return the name of the image of a sample, and the position of the sample in it."""
    number = int(batch["image_index"][row])
    bank = getattr(datamodule, "bank", None)
    name = f"image {number}" if bank is None else Path(bank.name(number)).name[-_NAME:]
    if "position" not in batch:
        return name
    top, left = batch["position"][row].tolist()
    return f"{name}\ny {top}, x {left}"


def draw_mark_samples(
    datamodule: BaseDataModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
    classes: Sequence[str] = (),
) -> list[int]:
    """Draw samples as the model sees them, with their masks, the largest first.

    Args:
        datamodule: Its images have names.
        batch: A finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.
        classes: Names of the classes whose numbers are in the masks; empty: masks are in 0..1.

    Returns:
        Rows of the batch that are drawn.
    """
    masks = _masks_of(batch)
    order = torch.argsort(_measure_marked(masks), descending=True, stable=True)
    rows: list[int] = order[:count].tolist()
    has_clean = "clean" in batch
    titles = ["image", "edge of the mask", "mask"]
    if has_clean:
        titles.append("clean")
    figure, axes = open_figure(len(rows), titles)
    for cells, row in zip(axes, rows, strict=True):
        show_pixels(cells[0], batch["image"][row])
        show_outlined(cells[1], batch["image"][row], masks[row, 0], classes=len(classes))
        show_mask(cells[2], masks[row, 0], classes=len(classes))
        if has_clean:
            show_pixels(cells[3], batch["clean"][row])
        cells[0].set_ylabel(name_sample(datamodule, batch, row), fontsize=8)
    save_figure(figure, path, title, number_classes(classes), CLASS_COLOURS)
    return rows


def draw_mark_predictions(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
    classes: Sequence[str] = (),
) -> bool:
    """Draw samples from the largest watermark to none, beside the predictions of a model.

    Args:
        datamodule: Its images have names.
        model: A module whose `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.
        classes: As for `draw_mark_samples`.

    Returns:
        True if it was drawn; False if the module returns something else.
    """
    rows = _choose_marked(_measure_marked(_masks_of(batch)), count)
    chosen = {key: value[rows] for key, value in batch.items()}
    outputs = ask_step(model, chosen)
    probability = read_probability(outputs)
    if probability is None:
        return False
    threshold = read_threshold(model)
    marks = (probability >= threshold).float()
    kinds = read_kinds(outputs) if classes else None
    if kinds is not None:
        marks = marks * (1 + kinds.argmax(1, keepdim=True))  # numbers of classes, from 1
    marks = marks.cpu()
    probability = probability.float().cpu()
    masks = _masks_of(chosen)
    titles = ("image", "mask", f"found (p >= {threshold:.2g})", "model")
    figure, axes = open_figure(len(rows), titles)
    for row, cells in enumerate(axes):
        cells[0].set_ylabel(name_sample(datamodule, chosen, row), fontsize=8)
        show_pixels(cells[0], chosen["image"][row])
        show_outlined(cells[1], chosen["image"][row], masks[row, 0], classes=len(classes))
        show_pixels(cells[2], chosen["image"][row])
        outline_mask(cells[2], marks[row, 0], classes=len(classes), colour=FOUND_COLOUR)
        _show_probability(cells[3], probability[row, 0].numpy())
        outline_mask(cells[3], masks[row, 0], classes=len(classes), width=0.6)
    if classes:
        save_figure(figure, path, title, number_classes(classes), CLASS_COLOURS)
    else:
        save_figure(figure, path, title, ("mask", "found"), (TRUE_COLOUR, FOUND_COLOUR))
    return True


def _show_probability(cell: Axes, probability: Array) -> None:
    cell.imshow(probability, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
    cell.set_xlabel(f"highest {float(probability.max()):.2f}", fontsize=8)


def draw_augmented_marks(
    datamodule: BaseDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
    classes: int = 0,
) -> bool:
    """Draw samples and their masks before and after augmentation; see `draw_before_after`."""

    def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
        show_pixels(cells[0], batch["image"][row])
        show_mask(cells[1], _masks_of(batch)[row, 0], classes=classes)

    return draw_before_after(
        datamodule, planned, rows, path, stage=stage, show=show, columns=("image", "mask")
    )


def show_outlined(cell: Axes, image: Tensor, mask: Tensor, *, classes: int = 0) -> None:
    """Show an image [C, H, W] with a line around what a mask [H, W] marks; see `outline_mask`."""
    show_pixels(cell, image)
    outline_mask(cell, mask, classes=classes, width=0.8)


def _choose_marked(marked: Tensor, count: int) -> list[int]:
    """Choose samples of all sizes of mark, from the largest, and behind them a few without any.

    Args:
        marked: [B] how much of each mask is marked.
        count: Samples at most.
    """
    order = torch.argsort(marked, descending=True, stable=True)
    with_mark, without = order[marked[order] > 0], order[marked[order] == 0]
    # Samples without a mark fill what those with one leave, but get at least `_UNMARKED` rows.
    free = count - min(len(without), _UNMARKED)
    spread = torch.linspace(0, len(with_mark) - 1, min(free, len(with_mark))).round().long()
    chosen: list[int] = torch.cat([with_mark[spread], without]).tolist()
    return chosen[:count]


def _measure_marked(masks: Tensor) -> Tensor:
    """Return the marked area of each mask, [B] px; pixels that are ignored do not count."""
    return masks.masked_fill(masks == IGNORED, 0).clamp(max=1).flatten(1).sum(1)


def _masks_of(batch: Batch) -> Tensor:
    """Return the masks of a batch, [B, 1, H, W]; without masks nothing is marked."""
    if "mask" in batch:
        return batch["mask"]
    return torch.zeros_like(batch["image"][:, :1])
