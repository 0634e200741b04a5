"""``show`` draws what a model will see; ``fit`` takes the same pictures of samples and predictions."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from omegaconf import DictConfig
from torch import Tensor

from lit_data.app.build import build_datamodule
from lit_data.app.configuration.targets import read_options
from lit_data.augment.host import HostRows
from lit_data.core.checks import check_count
from lit_data.core.files import write_table
from lit_data.core.types import Batch, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.visuals import FamilyPreview
from lit_data.predict import find_task
from lit_data.predict.answers import AskedModule
from lit_data.predict.cells import show_images, show_mask
from lit_data.predict.figures import open_figure, save_figure
from lit_data.predict.task import UNCHANGED

log = logging.getLogger(__name__)

_SIDE_PX = 64
"""Of the part of a patch that is shown of a family."""
_CANDIDATES = 4  # drawn of a family for each that is shown


def draw_samples(
    datamodule: BaseDataModule, path: Path, *, stage: Stage, count: int = 6, epoch: int = 0
) -> tuple[Batch, list[int]]:
    """Draw samples as the model sees them, those that hold the most first.

    Args:
        datamodule: A prepared and opened datamodule.
        path: The PNG to write.
        stage: Whose samples.
        count: Samples in the picture.
        epoch: The epoch they are drawn for.

    Returns:
        A planned batch on the host, and which of its samples are shown.
    """
    task = find_task(datamodule)
    planned, batch = _read_samples(datamodule, stage, epoch, task.candidates)
    title = f"{stage} samples, epoch {epoch}"
    return planned, task.draw_samples(planned, batch, path, title, stage=stage, count=count)


def draw_predictions(
    datamodule: BaseDataModule, model: LightningModule, path: Path, *, count: int = 8
) -> None:
    """Draw test images, or samples of them, beside what the model makes of them.

    Where the test split is empty, they are of the validation, else of the training.

    Args:
        datamodule: A prepared and opened datamodule.
        model: A module with the method that the view of the datamodule asks for; otherwise nothing
            is drawn.
        path: The PNG to write.
        count: Samples in the picture.
    """
    task = find_task(datamodule)
    if not task.can_draw(model):
        log.info("no predictions.png: %s has no %s", type(model).__name__, task.method)
        return
    stages: tuple[Stage, ...] = ("test", "val", "train")
    stage = next(stage for stage in stages if len(datamodule.dataset(stage)))
    if task.draw_whole(model, stage, path, f"predictions on {stage} images", count=count):
        return
    _, batch = _read_samples(datamodule, stage, 0, task.candidates)
    asked: Any = AskedModule(model, datamodule)  # which gets batches in its own form
    title = f"predictions on {stage} samples"
    if not task.draw_predictions(asked, batch, path, title, count=count):
        name = type(model).__name__
        log.info("no predictions.png: %s of %s returns no %s", task.method, name, task.predicts)


def _read_samples(
    datamodule: BaseDataModule, stage: Stage, epoch: int, most: int
) -> tuple[Batch, Batch]:
    """Return some samples, spread evenly over the split: planned, and finished."""
    loader = datamodule.make_loader(stage)
    length = loader.order.length
    count = min(length, most)
    positions = np.unique(np.linspace(0, length - 1, count).astype(np.int64))
    planned = datamodule.plan_batch(loader.read(positions, epoch), stage)
    if isinstance(loader.dataset, HostRows):
        unchanged = copy.copy(loader)
        unchanged.dataset = loader.dataset.dataset
        planned[UNCHANGED] = datamodule.plan_batch(unchanged.read(positions, epoch), stage)
    return planned, datamodule.finish_batch(planned, stage)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of ``show``; conf/show.yaml has one line for each.

    Args:
        stage: Whose samples.
        count: Patches or images in the pictures.
        examples: Of each family of defects.
        epoch: The epoch they are drawn for.
    """

    stage: Stage
    count: int
    examples: int
    epoch: int

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("examples", 1), ("epoch", 0)):
            check_count(f"show.{name}", getattr(self, name), least)


def draw_families(
    datamodule: BaseDataModule, planned: Batch, path: Path, *, stage: Stage, count: int = 4
) -> int:
    """Draw each family of defects in a row: for each example the patch around it, and its mask.

    Under an example stands its severity: the mean change in standard deviations of the noise around
    it.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch of it, as `draw_samples` returns.
        path: The PNG to write; without synthesis nothing is drawn.
        stage: Whose patches.
        count: Examples of each family.

    Returns:
        Families drawn.
    """
    most = _CANDIDATES * count
    batch = {key: value[:most] for key, value in planned.items() if isinstance(value, Tensor)}
    families = datamodule.inspect(stage).preview_families(batch)
    if not families:
        return 0
    count = min(count, len(families[0].after))
    figure, axes = open_figure(len(families), ["with the defect", "mask"] * count)
    for cells, family in zip(axes, families, strict=True):
        cells[0].set_ylabel(family.name, fontsize=9)
        # Some candidates change less than what counts as a defect: those come last.
        is_seen = family.mask.flatten(1).any(dim=1)
        chosen = torch.argsort(is_seen.int(), descending=True, stable=True)[:count].tolist()
        for column, number in enumerate(chosen):
            _draw_example(cells[2 * column : 2 * column + 2], family, number)
    save_figure(figure, path, f"families of defects on {stage} patches", ())
    return len(families)


def _draw_example(cells: Any, family: FamilyPreview, number: int) -> None:  # noqa: ANN401 - axes
    """Draw the part of a patch around a defect, and beside it the mask."""
    window = _window_around(family.centre[number], family.after.shape[1:])
    mask = family.mask[number]
    show_images(cells[:1], family.after[number][window][None])
    show_mask(cells[1], mask[window])
    cells[0].set_xlabel(f"severity {float(family.severity[number]):.1f}", fontsize=8)
    cells[1].set_xlabel(f"{int(mask.sum())} px", fontsize=8)


def _window_around(centre: Tensor, shape_px: Sequence[int]) -> tuple[slice, slice]:
    """Return the rows and columns of a square around a point, moved into the patch."""
    slices = []
    for position, length in zip(centre.tolist(), shape_px, strict=True):
        last_start = max(0, length - _SIDE_PX)
        start = int(np.clip(round(position) - _SIDE_PX // 2, 0, last_start))
        slices.append(slice(start, start + _SIDE_PX))
    return slices[0], slices[1]


def run(cfg: DictConfig) -> dict[str, Any]:
    """Write pictures of samples and of what they are made by.

    - ``samples.png``, and ``plan.csv`` with one row for each defect drawn in the patches shown
    - ``families.png``: each family of defects on its own, with masks and severities
    - ``augment.png``: samples before and after augmentation, where the stage has one

    Returns:
        Number of patches or images, defects and families shown.
    """
    folder = Path(cfg.paths.run)
    options = read_options(ShowOptions, cfg.show, "show")
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    stage = options.stage
    batch, samples = draw_samples(
        datamodule, folder / "samples.png", stage=stage, count=options.count, epoch=options.epoch
    )
    plan = datamodule.inspect(stage).describe_plan(batch, samples)
    if plan:
        path = folder / "plan.csv"
        write_table(path, list(plan[0]), plan)
        log.info("plan: %s", path)
    families = draw_families(
        datamodule, batch, folder / "families.png", stage=stage, count=options.examples
    )
    find_task(datamodule).draw_augmented(batch, samples, folder / "augment.png", stage=stage)
    return {"show/patches": len(samples), "show/defects": len(plan), "show/families": families}
