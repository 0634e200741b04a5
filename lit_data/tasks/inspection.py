"""Single images: patches with masks of defects, a map and a verdict, or a label, for each image."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from typing_extensions import override

from lit_data.datamodules.inspection import InspectionDataModule, LabelledImageDataModule
from lit_data.datasets.inspection.occupancy import is_defect
from lit_data.errors import ConfigError
from lit_data.files import write_table
from lit_data.inference import find_defects
from lit_data.io.images.readers import read_image
from lit_data.modules.segmentation.image_scores import count_top_px, mean_highest
from lit_data.synthesis.canvas import ValueRange
from lit_data.tasks.answers import ask_step
from lit_data.tasks.base import Task, register
from lit_data.tasks.batches import predict_batches
from lit_data.tasks.figures import (
    CELL_INCHES,
    TRUE_COLOUR,
    crop_strip,
    draw_outline,
    new_axes,
    save_figure,
    shorten_name,
    show_pixels,
    show_stored,
)
from lit_data.tasks.maps import MapWriter
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.pixels import PixelTask
from lit_data.tasks.whole_images import ProbabilityMap, WholeImages, slabs
from lit_data.tasks.writer import BankWriter, Entry, Written
from lit_data.types import Array, Batch

log = logging.getLogger(__name__)

COLUMNS: Final = ("image", "score", "defects", "verdict")
_VERDICTS: Final = ("good", "defect")
_UNSURE: Final = "unsure"
_MANY: Final = 10  # images that are not all defective, as a rule
_WORST: Final = 6


@register(InspectionDataModule)
class InspectionTask(PixelTask[InspectionDataModule]):
    """Images with the masks of their defects; predictions are maps and tables of defects."""

    neutral_data = (
        *Task.neutral_data,
        "groups",
        "patch_px",
        "sampling",
        "near_duplicates",
        "stride_px",
        "train_on",
    )
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    trained_data = ("classes", "mask_read", "patch_px", "read", "scale", "size_px", "value_range")
    unused = ("clean", "count")

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "VerdictWriter":
        options.refuse("maps of defects", *self.unused)
        return VerdictWriter(self.datamodule, run.folder, options, doubt=run.doubt)

    @override
    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return super().predict(model, run, self._show_whole(options))

    def _show_whole(self, options: PredictOptions) -> PredictOptions:
        """Enlarge the default tile to the whole image for a net that was trained with whole images."""
        scaling = self.datamodule.source.scaling
        is_default_tile = options.tile_px == PredictOptions().tile_px
        if scaling is None or scaling.size_px is None or not is_default_tile:
            return options
        stride_px = options.multiple_px
        tile_px = []
        for image_px, default_px in zip(scaling.size_px, options.tile_sides_px, strict=True):
            # Tiles are multiples of the stride of the net; images are padded to that.
            padded_px = -(-image_px // stride_px) * stride_px
            tile_px.append(max(padded_px, default_px))
        return replace(options, tile_px=tuple(tile_px))


class VerdictWriter(MapWriter):
    """Writes what `MapWriter` does, and ``images.csv`` with a verdict for each image.

    Its columns are the score, which is the mean of the highest probabilities as in validation, the
    defects found at the threshold of pixels, and ``good`` or ``defect`` by the threshold of images;
    where there is none, an image is defective in which any defect is found. Where there are masks,
    the table has the truth and the kind of the image too, and ``worst.png`` shows the defective
    images of the lowest scores and the good ones of the highest.

    Args:
        datamodule: Whose images.
        folder: As for `MapWriter`, as `options`.
        options: See there.
        doubt: Why the model is worth nothing: verdicts are ``unsure`` then.
    """

    def __init__(
        self,
        datamodule: InspectionDataModule,
        folder: Path,
        options: PredictOptions,
        *,
        doubt: str | None = None,
    ) -> None:
        super().__init__(open_inspection_images(datamodule), folder, options)
        self._datamodule = datamodule
        self._doubt = doubt
        self._kinds = datamodule.image_kinds

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        # The score of the image replaces that of its surest defect, which `MapWriter` gives.
        count = count_top_px(answer.values.size, self.options.top_fraction)
        score = mean_highest((answer.rows(part) for part in slabs(answer.shape)), count)
        return super().write(number, answer, seconds)._replace(score=score)

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self.images.names)}
        rows = [self._make_row(entry, numbers[entry.image]) for entry in entries]
        # The truth helps only where it is known of every image.
        is_known = bool(rows) and all(row["truth"] for row in rows)
        columns = (*COLUMNS, "truth", "kind") if is_known else COLUMNS
        path = self.folder / "images.csv"
        write_table(path, columns, rows)
        log.info("verdicts: %s", path)
        self._warn_of_verdicts(rows)
        metrics = super().finish(entries)
        if is_known:
            self._draw_worst([(row, numbers[row["image"]]) for row in rows])
            metrics |= score_verdicts(rows)
        return metrics

    def _make_row(self, entry: Entry, number: int) -> dict[str, Any]:
        """Return the row of an image in ``images.csv``; its truth is empty if there is no mask."""
        has_defect = self._datamodule.has_defect(number)
        return {
            "image": entry.image,
            "score": round(entry.score, 6),
            "defects": len(entry.rows),
            "verdict": _UNSURE if self._doubt else _VERDICTS[self._is_defective(entry)],
            "truth": "" if has_defect is None else _VERDICTS[has_defect],
            "kind": self._kinds[number],
        }

    def _warn_of_verdicts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._doubt:
            log.warning(
                "%s: verdicts are %s, train longer or look at report.html of the run",
                self._doubt,
                _UNSURE,
            )
        elif len(rows) >= _MANY and all(row["verdict"] == "defect" for row in rows):
            log.warning(
                "all %d images are defective: is this the right model, and does its threshold fit "
                "these images? predict.image_threshold sets another",
                len(rows),
            )

    def _is_defective(self, entry: Entry) -> bool:
        threshold = self.options.image_threshold
        return bool(entry.rows) if threshold is None else entry.score >= threshold

    def _draw_worst(self, rows: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Draw the defective images of the lowest scores above the good ones of the highest."""
        defective, good = [], []
        for row, number in rows:
            if not self.is_small(number):
                continue
            if row["truth"] == "defect":
                defective.append((row, number))
            else:
                good.append((row, number))
        defective.sort(key=lambda pair: pair[0]["score"])
        good.sort(key=lambda pair: -pair[0]["score"])
        columns = min(_WORST, max(len(defective), len(good)))
        figure, axes = new_axes(4, max(columns, 1), 4 * CELL_INCHES + 0.9)
        self._draw_images(axes[:2].T, defective)
        self._draw_images(axes[2:].T, good)
        title = (
            "defects of the lowest scores, and below good images of the highest, "
            "each above its probability"
        )
        save_figure(figure, self.folder / "worst.png", title, ("defect",))

    def _draw_images(
        self, cells: NDArray[np.object_], rows: Sequence[tuple[Mapping[str, Any], int]]
    ) -> None:
        """Draw images into pairs of cells; cells without an image stay empty."""
        unused_cells: list[Any] = list(cells[len(rows) :].flat)
        for cell in unused_cells:
            cell.set_axis_off()
        for pair, (row, number) in zip(cells, rows, strict=False):
            self._draw_pair(pair, row, number)

    def _draw_pair(self, cells: Sequence[Any], row: Mapping[str, Any], number: int) -> None:
        name = str(row["image"])
        pixels = self.images.show(number)
        probability = read_image(self._map_of(name))[0] / 65535
        mask = self._datamodule.read_mask(number)
        if mask is None:
            is_marked = np.zeros(probability.shape, np.bool_)
        else:
            is_marked = is_defect(mask)
        part = crop_strip(probability.shape, find_defects(is_marked.astype(np.float32)))
        show_stored(cells[0], pixels[:, *part])
        cells[1].imshow(probability[part], cmap="magma", vmin=0, vmax=1)
        kind = row["kind"] or row["truth"]
        title = f"{shorten_name(name)}\n{kind}, score {row['score']:.2f}"
        cells[0].set_title(title, fontsize=7)
        for cell in cells:
            draw_outline(cell, is_marked[part], colour=TRUE_COLOUR)

    @override
    def shown_channels(self, pixels: Array) -> Array:
        return pixels


