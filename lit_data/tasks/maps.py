"""Maps of pixels: patches with circled defects, and a probability map of every image."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.image import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.files import write_table
from lit_data.inference import Defect, find_defects
from lit_data.io.images.readers import read_image
from lit_data.io.images.writing import write_png_parts
from lit_data.synthesis.canvas import ValueRange
from lit_data.tasks.answers import ask_step, read_probability, read_threshold
from lit_data.tasks.base import Data, Task, register
from lit_data.tasks.figures import (
    DISTRACTOR_COLOUR,
    FOUND_COLOUR,
    TRUE_COLOUR,
    ShownImage,
    circle_mask,
    draw_outline,
    draw_whole_images,
    open_figure,
    outline_mask,
    save_figure,
    show_images,
    show_mask,
)
from lit_data.tasks.options import VERDICT_OPTIONS, PredictOptions, PredictRun
from lit_data.tasks.pixels import PixelTask, name_sample
from lit_data.tasks.tiles import ImageWriter
from lit_data.tasks.whole_images import ProbabilityMap, WholeImages, slabs
from lit_data.tasks.writer import Entry, Written
from lit_data.types import Array, Batch, Stage

log = logging.getLogger(__name__)


SHOWN: Final = 6
_MOST_DEFECTS: Final = 1000  # of an image in the table: more are noise, and make files of many MB
COLUMNS: Final = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


class PatchPictures(Task[Data]):
    """Pictures of patches beside their masks and predictions."""

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        return draw_patch_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        draw_augmented(self.datamodule, planned, path, stage=stage, count=len(rows))


@register(BaseDataModule)
class PatchTask(PatchPictures[BaseDataModule]):
    """Images with masks; the task of datamodules that have no other."""

    predicts = "dict with `probability`"


@register(StripeDataModule)
class StripeTask(PatchPictures[StripeDataModule], PixelTask[StripeDataModule]):
    """Target, references and mask; predictions are maps and tables of defects."""

    neutral_data = (*Task.neutral_data, "backend", "edges", "patch_px", "stride_px")
    unused = (*VERDICT_OPTIONS, "clean", "count")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_patch_samples(
            self.datamodule, planned, batch, path, title, stage=stage, count=count
        )

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "MapWriter":
        options.refuse("maps of defects", *self.unused)
        if self.datamodule.source.layout == "single":
            log.warning(
                "layout=single: target and references are one image, so what is really in it is "
                "in all three and not found; the maps show false alarms only"
            )
        return MapWriter(open_stripe_images(self.datamodule), run.folder, options)


def draw_patch_samples(
    datamodule: BaseDataModule,
    planned: Batch,
    batch: Batch,
    path: Path,
    title: str,
    *,
    stage: Stage,
    count: int,
) -> list[int]:
    """Draw samples as the model sees them, with true defects and distractors circled.

    A row has target, references and mask. Samples with true defects come first, then those with
    distractors.

    Args:
        datamodule: Tells synthetic defects from distractors.
        planned: The batch before it was finished.
        batch: The finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        stage: Whose samples.
        count: Rows of the picture.

    Returns:
        Rows of the batch that are drawn.
    """
    distractors = _mark_distractors(datamodule, planned, stage)
    masks = batch.get("mask", torch.zeros_like(batch["image"][:, :1]))
    interest = 2.0 * masks.flatten(1).amax(1)
    if distractors is not None:
        interest += distractors.flatten(1).amax(1).float()
    rows: list[int] = torch.argsort(interest, descending=True, stable=True)[:count].tolist()
    figure, axes = open_figure(len(rows), ("target", "reference 1", "reference 2", "mask"))
    for cells, row in zip(axes, rows, strict=True):
        show_images(cells[:3], batch["image"][row])
        show_mask(cells[3], masks[row, 0])
        circle_mask(cells[0], masks[row, 0], TRUE_COLOUR)
        if distractors is not None:
            for channel, cell in enumerate(cells[:3]):
                circle_mask(cell, distractors[row, channel], DISTRACTOR_COLOUR)
        cells[0].set_ylabel(name_sample(datamodule, batch, row), fontsize=8)
    save_figure(figure, path, title, ("true defect", "distractor (not in the mask)"))
    return rows


def draw_patch_predictions(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
) -> bool:
    """Draw samples with a mask beside the prediction of a model.

    Those with the largest masks come first, and the one with the smallest comes last.

    Args:
        datamodule: Its images have names.
        model: A module whose `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.

    Returns:
        True if it was drawn; False if the samples have no masks, or the module returns something
        else.
    """
    if "mask" not in batch:
        return False
    marked = batch["mask"].flatten(1).sum(1)
    rows = torch.argsort(marked, descending=True, stable=True)[: count - 1].tolist()
    rows += torch.argsort(marked, stable=True)[:1].tolist()
    chosen = {key: value[rows] for key, value in batch.items()}
    probability = predict_probability(model, chosen)
    if probability is None:
        return False
    threshold = read_threshold(model)
    titles = ("target", "reference 1", "|target - mean(ref)|", f"found (p >= {threshold:.2g})")
    figure, axes = open_figure(len(rows), (*titles, "model"))
    for row, cells in enumerate(axes):
        cells[0].set_ylabel(name_sample(datamodule, chosen, row), fontsize=8)
        _draw_patch(
            cells,
            chosen["image"][row],
            chosen["mask"][row, 0],
            probability[row, 0].numpy(),
            threshold,
        )
    save_figure(figure, path, title, ("true defect", "found"), (TRUE_COLOUR, FOUND_COLOUR))
    return True


def _draw_patch(
    cells: Sequence[Axes], image: Tensor, mask: Tensor, probability: Array, threshold: float
) -> None:
    """Draw one patch: target, reference, their difference, predicted defects, and probability."""
    show_images(cells[:2], image)
    difference = (image[0] - image[1:].mean(0)).abs()
    brightest = max(float(difference.max()), 0.1)  # so that noise alone stays dark
    cells[2].imshow(difference.numpy(), cmap="magma", vmin=0, vmax=brightest)
    show_images(cells[3:4], image[:1])
    draw_outline(cells[3], probability >= threshold, colour=FOUND_COLOUR)
    cells[4].imshow(probability, cmap="magma", vmin=0, vmax=1)
    cells[4].set_xlabel(f"highest {float(probability.max()):.2f}", fontsize=8)
    outline_mask(cells[0], mask)
    outline_mask(cells[4], mask)


def predict_probability(model: L.LightningModule, batch: Batch) -> Tensor | None:
    """Return the prediction of a module for a batch.

    Returns:
        [B, 1, H, W] in 0..1 on the host; None if the module gives no probability.
    """
    probability = read_probability(ask_step(model, batch))
    return None if probability is None else probability.float().cpu()


def _mark_distractors(datamodule: BaseDataModule, planned: Batch, stage: Stage) -> Tensor | None:
    """Return the pixels of distractors, [B, C, H, W] bool; None without synthetic defects."""
    annotated = datamodule.inspect(stage).annotate(planned)
    if annotated is None:
        return None
    plan, annotations = annotated
    # Label 0 is the background, label n the n-th synthetic object of the plan.
    is_distractor = torch.cat((torch.zeros(1, dtype=torch.bool), ~plan.is_true))
    return is_distractor[annotations.labels.long()]


class MapWriter(ImageWriter):
    """Writes ``maps/<image>.png`` (16 bit, 65535 is probability 1).

    Where classes are told apart, ``classes/<image>.png`` holds their numbers. At the end come
    ``defects.csv`` with the surest 1,000 defects of each image, and ``predictions.png`` with the
    images that hold the surest defects, but for images of more than `large_px`.

    Args:
        images: What is predicted.
        folder: Where to write.
        options: Threshold and smallest defect.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        super().__init__(images, folder, options)
        self._left_out: dict[str, int] = {}  # defects of images that have too many for the table

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        """Write the map of an image and find its defects, for which all of it is held in memory."""
        name = self.images.names[number]
        shape = answer.shape
        threshold = self.options.least_score
        paths = [self._map_of(name)]
        write_png_parts(paths[0], shape, (answer.encode(part, np.uint16) for part in slabs(shape)))
        kinds = answer.number_kinds(threshold)
        if kinds is not None:
            paths.append(self.folder / "classes" / f"{name}.png")
            write_png_parts(paths[1], shape, (kinds[part] for part in slabs(shape)))
        probability = answer.rows(slice(None))
        defects = find_defects(
            probability, threshold=threshold, min_area_px=self.options.min_area_px, kinds=kinds
        )
        score = max((defect.score for defect in defects), default=0)
        if len(defects) > _MOST_DEFECTS:
            self._left_out[name] = len(defects) - _MOST_DEFECTS
            defects = sorted(defects, key=lambda defect: -defect.score)[:_MOST_DEFECTS]
        return Written(paths, [_round(defect) for defect in defects], score)

    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write the table and the picture.

        Returns:
            The numbers for summary.json.
        """
        self._write_table(entries)
        self._draw(entries)
        return {
            "predict/images": len(entries),
            "predict/images_with_defects": sum(bool(entry.rows) for entry in entries),
            "predict/defects": sum(len(entry.rows) for entry in entries),
        }

    def _write_table(self, entries: Sequence[Entry]) -> None:
        """Write ``defects.csv``, and warn of images that have too many for it."""
        class_names = ("", *self.images.classes)  # kind 0: no class is told
        rows = []
        for entry in entries:
            for row in entry.rows:
                name = class_names[row.get("kind", 0)]
                rows.append({"image": entry.image, **row, "class": name})
        columns = (*COLUMNS, "class") if self.images.classes else COLUMNS
        path = self.folder / "defects.csv"
        write_table(path, columns, rows)
        log.info("defects: %s", path)
        if self._left_out:
            log.warning(
                "%d images have more than %d defects, and %d are left out of defects.csv: the "
                "threshold %.4g is too low for them, or the model is of no use",
                len(self._left_out),
                _MOST_DEFECTS,
                sum(self._left_out.values()),
                self.options.least_score,
            )

    def _draw(self, entries: Sequence[Entry]) -> None:
        numbers = {name: number for number, name in enumerate(self.images.names)}
        small = [entry for entry in entries if self.is_small(numbers[entry.image])]
        surest = sorted(small, key=lambda entry: -entry.score)[:SHOWN]
        if not surest:
            return
        images = [self._show(entry, numbers[entry.image]) for entry in surest]
        title = "images with the surest defects, and their probability"
        path = self.folder / "predictions.png"
        draw_whole_images(images, path, title, self.options.least_score)

    def _show(self, entry: Entry, number: int) -> ShownImage:
        probability = read_image(self._map_of(entry.image))[0] / 65535
        defects = [_read(row) for row in entry.rows]
        pixels = self.shown_channels(self.images.show(number))
        return ShownImage(entry.image, pixels, probability, defects)

    def is_small(self, number: int) -> bool:
        """Return True if an image and its map fit into memory for a picture."""
        return self.images.count_px(number) <= self.options.large_px

    def shown_channels(self, pixels: Array) -> Array:
        """Return the channels of an image that are shown: the target, without its references."""
        return pixels[:1]

    def _map_of(self, name: str) -> Path:
        return self.folder / "maps" / f"{name}.png"


def _round(defect: Defect) -> dict[str, float]:
    """Return the row of a defect; its kind is left out where there are no classes."""
    row = {name: round(value, 3) for name, value in asdict(defect).items()}
    if not defect.kind:
        del row["kind"]
    return row


def _read(row: Mapping[str, Any]) -> Defect:
    return Defect(**row)


def open_stripe_images(datamodule: StripeDataModule) -> WholeImages:
    """Return the images of a stripe dataset.

    Where their finishing is more than choosing channels and scaling (a nuisance for layout
    `single`, an augmentation of the predict stage), the datamodule finishes a whole image as it
    would finish a patch.
    """
    transform = datamodule.transformation
    names = datamodule.source.names(datamodule.bank)
    if transform.nuisance is not None or "predict" in transform.augment:
        return WholeImages(
            bank=datamodule.bank,
            names=names,
            channels=tuple(range(len(transform.expand))),
            value_range=None,
            finish=lambda number: _finish(datamodule, number),
        )
    values = transform.values
    value_range = None if values == ValueRange() else (values.low, values.high)
    return WholeImages(
        bank=datamodule.bank, names=names, channels=transform.expand, value_range=value_range
    )


def _finish(datamodule: StripeDataModule, number: int) -> Tensor:
    """Return an image as the predict stage of the datamodule finishes it, [C, H, W]."""
    pixels = np.array(datamodule.bank[number])  # a copy: torch warns of read-only arrays
    image_index = torch.tensor([number])
    batch = {
        "image": torch.from_numpy(pixels)[None],
        "index": image_index,
        "image_index": image_index,
        "position": torch.zeros(1, 2, dtype=torch.int64),
        "epoch": torch.zeros(1, dtype=torch.int64),
    }
    finished: Tensor = datamodule.transform(batch, "predict")["image"][0]
    finished_px, image_px = list(finished.shape[1:]), list(pixels.shape[1:])
    if finished_px != image_px:
        raise ConfigError(
            f"the augmentation of the predict stage makes {finished_px} of {image_px} px: "
            "maps have the size of their images, so leave out what crops or resizes"
        )
    return finished


def draw_augmented(
    datamodule: BaseDataModule, planned: Batch, path: Path, *, stage: Stage, count: int = 6
) -> int:
    """Draw samples before and after augmentation, with the masks that move along.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch of it, as `draw_samples` returns.
        path: The PNG to write; where the stage has no augmentation nothing is drawn.
        stage: Whose samples.
        count: Rows of the picture.

    Returns:
        Samples drawn.
    """
    before = datamodule.inspect(stage).draw(planned)
    if before is None:
        return 0
    after = datamodule.finish_batch(planned, stage)
    rows = _choose_rows(before.get("mask"), len(after["image"]), count)
    titles = ("before", "reference 1", "after", "reference 1", "mask after")
    figure, axes = open_figure(len(rows), titles)
    for cells, row in zip(axes, rows, strict=True):
        _show_circled(cells[:2], before, row)
        _show_circled(cells[2:4], after, row)
        if "mask" in after:
            show_mask(cells[4], after["mask"][row, 0])
    title = f"{stage} samples before and after augmentation, epoch {int(planned['epoch'][0])}"
    save_figure(figure, path, title, ("true defect",))
    return len(rows)


def _show_circled(cells: Sequence[Axes], batch: Batch, row: int) -> None:
    """Show target and first reference of a sample, with its true defects circled."""
    show_images(cells, batch["image"][row])
    if "mask" in batch:
        circle_mask(cells[0], batch["mask"][row, 0], TRUE_COLOUR)


def _choose_rows(masks: Tensor | None, length: int, count: int) -> list[int]:
    """Return up to `count` samples, those with the largest masks first."""
    if masks is None:
        return list(range(min(length, count)))
    marked = masks.flatten(1).sum(1).numpy()
    return [int(row) for row in np.argsort(-marked, kind="stable")[:count]]
