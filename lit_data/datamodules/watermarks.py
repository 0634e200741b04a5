"""`WatermarkDataModule`: pages and photographs with text watermarks, drawn or real."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Unpack

from typing_extensions import override

from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import MaskedImageFolder, MaskedKeywords
from lit_data.datamodules.images import Augment, ImageDataModule
from lit_data.datamodules.source import name_options
from lit_data.datamodules.watermark_transform import WatermarkTransform, WatermarkVisuals
from lit_data.datasets.patch_source import (
    GridPatches,
    PatchSource,
    ProgressiveSize,
    RandomPatches,
    make_padded_grid,
)
from lit_data.datasets.patches import PatchDataset
from lit_data.datasets.splits import SPLITS
from lit_data.datasets.stripes.layouts import describe_no_images
from lit_data.datasets.writers import WatermarkWriter, check_colours
from lit_data.errors import ConfigError, DataError
from lit_data.grid import PatchGrid, pair_px
from lit_data.io.discovery import find_images
from lit_data.io.images.decoders import ImageSource
from lit_data.io.images.image_source import describe_bank
from lit_data.io.images.options import ReadOptions
from lit_data.io.remote import Scope
from lit_data.loading import LoaderOptions
from lit_data.samples.watermarks import ensure_watermark_samples
from lit_data.synthesis.watermarks import GlyphBank, WatermarkSpec
from lit_data.types import PathText, Stage


@dataclass(frozen=True, kw_only=True)
class WatermarkSource(MaskedImageFolder):
    """The files of a watermark set; by default grey images are copied to three channels and alpha is dropped."""

    read: ReadOptions = field(default_factory=partial(ReadOptions, gray_to_rgb=True, alpha="drop"))

    takes_shards = True
    draw = staticmethod(ensure_watermark_samples)

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        if self.masks and not self.root:
            raise ConfigError(
                "the drawn backgrounds have no masks: set data.root, or leave data.masks out"
            )
        super().__post_init__()

    @override
    def _find_images(self) -> list[ImageSource]:
        masks = self.mask_folder
        listed = find_images(self.folder, patterns=self.patterns, exclude=self.exclude).paths
        images = [path for path in listed if masks is None or not path.is_relative_to(masks)]
        if not images:
            raise DataError(describe_no_images(self.folder, [masks] if masks else []))
        return [ImageSource((str(path),)) for path in images]

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns, self.masks))

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns, masks=self.masks)


class WatermarkDataModule(ImageDataModule):
    """Patches of images of any size; watermarks are drawn into them, or lie in them and have masks.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, 3, H, W] float32     0..1, R, G, B
    ``mask``         [B, 1, H, W] float32     0..1, the watermark; not when predicting
    ``clean``        [B, 3, H, W] float32     0..1, the image before its watermark; only with `clean`
    ``index``        [B] int64                number of the sample among those of all images
    ``image_index``  [B] int64                number of the image
    ``position``     [B, 2] int64             (y, x) of the patch in its image, px
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Training patches are cut at random; those of the other stages lie on a grid and have the same
    watermarks in every epoch. Prediction takes the grid of all images, as they are.

    Args, beside those of `WatermarkSource` and `BaseDataModule`:
        mask_splits: Splits that use the masks instead of synthetic watermarks.
        patch_px: Patch size, one number or (height, width); smaller images are reflect-padded.
        stride_px: Distance between the patches of the grid; by default they lie side by side.
        samples_per_image: Training patches of each image in an epoch.
        progressive: Sizes of training patches by epoch, in place of `patch_px`; (first epoch, side
            in px) each, or a `ProgressiveSize`.
        clean: Batches hold ``clean`` too, for modules that restore images; of synthetic watermarks
            alone.
        synthesis: Watermarks to draw; none draws none.
        augment: Augmentation of the training split, or a mapping of stages to theirs.

    Raises:
        ConfigError: An option is out of its range.
    """

    marks: GlyphBank | None
    transformation: WatermarkTransform
    reads_margins = False
    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "mask",
        "clean",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    @name_options(WatermarkSource)
    def __init__(
        self,
        root: PathText | None = None,
        *,
        mask_splits: Sequence[Stage] = SPLITS,
        patch_px: int | tuple[int, int] = 192,
        stride_px: int | tuple[int, int] | None = None,
        samples_per_image: int = 16,
        progressive: ProgressiveSize | Sequence[tuple[int, int]] | None = None,
        clean: bool = False,
        loader: LoaderOptions | None = None,
        synthesis: WatermarkSpec | None = None,
        augment: Augment = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        super().__init__(
            patch_px=pair_px("patch_px", patch_px),
            synthesis=synthesis,
            augment=augment,
            loader=loader,
            batch_format=batch_format,
        )
        self.source: WatermarkSource = WatermarkSource.of(root=root, **options)
        self.mask_splits = tuple(mask_splits)
        self.stride_px = stride_px
        self.samples_per_image = samples_per_image
        self.progressive = _read_sizes(progressive)
        self.clean = clean
        self._spec = synthesis
        self._check()

    @override
    def prepare_data(self) -> None:
        super().prepare_data()
        if self.source.masks:
            for split in self.mask_splits:
                self.dataset(split)

    def build_dataset(self, stage: Stage) -> PatchDataset:
        """Return patches of the images of one stage; those of all images, as they are, to predict."""
        if stage == "predict":
            return self.build_plain_dataset(stage)
        images, masks = self.open_split_masks(stage, self.mask_splits)
        patches: PatchSource = GridPatches(self.grid, images)
        if stage == "train":
            size_px = self.progressive or self.patch_px
            patches = RandomPatches(
                self.bank, images, self.samples_per_image, size_px, self.loader.seed
            )
        writer = None
        if masks is None and self.marks is not None:
            writer = WatermarkWriter(self.marks, self.loader.seed)
        return PatchDataset(self.bank, patches, masks=masks, writer=writer)

    @override
    def inspect(self, stage: Stage) -> WatermarkVisuals:
        fonts = self.marks.fonts if self.marks is not None else ()
        return WatermarkVisuals(self.transformation, stage, fonts)

    @override
    def check_sources(self) -> dict[str, int]:
        fresh = self.renew(self.source.unstored())
        samples = {f"{split}_samples": len(fresh.dataset(split)) for split in SPLITS}
        return self.source.check() | samples

    @override
    def describe(self) -> dict[str, Any]:
        """Return numbers about the opened dataset: images, samples of each split, bytes of its pixels, fonts."""
        samples = {f"{split}_samples": len(self.dataset(split)) for split in SPLITS}
        images = {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        fonts = {"fonts": len(self.marks.fonts) if self.marks else 0}
        return describe_bank(self.bank) | samples | images | fonts

    @override
    def open_source(self) -> None:
        self.marks = GlyphBank(self._spec) if self._spec else None
        super().open_source()

    @override
    def make_grid(self) -> PatchGrid:
        check_colours(self.bank)
        return make_padded_grid(self.bank, self.patch_px, self.stride_px or self.patch_px)

    @override
    def make_transformation(self) -> WatermarkTransform:
        return WatermarkTransform(
            spec=self._spec,
            patch_px=self.patch_px,
            progressive=self.progressive,
            seed=self.loader.seed,
            augment=self.augment,
            clean=self.clean,
        )

    def _check(self) -> None:
        augment = self.augment
        if self.synthesis is not None and not isinstance(self.synthesis, WatermarkSpec):
            kind = type(self.synthesis).__name__
            raise ConfigError(
                f"synthesis is a {kind}, which draws no watermarks: set synthesis=watermark"
            )
        unknown = set(self.mask_splits) - set(SPLITS)
        if unknown:
            raise ConfigError(
                f"mask_splits={list(self.mask_splits)} names no split: choose from {', '.join(SPLITS)}"
            )
        if self.progressive and "train" in augment and augment["train"].crop_px:
            raise ConfigError(
                "progressive sets the size of training patches: leave crop_px out of the augmentation"
            )


def _read_sizes(
    sizes: ProgressiveSize | Sequence[tuple[int, int]] | None,
) -> ProgressiveSize | None:
    return (
        sizes
        if sizes is None or isinstance(sizes, ProgressiveSize)
        else ProgressiveSize(tuple(sizes))
    )
