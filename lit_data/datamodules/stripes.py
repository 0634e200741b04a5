"""`StripeDataModule`: inspection images with a target and two references."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from typing_extensions import override

from lit_data.augment import SingleTexture
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import MaskedKeywords
from lit_data.datamodules.image_transform import ImageTransform, StripeVisuals
from lit_data.datamodules.images import Augment, ImageDataModule
from lit_data.datamodules.placement import Backend, DrawingBackend
from lit_data.datamodules.source import name_options
from lit_data.datamodules.stripe_files import StripeFiles
from lit_data.datasets.patch_source import GridPatches
from lit_data.datasets.patches import PatchDataset
from lit_data.datasets.stripes.layouts import ROLES, rule_of
from lit_data.grid import Edges, PatchGrid, pair_px
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.types import PathText, Stage

log = logging.getLogger(__name__)


class StripeDataModule(ImageDataModule):
    """Patches of images with references; defects are drawn, or real masks say where they are.

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

    transformation: ImageTransform
    synthesis: DefectSpec | None
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
        augment: Augment = None,
        nuisance: SingleTexture | None = None,
        backend: Backend = "auto",
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        super().__init__(
            patch_px=pair_px("patch_px", patch_px),
            value_range=value_range,
            synthesis=synthesis,
            augment=augment,
            nuisance=(nuisance or SingleTexture()) if layout == "single" else None,
            loader=loader,
            batch_format=batch_format,
        )
        self.source: StripeFiles = StripeFiles.of(
            root=root, layout=layout, channels=channels, files=files, **options
        )
        self.channel_map = rule_of(layout).expand
        self.mask_splits = tuple(mask_splits)
        self.stride_px = pair_px("stride_px", stride_px)
        self.edges = edges
        self.backend = DrawingBackend(backend)

    @override
    def prepare_data(self) -> None:
        super().prepare_data()
        if self.source.mask_folder:
            for split in self.mask_splits:
                self.dataset(split)

    def build_dataset(self, stage: Stage) -> PatchDataset:
        """Return patches of the images of one stage; those of all images to predict."""
        if stage == "predict":
            return self.build_plain_dataset(stage)
        images, masks = self.open_split_masks(stage, self.mask_splits)
        make = partial(
            PatchDataset,
            self.bank,
            GridPatches(self.grid, images),
            pixels=self.source.cache != "device",
            margin_px=self.margins_px[stage],
        )
        if masks is not None or self.synthesis is None:
            return make(masks=masks)
        dataset = make()
        writer = self.backend.choose(
            dataset, self.transformation.make_writer(), self.loader, self.trainer
        )
        return dataset if writer is None else make(writer=writer)

    @override
    def inspect(self, stage: Stage) -> StripeVisuals:
        return StripeVisuals(self.dataset(stage), self.transformation, self._device_patches, stage)

    def describe_loaders(self) -> dict[str, dict[str, Any]]:
        """Return for each stage that was read its workers, and who draws the defects."""
        return super().describe_loaders() | self.backend.to_plain()

    @override
    def open_source(self) -> None:
        super().open_source()
        is_split = sum(len(numbers) > 0 for numbers in self.split_images.values()) > 1
        has_masks = self.source.masks is not None or not self.source.root
        if is_split and not has_masks and self.synthesis is not None:
            log.info("no masks: targets are taken as good, and defects are drawn into them")

    @override
    def make_grid(self) -> PatchGrid:
        heights_px, widths_px = self.bank.heights_px, self.bank.widths_px
        return PatchGrid(
            heights_px, widths_px, self.patch_px, self.stride_px, self.edges, name=self.bank.name
        )
