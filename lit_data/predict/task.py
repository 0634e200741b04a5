"""`Task`: draws samples of a kind of data, and draws and writes predictions.

`find_task` returns that of a datamodule: the attribute ``task`` of its class, which is a `Task` or
its dotted name, or the one that `register` noted for the class, else that of its parents. A package
of your own adds its kind of data in this way; ``docs/extend.md`` walks through one.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from lightning import LightningModule
from matplotlib.axes import Axes
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.drawn_images import DrawnImages
from lit_data.predict.cells import show_pixels
from lit_data.predict.figures import CELL_INCHES, ShowSample, new_axes, open_figure, save_figure
from lit_data.predict.net_facts import NetFacts
from lit_data.predict.options import ExportRequest, Predicted, PredictOptions, PredictRun, Use
from lit_data.predict.predict import predict_batches
from lit_data.predict.verdicts import TellsDoubt
from lit_data.predict.writer import PredictionWriter

log = logging.getLogger(__name__)

UNCHANGED = "unchanged"
"""Key of a planned batch with its samples before workers augmented them."""


Data = TypeVar("Data", bound=BaseDataModule)
_TASKS: "dict[type[Any], type[Task[Any]]]" = {}
"""Registered tasks, by the classes of their datamodules."""


class Task(Generic[Data]):
    """The interface of a kind of data for the commands.

    This base draws images under ``image`` and predicts nothing.

    Args:
        datamodule: Datamodule that is prepared and opened.

    Attributes:
        predicts: Description of what `method` must return.
        method: Method that a module needs for its predictions to be drawn.
        candidates: Number of samples from which those of a picture are chosen.
        predict_data: Options of the datamodule that prediction sets.
        trained_data: Options of the datamodule that a checkpoint holds, which apply unless you set
            others.
        unexported: Reason why there is no file for `lit_inspect`, with advice.
        uses: Features to which options of ``predict`` apply here; other options are refused.
        shares: True if several processes may each predict some of the inputs; `predict` then uses
            the share of the run.
    """

    predicts: ClassVar[str] = "predictions"
    method: ClassVar[str] = "predict_step"
    candidates: ClassVar[int] = 64
    predict_data: ClassVar[Mapping[str, Any]] = {}
    trained_data: ClassVar[Sequence[str]] = ()
    unexported: ClassVar[str] = (
        "lit_inspect supports only maps of images, classes and boxes: predict with the checkpoint"
    )
    shares: ClassVar[bool] = True
    uses: ClassVar[Use] = Use.INPUTS | Use.FINDING

    def __init__(self, datamodule: Data) -> None:
        self.datamodule = datamodule

    @property
    def truth(self) -> TellsDoubt:
        """Truth of images, for kinds with verdicts; by default the datamodule knows it."""
        truth: Any = self.datamodule
        known: TellsDoubt = truth
        return known

    def list_split(self, split: Stage) -> list[int]:
        """Return the numbers of the images of a split."""
        numbers: list[int] = self.datamodule.split_images[split].tolist()
        return numbers

    @classmethod
    def has_verdicts(cls) -> bool:
        """Return True if images of this kind get verdicts, with their own threshold."""
        return Use.VERDICTS in cls.uses

    def can_draw(self, model: LightningModule) -> bool:
        """Return True if a model has the method that `draw_predictions` calls."""
        step = getattr(model, self.method, None)
        if step is None:
            return False
        # Lightning's base class has a `predict_step` too, which predicts nothing to draw.
        function = getattr(step, "__func__", step)
        return function is not getattr(LightningModule, self.method, None)

    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw up to `count` samples of a finished batch on the host, spread evenly over it.

        If their titles show classes, some of each are drawn.

        Returns:
            Rows of the batch that were drawn; empty if it has no images.
        """
        images = batch.get("image") if isinstance(batch, dict) else None
        if not isinstance(images, Tensor) or images.ndim != 4:
            log.info("no %s: the batch has no image [B, C, H, W]", path.name)
            return []
        titles = [self.describe_sample(batch, row) for row in range(len(images))]
        rows = choose_strata(titles, [0.0] * len(images), count)
        figure, axes = new_axes(1, len(rows), CELL_INCHES + 0.5)
        for cell, row in zip(axes[0], rows, strict=True):
            show_pixels(cell, images[row].float())
            cell.set_title(titles[row], fontsize=8)
        save_figure(figure, path, title, ())
        return rows

    def describe_sample(self, batch: Batch, row: int) -> str:
        """Return the title of a sample."""
        return ""

    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw samples beside a model's predictions, and return True if these could be drawn."""
        return False

    def draw_whole(
        self, model: LightningModule, stage: Stage, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw whole images of a split instead of samples, and return True if they could be drawn."""
        return False

    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Draw samples before and after augmentation, if there is any."""

        def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
            show_pixels(cells[0], batch["image"][row])

        draw_before_after(self.datamodule, planned, rows, path, stage=stage, show=show)

    def writer(self, run: PredictRun, options: PredictOptions) -> PredictionWriter:
        """Return the writer of predictions.

        Raises:
            ConfigError: There is no writer, or none with these options.
        """
        raise ConfigError(
            "predict does not know how to write what is predicted for a "
            f"{type(self.datamodule).__name__}: give it a `task` with a `writer`, see docs/extend.md"
        )

    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        """Predict all samples, batch by batch, and write the predictions into the run folder."""
        return predict_batches(self.datamodule, model, self.writer(run, options), run, options)

    def draw_truth(self, split: Stage) -> DrawnImages | None:
        """Switch to predicting a split's images, both unchanged and with synthetic defects.

        Returns:
            The images; None if other truth is known, or no defects can be drawn.
        """
        return None

    def export(self, request: ExportRequest) -> NetFacts:
        """Return the net of a model with the facts for an ``.inspect`` file.

        Raises:
            ConfigError: This kind of data has no such file.
        """
        raise ConfigError(
            f"a {type(self.datamodule).__name__} cannot be exported, because {self.unexported}"
        )


def choose_strata(
    strata: Sequence[Hashable], sizes: Sequence[float], count: int, *, good: Hashable = None
) -> list[int]:
    """Choose some of many items so that each stratum is present, with small and large items.

    Args:
        strata: Class of each item.
        sizes: Size of each item, such as its marked area.
        count: Largest number of items to choose.
        good: Stratum that gets no more than its share, and at most half.

    Returns:
        Numbers of the items, grouped by stratum, with the good ones last.
    """
    members: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(strata)), key=lambda number: -sizes[number]):
        members.setdefault(strata[number], []).append(number)
    good_ones = members.pop(good, [])
    good_count = _count_good(len(good_ones), len(strata), count)
    # The most frequent classes first, if there is not enough space for all.
    classes = sorted(members.values(), key=len, reverse=True)
    quotas = _share_in_turn(list(map(len, classes)), count - good_count)
    chosen = []
    for stratum, quota in zip((*classes, good_ones), (*quotas, good_count), strict=True):
        chosen += _spread(stratum, quota)
    return chosen


