"""Tasks for patches whose first channel is a target, and for whole images with references."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning import LightningModule
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import override

from lit_data.core.types import Batch, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.drawn_images import DrawnImages
from lit_data.datamodules.stripe import StripeDataModule
from lit_data.predict.cells import show_images, show_mask
from lit_data.predict.defects import find_defects
from lit_data.predict.figures import (
    DISTRACTOR_COLOUR,
    SHOWN_PX,
    TRUE_COLOUR,
    ShownImage,
    list_outcomes,
    open_figure,
    paint,
    save_figure,
)
from lit_data.predict.maps import VerdictWriter, WholeImages
from lit_data.predict.net_facts import NetFacts, describe_maps
from lit_data.predict.options import ExportRequest, PredictOptions, PredictRun, Use
from lit_data.predict.pixels import PixelTask, masks_of, name_sample, show_samples
from lit_data.predict.task import Data, Task, choose_strata, register

log = logging.getLogger(__name__)


@register(BaseDataModule)
class PatchTask(Task[Data]):
    """Task for images with masks whose first channel is a target; the default for datamodules."""

    predicts = "dict with `probability`"

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw samples with masks of all sizes and some without, next to their predictions."""
        if "mask" not in batch:
            return False
        marked = batch["mask"].flatten(1).sum(1)
        strata = ["defect" if area else "" for area in marked.tolist()]
        rows = choose_strata(strata, marked.tolist(), count, good="")
        chosen = {key: value[rows] for key, value in batch.items()}
        images = show_samples(self.datamodule, model, chosen)
        if images is None:
            return False
        titles = ("target", "reference 1", "|target - mean(ref)|", "probability", "result")
        figure, axes = open_figure(len(rows), titles)
        for image, patch, cells in zip(images, chosen["image"], axes, strict=True):
            cells[0].set_ylabel(f"{image.name}\n{image.text}", fontsize=8)
            _draw_patch(cells, image, patch)
        save_figure(figure, path, title, *list_outcomes())
        return True

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Draw samples before and after augmentation, those with the largest masks first."""
        before = self.datamodule.inspect(stage).draw(planned)
        if before is None:
            return
        after = self.datamodule.finish_batch(planned, stage)
        marked = masks_of(before).flatten(1).sum(1)
        largest = torch.argsort(marked, descending=True, stable=True)[: len(rows)].tolist()
        titles = ("before", "reference 1", "after", "reference 1", "mask after")
        figure, axes = open_figure(len(largest), titles)
        for cells, row in zip(axes, largest, strict=True):
            _show_circled(cells[:2], before, row)
            _show_circled(cells[2:4], after, row)
            if "mask" in after:
                show_mask(cells[4], after["mask"][row, 0])
        epoch = int(planned["epoch"][0])
        title = f"{stage} samples before and after augmentation, epoch {epoch}"
        save_figure(figure, path, title, ("true defect",))


@register(StripeDataModule)
class StripeTask(PatchTask[StripeDataModule], PixelTask[StripeDataModule]):
    """Task for target, references and mask; predictions are maps and tables of defects."""

    takes_augmented = True
    trained_data = ("channels", "edges", "files", "layout", "patch_px", "read", "value_range")
    uses = Use.INPUTS | Use.FINDING | Use.TILES | Use.VERDICTS | Use.PICTURES
    _drawn: DrawnImages | None = None

    @override
    def draw_truth(self, split: Stage) -> DrawnImages | None:
        numbers = self.datamodule.split_images[split].tolist()
        if any(self.datamodule.has_defect(number) is None for number in numbers):
            self._drawn = self.datamodule.draw_images(split)
        return self._drawn

    @override
    def open_images(self) -> WholeImages:
        images = super().open_images()
        drawn = self._drawn
        if drawn is None:
            return images
        channels = tuple(range(drawn.channels))
        return WholeImages(
            bank=drawn, names=drawn.names, channels=channels, value_range=None, shown_channels=1
        )

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw target, references and mask; circle true defects and distractors.

        Samples with true defects of all sizes come first, then those with distractors, then the others.
        """
        distractors = _mark_distractors(self.datamodule, planned, stage)
        masks = masks_of(batch)
        strata = ["defect" if is_marked else "" for is_marked in masks.flatten(1).any(1).tolist()]
        if distractors is not None:
            for row, has_any in enumerate(distractors.flatten(1).any(1).tolist()):
                strata[row] = strata[row] or ("distractor" if has_any else "")
        rows = choose_strata(strata, masks.flatten(1).sum(1).tolist(), count, good="")
        figure, axes = open_figure(len(rows), ("target", "reference 1", "reference 2", "mask"))
        for cells, row in zip(axes, rows, strict=True):
            show_images(cells[:3], batch["image"][row])
            show_mask(cells[3], masks[row, 0])
            _circle_mask(cells[0], masks[row, 0], TRUE_COLOUR)
            if distractors is not None:
                for channel, cell in enumerate(cells[:3]):
                    _circle_mask(cell, distractors[row, channel], DISTRACTOR_COLOUR)
            cells[0].set_ylabel(name_sample(self.datamodule, batch, row), fontsize=8)
        save_figure(figure, path, title, ("true defect", "distractor (not in the mask)"))
        return rows

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> VerdictWriter:
        if self.datamodule.source.layout == "single":
            log.warning(
                "layout=single: target and references come from one image, so real defects are "
                "in all three and are not found; the maps show false alarms only"
            )
        truth, images = self._drawn or self.datamodule, self.open_images()
        find_misfits = None
        limits = run.reference_limits
        if limits is not None and self._drawn is None and self.datamodule.has_references:
            find_misfits = partial(self.datamodule.describe_misfits, limits=limits)
        return self.write_verdicts(truth, images, run, options, find_misfits)

    @override
    def export(self, request: ExportRequest) -> NetFacts:
        return describe_maps(self.datamodule, self.open_images(), request)


