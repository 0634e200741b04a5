"""Single images: patches with masks of their defects, a map and a verdict of every image; or a label for each."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import numpy as np
import torch
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
from lit_data.synthesis.values import ValueRange
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
        "similar",
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
        """Let a net that was trained with whole images see them whole, where the default tile is smaller."""
        scaling, default_px = self.datamodule.source.scaling, PredictOptions().tile_px
        if scaling is None or scaling.size_px is None or options.tile_px != default_px:
            return options
        stride_px = options.multiple_px  # tiles are multiples of it; images are filled up to that
        whole_px = [-(-length // stride_px) * stride_px for length in scaling.size_px]
        return replace(options, tile_px=tuple(map(max, whole_px, options.tile_sides_px)))


class VerdictWriter(MapWriter):
    """Writes what `MapWriter` does, and ``images.csv`` with a verdict for each image.

    Its columns are the score, which is the mean of the highest probabilities as in validation, the
    defects found at the threshold of pixels, and ``good`` or ``defect`` by the threshold of images;
    where there is none, an image is defective in which any defect is found. Where masks say what is
    true, that stands beside it, with the kind of the image, and ``worst.png`` shows the defects
    that were seen worst and the good images that looked worst.

    Args:
        datamodule: Whose images.
        folder: As for `MapWriter`, as `options`.
        options: See there.
        doubt: Why the model can tell nothing: verdicts are ``unsure`` then.
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
        self._datamodule, self._doubt = datamodule, doubt

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        count = count_top_px(answer.values.size, self.options.top_fraction)
        score = mean_highest((answer.rows(part) for part in slabs(answer.shape)), count)
        return super().write(number, answer, seconds)._replace(score=score)

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self.images.names)}
        kinds = self._datamodule.image_kinds
        defective = [self._datamodule.has_defect(numbers[entry.image]) for entry in entries]
        rows: list[dict[str, Any]] = [
            {
                "image": entry.image,
                "score": round(entry.score, 6),
                "defects": len(entry.rows),
                "verdict": _UNSURE if self._doubt else _VERDICTS[self._is_defective(entry)],
                "truth": "" if is_bad is None else _VERDICTS[is_bad],
                "kind": kinds[numbers[entry.image]],
            }
            for entry, is_bad in zip(entries, defective, strict=True)
        ]
        path, is_known = self.folder / "images.csv", None not in defective and bool(entries)
        write_table(path, (*COLUMNS, "truth", "kind") if is_known else COLUMNS, rows)
        log.info("verdicts: %s", path)
        if self._doubt:
            log.warning(
                "%s: verdicts are %s, train longer or look at report.html of the run",
                self._doubt,
                _UNSURE,
            )
        elif len(rows) >= _MANY and all(row["verdict"] == "defect" for row in rows):
            log.warning(
                "all %d images are defective: is this the right model, and does its threshold fit these images? "
                "predict.image_threshold sets another",
                len(rows),
            )
        found = super().finish(entries)
        if is_known:
            self._draw_worst([(row, numbers[row["image"]]) for row in rows])
            found |= score_verdicts(rows)
        return found

    def _is_defective(self, entry: Entry) -> bool:
        least = self.options.image_threshold
        return bool(entry.rows) if least is None else entry.score >= least

    def _draw_worst(self, rows: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """The defective images of the lowest scores above the good ones of the highest."""
        small = [row for row in rows if self.images.count_px(row[1]) <= self.options.large_px]
        missed = sorted(
            (r for r in small if r[0]["truth"] == "defect"), key=lambda r: r[0]["score"]
        )
        alarms = sorted((r for r in small if r[0]["truth"] == "good"), key=lambda r: -r[0]["score"])
        columns = min(_WORST, max(len(missed), len(alarms)))
        figure, axes = new_axes(4, max(columns, 1), 4 * CELL_INCHES + 0.9)
        for cells, chosen in ((axes[:2].T, missed), (axes[2:].T, alarms)):
            for pair in cells[len(chosen) :]:
                for cell in pair:
                    cell.set_axis_off()
            for pair, (row, number) in zip(cells, chosen, strict=False):
                self._draw_pair(pair, row, number)
        title = "defects of the lowest scores, and below good images of the highest, each above its probability"
        save_figure(figure, self.folder / "worst.png", title, ("defect",))

    def _draw_pair(self, cells: Sequence[Any], row: Mapping[str, Any], number: int) -> None:
        name = str(row["image"])
        pixels = self.images.show(number)
        probability = read_image(self._map_of(name))[0] / 65535
        mask = self._datamodule.read_mask(number)
        is_marked = np.zeros(probability.shape, np.bool_) if mask is None else is_defect(mask)
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
    """What verdicts are worth where the truth is known.

    Args:
        rows: Of ``images.csv``.

    Returns:
        ``predict/missed`` and ``predict/false_alarms``, images; and ``predict/image_auroc`` of all,
        and of each kind against the good ones, where there are both.
    """
    good = [row["score"] for row in rows if row["truth"] == "good"]
    bad = [row for row in rows if row["truth"] == "defect"]
    found: dict[str, Any] = {
        "predict/missed": sum(row["verdict"] == "good" for row in bad),
        "predict/false_alarms": sum(
            row["verdict"] == "defect" for row in rows if row["truth"] == "good"
        ),
    }
    kinds = sorted({row["kind"] for row in bad})
    parts = {"": bad} | (
        {f"_{kind}": [r for r in bad if r["kind"] == kind] for kind in kinds}
        if len(kinds) > 1
        else {}
    )
    for name, part in parts.items():
        if good and part:
            scores = torch.tensor(good + [row["score"] for row in part])
            truth = torch.tensor([0] * len(good) + [1] * len(part))
            found[f"predict/image_auroc{name}"] = round(float(binary_auroc(scores, truth)), 4)
    return found


def open_inspection_images(datamodule: InspectionDataModule) -> WholeImages:
    """The images of a set, as they are.

    Raises:
        ConfigError: The predict stage has an augmentation.
    """
    if "predict" in datamodule.augment:
        raise ConfigError("predict takes images as they are: leave predict out of data.augment")
    values, bank = datamodule.transformation.values, datamodule.bank
    span = None if values == ValueRange() else (values.low, values.high)
    names = datamodule.source.names(bank)
    channels, classes = tuple(range(bank.channels)), tuple(datamodule.classes or ())
    return WholeImages(
        bank=bank,
        names=names,
        channels=channels,
        value_range=span,
        classes=classes,
        original_sizes=datamodule.original_sizes,
    )


@register(LabelledImageDataModule)
class LabelTask(Task[LabelledImageDataModule]):
    """Images with the names of their classes; predictions are a table of labels."""

    predicts = "probabilities [B, classes]"
    neutral_data = (*Task.neutral_data, "groups", "similar")
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    trained_data = ("classes", "read", "size_px", "value_range")

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        return (self.datamodule.classes or ())[int(batch["label"][row])] if "label" in batch else ""

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
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
            text = f"{self.describe_sample(batch, row)}\nmodel: {classes[int(label)]} {score:.2f}"
            cell.set_title(text, fontsize=7, color=TRUE_COLOUR if wrong[row] else "black")
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
    """Writer of ``labels.csv``: the label of each image and how sure that is.

    And what its folder says, if it names a class.

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
        row = {
            "label": self._classes[int(label)],
            "score": round(float(score), 4),
            "truth": self._truth[number],
        }
        return Written([], [row], float(score))

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [{"image": entry.image, **entry.rows[0]} for entry in entries]
        known = [row for row in rows if row["truth"]]
        path = self._folder / "labels.csv"
        write_table(path, ("image", "label", "score", *(("truth",) if known else ())), rows)
        log.info("labels: %s", path)
        counts = {
            f"predict/{name}": count
            for name, count in sorted(Counter(row["label"] for row in rows).items())
        }
        right = sum(row["label"] == row["truth"] for row in known)
        accuracy = {"predict/accuracy": round(right / len(known), 4)} if known else {}
        return counts | {"predict/images": len(rows)} | accuracy


def read_labels(found: object) -> Tensor | None:
    """Probability of each class, [B, classes] on the host, that a `predict_step` returned; none of anything else."""
    return found.float().cpu() if isinstance(found, Tensor) and found.ndim == 2 else None
