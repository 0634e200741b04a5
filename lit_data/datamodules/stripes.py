"""`StripeDataModule`: inspection images with a target and two references."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np
from torch import nn
from typing_extensions import override

from lit_data.augment import SingleTexture, stage_augmentations
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import MaskedKeywords
from lit_data.datamodules.placement import Backend, DrawingBackend
from lit_data.datamodules.source import name_options
from lit_data.datamodules.stripe_files import StripeFiles
from lit_data.datamodules.stripe_transform import (
    StripeTransform,
    StripeVisuals,
    find_margins,
    find_unit_range,
)
from lit_data.datasets import StripeDataset
from lit_data.datasets.splits import SPLITS, split_images
from lit_data.datasets.stripes.device_bank import DevicePatches
from lit_data.datasets.stripes.layouts import ROLES, rule_of
from lit_data.errors import ConfigError
from lit_data.grid import Edges, PatchGrid, pair_px
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.types import Batch, PathText, PlannedBatch, Stage

log = logging.getLogger(__name__)


class StripeDataModule(BaseDataModule[StripeDataset]):
    """Patches of inspection images; defects are drawn on the device, real masks are used where
    there are any.

    A batch is a dict:

    ===============  ===========================  ======================================================
    key              shape, dtype                 what
    ===============  ===========================  ======================================================
    ``image``        [B, 3, H, W] float32         0..1, channels target, ref1, ref2
    ``mask``         [B, 1, H, W] float32         {0, 1}, true defects; not when predicting
    ``index``        [B] int64                    number of the patch among those of all images
    ``image_index``  [B] int64                    number of the image
    ``position``     [B, 2] int64                 (y, x) of the patch in its image, px
    ``epoch``        [B] int64                    epoch the sample was drawn for
    ===============  ===========================  ======================================================

    `batch_format` renames keys or makes a tuple; it may also name ``target``, ``ref1`` and ``ref2``
    ([B, 1, H, W]). `classes` makes the mask [B, H, W] int64, `anomalib` its ImageBatch.

    Args, beside those of `StripeFiles` and `BaseDataModule`:
        mask_splits: Splits that use the masks instead of synthesis.
        patch_px: Patch size, one number or (height, width).
        stride_px: Distance between patches.
        edges: `cover`, `drop` or `pad`, see `PatchGrid`.
        value_range: Pixel values that become 0 and 1; by default all of an unsigned dtype, 0..1
            for float32.
        synthesis: Defects to draw; none draws none.
        augment: Augmentation of the training split, or a mapping of stages to theirs; an
            `Augmentation`, or any module of yours (see `lit_data.augment.ExternalTransform`). None
            leaves images as they are.
        nuisance: For layout `single`: what makes target and references differ.
        backend: `cpu` has the workers draw defects, `device` the device of the batch; `auto`
            decides by a short measurement. Samples are the same to the byte on the CPU, and to one
            grey level of 255 between CPU and GPU.

    Raises:
        ConfigError: An option is out of its range.
    """

    bank: ImageBank
    grid: PatchGrid
    transformation: StripeTransform
    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "mask",
        "index",
        "image_index",
        "position",
        "epoch",
    )
    channel_names: ClassVar[Mapping[str, int]] = {name: number for number, name in enumerate(ROLES)}

    @name_options(StripeFiles)
    def __init__(
        self,
        root: PathText | None = None,
        *,
        layout: str = "channels",
        channels: Sequence[int] = (0, 1, 2),
        files: Mapping[str, str] | None = None,
        mask_splits: Sequence[Stage] = ("test",),
        patch_px: int | tuple[int, int] = 128,
        stride_px: int | tuple[int, int] = 112,
        edges: Edges = "cover",
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        synthesis: DefectSpec | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        nuisance: SingleTexture | None = None,
        backend: Backend = "auto",
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.source: StripeFiles = StripeFiles.of(
            root=root, layout=layout, channels=channels, files=files, **options
        )
        self.mask_splits = tuple(mask_splits)
        self.patch_px = pair_px("patch_px", patch_px)
        self.stride_px = pair_px("stride_px", stride_px)
        self.edges = edges
        self.value_range = value_range
        self.synthesis = synthesis
        self.augment = augment
        self.nuisance = (nuisance or SingleTexture()) if layout == "single" else None
        self.backend, self._device_patches = DrawingBackend(backend), DevicePatches()

    @override
    def prepare_data(self) -> None:
        super().prepare_data()
        if self.source.mask_folder:
            for split in self.mask_splits:
                self.dataset(split)

    def build_dataset(self, stage: Stage) -> StripeDataset:
        """Patches of the images of one stage; those of all images to predict."""
        pixels, margin_px = self.source.cache != "device", self.margins_px[stage]
        if stage == "predict":
            return StripeDataset(self.bank, self.grid, pixels=pixels, margin_px=margin_px)
        images, masks = self.split_images[stage], None
        if stage in self.mask_splits:
            masks, kept = self.source.open_masks(images.tolist(), self.bank, stage)
            images = np.asarray(kept, np.int64)
        if masks is None and self.synthesis is None and len(images):
            raise ConfigError(
                f"the {stage} split has neither masks nor synthesis: set data.masks or data.synthesis"
            )
        dataset = StripeDataset(
            self.bank, self.grid, images=images, masks=masks, pixels=pixels, margin_px=margin_px
        )
        if masks is not None or self.synthesis is None:
            return dataset
        writer = self.backend.choose(
            dataset, self.transformation.build_writer(), self.loader, self.trainer
        )
        if writer is None:
            return dataset
        return StripeDataset(
            self.bank, self.grid, images=images, defects=writer, margin_px=margin_px
        )

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw defects, nuisance and augmentation of each sample from its own stream."""
        return self.transformation.plan(batch, stage)

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cut what was not cut by the loader, cast to float, spread to three channels, render defects, augment."""
        if "image" not in batch:
            batch = self._device_patches.fill(batch, self.dataset(stage))
        images, masks = self.transformation.finish(batch, stage)
        finished = {key: batch[key] for key in self.batch_keys if key in batch} | {"image": images}
        return finished if masks is None else finished | {"mask": masks}

    def inspect(self, stage: Stage) -> StripeVisuals:
        """The plans of samples, where their defects show, and each family of defects on its own."""
        return StripeVisuals(self.dataset(stage), self.transformation, self._device_patches, stage)

    @override
    def check_sources(self) -> dict[str, int]:
        super().check_sources()
        return self.renew(self.source.unstored()).describe()

    def describe_loaders(self) -> dict[str, dict[str, Any]]:
        """For each stage that was read its workers, and who draws the defects."""
        return super().describe_loaders() | self.backend.to_plain()

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set: images, patches of each split, bytes of its pixels."""
        patches = {f"{split}_patches": len(self.dataset(split)) for split in SPLITS}
        images = {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        return describe_bank(self.bank) | images | patches

    @override
    def open_source(self) -> None:
        self.bank = self.source.open_images()
        sizes_px = self.bank.heights_px, self.bank.widths_px
        self.grid = PatchGrid(
            *sizes_px, self.patch_px, self.stride_px, self.edges, name=self.bank.name
        )
        names = self.source.names(self.bank)
        self.split_images = split_images(names, self.source.splits, seed=self.source.split_seed)
        is_shared_out = (
            sum(len(numbers) > 0 for numbers in self.split_images.values()) > 1
        )  # not to predict
        if (
            self.source.root
            and self.source.masks is None
            and self.synthesis is not None
            and is_shared_out
        ):
            log.info("no masks: targets are taken as good, and defects are drawn into them")
        augment, patch_px = stage_augmentations(self.augment), self.grid.patch_px
        self.margins_px = find_margins(augment, patch_px)
        self.transformation = StripeTransform(
            values=find_unit_range(self.bank.dtype, self.value_range),
            read_px={
                s: (patch_px[0] + 2 * m[0], patch_px[1] + 2 * m[1])
                for s, m in self.margins_px.items()
            },
            expand=rule_of(self.source.layout).expand,
            seed=self.loader.seed,
            synthesis=self.synthesis,
            nuisance=self.nuisance,
            augment=augment,
        )
