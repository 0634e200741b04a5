"""`Task`: drawing of samples of a kind of data, drawing and writing of predictions.

`find_task` gives that of a datamodule: ``datamodule.task`` if it has one, else what `register` was
told of its class. A package of your own brings its own kind of data in this way; ``docs/extend.md``
walks through one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import lightning as L
import numpy as np
from torch import Tensor

from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.tasks.batches import predict_batches
from lit_data.tasks.figures import (
    CELL_INCHES,
    draw_before_after,
    new_axes,
    save_figure,
    show_pixels,
)
from lit_data.tasks.options import (
    TILE_OPTIONS,
    VERDICT_OPTIONS,
    Predicted,
    PredictOptions,
    PredictRun,
)
from lit_data.tasks.writer import PredictionWriter
from lit_data.types import Batch, Stage

log = logging.getLogger(__name__)


Data = TypeVar("Data", bound=BaseDataModule)


class Task(Generic[Data]):
    """Kind of data as the commands see it.

    This one draws images under ``image`` and predicts nothing.

    Args:
        datamodule: Prepared and opened.

    Attributes:
        predicts: What `method` must return, in words.
        method: What a module needs for its predictions to be drawn.
        candidates: Samples that those of a picture are chosen from.
        neutral_data: Options of the datamodule that do not change what is predicted of an input, so
            that a run with others can go on.
        predict_data: Options of the datamodule that prediction sets.
        trained_data: Options of the datamodule that a checkpoint holds, and that hold for it unless
            others are typed.
        unused: Options of ``predict`` that mean nothing here: they are refused.
    """

    predicts: ClassVar[str] = "predictions"
    method: ClassVar[str] = "predict_step"
    candidates: ClassVar[int] = 64
    neutral_data: ClassVar[Sequence[str]] = (
        *(
            "batch_format",
            "cache",
            "cache_bytes",
            "cache_dir",
            "exclude",
            "loader",
            "mask_splits",
            "on_bad",
        ),
        *("patterns", "split_seed", "splits"),
    )
    predict_data: ClassVar[Mapping[str, Any]] = {}
    trained_data: ClassVar[Sequence[str]] = ()
    unused: ClassVar[Sequence[str]] = (*TILE_OPTIONS, *VERDICT_OPTIONS, "clean", "count")

    def __init__(self, datamodule: Data) -> None:
        self.datamodule = datamodule

    def can_draw(self, model: L.LightningModule) -> bool:
        """Whether a model has the method that `draw_predictions` asks for."""
        found = getattr(model, self.method, None)
        return found is not None and getattr(found, "__func__", found) is not getattr(
            L.LightningModule, self.method, None
        )

    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw up to `count` samples of a finished batch on the host and return which; none if there are no images."""
        images = batch.get("image") if isinstance(batch, dict) else None
        if not isinstance(images, Tensor) or images.ndim != 4:
            log.info("no %s: the batch has no image [B, C, H, W]", path.name)
            return []
        rows: list[int] = np.unique(
            np.linspace(0, len(images) - 1, min(len(images), count)).astype(np.int64)
        ).tolist()
        figure, axes = new_axes(1, len(rows), CELL_INCHES + 0.5)
        for cell, row in zip(axes[0], rows, strict=True):
            show_pixels(cell, images[row].float())
            cell.set_title(self.describe_sample(batch, row), fontsize=8)
        save_figure(figure, path, title, ())
        return rows

    def describe_sample(self, batch: Batch, row: int) -> str:
        """The words over a sample."""
        return ""

    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw samples beside what a model makes of them; return whether it says something that can be drawn."""
        return False

    def draw_augmented(
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Draw samples before and after augmentation, if there is any."""
        draw_before_after(
            self.datamodule,
            planned,
            shown,
            path,
            stage=stage,
            show=lambda cells, batch, row: show_pixels(cells[0], batch["image"][row]),
        )

    def writer(self, run: PredictRun, options: PredictOptions) -> PredictionWriter:
        """What writes predictions.

        Raises:
            ConfigError: Nothing does, or not with these options.
        """
        raise ConfigError(
            f"predict does not know how to write what is predicted for a {type(self.datamodule).__name__}: give it a "
            "`task` with a `writer`, see docs/extend.md"
        )

    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        """Predict all there is, batch by batch, and write what comes of it into the folder of the run."""
        return predict_batches(self.datamodule, model, self.writer(run, options), run, options)


def find_task(datamodule: BaseDataModule) -> Task[Any]:
    """The task of a datamodule: its own ``task``, else that of its class."""
    return find_task_of(type(datamodule))(datamodule)


def find_task_of(kind: object) -> type[Task[Any]]:
    """The task of a class of datamodules; of a function that makes one, that of any."""
    kind = kind if isinstance(kind, type) else BaseDataModule
    own: type[Task[Any]] | None = getattr(kind, "task", None)
    return own if own is not None else _registered.dispatch(kind)(None)


def register(kind: type[Any]) -> Callable[[type[Task[Any]]], type[Task[Any]]]:
    """Decorates a `Task`: that of a class of datamodules and of those derived from it."""

    def note(task: type[Task[Any]]) -> type[Task[Any]]:
        _registered.register(kind, lambda _: task)
        return task

    return note


@singledispatch
def _registered(_: object) -> type[Task[Any]]:
    return Task
