"""`DetectionDataModule`: images with boxes for detectors, also in the format of YOLO trainers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Unpack, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.annotations.labels import LabelTable
from lit_data.augment import Augmentation, Layers, draw_tiles, pack_tiles, stage_augmentations
from lit_data.core.batch_form import count_samples, slice_batch
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import pair_px
from lit_data.core.mosaic import FILL, MosaicSpec
from lit_data.core.rng import find_streams
from lit_data.core.types import (
    COUNT_SUFFIX,
    NEUTRAL,
    Batch,
    Ints,
    PathText,
    PlannedBatch,
    Size,
    Stage,
)
from lit_data.core.value_range import ValueRange, find_unit_range, to_unit
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat, names_parts
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.balanced_splits import find_groups
from lit_data.datasets.split_names import SPLITS
from lit_data.images.bank import ImageBank, describe_bank
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec
from lit_data.wings.detection.batches import IGNORED_KEY, cut_batch, describe_fit
from lit_data.wings.detection.dataset import DetectionDataset
from lit_data.wings.detection.files import DetectionFiles
from lit_data.wings.detection.sampling import BoxSampling, PositiveImages
from lit_data.wings.detection.source import (
    DetectionKeywords,
    DetectionSource,
    choose_size,
    keep_groups_together,
)
from lit_data.wings.detection.synthetic import SyntheticObjects, check_synthesis
from lit_data.wings.detection.windows import WholeImage, WindowDataset, Windows
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

MosaicPlace = Literal["worker", "device"]
MOSAIC_KEY = "mosaic"
"""Key of a planned batch with the mosaic tiles that the device draws."""
SHAPES_KEY = "shapes"
"""Key of a YOLO trainer's batch with the scale and padding of each image in its sample."""
_BYTE = 255.0
_YOLO = ("image", "boxes", "path", SHAPES_KEY)