def _count_good(good: int, total: int, count: int) -> int:
    """Return the number of good items among `count` chosen ones, of `good` good ones in `total`."""
    if not good:
        return 0
    share = round(count * good / total)
    left_by_others = count - (total - good)
    return min(good, max(left_by_others, min(max(1, share), count // 2)))


def _share_in_turn(sizes: Sequence[int], count: int) -> list[int]:
    """Give places to groups in turn, until there are none left or all items are chosen."""
    quotas = [0] * len(sizes)
    while count > 0 and quotas != list(sizes):
        for group, size in enumerate(sizes):
            if count > 0 and quotas[group] < size:
                quotas[group] += 1
                count -= 1
    return quotas


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """Choose evenly from the first to the last; a single one is the middle one."""
    return [numbers[int((step + 0.5) * len(numbers) / count)] for step in range(count)]


def draw_before_after(
    datamodule: BaseDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
    show: ShowSample,
    columns: Sequence[str] = ("",),
    cell_inches: float = CELL_INCHES,
) -> bool:
    """Draw samples before and after augmentation.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch on the host.
        rows: Samples of the batch to draw.
        path: PNG file to write.
        stage: Stage of the samples.
        show: Function that fills the cells of a sample.
        columns: Titles of the cells.
        cell_inches: Side of a cell in inches.

    Returns:
        True if it was drawn; False if the stage has no augmentation.
    """
    unchanged: Any = planned.get(UNCHANGED, planned)
    before = datamodule.inspect(stage).draw(unchanged)
    if before is None:
        return False
    after = datamodule.finish_batch(planned, stage)
    titles = []
    for moment in ("before", "after"):
        titles += [f"{name} {moment}".strip() for name in columns]
    figure, axes = open_figure(len(rows), titles, cell_inches)
    for cells, row in zip(axes, rows, strict=True):
        show(cells[: len(columns)], before, row)
        show(cells[len(columns) :], after, row)
    save_figure(figure, path, f"{stage} samples before and after augmentation", ())
    return True


def find_task(datamodule: BaseDataModule) -> Task[Any]:
    """Return the task of a datamodule: its own ``task``, else that of its class."""
    return find_task_of(type(datamodule))(datamodule)


def find_task_of(kind: object) -> type[Task[Any]]:
    """Return the task of a class of datamodules; for a function that makes one, the general task.

    Raises:
        ConfigError: The named task does not exist.
    """
    datamodule_class = kind if isinstance(kind, type) else BaseDataModule
    for parent in datamodule_class.__mro__:
        task = vars(parent).get("task") or _TASKS.get(parent)
        if task is not None:
            return _import_task(task) if isinstance(task, str) else task
    return Task


def list_trained(task: type[Task[Any]]) -> Sequence[str]:
    """Return the options of the datamodule that a checkpoint holds: how its model is fed."""
    return (*task.trained_data, "batch_format")


def register(kind: type[Any]) -> Callable[[type[Task[Any]]], type[Task[Any]]]:
    """Return a decorator for the `Task` of a class of datamodules and its subclasses."""

    def note(task: type[Task[Any]]) -> type[Task[Any]]:
        _TASKS[kind] = task
        return task

    return note


def _import_task(name: str) -> type[Task[Any]]:
    module, _, class_name = name.rpartition(".")
    task: type[Task[Any]] | None = getattr(import_module(module), class_name, None)
    if task is None:
        raise ConfigError(f"task={name!r} of a datamodule names nothing that is there")
    return task
