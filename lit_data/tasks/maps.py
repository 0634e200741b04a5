"""Maps of pixels: patches with their masks and defects circled, and a probability map of every image."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.stripes import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.files import write_table
from lit_data.inference import Defect, find_defects
from lit_data.io.images.readers import read_image
from lit_data.io.images.writing import write_png_parts
from lit_data.synthesis.values import ValueRange
from lit_data.tasks.answers import ask_step, read_probability, read_threshold
from lit_data.tasks.base import Task, register
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


@register(BaseDataModule)
class PatchTask(Task[BaseDataModule]):
    """Images with masks; the task of what has no other."""

    predicts = "dict with `probability`"

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        return draw_patch_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        draw_augmented(self.datamodule, planned, path, stage=stage, count=len(shown))


@register(StripeDataModule)
class StripeTask(PixelTask[StripeDataModule]):
    """Target, references and mask, with defects circled; predictions are maps and tables of defects."""

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
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        return draw_patch_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        draw_augmented(self.datamodule, planned, path, stage=stage, count=len(shown))

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "MapWriter":
        options.refuse("maps of defects", *self.unused)
        if self.datamodule.source.layout == "single":
            log.warning(
                "layout=single: target and references are one image, so what is really in it is in all three and not "
                "found; the maps show false alarms only"
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
    """Draw samples as the model sees them.

    Target, references and mask, with true defects and distractors circled.

    Those with true defects come first, then those with distractors.

    Args:
        datamodule: Says what was drawn.
        planned: The batch before it was finished.
        batch: The finished batch, on the host.
        path: The PNG to write.
        title: Of the picture.
        stage: Whose samples.
        count: Rows of the picture.

    Returns:
        Which samples of the batch are shown.
    """
    marks = _mark_distractors(datamodule, planned, stage)
    masks = batch.get("mask", torch.zeros_like(batch["image"][:, :1]))
    interest = 2.0 * masks.flatten(1).amax(1) + (
        0 if marks is None else marks.flatten(1).amax(1).float()
    )
    rows = torch.argsort(interest, descending=True, stable=True)[:count].tolist()
    figure, axes = open_figure(len(rows), ("target", "reference 1", "reference 2", "mask"))
    for cells, row in zip(axes, rows, strict=True):
        show_images(cells[:3], batch["image"][row])
        show_mask(cells[3], masks[row, 0])
        circle_mask(cells[0], masks[row, 0], TRUE_COLOUR)
        for channel, cell in enumerate(cells[:3]):
            if marks is not None:
                circle_mask(cell, marks[row, channel], DISTRACTOR_COLOUR)
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

    Those with the largest masks come first, and one with the smallest.

    Args:
        datamodule: Its images have names.
        model: A module whose `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Rows of the picture.

    Returns:
        Whether it was drawn: the samples may have no masks, and the module may return something
        else.
    """
    if "mask" not in batch:
        return False
    masks = batch["mask"]
    rows = torch.argsort(masks.flatten(1).sum(1), descending=True, stable=True)[
        : count - 1
    ].tolist()
    rows += torch.argsort(masks.flatten(1).sum(1), stable=True)[:1].tolist()
    shown = {key: value[rows] for key, value in batch.items()}
    probability = predict_probability(model, shown)
    if probability is None:
        return False
    least = read_threshold(model)
    titles = ("target", "reference 1", "|target - mean(ref)|", f"found (p >= {least:.2g})", "model")
    figure, axes = open_figure(len(rows), titles)
    samples = zip(axes, shown["image"], shown["mask"], probability, strict=True)
    for row, (cells, image, mask, answer) in enumerate(samples):
        cells[0].set_ylabel(name_sample(datamodule, shown, row), fontsize=8)
        cells[4].set_xlabel(f"highest {float(answer.max()):.2f}", fontsize=8)
        show_images(cells[:2], image)
        show_images(cells[3:4], image[:1])
        difference = (image[0] - image[1:].mean(0)).abs()
        brightest = max(float(difference.max()), 0.1)
        cells[2].imshow(difference.numpy(), cmap="magma", vmin=0, vmax=brightest)
        cells[4].imshow(answer[0].numpy(), cmap="magma", vmin=0, vmax=1)
        for cell in (cells[0], cells[4]):
            outline_mask(cell, mask[0])
        draw_outline(cells[3], answer[0].numpy() >= least, colour=FOUND_COLOUR)
    save_figure(figure, path, title, ("true defect", "found"), (TRUE_COLOUR, FOUND_COLOUR))
    return True


def predict_probability(model: L.LightningModule, batch: Batch) -> Tensor | None:
    """What a module predicts for a batch: [B, 1, H, W] in 0..1 on the host, or `None` if it gives no probability."""
    probability = read_probability(ask_step(model, batch))
    return None if probability is None else probability.float().cpu()


