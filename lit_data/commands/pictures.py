"""Pictures that fit and show write of any datamodule."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from lit_data.datamodules.base import BaseDataModule
from lit_data.tasks import find_task
from lit_data.tasks.answers import AskedModule
from lit_data.types import Batch, Stage

log = logging.getLogger(__name__)


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
    datamodule: BaseDataModule, model: L.LightningModule, path: Path, *, count: int = 8
) -> None:
    """Draw test samples beside what the model makes of them.

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
    return planned, datamodule.finish_batch(planned, stage)
