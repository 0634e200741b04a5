"""Tasks of images with masks: patches, predictions of them, and predictions of whole images."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning import LightningModule
from matplotlib.axes import Axes
from torch import Tensor
from typing_extensions import TypeVar, override

from lit_data.core.errors import ConfigError, LitDataError
from lit_data.core.types import IGNORED, Batch, Stage
from lit_data.core.value_range import ValueRange
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datasets.splits import UNDIVIDED
from lit_data.predict.answers import (
    ask_step,
    read_image_threshold,
    read_kinds,
    read_probability,
    read_threshold,
)
from lit_data.predict.cells import (
    CLASS_COLOURS,
    number_classes,
    outline_mask,
    show_mask,
    show_pixels,
)
from lit_data.predict.figures import (
    ShownImage,
    draw_whole_images,
    open_figure,
    save_figure,
    shorten_name,
)
from lit_data.predict.maps import ImageWriter, VerdictWriter, WholeImages
from lit_data.predict.net_facts import NetFacts, describe_maps
from lit_data.predict.options import ExportRequest, Predicted, PredictOptions, PredictRun, Use
from lit_data.predict.predict import predict_few, predict_images
from lit_data.predict.task import Task, choose_strata, draw_before_after, register
from lit_data.predict.verdicts import KnowsTruth
from lit_inspect.verdicts import DEFECT, GOOD

_WHOLE_PX = (
    2**23
)  # of all images together that are predicted for a picture, which takes half a minute
log = logging.getLogger(__name__)

Images = TypeVar("Images", bound=ImageDataModule)


class PixelTask(Task[Images]):
    """Images with masks; a model gives the probability of each pixel.

    A subclass has the writer of its predictions.

    Attributes:
        takes_augmented: Whole images may be predicted as the predict stage augments them.
    """

    takes_augmented: ClassVar[bool] = False
    predicts = "dict with `probability`"
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": UNDIVIDED, "mask_splits": []}

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw samples of all classes and sizes as the model sees them, with their masks."""
        classes = self.datamodule.classes or ()
        masks = masks_of(batch)
        kinds = self._name_kinds(batch)
        rows = choose_strata(kinds, _measure_marked(masks).tolist(), count, good=GOOD)
        titles = ["image", "edge of the mask", "mask"]
        if "clean" in batch:
            titles.append("clean")
        figure, axes = open_figure(len(rows), titles)
        for cells, row in zip(axes, rows, strict=True):
            show_pixels(cells[0], batch["image"][row])
            _show_outlined(cells[1], batch["image"][row], masks[row, 0], classes=len(classes))
            show_mask(cells[2], masks[row, 0], classes=len(classes))
            if "clean" in batch:
                show_pixels(cells[3], batch["clean"][row])
            name = name_sample(self.datamodule, batch, row)
            cells[0].set_ylabel(f"{kinds[row]}\n{name}", fontsize=8)
        save_figure(figure, path, title, number_classes(classes), CLASS_COLOURS)
        return rows

    def _name_kinds(self, batch: Batch) -> list[str]:
        """Return the kind of each sample: ``good`` without a mark, else by its mask or its folder."""
        classes = self.datamodule.classes or ()
        masks = masks_of(batch)
        known = getattr(self.datamodule, "image_kinds", ())
        kinds = []
        for row, marked in enumerate(_measure_marked(masks).tolist()):
            numbers = masks[row][(masks[row] > 0) & (masks[row] != IGNORED)]
            kind = known[int(batch["image_index"][row])] if known else ""
            if classes and marked:
                kind = classes[int(numbers.long().mode().values) - 1]
            is_named = kind not in ("", GOOD)
            kinds.append((kind if is_named else DEFECT) if marked else GOOD)
        return kinds

    @override
    def draw_whole(
        self, model: LightningModule, stage: Stage, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw whole images of all kinds beside what a model makes of them.

        Not where nothing is known of them, or where the first one is too large.
        """
        try:
            images = list(self._show_whole(model, stage, path.parent, count))
        except LitDataError as error:
            log.debug("no whole images in %s: %s", path.name, error)
            return False
        if not images:
            return False
        draw_whole_images(images, path, title)
        return True

    def _show_whole(
        self, model: LightningModule, stage: Stage, folder: Path, count: int
    ) -> Iterator[ShownImage]:
        """Predict images of a split in memory, and yield them as pictures show them."""
        trainer = self.datamodule.trainer
        if not self.has_verdicts() or trainer is None:
            return
        truth: KnowsTruth = self.datamodule  # type: ignore[assignment]  # as all with verdicts
        options = PredictOptions(
            threshold=read_threshold(model),
            image_threshold=read_image_threshold(model),
            image_score_fraction=getattr(model, "image_score_fraction", None),
        )
        options = self.fit_tile(options, model)
        writer = self.writer(PredictRun(folder=folder, identity={}, trainer=trainer), options)
        if not isinstance(writer, VerdictWriter):
            return
        images = writer.images
        numbers = self._choose_whole(truth, self.list_split(stage), count)
        sizes_px = np.cumsum([images.count_px(number) for number in numbers])
        numbers = [
            number for number, sum_px in zip(numbers, sizes_px, strict=True) if sum_px <= _WHOLE_PX
        ]
        for number, answer in predict_few(self.datamodule, model, images, options, numbers):
            yield writer.show(number, answer)

    def _choose_whole(self, truth: KnowsTruth, numbers: Sequence[int], count: int) -> list[int]:
        """Choose images of a split of which the truth is known, of all kinds."""
        spread = np.linspace(0, len(numbers) - 1, min(len(numbers), self.candidates)).astype(int)
        known: dict[int, str] = {}
        kinds = truth.image_kinds
        for number in (numbers[at] for at in spread):
            has_defect = truth.has_defect(number)
            if has_defect is not None:
                kind = kinds[number] if kinds else ""
                known[number] = (kind or DEFECT) if has_defect else GOOD
        rows = choose_strata(list(known.values()), [0.0] * len(known), count, good=GOOD)
        return [list(known)[row] for row in rows]

    def fit_tile(self, options: PredictOptions, model: LightningModule) -> PredictOptions:
        """Return the options with the tile that a model and its images need; by default as they are."""
        return options

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw samples of all classes and sizes beside the predictions of a model."""
        masks = masks_of(batch)
        strata = self._name_kinds(batch)
        rows = choose_strata(strata, _measure_marked(masks).tolist(), count, good=GOOD)
        chosen = {key: value[rows] for key, value in batch.items()}
        images = show_samples(self.datamodule, model, chosen)
        if images is not None:
            draw_whole_images(images, path, title)
        return images is not None

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Draw samples and their masks before and after augmentation, if there is any."""
        classes = len(self.datamodule.classes or ())

        def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
            show_pixels(cells[0], batch["image"][row])
            show_mask(cells[1], masks_of(batch)[row, 0], classes=classes)

        draw_before_after(
            self.datamodule, planned, rows, path, stage=stage, show=show, columns=("image", "mask")
        )

    def open_images(self) -> WholeImages:
        """Return the images to predict.

        Where their finishing is more than choosing channels and scaling (a nuisance for layout
        `single`, an augmentation of the predict stage), the datamodule finishes a whole image as it
        would finish a patch.

        Raises:
            ConfigError: The predict stage has an augmentation, and maps are not of what it makes.
        """
        data = self.datamodule
        if "predict" in data.augment and not self.takes_augmented:
            raise ConfigError("predict uses images as they are: remove predict from data.augment")
        transform = data.transformation
        is_finished = transform.nuisance is not None or "predict" in data.augment
        values = transform.values
        is_scaled = not is_finished and values != ValueRange()  # floats stay as they are
        return WholeImages(
            bank=data.bank,
            names=data.source.names(data.bank),
            channels=tuple(range(len(transform.expand))) if is_finished else transform.expand,
            value_range=(values.low, values.high) if is_scaled else None,
            classes=tuple(data.classes or ()),
            finish=self._finish if is_finished else None,
            shown_channels=1 if "target" in data.channel_names else None,
        )

    def _finish(self, number: int) -> Tensor:
        """Return an image as the predict stage of the datamodule finishes it, [C, H, W]."""
        pixels = np.array(self.datamodule.bank[number])  # a copy: torch warns of read-only arrays
        image_index = torch.tensor([number])
        batch = {
            "image": torch.from_numpy(pixels)[None],
            "index": image_index,
            "image_index": image_index,
            "position": torch.zeros(1, 2, dtype=torch.int64),
            "epoch": torch.zeros(1, dtype=torch.int64),
        }
        finished: Tensor = self.datamodule.transform(batch, "predict")["image"][0]
        finished_px = list(finished.shape[1:])
        image_px = list(pixels.shape[1:])
        if finished_px != image_px:
            raise ConfigError(
                f"the augmentation of the predict stage turns {image_px} px into {finished_px}: "
                "maps have the size of their images, so remove what crops or resizes"
            )
        return finished

    def writer(self, run: PredictRun, options: PredictOptions) -> ImageWriter:
        """Return the writer of the predictions of whole images."""
        raise NotImplementedError

    def write_verdicts(
        self,
        truth: KnowsTruth,
        images: WholeImages,
        run: PredictRun,
        options: PredictOptions,
        find_misfits: Callable[[int], str] | None = None,
    ) -> VerdictWriter:
        """Return the writer of maps and verdicts."""
        options.refuse_unused("maps of defects", self.uses)
        return VerdictWriter(
            truth,
            images,
            run,
            options,
            find_misfits=find_misfits,
            lists_defects=run.lists_defects,
        )

    @override
    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return predict_images(self.datamodule, model, self.writer(run, options), run, options)


@register(InspectionDataModule)
class InspectionTask(PixelTask[InspectionDataModule]):
    """Images with the masks of their defects; predictions are maps and tables of defects."""

    predict_data: ClassVar[Mapping[str, Any]] = {
        "splits": UNDIVIDED,
        "folds": None,
        "fold": 0,
        "protocol": "auto",
        "sampling": None,
    }
    trained_data = (
        "classes",
        "fit",
        "mask_read",
        "patch_px",
        "read",
        "scale",
        "size_px",
        "value_range",
    )
    uses = Use.INPUTS | Use.FINDING | Use.TILES | Use.VERDICTS | Use.PICTURES

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> VerdictWriter:
        images = replace(self.open_images(), original_sizes=self.datamodule.original_sizes)
        return self.write_verdicts(self.datamodule, images, run, options)

    @override
    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        return super().predict(model, run, self.fit_tile(options, model))

    @override
    def export(self, request: ExportRequest) -> NetFacts:
        request = replace(request, options=self.fit_tile(request.options, request.model))
        scaling = self.datamodule.source.scaling
        return describe_maps(self.datamodule, self.open_images(), request, scaling=scaling)

    @override
    def fit_tile(self, options: PredictOptions, model: LightningModule) -> PredictOptions:
        """Make the size of whole images, or of patches that a model needs, the default tile."""
        scaling = self.datamodule.source.scaling
        if scaling is not None and scaling.size_px is not None:
            size_px = scaling.size_px
        elif getattr(model, "needs_one_size", False):
            size_px = self.datamodule.patch_px
        else:
            return options
        if options.tile_px != PredictOptions().tile_px:
            return options
        stride_px = options.multiple_px
        # Tiles are multiples of the stride of the net; images are padded to that.
        height_px, width_px = (-(-side_px // stride_px) * stride_px for side_px in size_px)
        return replace(options, tile_px=(height_px, width_px))


def name_sample(datamodule: BaseDataModule, batch: Batch, row: int) -> str:
    """Return the name of the image of a sample, and the position of the sample in it."""
    number = int(batch["image_index"][row])
    bank = getattr(datamodule, "bank", None)
    name = f"image {number}" if bank is None else shorten_name(Path(bank.name(number)).name)
    if "position" not in batch:
        return name
    top, left = batch["position"][row].tolist()
    return f"{name}\ny {top}, x {left}"


def masks_of(batch: Batch) -> Tensor:
    """Return the masks of a batch, [B, 1, H, W]; without masks nothing is marked."""
    if "mask" in batch:
        return batch["mask"]
    return torch.zeros_like(batch["image"][:, :1])


def _show_outlined(cell: Axes, image: Tensor, mask: Tensor, *, classes: int) -> None:
    """Show an image [C, H, W] with a line around what a mask [H, W] marks; see `outline_mask`."""
    show_pixels(cell, image)
    outline_mask(cell, mask, classes=classes, width=0.8)


def show_samples(
    datamodule: BaseDataModule, model: LightningModule, batch: Batch
) -> list[ShownImage] | None:
    """Return samples with what a model says of them, as pictures show them; None if it says nothing.

    Args:
        datamodule: Whose samples.
        model: See `read_probability`.
        batch: A finished batch on the host.
    """
    classes = getattr(datamodule, "classes", None) or ()
    outputs = ask_step(model, batch)
    probability = read_probability(outputs)
    if probability is None:
        return None
    least = read_threshold(model)
    predicted = (probability >= least).to(torch.uint8)
    kinds = read_kinds(outputs) if classes else None
    if kinds is not None:
        predicted = predicted * (1 + kinds.argmax(1, keepdim=True))  # numbers of classes, from 1
    predicted, probability = predicted.cpu(), probability.float().cpu()
    masks = masks_of(batch)
    images = []
    for row in range(len(masks)):
        mask = masks[row, 0].float().masked_fill(masks[row, 0] == IGNORED, 0)
        truth = mask if classes else (mask > 0) & (mask >= mask.max() / 2)
        truth = truth.to(torch.uint8).masked_fill(masks[row, 0] == IGNORED, IGNORED)
        names = name_sample(datamodule, batch, row).partition("\n")
        highest = f"highest {float(probability[row].max()):.2f}"
        images.append(
            ShownImage(
                name=names[0],
                text=f"{names[2]}, {highest}".removeprefix(", "),
                pixels=batch["image"][row].float().numpy(),
                probability=probability[row, 0].numpy(),
                predicted=predicted[row, 0].to(torch.uint8).numpy(),
                truth=truth.numpy(),
                least=least,
            )
        )
    return images


def _measure_marked(masks: Tensor) -> Tensor:
    """Return the marked area of each mask, [B] px; pixels that are ignored do not count."""
    return masks.masked_fill(masks == IGNORED, 0).clamp(max=1).flatten(1).sum(1)