def _circle_mask(cell: Axes, mask: Tensor, colour: str) -> None:
    """Circle every connected region of a mask, [H, W]."""
    angle = np.linspace(0, 2 * np.pi, 40)
    for defect in find_defects(mask.numpy()):
        radius = max(defect.height_px, defect.width_px) / 2 + 3
        y, x = defect.y + radius * np.sin(angle), defect.x + radius * np.cos(angle)
        cell.plot(x, y, color=colour, linewidth=1.2)
    cell.set_xlim(-0.5, mask.shape[1] - 0.5)
    cell.set_ylim(mask.shape[0] - 0.5, -0.5)


def _show_circled(cells: Sequence[Axes], batch: Batch, row: int) -> None:
    """Show target and first reference of a sample, with its true defects circled."""
    show_images(cells, batch["image"][row])
    if "mask" in batch:
        _circle_mask(cells[0], batch["mask"][row, 0], TRUE_COLOUR)


def _draw_patch(cells: Sequence[Axes], image: ShownImage, patch: Tensor) -> None:
    """Draw a patch: target, reference, their difference, the probability over it, and the result."""
    show_images(cells[:2], patch)
    difference = (patch[0] - patch[1:].mean(0)).abs()
    brightest = max(float(difference.max()), 0.1)  # so that noise alone stays dark
    cells[2].imshow(difference.numpy(), cmap="magma", vmin=0, vmax=brightest)
    _, heat, result = paint(replace(image, pixels=patch[:1].numpy()), SHOWN_PX)
    cells[3].imshow(heat)
    cells[4].imshow(result)


def _mark_distractors(datamodule: BaseDataModule, planned: Batch, stage: Stage) -> Tensor | None:
    """Return the pixels of distractors, [B, C, H, W] bool; None without synthetic defects."""
    annotated = datamodule.inspect(stage).annotate(planned)
    if annotated is None:
        return None
    plan, annotations = annotated
    # Label 0 is the background, label n the n-th synthetic object of the plan.
    is_distractor = torch.cat((torch.zeros(1, dtype=torch.bool), ~plan.is_true))
    return is_distractor[annotations.labels.long()]
