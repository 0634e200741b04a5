"""Whole images with labels: what each shows, and what a model says it does."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.files import write_table
from lit_data.tasks.answers import ask_step
from lit_data.tasks.base import Task, register
from lit_data.tasks.batches import predict_batches
from lit_data.tasks.figures import CELL_INCHES, new_axes, save_figure, show_pixels
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.writer import BankWriter, Entry, Written
from lit_data.types import Batch

log = logging.getLogger(__name__)


@register(LabelledImageDataModule)
class LabelTask(Task[LabelledImageDataModule]):
    """Images with the names of their classes; predictions are a table of labels."""

    predicts = "probabilities [B, classes]"
    neutral_data = (*Task.neutral_data, "groups", "similar")
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        return (self.datamodule.classes or ())[int(batch["label"][row])] if "label" in batch else ""

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        found, classes = read_labels(ask_step(model, batch)), self.datamodule.classes or ()
        if found is None or found.shape[1] != len(classes):
            return False
        wrong = found.argmax(1) != batch["label"].cpu()
        rows = torch.argsort(wrong.int(), descending=True, stable=True)[: 2 * count].tolist()
        figure, axes = new_axes(2, -(-len(rows) // 2), 2 * CELL_INCHES + 1.0)
        cells: list[Any] = list(axes.flat)
        for cell in cells[len(rows) :]:
            cell.set_axis_off()
        for cell, row in zip(cells, rows, strict=False):
            show_pixels(cell, batch["image"][row])
            score, label = found[row].max(0)
            cell.set_title(f"{self.describe_sample(batch, row)}\nmodel: {classes[int(label)]} {score:.2f}", fontsize=7)
        save_figure(figure, path, title, ())
        return True

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "LabelWriter":
        options.refuse("labels", *self.unused, "threshold", "min_area_px")
        return LabelWriter(self.datamodule, run.folder)

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        return predict_batches(self.datamodule, model, self.writer(run, options), run, options)


class LabelWriter(BankWriter):
    """Writes ``labels.csv``: of each image its label, how sure that is, and what its folder says, if it names a class.

    Args:
        datamodule: Whose images.
        folder: Where to write.
    """

    expects = "probabilities [B, classes]"

    def __init__(self, datamodule: LabelledImageDataModule, folder: Path) -> None:
        super().__init__(datamodule.bank, datamodule.source.names(datamodule.bank))
        self._classes, self._folder = tuple(datamodule.classes or ()), folder
        self._truth = [kind if kind in self._classes else "" for kind in datamodule.image_kinds]

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[Tensor] | None:
        found = read_labels(outputs)
        return None if found is None or found.shape[1] != len(self._classes) else list(found)

    @override
    def write(self, number: int, answer: Tensor, seconds: float) -> Written:
        score, label = answer.max(0)
        row = {"label": self._classes[int(label)], "score": round(float(score), 4), "truth": self._truth[number]}
        return Written([], [row], float(score))

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [{"image": entry.image, **entry.rows[0]} for entry in entries]
        known = [row for row in rows if row["truth"]]
        path = self._folder / "labels.csv"
        write_table(path, ("image", "label", "score", *(("truth",) if known else ())), rows)
        log.info("labels: %s", path)
        counts = {f"predict/{name}": count for name, count in sorted(Counter(row["label"] for row in rows).items())}
        right = sum(row["label"] == row["truth"] for row in known)
        return counts | ({"predict/accuracy": round(right / len(known), 4)} if known else {})


def read_labels(found: object) -> Tensor | None:
    """Probability of each class, [B, classes] on the host, that a `predict_step` returned; none of anything else."""
    return found.float().cpu() if isinstance(found, Tensor) and found.ndim == 2 else None
