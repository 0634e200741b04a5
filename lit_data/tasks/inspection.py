"""Single images with masks of their defects: patches with their masks; a map and a verdict of every image."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
from typing_extensions import override

from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.errors import ConfigError
from lit_data.files import write_table
from lit_data.synthesis.values import ValueRange
from lit_data.tasks.base import Task, register
from lit_data.tasks.maps import MapWriter
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.tiles import predict_images
from lit_data.tasks.watermarks import draw_augmented_marks, draw_mark_predictions, draw_mark_samples
from lit_data.tasks.whole_images import ProbabilityMap, WholeImages, slabs
from lit_data.tasks.writer import Entry, Written
from lit_data.types import Batch, Stage

log = logging.getLogger(__name__)

COLUMNS: Final = ("image", "score", "defects", "verdict")


@register(InspectionDataModule)
class InspectionTask(Task[InspectionDataModule]):
    """Images with the masks of their defects; predictions are maps and tables of defects."""

    predicts = "dict with `probability`"
    neutral_data = (*Task.neutral_data, "patch_px", "positives", "stride_px")
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    unused = ("clean", "count")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_mark_samples(batch, path, title, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_mark_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented_marks(self.datamodule, planned, shown, path, stage=stage)

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "VerdictWriter":
        options.refuse("maps of defects", *self.unused)
        return VerdictWriter(open_inspection_images(self.datamodule), run.folder, options)

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        return predict_images(self.datamodule, model, self.writer(run, options), run, options)


class VerdictWriter(MapWriter):
    """Writes what `MapWriter` does, and ``images.csv`` with a verdict for each image.

    Its columns are the highest probability, the defects found at the threshold, and ``good`` or ``defect``.
    """

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        highest = max(float(answer.rows(part).max()) for part in slabs(answer.shape))
        return super().write(number, answer, seconds)._replace(score=round(highest, 4))

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [
            {
                "image": entry.image,
                "score": entry.score,
                "defects": len(entry.rows),
                "verdict": "defect" if entry.rows else "good",
            }
            for entry in entries
        ]
        path = self.folder / "images.csv"
        write_table(path, COLUMNS, rows)
        log.info("verdicts: %s", path)
        return super().finish(entries)


def open_inspection_images(datamodule: InspectionDataModule) -> WholeImages:
    """The images of a set, as they are.

    Raises:
        ConfigError: The predict stage has an augmentation.
    """
    if "predict" in datamodule.transformation.augment:
        raise ConfigError("predict takes images as they are: leave predict out of data.augment")
    values, bank = datamodule.transformation.values, datamodule.bank
    span = None if values == ValueRange() else (values.low, values.high)
    names = datamodule.source.names(bank)
    return WholeImages(bank=bank, names=names, channels=tuple(range(bank.channels)), value_range=span)
