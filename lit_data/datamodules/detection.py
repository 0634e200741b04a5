"""`DetectionDataModule`: images with boxes, for detectors."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment import Augmentation, stage_augmentations
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.detection_batch import (
    SHAPES_KEY,
    DetectionVisuals,
    MosaicPlace,
    check_place,
    cut_batch,
    describe_fit,
    plan_mosaics,
    spell_out,
    to_layers,
    wants_shapes,
)
from lit_data.datamodules.detection_source import DetectionSource
from lit_data.datamodules.image_files import ImageKeywords
from lit_data.datamodules.source import name_options
from lit_data.datasets.detection.dataset import DetectionDataset
from lit_data.datasets.detection.files import DetectionFiles, LabelFormat
from lit_data.datasets.splits import SPLITS
from lit_data.errors import DataError, show_path
from lit_data.grid import pair_px
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.mosaic import MosaicSpec
from lit_data.types import COUNT_SUFFIX, Batch, PathText, PlannedBatch, Stage

log = logging.getLogger(__name__)


class DetectionDataModule(BaseDataModule[DetectionDataset]):
    """Images with boxes; training samples may be mosaics.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, 3, H, W] float32     0..1, R, G, B
    ``boxes``        [N, 6] float32           (row, class, cx, cy, w, h), the last four in shares of H and W
    ``boxes_count``  [B] int64                boxes of each image, in order
    ``index``        [B] int64                number of the sample
    ``image_index``  [B] int64                number of its image (of the first one of a mosaic)
    ``shape``        [B, 2] int64             (height, width) px of that image on the disk
    ``path``         B paths                  of that image
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    `batch_format=yolo` is the tuple that YOLO trainers take: images, targets (``boxes``), paths,
    and for each sample ``((height, width), ((scale of y, scale of x), (left, top)))``, how its
    image was fitted; ``None`` for mosaics. `torchvision` is (images, targets) for its detectors,
    `ultralytics` the dict of the v8 losses.

    Args, beside those of `DetectionSource` and `BaseDataModule`:
        mosaic: Sizes and number of the tiles of training samples; none shows each image alone.
        mosaic_on: `worker` draws mosaics of any images of the split. `device` has each image cross
            the bus once, and makes mosaics there of images of the same batch, see
            `DetectionDataset.plan_batch`: for fast devices.
        augment: Augmentation of the training split, or a mapping of stages to theirs.

    Raises:
        ConfigError: An option is out of its range.
    """

    files: DetectionFiles
    bank: ImageBank
    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "boxes",
        "boxes_count",
        "index",
        "image_index",
        "shape",
        "path",
        "epoch",
    )

    @name_options(DetectionSource)
    def __init__(
        self,
        root: PathText | None = None,
        *,
        label_format: LabelFormat = "auto",
        classes: Sequence[str] | None = None,
        annotations: PathText | None = None,
        difficult: bool = True,
        size_px: int | tuple[int, int] = 320,
        mosaic: MosaicSpec | None = None,
        mosaic_on: MosaicPlace = "worker",
        loader: LoaderOptions | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[ImageKeywords],
    ) -> None:
        spelled = spell_out(batch_format)
        super().__init__(
            loader=loader, batch_format=batch_format if spelled is batch_format else "dict"
        )
        self.batch_format = spelled
        self.source: DetectionSource = DetectionSource.of(
            root=root,
            label_format=label_format,
            classes=tuple(classes) if classes else None,
            annotations=annotations,
            difficult=difficult,
            size_px=pair_px("size_px", size_px),
            **options,
        )
        self.mosaic = mosaic
        self.augment = stage_augmentations(augment)
        self.workers_draw = check_place(mosaic_on)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self.files.labels.classes

    @override
    def find_classes(self) -> tuple[str, ...]:
        return self.source.find_classes()

    def build_dataset(self, stage: Stage) -> DetectionDataset:
        """Images of one stage; all of them to predict."""
        if stage != "predict" and not len(self.files.labels.boxes):
            raise DataError(
                f"{show_path(self.source.folder)}: no image has a box, so there is nothing to learn or to score; see "
                "docs/detection.md for the labels that are known"
            )
        return DetectionDataset(
            self.bank,
            self.files.labels,
            self.files.sizes_px,
            images=None if stage == "predict" else self.files.splits[stage],
            size_px=self.source.size_px,
            mosaic=self.mosaic if stage == "train" else None,
            draws_mosaics=self.workers_draw,
            seed=self.loader.seed,
        )

    @override
    def make_loader(self, stage: Stage) -> MicroBatchLoader:
        # The run's length is known now; the dataset may have been made before, for pictures.
        self.dataset(stage).mosaic_epochs = self._count_mosaic_epochs()
        return super().make_loader(stage)

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Name the files, and draw mosaics and augmentation of each sample from its own streams."""
        dataset = self.dataset(stage)
        paths = [self.bank.name(image) for image in batch["image_index"].tolist()]
        planned = batch | {"path": paths} | plan_mosaics(dataset, batch)
        if wants_shapes(self.batch_format):
            planned |= {SHAPES_KEY: describe_fit(dataset, batch)}
        if stage not in self.augment:
            return planned
        index, epoch = batch["index"].numpy(), int(batch["epoch"][0])
        return planned | self.augment[stage].draw(
            self.loader.seed, epoch, index, batch["image"].shape[1]
        )

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cast to 0..1, draw mosaics that are left to the device, and augment."""
        return self._finish(batch, self.augment.get(stage))

    @override
    def inspect(self, stage: Stage) -> DetectionVisuals:
        return DetectionVisuals(
            partial(self._finish, augment=None) if stage in self.augment else None
        )

    def slice_batch(self, batch: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - the user's format
        """Some samples of a batch in the format of this datamodule, for `AdaptiveBatchSize`."""
        return cut_batch(batch, self.batch_format, start, stop)

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set: images, boxes and classes."""
        images = {f"{split}_images": len(self.files.splits[split]) for split in SPLITS}
        counts = {"boxes": len(self.files.labels.boxes), "classes": ", ".join(self.classes)}
        return describe_bank(self.bank) | images | counts

    def _finish(self, batch: PlannedBatch, augment: Augmentation | None) -> Batch:
        layers = to_layers(batch)
        layers = layers.in_floats() if augment is None else augment.forward(layers, batch)
        images, boxes = layers.images, cast(Tensor, layers.boxes)
        # Boxes lie in the order of their rows; `bincount` would wait for the device.
        starts = torch.arange(len(images) + 1, dtype=boxes.dtype, device=boxes.device)
        counts = torch.searchsorted(boxes[:, 0].contiguous(), starts).diff()
        finished = {key: batch[key] for key in (*self.batch_keys, SHAPES_KEY) if key in batch}
        return finished | {"image": images, "boxes": boxes, "boxes" + COUNT_SUFFIX: counts}

    def _count_mosaic_epochs(self) -> int | None:
        """Epochs of the run that have mosaics; none if its length is not known."""
        most = self.trainer.max_epochs if self.trainer else None
        if self.mosaic is None or most is None or most < 0:
            return None
        if most <= self.mosaic.close_epochs:
            level = logging.DEBUG if self._loaders else logging.WARNING  # once, not for each stage
            log.log(
                level,
                "no mosaics: the run has %d epochs, the last %d without",
                most,
                self.mosaic.close_epochs,
            )
        return max(0, most - self.mosaic.close_epochs)

    @override
    def open_source(self) -> None:
        self.files, self.bank = self.source.open()
