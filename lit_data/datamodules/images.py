"""`ImageDataModule`: what all datamodules of image patches share, with or without references."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from lit_data.augment import SingleTexture, stage_augmentations
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import MaskedImageFolder
from lit_data.datamodules.image_transform import (
    BatchTransform,
    ImageTransform,
    ImageVisuals,
    find_margins,
    find_unit_range,
)
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.patch_source import GridPatches
from lit_data.datasets.patches import PatchDataset
from lit_data.datasets.splits import SPLITS, split_images
from lit_data.datasets.stripes.device_bank import DevicePatches
from lit_data.errors import ConfigError
from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.watermarks import WatermarkSpec
from lit_data.types import Batch, PlannedBatch, Stage

Augment = nn.Module | Mapping[Stage, nn.Module | None] | None


class ImageDataModule(BaseDataModule[PatchDataset]):
    """Patches of images, the masks of their defects, and synthetic defects.

    A subclass sets `source`, makes the grid, and builds the dataset of each stage.

    Args, beside those of `BaseDataModule`:
        patch_px: (height, width) of a patch.
        value_range: Pixel values that become 0 and 1; by default all of an unsigned dtype, 0..1
            for float32.
        synthesis: Defects to draw; none draws none.
        augment: Augmentation of the training split, or a mapping of stages to theirs.
        nuisance: Difference of target and references that are one texture; none leaves them.

    Attributes:
        source: The files of the images.
        grid: The patches of all images; after `setup`.
        margins_px: For each stage the pixels (above and below, left and right) that its patches
            are read larger by; after `setup`.
        transformation: What is planned on the host and done on the device; after `setup`.
        classes: Names of the kinds of defects that are told apart, if any.
        channel_map: For each channel of a batch the stored channel that gives it; None takes the
            channels as they are stored.
        reads_margins: False reads patches without the margins that their augmentation could use.
    """

    source: MaskedImageFolder
    bank: ImageBank
    grid: PatchGrid
    margins_px: Mapping[Stage, tuple[int, int]]
    transformation: BatchTransform
    classes: Sequence[str] | None = None
    channel_map: tuple[int, ...] | None = None
    reads_margins: ClassVar[bool] = True
    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "mask",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    def __init__(
        self,
        *,
        patch_px: tuple[int, int],
        value_range: tuple[float, float] | None = None,
        synthesis: DefectSpec | WatermarkSpec | None = None,
        augment: Augment = None,
        nuisance: SingleTexture | None = None,
        loader: LoaderOptions | None = None,
        batch_format: BatchFormat = "dict",
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.patch_px = patch_px
        self.value_range = value_range
        self.synthesis = synthesis
        self.augment = stage_augmentations(augment)
        self.nuisance = nuisance
        self._device_patches = DevicePatches()

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw defects, nuisance and augmentation of each sample from its own stream."""
        # Samples that are chosen anew in each epoch draw from the stream of their number in the split.
        planned: PlannedBatch = batch | {"index": batch.get("draw", batch["index"])}
        planned = self.transformation.plan(planned, stage)
        return planned | {"index": batch["index"]}

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cut what was not cut by the loader, cast to float, render defects, augment."""
        if "image" not in batch:
            batch = self._device_patches.fill(batch, self.dataset(stage))
        finished = {key: batch[key] for key in self.batch_keys if key in batch}
        return finished | self.transformation.finish(batch, stage)

    def inspect(self, stage: Stage) -> Visuals:
        """Return samples before augmentation."""
        return ImageVisuals(self.transformation, stage)

    @override
    def check_sources(self) -> dict[str, int]:
        super().check_sources()
        return self.describe_anew()

    def describe_anew(self) -> dict[str, Any]:
        """Return the numbers of `describe` for the files as they are now."""
        return self.renew(self.source.unstored()).describe()

    def describe(self) -> dict[str, Any]:
        """Return numbers about the opened dataset: images and patches of each split, bytes of pixels."""
        images = {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        patches = {f"{split}_patches": len(self.dataset(split)) for split in SPLITS}
        return describe_bank(self.bank) | images | patches

    @override
    def open_source(self) -> None:
        self.bank = self.source.open_images()
        self.grid = self.make_grid()
        self.open_masks()
        self.split_images = self.choose_splits()
        self.margins_px = find_margins(self.augment if self.reads_margins else {}, self.patch_px)
        self.transformation = self.make_transformation()

    def make_grid(self) -> PatchGrid:
        """Return the patches of all images."""
        raise NotImplementedError

    def open_masks(self) -> None:
        """Open the masks of all images, where splits or samples depend on them."""

    def choose_splits(self) -> dict[str, NDArray[np.int64]]:
        """Return for each of train, val and test the numbers of its images."""
        names = self.source.names(self.bank)
        return split_images(names, self.source.splits, seed=self.source.split_seed)

    def make_transformation(self) -> BatchTransform:
        """Return what is planned on the host and done on the device."""
        if isinstance(self.synthesis, WatermarkSpec):
            raise ConfigError(
                "synthesis is a WatermarkSpec, which draws no defects: set synthesis=library"
            )
        return ImageTransform(
            values=find_unit_range(self.bank.dtype, self.value_range),
            read_px={stage: self._add_margin(stage) for stage in self.margins_px},
            expand=self.channel_map or tuple(range(self.bank.channels)),
            seed=self.loader.seed,
            synthesis=self.synthesis,
            nuisance=self.nuisance,
            augment=self.augment,
            is_single=self.channel_map is None,
        )

    def build_plain_dataset(self, stage: Stage) -> PatchDataset:
        """Return every patch of the grid of all images, as they are: to predict."""
        has_pixels = self.source.cache != "device"
        patches, margin_px = GridPatches(self.grid), self.margins_px[stage]
        return PatchDataset(self.bank, patches, pixels=has_pixels, margin_px=margin_px)

    def open_split_masks(
        self, stage: Stage, mask_splits: Sequence[Stage]
    ) -> tuple[NDArray[np.int64], ImageBank | None]:
        """Open the masks of a split, by the stems of its images.

        Args:
            stage: The split.
            mask_splits: Splits that use masks.

        Returns:
            Numbers of the images, without those whose masks are bad and skipped; and their masks,
            `None` where the split uses none.

        Raises:
            ConfigError: Nothing is drawn either, so that nothing says what a defect is.
        """
        images = self.split_images[stage]
        masks = None
        if stage in mask_splits:
            masks, good_images = self.source.open_masks(images.tolist(), self.bank, stage)
            images = np.asarray(good_images, np.int64)
        if masks is None and self.synthesis is None and len(images):
            raise ConfigError(
                f"the {stage} split has neither masks nor synthesis: "
                "set data.masks or data.synthesis"
            )
        return images, masks

    def _add_margin(self, stage: Stage) -> tuple[int, int]:
        above_px, left_px = self.margins_px[stage]
        return self.patch_px[0] + 2 * above_px, self.patch_px[1] + 2 * left_px
