"""Tasks of images and masks: patches, what a model finds in them, and predictions of whole images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import torch
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import TypeVar, override

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.images import ImageDataModule
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
from lit_data.types import IGNORED, Batch, Stage

_NAME: Final = 24  # characters of a file's name
_UNMARKED: Final = 2  # samples without a mark in a picture, where there are enough with one
Images = TypeVar("Images", bound=ImageDataModule)


class PixelTask(Task[Images]):
    """Images with masks; a model gives the probability of each pixel.

    A subclass says what is written of it.
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
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        count = len(self.datamodule.classes or ())
        draw_augmented_marks(self.datamodule, planned, shown, path, stage=stage, classes=count)

    def writer(self, run: PredictRun, options: PredictOptions) -> ImageWriter:
        """Return the writer of the predictions of whole images."""
        raise NotImplementedError

    @override
    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return predict_images(self.datamodule, model, self.writer(run, options), run, options)


def name_sample(datamodule: BaseDataModule, batch: Batch, row: int) -> str:
    """The image that a sample is of, and where in it the sample lies, for a label."""
    number, bank = int(batch["image_index"][row]), getattr(datamodule, "bank", None)
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
    """Draw samples as the model sees them, with their masks.

    Of those with a watermark the largest come first.

    Args:
        datamodule: Its images have names.
        batch: A finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.
        classes: Names of what the numbers in masks mean, if they are such.

    Returns:
        Which samples of the batch are shown.
    """
    masks = _masks_of(batch)
    rows: list[int] = torch.argsort(_measure_marked(masks), descending=True, stable=True)[
        :count
    ].tolist()
    has_clean = "clean" in batch
    figure, axes = open_figure(
        len(rows), ("image", "edge of the mask", "mask", *(["clean"] if has_clean else []))
    )
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
    """Draw samples of all sizes of watermark, from the largest to none, beside what a model finds.

    Args:
        datamodule: Its images have names.
        model: A module whose `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.
        classes: As for `draw_mark_samples`.

    Returns:
        Whether it was drawn: the module may return something else.
    """
    rows = _choose_marked(_measure_marked(_masks_of(batch)), count)
    shown = {key: value[rows] for key, value in batch.items()}
    answer = ask_step(model, shown)
    probability, kinds = read_probability(answer), read_kinds(answer) if classes else None
    if probability is None:
        return False
    least = read_threshold(model)
    found = (probability >= least).float()
    if kinds is not None:
        found = found * (1 + kinds.argmax(1, keepdim=True))  # numbers of classes, from 1
    probability, found = probability.float().cpu(), found.cpu()
    figure, axes = open_figure(len(rows), ("image", "mask", f"found (p >= {least:.2g})", "model"))
    samples = zip(axes, shown["image"], _masks_of(shown), probability, strict=True)
    for row, (cells, image, mask, likely) in enumerate(samples):
        cells[0].set_ylabel(name_sample(datamodule, shown, row), fontsize=8)
        cells[3].set_xlabel(f"highest {float(likely.max()):.2f}", fontsize=8)
        show_pixels(cells[0], image)
        show_outlined(cells[1], image, mask[0], classes=len(classes))
        show_pixels(cells[2], image)
        outline_mask(cells[2], found[row, 0], classes=len(classes), colour=FOUND_COLOUR)
        cells[3].imshow(likely[0].numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        outline_mask(cells[3], mask[0], classes=len(classes), width=0.6)
    if classes:
        save_figure(figure, path, title, number_classes(classes), CLASS_COLOURS)
    else:
        save_figure(figure, path, title, ("mask", "found"), (TRUE_COLOUR, FOUND_COLOUR))
    return True


def draw_augmented_marks(
    datamodule: BaseDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
    classes: int = 0,
) -> bool:
    """Draw samples before and after augmentation, with the masks that move along; see `draw_before_after`."""

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
    """Return samples of all sizes of mark, from the largest, and behind them a few without any.

    Args:
        marked: [B] how much of each mask is marked.
        count: Samples at most.
    """
    order = torch.argsort(marked, descending=True, stable=True)
    with_mark, without = order[marked[order] > 0], order[marked[order] == 0]
    free = count - min(len(without), _UNMARKED)
    places = torch.linspace(0, len(with_mark) - 1, min(free, len(with_mark))).round().long()
    chosen: list[int] = torch.cat([with_mark[places], without]).tolist()
    return chosen[:count]


def _measure_marked(masks: Tensor) -> Tensor:
    """[B] how much of each mask is marked."""
    return masks.masked_fill(masks == IGNORED, 0).clamp(max=1).flatten(1).sum(1)


def _masks_of(batch: Batch) -> Tensor:
    """[B, 1, H, W]; nothing is marked where there are no masks."""
    return batch["mask"] if "mask" in batch else torch.zeros_like(batch["image"][:, :1])