def _mark_distractors(datamodule: BaseDataModule, planned: Batch, stage: Stage) -> Tensor | None:
    """[B, C, H, W] bool: in each image what looks like a defect and is none; none if nothing is drawn."""
    found = datamodule.inspect(stage).annotate(planned)
    if found is None:
        return None
    plan, annotations = found
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
        name, shape, options = self.images.names[number], answer.shape, self.options
        paths = [self._map_of(name)]
        write_png_parts(paths[0], shape, (answer.encode(part, np.uint16) for part in slabs(shape)))
        kinds = answer.number_kinds(options.least_score)
        if kinds is not None:
            paths.append(self.folder / "classes" / f"{name}.png")
            write_png_parts(paths[1], shape, (kinds[part] for part in slabs(shape)))
        found = find_defects(
            answer.rows(slice(None)),
            threshold=options.least_score,
            min_area_px=options.min_area_px,
            kinds=kinds,
        )
        score = max((defect.score for defect in found), default=0)
        if len(found) > _MOST_DEFECTS:
            self._left_out[name] = len(found) - _MOST_DEFECTS
            found = sorted(found, key=lambda defect: -defect.score)[:_MOST_DEFECTS]
        return Written(paths, [_round(defect) for defect in found], score)

    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write the table and the picture.

        Returns:
            The numbers for summary.json.
        """
        path = self.folder / "defects.csv"
        names = ("", *self.images.classes)
        rows = [
            {"image": e.image, **row, "class": names[row.get("kind", 0)]}
            for e in entries
            for row in e.rows
        ]
        write_table(path, (*COLUMNS, "class") if self.images.classes else COLUMNS, rows)
        log.info("defects: %s", path)
        if self._left_out:
            log.warning(
                "%d images have more than %d defects, and %d are left out of defects.csv: the threshold %.4g is too "
                "low for them, or the model is of no use",
                *(
                    len(self._left_out),
                    _MOST_DEFECTS,
                    sum(self._left_out.values()),
                    self.options.least_score,
                ),
            )
        self._draw(entries)
        return {
            "predict/images": len(entries),
            "predict/images_with_defects": sum(bool(entry.rows) for entry in entries),
            "predict/defects": sum(len(entry.rows) for entry in entries),
        }

    def _draw(self, entries: Sequence[Entry]) -> None:
        numbers = {name: number for number, name in enumerate(self.images.names)}
        small = [
            e for e in entries if self.images.count_px(numbers[e.image]) <= self.options.large_px
        ]
        shown = sorted(small, key=lambda entry: -entry.score)[:SHOWN]
        if not shown:
            return
        images = [self._show(entry, numbers[entry.image]) for entry in shown]
        title = "images with the surest defects, and their probability"
        least = self.options.least_score
        draw_whole_images(images, self.folder / "predictions.png", title, least)

    def _show(self, entry: Entry, number: int) -> ShownImage:
        probability = read_image(self._map_of(entry.image))[0] / 65535
        defects = [_read(row) for row in entry.rows]
        pixels = self.shown_channels(self.images.show(number))
        return ShownImage(entry.image, pixels, probability, defects)

    def shown_channels(self, pixels: Array) -> Array:
        """Return the channels of an image that are shown: the target, without its references."""
        return pixels[:1]

    def _map_of(self, name: str) -> Path:
        return self.folder / "maps" / f"{name}.png"


def _round(defect: Defect) -> dict[str, float]:
    return {
        name: round(value, 3) for name, value in asdict(defect).items() if name != "kind" or value
    }


def _read(row: Mapping[str, Any]) -> Defect:
    return Defect(**row)


def open_stripe_images(datamodule: StripeDataModule) -> WholeImages:
    """The images of a stripe set.

    Where their finishing is more than choosing channels and scaling (a nuisance for layout
    `single`, an augmentation of the predict stage), an image is finished whole by the datamodule,
    as one patch would be.
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
    span = None if values == ValueRange() else (values.low, values.high)
    return WholeImages(
        bank=datamodule.bank, names=names, channels=transform.expand, value_range=span
    )


def _finish(datamodule: StripeDataModule, number: int) -> Tensor:
    pixels = np.array(
        datamodule.bank[number]
    )  # a copy, as torch warns of arrays that cannot be written
    own, zero = torch.tensor([number]), torch.zeros(1, dtype=torch.int64)
    place = {
        "index": own,
        "image_index": own,
        "position": torch.zeros(1, 2, dtype=torch.int64),
        "epoch": zero,
    }
    finished = datamodule.transform({"image": torch.from_numpy(pixels)[None], **place}, "predict")[
        "image"
    ][0]
    if finished.shape[1:] != pixels.shape[1:]:
        raise ConfigError(
            f"the augmentation of the predict stage makes {list(finished.shape[1:])} of {list(pixels.shape[1:])} px: "
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
    figure, axes = open_figure(
        len(rows), ("before", "reference 1", "after", "reference 1", "mask after")
    )
    for cells, row in zip(axes, rows, strict=True):
        for place, batch in ((0, before), (2, after)):
            show_images(cells[place : place + 2], batch["image"][row])
            if "mask" in batch:
                circle_mask(cells[place], batch["mask"][row, 0], TRUE_COLOUR)
        if "mask" in after:
            show_mask(cells[4], after["mask"][row, 0])
    title = f"{stage} samples before and after augmentation, epoch {int(planned['epoch'][0])}"
    save_figure(figure, path, title, ("true defect",))
    return len(rows)


def _choose_rows(masks: Tensor | None, length: int, count: int) -> list[int]:
    """Samples with defects first."""
    if masks is None:
        return list(range(min(length, count)))
    marked = masks.flatten(1).sum(1).numpy()
    return [int(row) for row in np.argsort(-marked, kind="stable")[:count]]
