"""Pictures of watermarked patches: the image, where its watermark is, and what a model makes of it."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from matplotlib.axes import Axes
from torch import Tensor

from lit_data.commands.before_after import draw_before_after
from lit_data.commands.figures import TRUE_COLOUR, open_figure, save_figure, show_mask
from lit_data.commands.patch_pictures import name_sample, predict_probability
from lit_data.datamodules.base import BaseDataModule
from lit_data.types import Batch, Stage


def draw_mark_samples(batch: Batch, path: Path, title: str, *, count: int) -> list[int]:
    """Draw samples as the model sees them, with their masks; of those with a watermark the largest come first.

    Args:
        batch: A finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.

    Returns:
        Which samples of the batch are shown.
    """
    masks = _masks_of(batch)
    rows: list[int] = torch.argsort(masks.flatten(1).sum(1), descending=True, stable=True)[:count].tolist()
    has_clean = "clean" in batch
    figure, axes = open_figure(len(rows), ("image", "edge of the mask", "mask", *(["clean"] if has_clean else [])))
    for cells, row in zip(axes, rows, strict=True):
        show_colour(cells[0], batch["image"][row])
        show_outlined(cells[1], batch["image"][row], masks[row, 0])
        show_mask(cells[2], masks[row, 0])
        if has_clean:
            show_colour(cells[3], batch["clean"][row])
        top, left = batch["position"][row].tolist()
        cells[0].set_ylabel(f"image {int(batch['image_index'][row])}\ny {top}, x {left}", fontsize=8)
    save_figure(figure, path, title, ())
    return rows


def draw_mark_predictions(
    datamodule: BaseDataModule, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
) -> bool:
    """Draw samples of all sizes of watermark, from the largest to none, beside what a model finds.

    Args:
        datamodule: Its images have names.
        model: A module whose `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.

    Returns:
        Whether it was drawn: the module may return something else.
    """
    order = torch.argsort(_masks_of(batch).flatten(1).sum(1), descending=True, stable=True)
    places = torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()
    shown = {key: value[order[places]] for key, value in batch.items()}
    probability = predict_probability(model, shown)
    if probability is None:
        return False
    figure, axes = open_figure(len(places), ("image", "mask", "model", "found (p >= 0.5)"))
    for row, (cells, image, mask, found) in enumerate(
        zip(axes, shown["image"], _masks_of(shown), probability, strict=True)
    ):
        cells[0].set_ylabel(name_sample(datamodule, shown, row), fontsize=8)
        cells[2].set_xlabel(f"highest {float(found.max()):.2f}", fontsize=8)
        show_colour(cells[0], image)
        show_mask(cells[1], mask[0])
        cells[2].imshow(found[0].numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        show_outlined(cells[3], image, (found[0] >= 0.5).float())
    save_figure(figure, path, title, ())
    return True


def draw_augmented_marks(
    datamodule: BaseDataModule, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
) -> bool:
    """Draw samples before and after augmentation, with the masks that move along; see `draw_before_after`."""

    def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
        show_colour(cells[0], batch["image"][row])
        show_mask(cells[1], _masks_of(batch)[row, 0])

    return draw_before_after(datamodule, planned, rows, path, stage=stage, show=show, columns=("image", "mask"))


def show_colour(cell: Axes, image: Tensor) -> None:
    """[3, H, W] in 0..1, as it is."""
    cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")


def show_outlined(cell: Axes, image: Tensor, mask: Tensor) -> None:
    """An image [3, H, W] with a line around what a mask [H, W] marks by half of its largest value at least."""
    show_colour(cell, image)
    if float(mask.max()) > float(mask.min()):
        cell.contour(mask.numpy(), levels=[float(mask.max()) / 2], colors=[TRUE_COLOUR], linewidths=0.6)


def _masks_of(batch: Batch) -> Tensor:
    """[B, 1, H, W]; nothing is marked where there are no masks."""
    return batch["mask"] if "mask" in batch else torch.zeros_like(batch["image"][:, :1])
