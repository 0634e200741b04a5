"""`InspectionDataModule`: single inspection images with masks of their defects, as people have them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment import stage_augmentations
from lit_data.checks import check_choice
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import MaskedKeywords
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datamodules.source import name_options
from lit_data.datamodules.stripe_transform import (
    PatchVisuals,
    StripeTransform,
    find_margins,
    find_unit_range,
)
from lit_data.datasets.inspection.occupancy import PartialMasks, count_classes, is_defect
from lit_data.datasets.inspection.patches import InspectionDataset, Sampling, SamplingOptions
from lit_data.datasets.inspection.splitting import ImageSplitter, describe_splits, find_groups
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, show_path
from lit_data.grid import PatchGrid, pair_px
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.io.images.scaling import OriginalSizes, Scaling
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.types import Array, Batch, PathText, PlannedBatch, Stage

_PATCH_PX: Final = 128

log = logging.getLogger(__name__)


class InspectionDataModule(BaseDataModule[InspectionDataset]):
    """Patches of single images with the masks of their defects.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, C, H, W] float32     0..1; C is 3 unless `read` says otherwise
    ``mask``         [B, 1, H, W] float32     {0, 1}, defects; with `classes` their numbers; 255 where pixels
                                              are ignored; not when predicting
    ``index``        [B] int64                number of the patch among those of all images
    ``image_index``  [B] int64                number of the image
    ``position``     [B, 2] int64             (y, x) of the patch in its image, px
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Args, beside those of `InspectionFiles` and `BaseDataModule`:
        splits: Whole images to train, val, test. `auto`: by folders named so, where none says val
            a part of train; else 70 / 15 / 15 % of each kind of defect, of their classes and
            sizes, and images that are equal to the byte in the same split. `folders`, fractions,
            lists or the ``splits.csv`` of a run as for `split_images`; fractions keep kinds,
            classes and equal images likewise.
        similar: `together` keeps near-duplicates (saved anew, scaled, brighter) in one split;
            `apart` does not look at them.
        groups: A regular expression; images in whose paths it, or its first group, matches the
            same (a lot, a panel) stay in one split.
        train_on: `all`, or `good`: only images without a defect train, also where there are no
            masks at all. An image shows one where its mask marks a pixel, or where folders are
            named after kinds and its own is not ``good``. Splits are then those of
            `ImageSplitter.split_good`; without masks, defective images are in none.
        sampling: Which patches train, see `SamplingOptions`.
        patch_px: Patch size, one number or (height, width); smaller images are reflect-padded.
        size_px: Makes a sample of each whole image, in the place of patches: image and mask are
            scaled, aspect ratio kept, to fit this size, one number or (height, width), and
            reflect-padded to it. `None` cuts patches. See `lit_data.io.images.scaling`.
        scale: Scales images and masks by this factor before patches are cut, such as 0.5; `None`
            leaves them.
        stride_px: Distance between patches; by default they lie side by side.
        value_range: Pixel values that become 0 and 1; by default all of an unsigned dtype, 0..1
            for float32.
        synthesis: Synthetic defects: on training samples beside those that masks show, and
            without masks, of good parts alone, on all of train, val and test.
        augment: Augmentation of the training split, or a mapping of stages to theirs.

    Raises:
        ConfigError: An option is out of its range.
    """

    bank: ImageBank
    original_sizes: OriginalSizes | None
    grid: PatchGrid
    transformation: StripeTransform
    _masks: PartialMasks | None
    _is_positive: NDArray[np.bool_] | None = (
        None  # [images] whether its mask shows a defect, once that was counted
    )
    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "mask",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    @name_options(InspectionFiles)
    def __init__(
        self,
        root: PathText | None = None,
        *,
        classes: Sequence[str] | None = None,
        similar: Literal["together", "apart"] = "together",
        groups: str | None = None,
        train_on: Literal["all", "good"] = "all",
        sampling: SamplingOptions | None = None,
        patch_px: int | tuple[int, int] = _PATCH_PX,
        stride_px: int | tuple[int, int] | None = None,
        size_px: int | tuple[int, int] | None = None,
        scale: float | None = None,
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        synthesis: DefectSpec | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.source: InspectionFiles = InspectionFiles.of(
            root=root, classes=classes, scaling=Scaling.of(size_px, scale), **options
        )
        self.similar = similar
        self.groups = groups
        self.synthesis = synthesis
        self.augment = augment
        self.train_on = train_on
        self.value_range = value_range
        self.classes = self._choose_classes()
        self.patch_px, self.stride_px = _choose_grid(self.source.scaling, patch_px, stride_px)
        self.sampling = self._choose_sampling(sampling or SamplingOptions())

    def build_dataset(self, stage: Stage) -> InspectionDataset:
        """Patches of the images of one stage; those of all images to predict."""
        margin_px = self.margins_px[stage]
        if stage == "predict":
            return InspectionDataset(self.bank, self.grid, margin_px=margin_px)
        images = self.split_images[stage]
        if self.train_on == "good" and stage == "train" and not len(images):
            raise ConfigError(
                f"{show_path(self.source.folder)}: no image of train is without a defect, and data.train_on=good "
                "trains with such alone: add images of good parts, or check masks, folders and data.splits"
            )
        if self._masks is None and self.train_on == "good" and self.synthesis is None:
            nothing_marked = np.full(len(self.bank), -1)
            masks = PartialMasks(self.bank, images, self.bank, nothing_marked)
            return InspectionDataset(
                self.bank, self.grid, images=images, masks=masks, margin_px=margin_px
            )
        if self._masks is None:
            if self.synthesis is None:
                raise ConfigError(
                    f"{show_path(self.source.folder)}: no masks were found, so nothing says what a defect is: name "
                    "their folder with data.masks, see docs/inspection.md for the layouts that are known, or draw "
                    "defects with synthesis=library"
                )
            return InspectionDataset(self.bank, self.grid, images=images, margin_px=margin_px)
        return InspectionDataset(
            self.bank,
            self.grid,
            images=images,
            masks=self._masks.select(images),
            margin_px=margin_px,
            sampling=self._look_for_samples(self._masks)
            if stage == "train" and len(images)
            else None,
        )

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw the defects and the augmentation of each sample from its own stream."""
        planned: PlannedBatch = batch | {"index": batch["draw"]}
        if "mask" in batch and stage == "train":
            planned = self.transformation.add_plan(planned, stage)
        planned = self.transformation.plan(planned, stage)
        return planned | {"index": batch["index"]}

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cast to float, augment."""
        images, masks = self.transformation.finish(batch, stage)
        finished = {key: batch[key] for key in self.batch_keys if key in batch} | {"image": images}
        return finished if masks is None else finished | {"mask": masks}

    def inspect(self, stage: Stage) -> PatchVisuals:
        """Samples before augmentation."""
        return PatchVisuals(self.transformation, stage)

    @override
    def check_sources(self) -> dict[str, int]:
        return super().check_sources() | self.renew(self.source.unstored()).describe()

    def _foretell(self) -> str:
        """What was found and will be drawn, in one line, before an image is decoded."""
        found, classes, synthesis = self.source.found, self.classes, self.synthesis
        told = [f"layout {found.layout}, {found.describe()}"] + (
            [f"classes {', '.join(classes)}"] if classes else []
        )
        if synthesis is None:
            return "; ".join([*told, "no defects are drawn"])
        splits = "train" if any(found.masks) else ", ".join(SPLITS)
        families = ", ".join(family.name for family in synthesis.members)
        return "; ".join(
            [
                *told,
                f"defects are drawn on {synthesis.probability:.0%} of the samples of {splits}: {families}",
            ]
        )

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set: images, those with masks or defects, patches of each split."""
        about = describe_bank(self.bank) | {"layout": self.source.found.layout}
        about |= {
            "images_with_masks": 0
            if self._masks is None
            else int((self._masks.of_image >= 0).sum())
        }
        about |= {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        if self._masks is not None:
            self.count_classes()
            assert self._is_positive is not None
            positive = {
                split: int(self._is_positive[numbers].sum())
                for split, numbers in self.split_images.items()
            }
            about |= {f"{split}_positive_images": count for split, count in positive.items()}
        return about | (
            {f"{split}_patches": len(self.dataset(split)) for split in SPLITS}
            if self._masks is not None
            else {}
        )

    def read_mask(self, number: int) -> Array | None:
        """[H, W] uint8 numbers of classes in an image; None where there are no masks, or its mask
        is bad.

        Of a scaled image it has the size of the file, and the accuracy of the scaled mask.
        """
        if self._masks is None or number in self._bad:
            return None
        mask: Array = self._masks[number]
        sizes = self.original_sizes
        restored = mask if sizes is None else sizes.scaling.restore_mask(mask, sizes.of(number))
        class_numbers: Array = restored[0]
        return class_numbers

    def has_defect(self, number: int) -> bool | None:
        """Return True if the mask of an image shows a defect; None where there are no masks, or its mask is bad."""
        if self._masks is None or number in self._bad:
            return None
        return bool(is_defect(self._masks[number]).any())

    @property
    def image_kinds(self) -> list[str]:
        """Kind of each image, ``good`` for those without a defect; empty where no folder says so."""
        found = self.source.found
        kinds = dict(zip(map(str, found.images), found.kinds, strict=True))
        return [kinds[self.bank.name(number)] for number in range(len(self.bank))]

    @property
    @override
    def image_classes(self) -> Sequence[str]:
        """Kind of each image; where no folder says it, ``good`` or ``defect`` as its mask shows."""
        kinds = self.image_kinds
        if any(kinds) or self._is_positive is None:
            return kinds if any(kinds) else ()
        return ["defect" if is_positive else "good" for is_positive in self._is_positive]

    @property
    def image_sizes_px(self) -> Tensor:
        """[images, 2] int64 (height, width) of each image."""
        return torch.from_numpy(np.stack((self.bank.heights_px, self.bank.widths_px), axis=1))

    def count_classes(self, split: Stage | None = None) -> NDArray[np.int64]:
        """[n, classes] pixels of each class, the background first, in the images of a split; of all
        images for None.

        Raises:
            ConfigError: There are no masks.
        """
        if self._masks is None:
            raise ConfigError("there are no masks whose pixels could be counted")
        classes = len(self.source.classes or ("defect",)) + 1
        counts = count_classes(self._masks, classes, self._kept_folder)
        self._is_positive = counts[:, 1:].sum(1) > 0
        return counts if split is None else counts[self.split_images[split]]

    @override
    def open_source(self) -> None:
        log.info("%s: %s", show_path(self.source.folder), self._foretell())
        self.bank = self.source.open_images()
        heights_px, widths_px = np.maximum(
            [self.bank.heights_px, self.bank.widths_px], np.array(self.patch_px)[:, None]
        )
        self.grid = PatchGrid(
            heights_px, widths_px, self.patch_px, self.stride_px, name=self.bank.name
        )
        self._masks, self._bad = self.source.open_all_masks(self.bank)
        self.original_sizes = self.source.find_original_sizes(self.bank)
        self.split_images = {
            split: np.array([n for n in numbers.tolist() if n not in self._bad], np.int64)
            for split, numbers in self._choose_splits().items()
        }
        if sum(len(numbers) > 0 for numbers in self.split_images.values()) > 1:
            log.info(
                "splits: %s",
                describe_splits(self.split_images, self.image_kinds, self._is_positive),
            )
        augment = stage_augmentations(self.augment)
        self.margins_px = find_margins(augment, self.patch_px)
        self.transformation = StripeTransform(
            values=find_unit_range(self.bank.dtype, self.value_range),
            read_px=dict.fromkeys(self.margins_px, self.patch_px),
            expand=tuple(range(self.bank.channels)),
            seed=self.loader.seed,
            synthesis=self.synthesis,
            nuisance=None,
            augment=augment,
            is_single=True,
        )

    def _choose_sampling(self, options: SamplingOptions) -> Sampling:
        return Sampling(options=options, classes=tuple(self.classes or ()), seed=self.loader.seed)

    def _choose_classes(self) -> Sequence[str] | None:
        """Those of the source; options that do not go together with them are refused."""
        check_choice("similar", self.similar, ("together", "apart"))
        check_choice("train_on", self.train_on, ("all", "good"))
        if self.synthesis is not None and self.source.classes is not None:
            raise ConfigError(
                "drawn defects are of no class: set synthesis=none, or leave data.classes out"
            )
        return self.source.classes

    def _look_for_samples(self, masks: PartialMasks) -> Sampling:
        least = (self.sampling.options.skip_blank or 0) * self.transformation.values.scale
        sampling = replace(self.sampling, image_kinds=self.image_kinds)
        return sampling.look(masks, self.grid, self.bank, least, self._kept_folder)

    def _choose_splits(self) -> dict[str, NDArray[np.int64]]:
        masks, found = self._masks, self.source.found
        splitter = ImageSplitter(
            names=self.source.names(self.bank),
            kinds=self.image_kinds,
            has_mask=None if masks is None else masks.of_image >= 0,
            count_classes=self.count_classes,
            find_groups=self._find_groups,
            seed=self.source.split_seed,
        )
        if self.train_on == "all":
            return splitter.split(self.source.splits, is_anomaly_set=found.layout == "anomaly")
        is_good = self._find_good()
        splits = splitter.split_good(self.source.splits, is_good)
        if masks is None:  # nothing says where their defects are, so that they cannot be scored
            splits = {split: numbers[is_good[numbers]] for split, numbers in splits.items()}
        return splits

    def _find_good(self) -> NDArray[np.bool_]:
        """[n] which images show no defect, as far as masks and folders say."""
        kinds = np.array(self.image_kinds)
        is_good = np.ones(len(self.bank), np.bool_)
        if (kinds == "good").any():
            is_good = (kinds == "good") | (kinds == "")
        if self._masks is not None:
            is_good &= self.count_classes()[:, 1:].sum(1) == 0
        return is_good

    def _find_groups(self, names: Sequence[str]) -> NDArray[np.int64]:
        return find_groups(
            self.bank,
            names,
            pattern=self.groups,
            similar=self.similar == "together",
            folder=self._kept_folder,
        )

    @property
    def _kept_folder(self) -> Path:
        """Where stays what was found by reading a whole set."""
        return self.source.kept_folder


def _choose_grid(
    scaling: Scaling | None,
    patch_px: int | tuple[int, int],
    stride_px: int | tuple[int, int] | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return size and distance of patches, (height, width) each: those of whole images where each
    one is scaled to fit.

    Raises:
        ConfigError: A size is not positive, or patches are chosen beside whole images.
    """
    sides_px = pair_px("patch_px", patch_px)
    whole_px = None if scaling is None else scaling.size_px
    if whole_px is None:
        return sides_px, sides_px if stride_px is None else pair_px("stride_px", stride_px)
    if stride_px is not None or sides_px not in (whole_px, pair_px("patch_px", _PATCH_PX)):
        given = f"patch_px={patch_px}" if stride_px is None else f"stride_px={stride_px}"
        raise ConfigError(
            f"size_px={list(whole_px)} makes a sample of each whole image, and {given} is for patches: leave "
            "data.patch_px and data.stride_px out, or scale by data.scale=0.5 and cut patches"
        )
    return whole_px, whole_px
