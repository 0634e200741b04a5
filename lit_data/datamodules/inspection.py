"""`InspectionDataModule`: single inspection images with masks of their defects, as people have them."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from lit_data.augment import stage_augmentations
from lit_data.checks import check_share
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.source import MaskedImageFolder
from lit_data.datamodules.stripe_transform import StripeTransform, find_margins, find_unit_range
from lit_data.datamodules.visuals import Inspection
from lit_data.datasets.inspection.annotations import draw_masks, read_annotations
from lit_data.datasets.inspection.layouts import InspectionSet, find_inspection_set
from lit_data.datasets.inspection.patches import InspectionDataset, PartialMasks, split_stratified
from lit_data.datasets.splits import DEFAULT_SHARES, SPLITS, Splits, split_images
from lit_data.errors import ConfigError, show_path
from lit_data.grid import PatchGrid, pair_px
from lit_data.io.images.decoders import ImageSource, MaskDecoder
from lit_data.io.images.header_scan import OnBad, find_faults
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.io.images.masks import MaskOptions
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.writing import write_png
from lit_data.io.progress import track
from lit_data.io.remote import RemoteOptions, Scope
from lit_data.io.store.arrays import publish
from lit_data.io.store.sources import list_sources
from lit_data.io.store.store import DecodedStore
from lit_data.io.temp import temp_folder
from lit_data.loading import LoaderOptions
from lit_data.samples.inspection import ensure_inspection_samples
from lit_data.types import Batch, PlannedBatch, Stage

log = logging.getLogger(__name__)

ANNOTATION_FORMAT = 1  # raise it with every change of a drawn mask


@dataclass(frozen=True, kw_only=True)
class InspectionFiles(MaskedImageFolder):
    """The files of an inspection set; by default grey images are copied to three channels.

    Args:
        masks: Folder of the masks; `None` looks for them, see `lit_data.datasets.inspection.layouts`.
    """

    read: ReadOptions = field(default_factory=partial(ReadOptions, gray_to_rgb=True))

    @cached_property
    def found(self) -> InspectionSet:
        """The images, and the mask of each that has one."""
        found = find_inspection_set(self.folder, self.masks, self.patterns)
        if found.layout == "none":
            found = self._draw_annotations(found)
        log.info("%s: %s", show_path(self.folder), found.describe())
        return found

    @override
    def list_images(self) -> list[ImageSource]:
        return [ImageSource((str(path),)) for path in self.found.images]

    def open_all_masks(self, bank: ImageBank) -> tuple[ImageBank | None, NDArray[np.int64], set[int]]:
        """Decode the masks that there are.

        Args:
            bank: The images.

        Returns:
            The masks; for each image the number of its mask, -1 where it has none; and the images whose masks are bad,
            which are to be left out.

        Raises:
            DataError: Masks are bad, and are not to be skipped.
        """
        of_path = {str(image): mask for image, mask in zip(self.found.images, self.found.masks, strict=True)}
        wanted = [of_path[bank.name(number)] for number in range(len(bank))]
        sources = [ImageSource((str(mask),)) for mask in wanted if mask is not None]
        numbers = np.full(len(bank), -1, np.int64)
        if not sources:
            return None, numbers, set()
        masks = self._open_bank(sources, MaskDecoder(self.mask_read), "masks")
        places = {masks.name(number): number for number in range(len(masks))}
        bad = set()
        for image, mask in enumerate(wanted):
            if mask is not None and str(mask) in places:
                numbers[image] = places[str(mask)]
            elif mask is not None:
                bad.add(image)
        if bad:
            log.warning("%d images are left out with their masks, which are bad", len(bad))
        return masks, numbers, bad

    @override
    def check(self) -> dict[str, int]:
        self.refresh()
        images, masks = self.list_images(), [mask for mask in self.found.masks if mask is not None]
        problems = find_faults(images, self.decoder)
        problems.extend(find_faults([ImageSource((str(mask),)) for mask in masks], MaskDecoder(self.mask_read)))
        problems.raise_if_any(f"{len(problems)} of {len(images) + len(masks)} images and masks are bad")
        return {"images": len(images), "masks": len(masks)}

    def _draw_annotations(self, found: InspectionSet) -> InspectionSet:
        """The set with masks drawn from its files of annotations, once; as it is where there are none."""
        annotated = read_annotations(self.folder, found.images)
        if annotated is None:
            return found
        sources = [ImageSource((str(path),)) for path in (*annotated.files, *found.images)]
        folder = (
            self._cache / "annotations" / list_sources(sources, progress=False).digest(f"masks {ANNOTATION_FORMAT}")
        )
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with temp_folder(folder.parent) as temp:
                masks = draw_masks(annotated, found.images)
                for number, mask in track(masks, "drawing masks", len(annotated.marks)):
                    write_png(temp / f"{number}.png", mask)
                publish(temp, folder)
        drawn = [folder / f"{number}.png" for number in range(len(found.images))]
        masks_of = tuple(mask if number in annotated.marks else None for number, mask in enumerate(drawn))
        return replace(found, layout=annotated.layout, masks=masks_of, where=f"drawn from {annotated.layout} files")

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns, self.masks))

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_inspection_samples(folder, **self.samples)

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns, masks=self.masks)


class InspectionDataModule(BaseDataModule[InspectionDataset]):
    """Patches of single images with the masks of their defects.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, C, H, W] float32     0..1; C is 3 unless `read` says otherwise
    ``mask``         [B, 1, H, W] float32     {0, 1}, defects; not when predicting
    ``index``        [B] int64                number of the patch among those of all images
    ``image_index``  [B] int64                number of the image
    ``position``     [B, 2] int64             (y, x) of the patch in its image, px
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Args, beside those of `InspectionFiles` and `BaseDataModule`:
        splits: Whole images to train, val, test. `auto`: by folders named so; else 70 / 15 / 15 % of each kind of
            defect, and images that are equal to the byte in the same split. `folders`, shares or lists as for
            `split_images`; shares are of each kind too.
        split_seed: Chooses the images of each share.
        positives: Share of training samples that show a defect, chosen anew in each epoch; `None` takes every patch
            once. The other stages take every patch.
        patch_px: Patch size, one number or (height, width); smaller images are mirrored on.
        stride_px: Distance between patches; by default they lie side by side.
        value_range: Pixel values that become 0 and 1; by default all of an unsigned dtype, 0..1 for float32.
        augment: Augmentation of the training split, or a mapping of stages to theirs.

    Raises:
        ConfigError: An option is out of its range.
    """

    bank: ImageBank
    grid: PatchGrid
    transformation: StripeTransform
    batch_keys: ClassVar[Sequence[str]] = ("image", "mask", "index", "image_index", "position", "epoch")

    def __init__(
        self,
        root: str | None = None,
        *,
        patterns: Sequence[str] = ("**/*",),
        masks: str | None = None,
        mask_read: MaskOptions | None = None,
        splits: Splits = "auto",
        split_seed: int = 0,
        positives: float | None = None,
        patch_px: int | tuple[int, int] = 128,
        stride_px: int | tuple[int, int] | None = None,
        value_range: tuple[float, float] | None = None,
        read: ReadOptions | None = None,
        on_bad: OnBad = "error",
        cache: str = "store",
        cache_dir: str | None = None,
        cache_bytes: int = 2**30,
        samples: Mapping[str, Any] | None = None,
        remote: RemoteOptions | None = None,
        loader: LoaderOptions | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        batch_format: BatchFormat = "dict",
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.source: InspectionFiles = InspectionFiles.of(locals())
        self.splits, self.split_seed, self.positives = splits, split_seed, positives
        self.patch_px = pair_px("patch_px", patch_px)
        self.stride_px = self.patch_px if stride_px is None else pair_px("stride_px", stride_px)
        self.value_range, self.augment = value_range, augment
        if positives is not None:
            check_share("positives", positives)

    def build_dataset(self, stage: Stage) -> InspectionDataset:
        """Patches of the images of one stage; those of all images to predict."""
        margin_px = self.margins_px[stage]
        if stage == "predict":
            return InspectionDataset(self.bank, self.grid, margin_px=margin_px)
        if self._masks is None:
            raise ConfigError(
                f"{show_path(self.source.folder)}: no masks were found, so nothing says what a defect is: name their "
                "folder with data.masks, or see docs/inspection.md for the layouts that are known"
            )
        images = self.split_images[stage]
        return InspectionDataset(
            self.bank,
            self.grid,
            images=images,
            masks=PartialMasks(self.bank, images, self._masks, self._mask_of[images]),
            margin_px=margin_px,
            positives=self.positives if stage == "train" and len(images) else None,
            seed=self.loader.seed,
        )

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw the augmentation of each sample from its own stream."""
        planned = self.transformation.plan(batch | {"index": batch["draw"]}, stage)
        return planned | {"index": batch["index"]}

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cast to float, augment."""
        images, masks = self.transformation.finish(batch, stage)
        finished = {key: batch[key] for key in self.batch_keys if key in batch} | {"image": images}
        return finished if masks is None else finished | {"mask": masks}

    def inspect(self, stage: Stage) -> "InspectionVisuals":
        """Samples before augmentation."""
        return InspectionVisuals(self.transformation, stage)

    @override
    def check_sources(self) -> dict[str, int]:
        return super().check_sources() | self._unstored().describe()

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set: images, those with masks, patches of each split."""
        about = describe_bank(self.bank) | {"layout": self.source.found.layout}
        about |= {"images_with_masks": int((self._mask_of >= 0).sum())}
        about |= {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        return about | (
            {f"{split}_patches": len(self.dataset(split)) for split in SPLITS} if self._masks is not None else {}
        )

    @override
    def open_source(self) -> None:
        self.bank = self.source.open_images()
        heights_px, widths_px = np.maximum(
            [self.bank.heights_px, self.bank.widths_px], np.array(self.patch_px)[:, None]
        )
        self.grid = PatchGrid(heights_px, widths_px, self.patch_px, self.stride_px, name=self.bank.name)
        self._masks, self._mask_of, bad = self.source.open_all_masks(self.bank)
        self.split_images = {
            split: np.array([n for n in numbers.tolist() if n not in bad], np.int64)
            for split, numbers in self._split().items()
        }
        augment = stage_augmentations(self.augment)
        self.margins_px = find_margins(augment, self.patch_px)
        self.transformation = StripeTransform(
            values=find_unit_range(self.bank.dtype, self.value_range),
            read_px=dict.fromkeys(self.margins_px, self.patch_px),
            expand=tuple(range(self.bank.channels)),
            seed=self.loader.seed,
            synthesis=None,
            nuisance=None,
            augment=augment,
        )

    def _split(self) -> dict[str, NDArray[np.int64]]:
        names, found = self.source.names(self.bank), self.source.found
        shares = DEFAULT_SHARES if self.splits == "auto" else self.splits
        in_folders = found.layout != "anomaly" and {name.split("/", 1)[0] for name in names} <= set(SPLITS)
        is_shared = isinstance(shares, Mapping) and all(isinstance(share, int | float) for share in shares.values())
        if not is_shared or (self.splits == "auto" and in_folders):
            return split_images(names, self.splits, seed=self.split_seed)
        split_images(names, shares)  # checks the shares
        if self.splits == "auto" and found.layout == "anomaly":
            log.info("train/good shows no defect: images of test are shared out too, see docs/inspection.md")
        kinds = dict(zip(map(str, found.images), found.kinds, strict=True))
        told = [f"{kinds[self.bank.name(number)]} {marked}" for number, marked in enumerate(self._mask_of >= 0)]
        numbers = {split: float(dict(shares).get(split, 0)) for split in SPLITS}  # type: ignore[arg-type]
        return split_stratified(told, self._group_equal(), numbers, seed=self.split_seed)

    def _group_equal(self) -> NDArray[np.int64]:
        """Images whose files are equal to the byte are one group; without a store each is its own."""
        if not isinstance(self.bank, DecodedStore):
            return np.arange(len(self.bank))
        return np.unique(self.bank.source_states, axis=0, return_inverse=True)[1].reshape(-1)


class InspectionVisuals(Inspection):
    """See `Inspection`.

    Args:
        transformation: What is done with batches.
        stage: Whose samples.
    """

    def __init__(self, transformation: StripeTransform, stage: Stage) -> None:
        self._transformation, self._stage = transformation, stage

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        if self._stage not in self._transformation.augment:
            return None
        images, masks = self._transformation.draw(batch)
        return {"image": images} if masks is None else {"image": images, "mask": masks}
