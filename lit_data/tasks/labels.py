"""Images with one label each: pictures of them, and a table of predicted labels."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning import LightningModule
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.tasks.answers import ask_step, check_probabilities
from lit_data.tasks.base import Task, register
from lit_data.tasks.export import encode_labels
from lit_data.tasks.figures import CELL_INCHES, TRUE_COLOUR, new_axes, save_figure, show_pixels
from lit_data.tasks.journal import Entry
from lit_data.tasks.options import ExportRequest, PredictOptions, PredictRun, Use
from lit_data.tasks.writer import BankWriter, Written
from lit_data.types import Batch

log = logging.getLogger(__name__)


@register(LabelledImageDataModule)
class LabelTask(Task[LabelledImageDataModule]):
    """Images with the names of their classes; predictions are a table of labels."""

    predicts = "probabilities [B, classes]"
    neutral_data = (*Task.neutral_data, "fold", "folds", "groups", "near_duplicates")
    predict_data: ClassVar[Mapping[str, Any]] = {
        "splits": {"train": 1.0},
        "folds": None,
        "fold": 0,
    }
    trained_data = ("classes", "read", "size_px", "value_range")
    uses = Use.INPUTS

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        if "label" not in batch:
            return ""
        classes = self.datamodule.classes or ()
        return classes[int(batch["label"][row])]

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        classes = self.datamodule.classes or ()
        probabilities = read_labels(ask_step(model, batch), len(classes))
        if probabilities is None:
            return False
        is_wrong = probabilities.argmax(1) != batch["label"].cpu()
        order = torch.argsort(is_wrong.int(), descending=True, stable=True)
        rows = order[: 2 * count].tolist()  # two lines of them, errors first
        figure, axes = new_axes(2, -(-len(rows) // 2), 2 * CELL_INCHES + 1.0)
        cells: list[Any] = list(axes.flat)
        for cell in cells[len(rows) :]:
            cell.set_axis_off()
        for cell, row in zip(cells, rows, strict=False):
            show_pixels(cell, batch["image"][row])
            score, label = probabilities[row].max(0)
            answer = f"model: {classes[int(label)]} {score:.2f}"
            colour = TRUE_COLOUR if is_wrong[row] else "black"
            sample_title = f"{self.describe_sample(batch, row)}\n{answer}"
            cell.set_title(sample_title, fontsize=7, color=colour)
        save_figure(figure, path, title, ())
        return True

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "LabelWriter":
        options.refuse_unused("labels", self.uses)
        return LabelWriter(self.datamodule, run.folder)

    @override
    def export(self, request: ExportRequest) -> bytes:
        return encode_labels(self.datamodule, request)


class LabelWriter(BankWriter):
    """Writer of ``labels.csv``: the label of each image, its probability, and the true label.

    The true label is that of the folder of the image, if it names a class.

    Args:
        datamodule: Whose images.
        folder: Where to write.
    """

    expects = "probabilities [B, classes]"

    def __init__(self, datamodule: LabelledImageDataModule, folder: Path) -> None:
        super().__init__(datamodule.bank, datamodule.source.names(datamodule.bank))
        self._classes = tuple(datamodule.classes or ())
        self._folder = folder
        self._truth = [kind if kind in self._classes else "" for kind in datamodule.image_kinds]

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[Tensor] | None:
        probabilities = read_labels(outputs, len(self._classes))
        if probabilities is None:
            return None
        check_probabilities(probabilities)
        return list(probabilities)

    @override
    def write(self, number: int, answer: Tensor, seconds: float) -> Written:
        score, label = answer.max(0)
        row = {
            "label": self._classes[int(label)],
            "score": round(float(score), 4),
            "truth": self._truth[number],
        }
        return Written([], [row], float(score))

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [{"image": entry.image, **entry.rows[0]} for entry in entries]
        with_truth = [row for row in rows if row["truth"]]
        columns = ["image", "label", "score"]
        if with_truth:
            columns.append("truth")
        path = self.write_rows(self._folder / "labels", columns, rows)
        log.info("labels: %s", path)
        metrics: dict[str, Any] = {}
        counts = Counter(row["label"] for row in rows)
        for name, count in sorted(counts.items()):
            metrics[f"predict/{name}"] = count
        metrics["predict/images"] = len(rows)
        if with_truth:
            right = sum(row["label"] == row["truth"] for row in with_truth)
            metrics["predict/accuracy"] = round(right / len(with_truth), 4)
        return metrics


def read_labels(outputs: object, classes: int) -> Tensor | None:
    """Return the probability of each class from what a `predict_step` returned.

    Returns:
        [B, classes] on the host; None if the outputs are something else.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] != classes:
        return None
    return outputs.float().cpu()
