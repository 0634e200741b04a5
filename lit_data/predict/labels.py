"""Images with one label each: their pictures, and the table of predicted labels."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from lightning import LightningModule
from torch import Tensor
from typing_extensions import override

from lit_data.annotations.writing import ImageLabels, Labelled
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Bytes
from lit_data.datamodules.labelled import LabelledImageDataModule
from lit_data.datasets.splits import UNDIVIDED
from lit_data.predict.answers import ask_step, check_probabilities, read_image_threshold
from lit_data.predict.cells import show_pixels
from lit_data.predict.figures import CELL_INCHES, TRUE_COLOUR, new_axes, save_figure, stretch
from lit_data.predict.journal import Entry
from lit_data.predict.net_facts import NetFacts, describe_labels
from lit_data.predict.options import ExportRequest, PredictOptions, PredictRun, Use
from lit_data.predict.task import Task, register
from lit_data.predict.verdict_table import COLUMNS, Row, VerdictTable
from lit_data.predict.worst_images import draw_worst
from lit_data.predict.writer import BankWriter, Written
from lit_inspect.regions import round_score
from lit_inspect.verdicts import GOOD, Judge, score_labels

log = logging.getLogger(__name__)

_TITLE_LETTERS = 18


@register(LabelledImageDataModule)
class LabelTask(Task[LabelledImageDataModule]):
    """Images with the names of their classes; predictions are a table of labels."""

    predicts = "probabilities [B, classes]"
    predict_data: ClassVar[Mapping[str, Any]] = {
        "splits": UNDIVIDED,
        "folds": None,
        "fold": 0,
        "class_pattern": None,
    }
    trained_data = ("classes", "good", "read", "size_px", "value_range")
    uses = Use.INPUTS | Use.VERDICTS

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
        """Draw samples with their predictions.

        Missed defects come first, then false alarms, other wrong labels, and found defects. Each
        group starts with the worst samples.
        """
        classes = self.datamodule.classes or ()
        probabilities = read_labels(ask_step(model, batch), len(classes))
        if probabilities is None:
            return False
        labels = batch["label"].tolist()
        judge = Judge(threshold=read_image_threshold(model))
        answers = []
        for row, label in enumerate(labels):
            answers.append(self._describe_answer(probabilities[row], label, judge))
        order = sorted(range(len(answers)), key=lambda row: answers[row].rank)
        rows = order[: 2 * count]  # two lines of them
        figure, axes = new_axes(2, -(-len(rows) // 2), 2 * CELL_INCHES + 1.0)
        cells: list[Any] = list(axes.flat)
        for cell in cells[len(rows) :]:
            cell.set_axis_off()
        for cell, row in zip(cells, rows, strict=False):
            show_pixels(cell, batch["image"][row])
            sample_title = f"{_shorten(self.describe_sample(batch, row))}\n{answers[row].text}"
            colour = TRUE_COLOUR if answers[row].is_wrong else "black"
            cell.set_title(sample_title, fontsize=7, color=colour)
        save_figure(figure, path, title, ())
        return True

    def _describe_answer(self, probabilities: Tensor, label: int, judge: Judge) -> "_Answer":
        classes = self.datamodule.classes or ()
        likeliest = int(probabilities.argmax())
        text = f"model: {_shorten(classes[likeliest])} {float(probabilities[likeliest]):.2f}"
        good = number_good(self.datamodule)
        if not good:
            return _Answer(likeliest != label, (int(likeliest == label), 0.0), text)
        score = round_score(score_labels(probabilities.numpy(), good))
        verdict = judge(score, is_found=likeliest not in good)
        text += f"\n{verdict}, score {score:.2f}"
        if label not in good and verdict == GOOD:
            return _Answer(True, (0, score), f"missed, {text}")
        if label in good and verdict != GOOD:
            return _Answer(True, (1, -score), f"false alarm, {text}")
        if likeliest != label:
            return _Answer(True, (2, score), text)
        return _Answer(False, (3 + (label in good), score if label not in good else -score), text)

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "LabelWriter":
        options.refuse_unused("labels", self.uses)
        options.refuse("labels", "image_score_fraction")
        return LabelWriter(self.datamodule, run, self._check_threshold(options))

    @override
    def export(self, request: ExportRequest) -> NetFacts:
        self._check_threshold(request.options)
        good = number_good(self.datamodule)
        return describe_labels(self.datamodule, request, good)

    def _check_threshold(self, options: PredictOptions) -> PredictOptions:
        """Refuse a threshold of verdicts where there are none.

        Raises:
            ConfigError: It is set, and no class is good.
        """
        if options.image_threshold is not None and not number_good(self.datamodule):
            raise ConfigError(
                f"predict.image_threshold={options.image_threshold:g}: "
                f"{self.datamodule.describe_doubt()}"
            )
        return options


def _shorten(name: str) -> str:
    """Return the name of a class as the title of a small picture has room for it."""
    return name if len(name) <= _TITLE_LETTERS else f"{name[: _TITLE_LETTERS - 3]}..."


class _Answer(NamedTuple):
    """Answer for a sample, for a picture.

    Attributes:
        is_wrong: It is not the truth.
        rank: Those of lower ones come first.
        text: Answer in words.
    """

    is_wrong: bool
    rank: tuple[int, float]
    text: str


class LabelWriter(BankWriter):
    """Writer of ``labels.csv``: the label of each image, its probability, and the true label.

    The true label is that of the folder of the image, if it names a class.

    If a class is good, ``images.csv`` has the verdict of each image. The score of an image is the
    probability that it belongs to no good class. If the truth is known too, ``worst.png`` shows the
    defective images with the lowest scores and the good images with the highest.

    Args:
        datamodule: Has the images.
        run: Where to write, and the calibration, if there is one.
        options: Threshold of the verdicts.
    """

    expects = "probabilities [B, classes]"
    labels = "classes"

    def __init__(
        self, datamodule: LabelledImageDataModule, run: PredictRun, options: PredictOptions
    ) -> None:
        super().__init__(datamodule.bank, datamodule.source.names(datamodule.bank))
        self.class_names = tuple(datamodule.classes or ())
        self._folder = run.folder
        self._good = number_good(datamodule)
        self._doubt = datamodule.describe_doubt()
        self._table = VerdictTable(datamodule, datamodule.bank, run, options)
        self._truth = [kind if kind in self.class_names else "" for kind in datamodule.image_kinds]

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[Tensor] | None:
        probabilities = read_labels(outputs, len(self.class_names))
        if probabilities is None:
            return None
        check_probabilities(probabilities)
        return list(probabilities)

    @override
    def write(self, number: int, answer: Tensor, seconds: float) -> Written:
        probability, label = answer.max(0)
        row = {
            "label": self.class_names[int(label)],
            "score": round(float(probability), 4),
            "truth": self._truth[number],
        }
        score = round_score(score_labels(answer.numpy(), self._good))
        return Written([], [row], score)

    @override
    def measure_margin(self, entry: Entry) -> float:
        if not self._good:  # the lower the surest class is, the less sure
            return float(entry.rows[0]["score"])
        return self._table.measure_margin(entry.score, 0.5)

    @override
    def label(self, entry: Entry) -> ImageLabels:
        number = self.numbers[entry.image]
        height, width = int(self.bank.heights_px[number]), int(self.bank.widths_px[number])
        [row] = entry.rows
        label = str(row["label"])
        box = 0, 0, width, height
        return ImageLabels(
            kind="classes",
            name=entry.image,
            stem=self.stems[entry.image],
            path=self.path(number),
            size_px=(height, width),
            score=entry.score if self._good else row["score"],
            margin=self.measure_margin(entry),
            objects=[Labelled(label, 1 + self.class_names.index(label), row["score"], box)],
        )

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
        return metrics | self._write_verdicts(entries)

    def _write_verdicts(self, entries: Sequence[Entry]) -> dict[str, Any]:
        if not self._good:
            log.info("%s", self._doubt)
            self.verdicts = Counter(str(entry.rows[0]["label"]) for entry in entries)
            return {}
        good = {self.class_names[number] for number in self._good}
        rows = []
        for entry in entries:
            is_found = entry.rows[0]["label"] not in good
            rows.append(self._table.make_row(entry, self.numbers[entry.image], is_found=is_found))
        metrics = self._table.write(self, rows, COLUMNS)
        if self._table.is_known(rows):
            path = self._folder / "worst.png"

            def paint(row: Row) -> Sequence[Bytes]:
                pixels = stretch(self.bank[self.numbers[row["image"]]])
                return [np.moveaxis(pixels, 0, -1)]

            draw_worst(rows, path, paint)
        return metrics


def number_good(datamodule: LabelledImageDataModule) -> frozenset[int]:
    """Return the numbers of the classes of good parts."""
    good = datamodule.good_classes
    numbers = [number for number, name in enumerate(datamodule.classes or ()) if name in good]
    return frozenset(numbers)


def read_labels(outputs: object, classes: int) -> Tensor | None:
    """Return the probability of each class from the outputs of a `predict_step`.

    Returns:
        [B, classes] on the host; None if the outputs have another form.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] != classes:
        return None
    return outputs.float().cpu()
