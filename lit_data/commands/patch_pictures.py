"""Pictures of patches: target and references with their masks, defects circled."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_data.commands.answers import read_probability
from lit_data.commands.figures import (
    CELL_INCHES,
    DISTRACTOR_COLOUR,
    TRUE_COLOUR,
    circle,
    circle_mask,
    new_axes,
    open_figure,
    save_figure,
    show_images,
    show_mask,
)
from lit_data.datamodules.base import BaseDataModule
from lit_data.inference import Defect
from lit_data.types import Array, Batch, Stage

_NAME = 24  # characters of a file's name


def draw_patch_samples(
    datamodule: BaseDataModule, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
) -> list[int]:
    """Draw samples as the model sees them: target, references and mask, true defects and distractors circled.

    Those with true defects come first, then those with distractors.

    Args:
        datamodule: Says what was drawn.
        planned: The batch before it was finished.
        batch: The finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        stage: Whose samples.
        count: Rows of the picture.

    Returns:
        Which samples of the batch are shown.
    """
    marks = _mark_distractors(datamodule, planned, stage)
    masks = batch.get("mask", torch.zeros_like(batch["image"][:, :1]))
    interest = 2.0 * masks.flatten(1).amax(1) + (0 if marks is None else marks.flatten(1).amax(1).float())
    rows = torch.argsort(interest, descending=True, stable=True)[:count].tolist()
    figure, axes = open_figure(len(rows), ("target", "reference 1", "reference 2", "mask"))
    for cells, row in zip(axes, rows, strict=True):
        show_images(cells[:3], batch["image"][row])
        show_mask(cells[3], masks[row, 0])
        circle_mask(cells[0], masks[row, 0], TRUE_COLOUR)
        for channel, cell in enumerate(cells[:3]):
            if marks is not None:
                circle_mask(cell, marks[row, channel], DISTRACTOR_COLOUR)
        cells[0].set_ylabel(name_sample(datamodule, batch, row), fontsize=8)
    save_figure(figure, path, title, ("true defect", "distractor (not in the mask)"))
    return rows


def draw_patch_predictions(
    datamodule: BaseDataModule, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
) -> bool:
    """Draw samples with a mask, those with the largest first and one with the smallest, beside what a model finds.

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
    masks = batch["mask"]
    rows = torch.argsort(masks.flatten(1).sum(1), descending=True, stable=True)[: count - 1].tolist()
    rows += torch.argsort(masks.flatten(1).sum(1), stable=True)[:1].tolist()
    shown = {key: value[rows] for key, value in batch.items()}
    probability = predict_probability(model, shown)
    if probability is None:
        return False
    figure, axes = open_figure(len(rows), ("target", "reference 1", "|target - mean(ref)|", "mask", "model"))
    for row, (cells, image, mask, found) in enumerate(
        zip(axes, shown["image"], shown["mask"], probability, strict=True)
    ):
        cells[0].set_ylabel(name_sample(datamodule, shown, row), fontsize=8)
        cells[4].set_xlabel(f"highest {float(found.max()):.2f}", fontsize=8)
        show_images(cells[:2], image)
        difference = (image[0] - image[1:].mean(0)).abs()
        cells[2].imshow(difference.numpy(), cmap="magma", vmin=0, vmax=max(float(difference.max()), 0.1))
        show_mask(cells[3], mask[0])
        cells[4].imshow(found[0].numpy(), cmap="magma", vmin=0, vmax=1)
        for cell in (cells[0], cells[2], cells[4]):
            circle_mask(cell, mask[0], TRUE_COLOUR)
    save_figure(figure, path, title, ("true defect",))
    return True


def name_sample(datamodule: BaseDataModule, batch: Batch, row: int) -> str:
    """The image that a sample is of, and where in it the sample lies, for a label."""
    number, bank = int(batch["image_index"][row]), getattr(datamodule, "bank", None)
    name = f"image {number}" if bank is None else Path(bank.name(number)).name[-_NAME:]
    if "position" not in batch:
        return name
    top, left = batch["position"][row].tolist()
    return f"{name}\ny {top}, x {left}"


def draw_maps(images: Sequence[tuple[str, Array, Array, Sequence[Defect]]], path: Path) -> None:
    """Draw whole images side by side, each above its probability map, with the defects found circled.

    Args:
        images: For each image its name, [H, W] pixels, [H, W] probability in 0..1, and its defects.
        path: The PNG to write.
    """
    height, width = images[0][1].shape
    rows = min(CELL_INCHES * height / width, 9.0)
    figure, axes = new_axes(2, len(images), 2 * rows + 0.9)
    for (name, pixels, probability, defects), cells in zip(images, axes.T, strict=True):
        low, high = np.percentile(pixels, (0.5, 99.5))
        cells[0].imshow(pixels, cmap="gray", vmin=low, vmax=max(high, low + 1e-3))
        cells[0].set_title(f"{name[-24:]}\n{len(defects)} defects", fontsize=8)
        cells[1].imshow(probability, cmap="magma", vmin=0, vmax=1)
        for cell in cells:
            circle(cell, defects, probability.shape, TRUE_COLOUR)
    save_figure(figure, path, "images with the surest defects, and their probability", ("found",))


@torch.no_grad()
def predict_probability(model: L.LightningModule, batch: Batch) -> Tensor | None:
    """What a module predicts for a batch: [B, 1, H, W] in 0..1 on the host, or none if it gives no probability."""
    training, device = model.training, model.device
    model.eval()
    result = model.predict_step({key: value.to(device) for key, value in batch.items()}, 0)
    model.train(training)
    probability = read_probability(result)
    return None if probability is None else probability.float().cpu()


def _mark_distractors(datamodule: BaseDataModule, planned: Batch, stage: Stage) -> Tensor | None:
    """[B, C, H, W] bool: in each image what looks like a defect and is none; none if nothing is drawn."""
    found = datamodule.inspect(stage).annotate(planned)
    if found is None:
        return None
    plan, annotations = found
    is_distractor = torch.cat((torch.zeros(1, dtype=torch.bool), ~plan.is_true))
    return is_distractor[annotations.labels.long()]
