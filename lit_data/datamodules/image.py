"""`ImageDataModule`, the base of all datamodules of image patches."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment import SingleTexture, stage_augmentations
from lit_data.core.errors import ConfigError
from lit_data.core.grid import Edges, PatchGrid, pair_px
from lit_data.core.types import Bools, Ints, PathText, Size, Stage
from lit_data.core.value_range import find_unit_range
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_batch import ImageBatches, ImageTransform, find_margin
from lit_data.datamodules.image_files import LayoutKeywords, MaskedImageFolder
from lit_data.datamodules.synthesis_visuals import SynthesisVisuals
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.patch_source import GridPatches, PatchSource, make_padded_grid
from lit_data.datasets.patches import DefectPaster, PatchDataset, PatchWriter
from lit_data.datasets.references import rule_of
from lit_data.datasets.split_names import SPLITS
from lit_data.images.bank import ImageBank, describe_bank
from lit_data.images.scaling import Scaling
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec, Synthesis

PATCH_PX = 128
_DRAWN_LATE = (
    "synthetic defects of these images are drawn on the device, after the transforms of the "
    "workers, which would not change them: set synthesis=none, or use an augmentation on the "
    "device, such as augment=segmentation"
)

log = logging.getLogger(__name__)

Augment = nn.Module | Mapping[Stage, nn.Module | None] | None


class ImageDataModule(ImageBatches):
    """Patches of images with masks or synthetic defects; the base of all datamodules of patches.

    A batch has ``image`` [B, C, H, W] float32 in 0..1, ``mask`` [B, K, H, W] float32 unless it is
    for prediction, ``index``, ``image_index`` and ``epoch`` [B] int64, and ``position`` [B, 2]
    int64, (y, x) in px. The layout of the files determines the number of references of an image;
    see `StripeDataModule`. A subclass names its files in `source_type`.

    Args, in addition to those of `MaskedImageFolder`:
        source: Files of images and masks; None makes them from the options.
        patch_px: Patch size, one number or (height, width).
        stride_px: Distance between patches; None places them side by side.
        edges: `cover`, `drop` or `pad`, see `PatchGrid`; None covers images too, and reflect-pads
            those that are smaller than a patch.
        mask_splits: Splits that use masks, if there are any; the others use synthetic defects.
        value_range: Pixel values that become 0 and 1; by default the whole range of an unsigned
            dtype, and 0..1 for float32.
        synthesis: Defects to draw; None draws none.
        augment: Augmentation of the training split, or a mapping from stages to augmentations.
        loader: Options of the loader, such as batch size, workers and seed.
        batch_format: Format of a batch, see `BaseDataModule`.

    Attributes:
        source_type: Class of the files.
        grid: The patches of all images; set by `setup`.
        classes: Names of the kinds of defects that are distinguished, if any.
        labels: [images] label of each image, if samples have labels.
        unmarked: [images] True for images with a defect that no mask marks, if there are any.
        reads_margins: False reads patches without the margins that their augmentation could use.
    """

    source_type: ClassVar[type[MaskedImageFolder]] = MaskedImageFolder
    source: MaskedImageFolder
    bank: ImageBank
    grid: PatchGrid
    classes: Sequence[str] | None = None
    labels: Ints | None = None
    unmarked: Bools | None = None
    reads_margins: ClassVar[bool] = True
    batch_keys: Sequence[str] = (
        "image",
        "mask",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    def __init__(
        self,
        root: PathText | None = None,
        *,
        source: MaskedImageFolder | None = None,
        patch_px: int | Size = 128,
        stride_px: int | Size | None = None,
        edges: Edges | None = None,
        mask_splits: Sequence[Stage] = SPLITS,
        value_range: tuple[float, float] | None = None,
        synthesis: Synthesis | None = None,
        augment: Augment = None,
        loader: LoaderOptions | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[LayoutKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.source = source or self.source_type.of(root=root, **options)
        if value_range is not None:
            self.source = self.source.keeping_numbers()
        self.patch_px = pair_px("patch_px", patch_px)
        self.stride_px = self.patch_px if stride_px is None else pair_px("stride_px", stride_px)
        self.edges = edges
        self.mask_splits = tuple(mask_splits)
        self.value_range = value_range
        self.synthesis = synthesis
        self.augment = {} if augment is None else stage_augmentations(augment, self.batch_keys)
        self.nuisance: SingleTexture | None = None  # for references made from one texture

    @override
    def prepare_data(self) -> None:
        super().prepare_data()
        # One process of each node decodes the masks before the others open them.
        if self.source.list_masks():
            for split in self.mask_splits:
                self.dataset(split)

    def build_dataset(self, stage: Stage) -> PatchDataset:
        """Return patches of the images of one stage, or of all images without changes to predict.

        Only this method decides whether workers or the device draw defects into them, if any.
        """
        make = partial(
            PatchDataset,
            self.bank,
            pixels=self.source.cache != "device",
            margin_px=self._find_margin_px(stage),
        )
        if stage == "predict":
            return make(GridPatches(self.grid))
        images, masks = self.open_split_masks(stage)
        patches = self.choose_patches(images, stage)
        # Single images are trained with both real and synthetic defects.
        trains_beside = self.transformation.is_single and stage == "train"
        is_drawn = self.synthesis is not None and (masks is None or trains_beside)
        runs_on_host = self.fit_transformation(stage).runs_on_host
        if masks is None and is_drawn:
            # The choice of who draws is measured on samples without drawn defects.
            writer = self.choose_writer(make(patches))
            if runs_on_host:
                writer = self._make_host_writer()
            return make(patches, writer=writer, drawn_late=writer is None)
        if is_drawn and runs_on_host:
            raise ConfigError(_DRAWN_LATE)
        return make(
            patches,
            masks=masks,
            drawn_late=is_drawn,
            labels=self.labels,
            unmarked=self.unmarked,
            paster=self.choose_paster(patches),
        )

    def _make_host_writer(self) -> PatchWriter:
        """Return the writer for workers that also augment, and therefore must draw first.

        Raises:
            ConfigError: Workers cannot draw.
        """
        writer = self.transformation.make_writer()
        if writer is None:
            raise ConfigError(_DRAWN_LATE)
        return writer

    def choose_patches(self, images: Ints, stage: Stage) -> PatchSource:
        """Return the patches of the images of a split; by default the whole grid."""
        return GridPatches(self.grid, images)

    def choose_paster(self, patches: PatchSource) -> DefectPaster | None:
        """Return the object that pastes defects of some patches into others; None pastes nothing."""
        return None

    def choose_writer(self, dataset: PatchDataset) -> PatchWriter | None:
        """Return the writer that workers draw into patches with; None if the device draws."""
        return None

    def open_split_masks(self, stage: Stage) -> tuple[Ints, ImageBank | None]:
        """Open the masks of a split.

        Returns:
            Numbers of the images, without those whose bad masks are skipped; and their masks,
            `None` if the split uses none.

        Raises:
            ConfigError: The split has neither masks nor synthetic defects.
        """
        images = self.split_images[stage]
        masks = None
        if stage in self.mask_splits:
            masks, good_images = self.source.open_masks(images.tolist(), self.bank, stage)
            images = np.asarray(good_images, np.int64)  # an image without its mask has no truth
        if masks is None and self.synthesis is None and len(images):
            raise ConfigError(
                f"the {stage} split has neither masks nor synthesis: "
                "set data.masks or data.synthesis"
            )
        return images, masks

    @override
    def inspect(self, stage: Stage) -> Visuals:
        transformation = self.transformation_of(stage)
        synthesis = self.transformation.synthesis
        return SynthesisVisuals(self.dataset(stage), transformation, synthesis, self.device_patches)

    @override
    def check_sources(self) -> dict[str, int]:
        super().check_sources()
        return self.describe_anew()

    def describe_anew(self) -> dict[str, Any]:
        """Return the numbers of `describe` for the current files."""
        return self.renew(self.source.unstored()).describe()

    def describe(self) -> dict[str, Any]:
        """Return numbers about the opened dataset: images and patches of each split, bytes of pixels."""
        images = {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        patches = {f"{split}_patches": len(self.dataset(split)) for split in SPLITS}
        return describe_bank(self.bank) | images | patches

    @override
    def open_source(self) -> None:
        # Each step needs the ones before, because splits may depend on masks.
        self.bank = self.source.open_images()
        self.grid = self.make_grid(self.bank)
        self.open_all_masks()
        self.split_images = self.choose_splits()
        self.transformation, self._transformations = self.make_transformation(), {}

    def _find_margin_px(self, stage: Stage) -> Size:
        augment = self.augment.get(stage) if self.reads_margins else None
        return (0, 0) if augment is None else find_margin(augment, self.patch_px)

    def make_grid(self, bank: ImageBank) -> PatchGrid:
        """Return the patches of the images of a bank."""
        if self.edges is None:
            return make_padded_grid(bank, self.patch_px, self.stride_px)
        sizes_px = bank.heights_px, bank.widths_px
        return PatchGrid(*sizes_px, self.patch_px, self.stride_px, self.edges, name=bank.name)

    def open_all_masks(self) -> None:
        """Open the masks of all images if splits or samples depend on them."""

    def choose_splits(self) -> dict[str, Ints]:
        """Return the numbers of the images of train, val and test."""
        others = self.source.list_others(self.bank)
        return self.source.split(self.source.names(self.bank), others)

    def make_transformation(self) -> ImageTransform:
        """Return the transform of the batches of any stage, without augmentation."""
        if not isinstance(self.synthesis, DefectSpec | None):
            kind = type(self.synthesis).__name__
            raise ConfigError(
                f"synthesis is a {kind}, which draws no defects: set synthesis=library"
            )
        # Without references every channel belongs to the same image, and so does a defect.
        channels = rule_of(self.source.layout).expand
        return ImageTransform(
            values=find_unit_range(self.bank.dtype, self.value_range),
            read_px=self.patch_px,
            expand=channels or tuple(range(self.bank.channels)),
            seed=self.loader.seed,
            synthesis=self.synthesis,
            nuisance=self.nuisance,
            augment=None,
            is_single=channels is None,
        )

    @property
    def image_sizes_px(self) -> Tensor:
        """[images, 2] int64 (height, width) of each image."""
        return torch.from_numpy(np.stack((self.bank.heights_px, self.bank.widths_px), axis=1))

    @override
    def fit_transformation(self, stage: Stage) -> ImageTransform:
        (height, width), (above_px, left_px) = self.patch_px, self._find_margin_px(stage)
        read_px = height + 2 * above_px, width + 2 * left_px
        return replace(self.transformation, read_px=read_px, augment=self.augment.get(stage))


def choose_grid(
    scaling: Scaling | None,
    patch_px: int | Size,
    stride_px: int | Size | None,
) -> tuple[Size, Size]:
    """Return size and distance of patches, (height, width) each.

    If each image is scaled to fit, both are the size of a whole image.

    Raises:
        ConfigError: A size is not positive, or patches and whole images are both chosen.
    """
    sides_px = pair_px("patch_px", patch_px)
    whole_px = None if scaling is None else scaling.size_px
    if whole_px is None:
        return sides_px, sides_px if stride_px is None else pair_px("stride_px", stride_px)
    if stride_px is not None or sides_px not in (whole_px, pair_px("patch_px", PATCH_PX)):
        patch_option = (
            f"data.patch_px={patch_px}" if stride_px is None else f"data.stride_px={stride_px}"
        )
        raise ConfigError(
            f"data.size_px={list(whole_px)} makes a sample of each whole image, and "
            f"{patch_option} is for patches: remove data.patch_px and data.stride_px, or cut "
            "patches with data.size_px=null"
        )
    return whole_px, whole_px