def score_verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare verdicts with the truth.

    Args:
        rows: Of ``images.csv``.

    Returns:
        ``predict/missed`` and ``predict/false_alarms``, images; and ``predict/image_auroc`` of all,
        and of each kind against the good ones, where there are both.
    """
    good = [row for row in rows if row["truth"] == "good"]
    defective = [row for row in rows if row["truth"] == "defect"]
    metrics: dict[str, Any] = {
        "predict/missed": sum(row["verdict"] == "good" for row in defective),
        "predict/false_alarms": sum(row["verdict"] == "defect" for row in good),
    }
    if not good or not defective:
        return metrics
    metrics["predict/image_auroc"] = _measure_auroc(good, defective)
    kinds = sorted({row["kind"] for row in defective})
    if len(kinds) > 1:  # of a single kind it would be the same number again
        for kind in kinds:
            of_kind = [row for row in defective if row["kind"] == kind]
            metrics[f"predict/image_auroc_{kind}"] = _measure_auroc(good, of_kind)
    return metrics


def _measure_auroc(
    good: Sequence[Mapping[str, Any]], defective: Sequence[Mapping[str, Any]]
) -> float:
    scores = torch.tensor([row["score"] for row in (*good, *defective)])
    truth = torch.tensor([0] * len(good) + [1] * len(defective))
    return round(float(binary_auroc(scores, truth)), 4)


def open_inspection_images(datamodule: InspectionDataModule) -> WholeImages:
    """Return the images of a dataset, as they are.

    Raises:
        ConfigError: The predict stage has an augmentation.
    """
    if "predict" in datamodule.augment:
        raise ConfigError("predict takes images as they are: leave predict out of data.augment")
    bank = datamodule.bank
    values = datamodule.transformation.values
    value_range = None if values == ValueRange() else (values.low, values.high)
    return WholeImages(
        bank=bank,
        names=datamodule.source.names(bank),
        channels=tuple(range(bank.channels)),
        value_range=value_range,
        classes=tuple(datamodule.classes or ()),
        original_sizes=datamodule.original_sizes,
    )


@register(LabelledImageDataModule)
class LabelTask(Task[LabelledImageDataModule]):
    """Images with the names of their classes; predictions are a table of labels."""

    predicts = "probabilities [B, classes]"
    neutral_data = (*Task.neutral_data, "groups", "near_duplicates")
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    trained_data = ("classes", "read", "size_px", "value_range")

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        if "label" not in batch:
            return ""
        classes = self.datamodule.classes or ()
        return classes[int(batch["label"][row])]

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        probabilities = read_labels(ask_step(model, batch))
        classes = self.datamodule.classes or ()
        if probabilities is None or probabilities.shape[1] != len(classes):
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
        options.refuse("labels", *self.unused, "threshold", "min_area_px")
        return LabelWriter(self.datamodule, run.folder)

    @override
    def predict(
        self, model: L.LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return predict_batches(self.datamodule, model, self.writer(run, options), run, options)


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
        probabilities = read_labels(outputs)
        if probabilities is None or probabilities.shape[1] != len(self._classes):
            return None
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
        path = self._folder / "labels.csv"
        write_table(path, columns, rows)
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


def read_labels(outputs: object) -> Tensor | None:
    """Return the probability of each class from what a `predict_step` returned.

    Returns:
        [B, classes] on the host; None if the outputs are something else.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return None
    return outputs.float().cpu()