class DetectionDataModule(BaseDataModule[DetectionDataset]):
    """Images with boxes, optionally trained on as mosaics.

    A batch is a dict:

    =================  =======================  ==================================================================
    key                shape, dtype             what
    =================  =======================  ==================================================================
    ``image``          [B, C, H, W] float32     0..1; R, G, B of color images
    ``boxes``          [N, 6] float32           (row, class, cx, cy, w, h), the last four in fractions of H, W
    ``boxes_count``    [B] int64                boxes of each image, in order
    ``index``          [B] int64                number of the image or window of the sample
    ``image_index``    [B] int64                number of its image (of the first one of a mosaic)
    ``shape``          [B, 2] int64             (height, width) px of that image on the disk
    ``path``           B paths                  of that image
    ``epoch``          [B] int64                epoch the sample was drawn for
    ``window``         [B, 2] int64             (top, left) px of the window in its image, with `patch_px`
    ``ignored``        [M, 6] float32           as ``boxes``: regions in which objects of the class
                                                do not count
    ``ignored_count``  [B] int64                regions of each image; both keys only if the labels
                                                have regions
    =================  =======================  ==================================================================

    `batch_format=yolo` is the tuple that YOLO trainers take: images, targets (``boxes``), paths,
    and for each sample ``((height, width), ((scale of y, scale of x), (left, top)))``, which is how
    its image was fitted; ``None`` for mosaics. `torchvision` is (images, targets) for its
    detectors, `ultralytics` the dict of the v8 losses.

    With `patch_px`, samples are windows of images at full resolution. Mosaics, augmentation and
    validation treat each window as an image; `predict` joins the objects found in the windows of an
    image.

    Args, in addition to those of `DetectionSource` and `BaseDataModule`:
        size_px: (height, width) that whole images are scaled to fit, or one number; 320 by default.
            Excludes `patch_px`.
        patch_px: (height, width) of windows of images, or one number; None takes whole images.
        stride_px: (down, right) from one window to the next, or one number. By default, windows
            overlap by the size of the largest object, and by half a window at most.
        sampling: Choice of the training samples.
        mosaic: Sizes and number of the tiles of training samples; None shows each image alone.
        mosaic_on: `worker` draws mosaics from any images of the split. `device` copies each image
            to the device once and makes mosaics there from images of the same batch, see
            `DetectionDataset.plan_batch`: for fast devices.
        augment: Augmentation of the training split, or a mapping of stages to augmentations.
        near_duplicates: `together` keeps near-duplicates (saved again, scaled, brighter) in one
            split if splits are fractions; `apart` does not search for them.
        groups: A regular expression; images whose paths have the same match of it, or of its first
            group (a lot, a panel), stay in one split.
        value_range: Pixel values that become 0 and 1; by default the full range of an unsigned
            dtype, and 0..1 for float32.
        synthesis: Synthetic defects, added to the objects of training samples. If no image has a
            box, validation and test samples get them too.
        synthetic_class: Class of all synthetic defects, or a mapping from names of families to
            classes, which then restricts synthesis to these families; None if there is only one
            class.

    Attributes:
        bank: The stored images.
        windows: Windows of the images; None if samples are whole images.

    Raises:
        ConfigError: An option is out of its range.
    """

    task = "lit_data.wings.detection.predictions.BoxTask"
    files: DetectionFiles
    bank: ImageBank
    windows: Windows | None = None
    batch_keys: Sequence[str] = (
        "image",
        "boxes",
        "boxes_count",
        "index",
        "image_index",
        "shape",
        "path",
        "epoch",
    )

    def __init__(
        self,
        root: PathText | None = None,
        *,
        classes: Sequence[str] | None = None,
        size_px: int | Size | None = None,
        patch_px: int | Size | None = None,
        stride_px: int | Size | None = None,
        sampling: Annotated[BoxSampling | None, NEUTRAL] = None,
        mosaic: MosaicSpec | None = None,
        mosaic_on: MosaicPlace = "worker",
        loader: LoaderOptions | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        near_duplicates: Annotated[Literal["together", "apart"], NEUTRAL] = "together",
        groups: Annotated[str | None, NEUTRAL] = None,
        value_range: tuple[float, float] | None = None,
        synthesis: DefectSpec | None = None,
        synthetic_class: str | Mapping[str, str] | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[DetectionKeywords],
    ) -> None:
        check_choice("mosaic_on", mosaic_on, get_args(MosaicPlace))
        check_choice("near_duplicates", near_duplicates, ("together", "apart"))
        is_on_device = mosaic is not None and mosaic_on == "device"
        check_synthesis(synthesis, synthetic_class, mosaics_on_device=is_on_device)
        if patch_px is not None:
            self.batch_keys = (*self.batch_keys, "window")
        is_yolo = batch_format == "yolo"
        super().__init__(loader=loader, batch_format="dict" if is_yolo else batch_format)
        if is_yolo:  # it has a key that no other format may name
            self.batch_format = _YOLO
        self.source: DetectionSource = DetectionSource.of(
            root=root,
            classes=tuple(classes) if classes else None,
            size_px=choose_size(size_px, patch_px),
            patch_px=None if patch_px is None else pair_px("patch_px", patch_px),
            stride_px=None if stride_px is None else pair_px("stride_px", stride_px),
            **options,
        )
        if value_range is not None:
            self.source = self.source.keeping_numbers()
        self.sampling = sampling or BoxSampling()
        self.mosaic = mosaic
        self.augment = stage_augmentations(augment, self.batch_keys)
        if is_on_device and any(step.host_steps for step in self.augment.values()):
            raise ConfigError(
                "mosaic_on=device makes mosaics after the transforms of the workers: set "
                "mosaic_on=worker, or mosaic=null"
            )
        self.workers_draw = mosaic_on == "worker"
        self.near_duplicates = near_duplicates
        self.groups = groups
        self.value_range = value_range
        self.synthesis = synthesis
        self.synthetic_class = synthetic_class

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self.files.labels.classes

    def overlap_windows(self, overlap_px: int) -> None:
        """Cut images into windows again, with neighbors that overlap by `overlap_px` pixels.

        Raises:
            ConfigError: Samples are whole images, or the windows are no larger than the overlap.
        """
        height, width = self.source.patch_px or (0, 0)
        if not 0 <= overlap_px < min(height, width):
            raise ConfigError(
                f"overlap_px={overlap_px} must be at least 0 and less than a window of "
                f"{height} x {width} px"
            )
        stride_px = height - overlap_px, width - overlap_px
        self.source = replace(self.source, stride_px=stride_px)
        self.windows = self.source.cut(self.files, self.bank, self.fill)
        self._datasets = {}

    def find_whole(self, image: int) -> WholeImage | None:
        """Return an image with its windows and boxes; None if samples are whole images."""
        if self.windows is None:
            return None
        return self.windows.find_whole(image, self.files.labels.of(image))

    @property
    def joins_windows(self) -> bool:
        """True if windows are scored as whole images, whose boxes are known."""
        return self.windows is not None and self.files.labels.object_count > 0

    @property
    def chosen_options(self) -> dict[str, Any]:
        """Options that were chosen from the data, for the checkpoint."""
        if self.windows is None:
            return {}
        grid = self.windows.bank.grid
        down = grid.vertical.stride_px
        right = grid.horizontal.stride_px
        return {"stride_px": [down, right]}

    @override
    def check_sources(self) -> dict[str, Any]:
        return super().check_sources() | self.renew(self.source.unstored()).describe()

    @override
    def find_classes(self) -> tuple[str, ...]:
        return self.source.find_classes()

    def build_dataset(self, stage: Stage) -> DetectionDataset:
        """Return the images of one stage; all images for ``predict``."""
        synthetic = self._choose_synthetic(stage)
        if stage != "predict" and synthetic is None and not self.files.labels.object_count:
            raise DataError(
                f"{self.source.shown_root}: no image has a box, so there is nothing to learn or to score; see "
                "docs/detection.md for the labels that are known"
            )
        numbers = range(len(self.bank)) if stage == "predict" else self.files.splits[stage]
        kind: type[DetectionDataset] = DetectionDataset
        bank, labels, sizes_px = self.bank, self.files.labels, self.files.sizes_px
        images = sources = np.array(numbers, np.int64)
        if self.windows is not None:
            kind = WindowDataset
            bank, labels = self.windows
            sizes_px = np.stack((bank.heights_px, bank.widths_px), axis=1)
            images = self.windows.bank.windows_of(numbers)
            sources = self.windows.bank.images_of(images)
        return kind(
            bank,
            labels,
            sizes_px,
            images=images,
            size_px=self.source.size_px,
            mosaic=self.mosaic if stage == "train" else None,
            draws_mosaics=self.workers_draw,
            seed=self.loader.seed,
            positives=self._choose_positives(stage, labels, images, sources),
            synthetic=synthetic,
            fill=self.fill,
        )

    def _choose_positives(
        self, stage: Stage, labels: LabelTable, images: Ints, sources: Ints
    ) -> PositiveImages | None:
        """Return the sampling of training images; None if each sample is taken once."""
        if self.synthesis is not None and self.sampling.positives == "auto":
            counts = np.diff(labels.ends, prepend=0)
            if not counts[images].any():  # all of them are backgrounds
                return None
        shares = self.sampling.find_shares(has_windows=self.windows is not None)
        if stage != "train" or not shares or not len(images):
            return None
        return PositiveImages(labels, images, sources, shares, self.loader.seed)

    def _choose_synthetic(self, stage: Stage) -> SyntheticObjects | None:
        """Return the synthetic defects of the samples of a stage, if it has any."""
        if self.synthesis is None or stage == "predict":
            return None
        if stage != "train" and self.files.labels.object_count:
            return None
        return SyntheticObjects.of(
            self.synthesis,
            self.synthetic_class,
            self.classes,
            seed=self.loader.seed,
            values=self.values,
        )

    @override
    def make_loader(self, stage: Stage) -> MicroBatchLoader:
        # The length of the run is known now; the dataset may have been made before, for pictures.
        self.dataset(stage).mosaic_epochs = self._count_mosaic_epochs()
        return super().make_loader(stage)

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Add the paths, and plan the mosaics and augmentation of each sample from its random stream."""
        dataset = self.dataset(stage)
        paths = [self.bank.name(image) for image in batch["image_index"].tolist()]
        planned = batch | {"path": paths} | plan_mosaics(dataset, batch)
        if self.batch_format == _YOLO:
            planned |= {SHAPES_KEY: describe_fit(dataset, batch)}
        if stage not in self.augment:
            return planned
        index, epoch = find_streams(batch), int(batch["epoch"][0])
        return planned | self.augment[stage].draw(
            self.loader.seed, epoch, index, batch["image"].shape[1]
        )

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cast to 0..1, draw mosaics that are left to the device, and augment."""
        return self._finish(batch, self.augment.get(stage))

    @override
    def inspect(self, stage: Stage) -> Visuals:
        return Visuals(partial(self._finish, augment=None) if stage in self.augment else None)

    def slice_batch(self, batch: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - the user's format
        """Return some samples of a batch in the format of this datamodule, for `AdaptiveBatchSize`."""
        if not names_parts(batch, self.batch_format):
            return slice_batch(batch, start, stop, count_samples(batch))
        return cut_batch(batch, self.batch_format, start, stop)

    def describe(self) -> dict[str, Any]:
        """Return facts about the opened dataset: numbers of images and boxes, and the classes."""
        images = {f"{split}_images": len(self.files.splits[split]) for split in SPLITS}
        labels = self.files.labels
        counts = {"boxes": labels.object_count, "classes": ", ".join(self.classes)}
        if labels.object_count < len(labels.boxes):
            counts["ignored_regions"] = len(labels.boxes) - labels.object_count
        if self.windows is not None:
            counts["windows"] = len(self.windows.bank)
        return describe_bank(self.bank) | images | counts

    def _finish(self, batch: PlannedBatch, augment: Augmentation | None) -> Batch:
        images = batch["image"]
        if not self._has_bytes:
            images = to_unit(images, self.values)
        if MOSAIC_KEY in batch:
            if not self._has_bytes:
                images = images * _BYTE
            images = draw_tiles(images, batch[MOSAIC_KEY])
        layers = Layers(images, boxes=batch["boxes"])
        layers = layers.in_floats() if augment is None else augment.forward(layers, batch)
        images, boxes = layers.images, cast(Tensor, layers.boxes)
        finished = {key: batch[key] for key in (*self.batch_keys, SHAPES_KEY) if key in batch}
        finished["image"] = images
        if self._has_ignored:
            # This waits for the device, as only it knows how many boxes there are.
            is_object = boxes[:, 1] >= 0
            regions = boxes[~is_object]
            regions[:, 1] = -1 - regions[:, 1]
            boxes = boxes[is_object]
            finished |= _count_rows(IGNORED_KEY, regions, len(images))
        return finished | _count_rows("boxes", boxes, len(images))

    @property
    def values(self) -> ValueRange:
        """Pixel values that become 0 and 1."""
        return find_unit_range(self.bank.dtype, self.value_range)

    @property
    def _has_bytes(self) -> bool:
        """True if pixels are bytes with their full range, as augmentation expects."""
        is_whole = (self.values.low, self.values.high) == (0.0, _BYTE)
        return self.bank.dtype == np.uint8 and is_whole

    @property
    def fill(self) -> float:
        """Pixel value of the gray around images and tiles."""
        fill = self.values.low + FILL / _BYTE * self.values.scale
        return round(fill) if self.values.whole else fill

    @property
    def _has_ignored(self) -> bool:
        labels = self.files.labels
        return labels.object_count < len(labels.boxes)

    def _count_mosaic_epochs(self) -> int | None:
        """Return the number of epochs that have mosaics; None if the run's length is unknown."""
        most = self.trainer.max_epochs if self.trainer else None
        if self.mosaic is None or most is None or most < 0:
            return None
        if most <= self.mosaic.close_epochs:
            # Once, not for each stage.
            level = logging.DEBUG if self._run.loaders else logging.WARNING
            log.log(
                level,
                "no mosaics: the run has %s, and the last %d have none",
                counted(most, "epoch"),
                self.mosaic.close_epochs,
            )
        return max(0, most - self.mosaic.close_epochs)

    @override
    def open_source(self) -> None:
        self.files, self.bank = self.source.open()
        shared_splits = [part for part in (self.files.fractions or {}).values() if part]
        if len(shared_splits) > 1:
            groups = find_groups(
                self.bank,
                [self.source.name(path) for path in self.files.images],
                pattern=self.groups,
                with_near_duplicates=self.near_duplicates == "together",
                folder=self.source.kept_folder,
            )
            self.files = keep_groups_together(self.files, groups, self.source.split_seed)
        log.info("%s: %s", self.source.shown_root, self.files.labels.describe(self.files.splits))
        self.windows = self.source.cut(self.files, self.bank, self.fill)
        if self._has_ignored:
            keys = dict.fromkeys((*self.batch_keys, IGNORED_KEY, IGNORED_KEY + COUNT_SUFFIX))
            self.batch_keys = tuple(keys)


def plan_mosaics(dataset: DetectionDataset, batch: Batch) -> Batch:
    """Return tiles and boxes of mosaics that the device draws; empty if workers draw them, or without mosaics."""
    epoch = int(batch["epoch"][0])
    spec = dataset.mosaic_of(epoch)
    if spec is None or dataset.draws_mosaics:
        return {}
    numbers, streams = batch["index"].numpy(), find_streams(batch)
    mosaics = dataset.plan_batch(numbers, spec, epoch, streams)
    return {
        MOSAIC_KEY: pack_tiles(mosaics.plan, mosaics.places_px, spec.tiles),
        "boxes": torch.from_numpy(mosaics.boxes),
        "boxes" + COUNT_SUFFIX: torch.from_numpy(mosaics.counts),
    }


def _count_rows(key: str, boxes: Tensor, count: int) -> Batch:
    """Return boxes, sorted by row, with the number of boxes of each of `count` rows."""
    # `bincount` would wait for the device.
    starts = torch.arange(count + 1, dtype=boxes.dtype, device=boxes.device)
    counts = torch.searchsorted(boxes[:, 0].contiguous(), starts).diff()
    return {key: boxes, key + COUNT_SUFFIX: counts}
