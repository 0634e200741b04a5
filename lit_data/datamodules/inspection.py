"""`InspectionDataModule`: single images with masks of their defects."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, Unpack

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.names import warn_of_names
from lit_data.core.types import NEUTRAL, Array, Bools, Ints, PathText, Size, Stage
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image import PATCH_PX, Augment, ImageDataModule, choose_grid
from lit_data.datamodules.image_files import MaskedKeywords
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datamodules.own_files import MadeOfFiles
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.balanced_patches import Paster, SampledPatches, Sampling, SamplingOptions
from lit_data.datasets.balanced_splits import (
    ImageSplitter,
    check_folds,
    describe_splits,
    find_groups,
    warn_of_contradictions,
)
from lit_data.datasets.good_names import GOOD, describe_doubt, names_defect
from lit_data.datasets.occupancy import PartialMasks, count_classes, is_defect
from lit_data.datasets.patch_source import PatchSource
from lit_data.datasets.split_lists import TO_SHARE
from lit_data.datasets.split_names import SPLITS
from lit_data.datasets.splits import UNDIVIDED, leave_undivided
from lit_data.images.bank import describe_bank
from lit_data.images.scaling import OriginalSizes, Scaling
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec

log = logging.getLogger(__name__)
_BATCH_KEYS = ("image", "mask", "unmarked", "index", "image_index", "position", "epoch")


class InspectionDataModule(MadeOfFiles, ImageDataModule):
    """Patches of single images with masks of their defects.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, C, H, W] float32     0..1; C is 3 unless `read` says otherwise
    ``mask``         [B, 1, H, W] float32     {0, 1}, defects; with `classes` their numbers; 255 where pixels
                                              are ignored; not when predicting
    ``unmarked``     [B] bool                 images that show a defect by their folder, and no mask says
                                              where: it is 255; only in splits with such images
    ``index``        [B] int64                number of the patch among those of all images
    ``image_index``  [B] int64                number of the image
    ``position``     [B, 2] int64             (y, x) of the patch in its image, px
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Args, in addition to those of `InspectionFiles` and `BaseDataModule`:
        splits: Assignment of whole images to train, val and test. `auto` uses folders with these
            names, and a part of train if there is no val; otherwise 70 / 15 / 15 % of each kind of
            defect, of their classes and sizes, with byte-identical images in the same split.
            `folders`, fractions, lists or the ``splits.csv`` of a run work as in `split_images`;
            fractions treat kinds, classes and identical images in the same way.
        near_duplicates: `together` keeps near-duplicates (saved again, scaled, brighter)
            in one split; `apart` does not search for them.
        groups: A regular expression; images in whose paths it, or its first group, matches the
            same (a lot, a panel) stay in one split.
        train_on: `all`, or `good`: only images without a defect are used for training, even without
            any masks. An image shows a defect if its mask marks a pixel, or if folders are named
            after kinds and its folder is not ``good``; without a mask it is then ``unmarked``.
            Splits are those of `ImageSplitter.split_good`.
        protocol: `mvtec` enforces the protocol of MVTec AD: train on good images only, test on all
            of the folder ``test``, and validate on a part of ``train/good``; any other layout,
            split or option is refused. `auto` leaves this to the other options.
        folds: Number of folds of a cross-validation, instead of `splits`; see
            `ImageSplitter.split_folds`.
        fold: Number of the fold to use as test, from 0.
        sampling: Choice of the patches for training, see `SamplingOptions`.
        patch_px: Patch size, one number or (height, width); smaller images are reflect-padded.
        size_px: Makes a sample of each whole image instead of patches: image and mask are scaled
            with their aspect ratio to fit this size, one number or (height, width), and
            reflect-padded to it. `None` cuts patches. See `lit_data.images.scaling`.
        fit: `stretch` scales each side to `size_px` separately, instead of padding.
        scale: Scales images and masks by this factor before patches are cut, such as 0.5; `None`
            does not scale.
        stride_px: Distance between patches; by default they are side by side.
        value_range: Pixel values that become 0 and 1; by default the whole range of an unsigned
            dtype, and 0..1 for float32.
        synthesis: Synthetic defects to draw, on training samples in addition to those that masks
            mark; without masks, if all parts are good, on train, val and test.
        augment: Augmentation of the training split, or a mapping from stages to augmentations.

    Raises:
        ConfigError: An option is out of its range.
    """

    source: InspectionFiles
    original_sizes: OriginalSizes | None
    synthesis: DefectSpec | None
    _masks: PartialMasks | None
    _is_positive: Bools | None = None  # [images] True if a mask shows a defect, once counted
    _unknown: Ints = np.zeros(0, np.int64)  # images that may or may not show a defect
    _kinds: Sequence[str] = ()
    _doubt: str = ""
    batch_keys: Sequence[str] = _BATCH_KEYS

    def __init__(
        self,
        root: PathText | None = None,
        *,
        classes: Sequence[str] | None = None,
        good: Sequence[str] | None = None,
        near_duplicates: Annotated[Literal["together", "apart"], NEUTRAL] = "together",
        groups: Annotated[str | None, NEUTRAL] = None,
        train_on: Annotated[Literal["all", "good"], NEUTRAL] = "all",
        protocol: Annotated[Literal["auto", "mvtec"], NEUTRAL] = "auto",
        folds: Annotated[int | None, NEUTRAL] = None,
        fold: Annotated[int, NEUTRAL] = 0,
        sampling: Annotated[SamplingOptions | None, NEUTRAL] = None,
        patch_px: Annotated[int | Size, NEUTRAL] = PATCH_PX,
        stride_px: Annotated[int | Size | None, NEUTRAL] = None,
        size_px: int | Size | None = None,
        fit: Literal["contain", "stretch"] = "contain",
        scale: float | None = None,
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        synthesis: DefectSpec | None = None,
        augment: Augment = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        scaling = Scaling.of(size_px, scale, fit)
        patch_px, stride_px = choose_grid(scaling, patch_px, stride_px)
        super().__init__(
            source=InspectionFiles.of(
                root=root,
                classes=classes,
                good=good,
                scaling=scaling,
                takes_labels=train_on == "good",
                **options,
            ),
            patch_px=patch_px,
            stride_px=stride_px,
            mask_splits=(),  # splits depend on the masks, which are opened first
            value_range=value_range,
            synthesis=synthesis,
            augment=augment,
            loader=loader,
            batch_format=batch_format,
        )
        self.near_duplicates = near_duplicates
        self.groups = groups
        self.train_on = "good" if protocol == "mvtec" else train_on
        self.protocol = protocol
        self.folds, self.fold = folds, fold
        self.classes = self.source.classes
        self._check()
        self.sampling: Sampling | None = None
        if sampling is not None:
            classes = tuple(self.classes or ())
            self.sampling = Sampling(options=sampling, classes=classes, seed=self.loader.seed)

    @override
    def open_split_masks(self, stage: Stage) -> tuple[Ints, PartialMasks | None]:
        images = self.split_images[stage]
        if self._find_doubt():
            raise ConfigError(self._find_doubt())
        if self.train_on == "good" and stage == "train" and not len(images):
            raise ConfigError(
                f"{self.source.shown_root}: train has no image without a defect, and "
                "data.train_on=good trains on those only: add images of good parts, or check "
                "masks, folders and data.splits"
            )
        # Masks of all images are open, because `choose_splits` needed them.
        masks = self._select_masks(images)
        if masks is None and self.synthesis is None:
            raise ConfigError(self.source.describe_lack())
        if stage == "train" and self.train_on == "all" and self.synthesis is None:
            self.source.refuse_unshown()
            self._refuse_good_alone(images)
        return images, masks

    @override
    def check_files(self) -> None:
        if self.source.list_masks():
            return
        if self.train_on == "good" and (doubt := self.describe_doubt()):
            raise ConfigError(doubt)
        if self.train_on == "all" and self.synthesis is None:
            raise ConfigError(self.source.describe_lack())

    def _refuse_good_alone(self, images: Ints) -> None:
        """Refuse to train if only other splits have defects, as in sets for anomaly detection."""
        has_mask = np.zeros(0, np.bool_) if self._masks is None else self._masks.of_image >= 0
        if len(images) and has_mask.any() and not has_mask[images].any():
            raise ConfigError(
                f"{self.source.shown_root}: no image of train has a mask, and masks of "
                f"other splits are not used for training unless you ask for it: {TO_SHARE} "
                "splits all images; experiment=anomaly trains on good images alone"
            )

    def describe_doubt(self) -> str:
        """Return the reason why folders do not show which images are good, with advice; else empty."""
        kinds = set(self.source.image_set.kinds)
        doubt = describe_doubt(kinds, self.source.good)
        if not doubt:
            return ""
        example = min(kinds, key=lambda kind: (names_defect(kind), kind))
        return (
            f"{self.source.shown_root}: {doubt}. Name all folders with good parts, such "
            f"as 'data.good=[\"{example}\"]'; 'data.good=[\"*\"]' means all"
        )

    def _find_doubt(self) -> str:
        """Return the doubt if good images are used for training and only folders show which are good."""
        needs_folders = self._masks is None or self._masks.unmarked.any()
        return self._doubt if self.train_on == "good" and needs_folders else ""

    @override
    def choose_patches(self, images: Ints, stage: Stage) -> SampledPatches:
        sampling = None
        masks = self._masks if stage == "train" and len(images) else None
        if self.sampling is not None and masks is not None:
            if self.train_on == "good" and self.sampling.options.positives is not None:
                message = "data.train_on=good leaves no defects: set data.sampling.positives=null"
                raise ConfigError(message)
            # `skip_blank` is a fraction of the value range; stored pixels are compared.
            least = (self.sampling.options.skip_blank or 0) * self.transformation.values.scale
            sampling = replace(self.sampling, image_kinds=self.image_kinds)
            sampling = sampling.look(masks, self.grid, self.bank, least, self.source.kept_folder)
        return SampledPatches(self.grid, images, sampling)

    @override
    def choose_paster(self, patches: PatchSource) -> Paster | None:
        if isinstance(patches, SampledPatches) and len(patches.donors):
            return Paster(patches)
        return None

    def _select_masks(self, images: Ints) -> PartialMasks | None:
        """Return the masks of a split, which mark nothing if only good parts train without masks."""
        if self._masks is not None:
            return self._masks.select(images)
        if self.train_on == "all" or self._draws_all:
            return None
        # Good parts are learned from masks that mark nothing.
        none = np.full(len(self.bank), -1)
        return PartialMasks(self.bank, images, self.bank, none, unmarked=self.unmarked)

    @override
    def inspect(self, stage: Stage) -> Visuals:
        # Without references all defects are true, so they are not listed, and families are not drawn.
        return Visuals(self.transformation.draw if stage in self.augment else None)

    @override
    def check_sources(self) -> dict[str, int]:
        with self._logging_leftovers():
            counts = self.source.check()
        return counts | self.describe_anew()

    def _describe_plans(self) -> str:
        """Return one line on the files and the synthetic defects, before an image is decoded."""
        files, synthesis = self.source.image_set, self.synthesis
        parts = [f"layout {files.layout}, {files.describe()}"]
        if self.classes:
            parts.append(f"classes {', '.join(self.classes)}")
        if synthesis is None:
            parts.append("no synthetic defects")
        else:
            # val and test are scored by real masks.
            splits = "train" if any(files.masks) else ", ".join(SPLITS)
            families = ", ".join(family.name for family in synthesis.members)
            samples = f"{synthesis.probability:.0%} of the samples of {splits}"
            parts.append(f"synthetic defects on {samples}: {families}")
        return "; ".join(parts)

    @override
    def describe(self) -> dict[str, Any]:
        """Return numbers of images, of those with masks or defects, and of patches in each split."""
        numbers = describe_bank(self.bank) | {"layout": self.source.image_set.layout}
        masks = self._masks
        numbers["images_with_masks"] = 0 if masks is None else int((masks.of_image >= 0).sum())
        for split, images in self.split_images.items():
            numbers[f"{split}_images"] = len(images)
        if masks is None:  # without them there may be no dataset to count patches of
            if self._find_doubt():  # which `fit` refuses
                log.warning("%s", self._find_doubt())
            return numbers
        is_positive = self.count_classes()[:, 1:].sum(1) > 0
        if self.unmarked is not None:
            is_positive |= self.unmarked
        for split, images in self.split_images.items():
            numbers[f"{split}_positive_images"] = int(is_positive[images].sum())
        return numbers | {f"{stage}_patches": len(self.dataset(stage)) for stage in SPLITS}

    def read_mask(self, number: int) -> Array | None:
        """Return the class numbers [H, W] uint8 of an image; None if unknown, or if its mask is bad.

        For a scaled image, the result has the size of the file but the accuracy of the scaled mask.
        """
        mask, sizes = self.read_stored_mask(number), self.original_sizes
        if mask is None or sizes is None:
            return mask
        return np.asarray(sizes.scaling.restore_mask(mask[None], sizes.of(number))[0])

    def read_stored_mask(self, number: int) -> Array | None:
        """Return the mask of `read_mask`, but in the size from which patches are cut."""
        if self._masks is None or number in self._bad or self._masks.unmarked[number]:
            return None
        return np.asarray(self._masks[number][0])

    def has_defect(self, number: int) -> bool | None:
        """Return True if an image shows a defect, by its mask or its folder; None if unknown."""
        if number in self._bad or number in self._unknown:
            return None
        if self._masks is not None and not self._masks.unmarked[number]:
            return bool(is_defect(self._masks[number]).any())
        kind = self._kinds[number]
        # If no kind is called good, folders may be lots or days.
        if not kind or GOOD not in self._kinds or self._doubt:
            return None
        return kind != GOOD

    @property
    def image_kinds(self) -> list[str]:
        """Return the kind of each image, ``good`` for those without a defect; empty if unknown."""
        paths = map(str, self.source.image_set.images)
        # The bank lacks bad images, so kinds are found by path and not by number.
        kind_of = dict(zip(paths, self.source.image_set.kinds, strict=True))
        return [kind_of[self.bank.name(number)] for number in range(len(self.bank))]

    @override
    def find_lack(self, stage: Stage) -> str:
        if self.train_on == "all":
            return super().find_lack(stage)
        return "" if self._find_good()[self.split_images[stage]].any() else "good images"

    @property
    @override
    def image_classes(self) -> Sequence[str]:
        """Kind of each image; if folders do not show it, ``good`` or ``defect`` by its mask."""
        kinds = self.image_kinds
        if any(kinds) or self._is_positive is None:
            return kinds if any(kinds) else ()
        return ["defect" if is_positive else "good" for is_positive in self._is_positive]

    def count_classes(self, split: Stage | None = None) -> Ints:
        """Count the pixels of each class in the images of a split or in all, [n, classes].

        The background is first.

        Raises:
            ConfigError: There are no masks.
        """
        if self._masks is None:
            raise ConfigError("there are no masks to count pixels in")
        classes = 1 + len(self.source.classes or ("defect",))
        counts = count_classes(self._masks, classes, self.source.kept_folder)
        self._is_positive = counts[:, 1:].sum(1) > 0
        return counts if split is None else counts[self.split_images[split]]

    @override
    def open_source(self) -> None:
        log.info("%s: %s", self.source.shown_root, self._describe_plans())
        super().open_source()
        # Nothing to log about images that are only predicted, which are in one split.
        if sum(len(numbers) > 0 for numbers in self.split_images.values()) > 1:
            counts = describe_splits(self.split_images, self.image_kinds, self._is_positive)
            log.info("splits: %s", counts)
            sizes = self.original_sizes
            if sizes is not None and (loss := sizes.scaling.describe_loss(sizes.sizes_px)):
                view_px = min(sizes.scaling.size_px or ())
                cure = f"data.size_px=null data.patch_px={view_px} takes patches at full resolution"
                log.warning("%s: %s, in more time", loss, cure)

    @override
    def open_all_masks(self) -> None:
        self._masks, self._bad = self.source.open_all_masks(self.bank)
        self.original_sizes = self.source.find_original_sizes(self.bank)

    @override
    def choose_splits(self) -> dict[str, Ints]:
        # Images with bad masks are split like any others, so that skipping one does not move others.
        splits = self._split_all_images().items()
        left_out = [*self._bad, *self._unknown.tolist()]
        return {split: numbers[~np.isin(numbers, left_out)] for split, numbers in splits}

    def _check(self) -> None:
        check_choice("near_duplicates", self.near_duplicates, ("together", "apart"))
        check_choice("train_on", self.train_on, ("all", "good"))
        check_choice("protocol", self.protocol, ("auto", "mvtec"))
        if self.source.splits != UNDIVIDED:
            check_folds(self.source.splits, self.folds, self.fold, protocol=self.protocol)
        if self.synthesis is not None and self.source.classes is not None:
            message = "synthetic defects have no class: set synthesis=none, or remove data.classes"
            raise ConfigError(message)

    def _split_all_images(self) -> dict[str, Ints]:
        self._kinds = self.image_kinds
        self._doubt = self.describe_doubt()
        if self.train_on == "good":
            self._ignore_unmarked()
        splitter = self._open_splitter()
        if self._masks is not None:
            self._unknown = splitter.find_unknown()
        if self.source.splits == UNDIVIDED:
            return leave_undivided(len(self.bank))
        warn_of_names(self._kinds)
        if truths := self.list_truths():
            warn_of_contradictions(self.bank, splitter.names, truths)
        if self.protocol == "mvtec":
            splitter.check_protocol(self.source.image_set.layout)
        splits = None if self.folds is None else splitter.split_folds(self.folds, self.fold)
        if self.train_on == "all":
            splits = splits or splitter.split(self.source.splits)
            shared = splitter.find_fractions(self.source.splits)
            splitter.add_unmasked(splits, shared or {})
            return splits
        if self._find_doubt():  # images that may show a defect are in no split, and `fit` asks
            return dict.fromkeys(SPLITS, np.zeros(0, np.int64))
        return self._split_good(splitter, splits)

    def _open_splitter(self) -> ImageSplitter:
        return ImageSplitter(
            names=tuple(self.source.names(self.bank)),
            kinds=self._kinds,
            has_mask=None if self._masks is None else self._masks.of_image >= 0,
            unmarked=self.unmarked,
            count_classes=self.count_classes,
            find_groups=cache(self._find_groups),  # asked for good and for defective images
            seed=self.source.split_seed,
            root=self.source.folder,
            others=self.source.list_others(self.bank),
            leftovers=self.source.leftovers,
        )

    def _find_groups(self, names: Sequence[str]) -> Ints:
        return find_groups(
            self.bank,
            names,
            pattern=self.groups,
            with_near_duplicates=self.near_duplicates == "together",
            folder=self.source.kept_folder,
        )

    def list_truths(self) -> Sequence[str]:
        """Return what identical images must have in common; empty if that is unknown."""
        if self.train_on == "all" or self._find_doubt():
            return ()
        truths = np.where(self._find_good(), "good", "defective")
        truths[[*self._bad, *self._unknown.tolist()]] = ""
        return list(truths)

    def _split_good(
        self, splitter: ImageSplitter, folds: Mapping[str, Ints] | None
    ) -> dict[str, Ints]:
        """Return splits in which train holds only good images; those of a fold if there are folds."""
        is_good = self._find_good()
        if folds is None:
            splits = splitter.split_good(self.source.splits, is_good)
        else:
            train = folds["train"]
            splits = {**folds, "train": train[is_good[train]]}
        if self._draws_all:
            splits = {split: numbers[is_good[numbers]] for split, numbers in splits.items()}
        splitter.add_unmasked(splits, dict.fromkeys(SPLITS, 1.0))
        splitter.add_unused(splits, is_good)
        return splits

    @property
    def _draws_all(self) -> bool:
        """True if val and test are scored by drawn defects, so that real ones would count as good."""
        return self._masks is None and self.synthesis is not None

    def _ignore_unmarked(self) -> None:
        """Find images that show a defect without a mask, and ignore their pixels."""
        unmarked = ~self._find_good()
        if self._masks is not None:
            # A mask that marks nothing is trusted.
            unmarked &= self._masks.of_image < 0
            self._masks = self._masks.ignore(unmarked)
        is_scored = unmarked.any() and not self._draws_all
        self.unmarked = unmarked if is_scored else None

    def _find_good(self) -> Bools:
        """Return [n] True for images without a defect, according to masks and folders."""
        kinds = np.array(self._kinds)
        is_good = np.ones(len(self.bank), np.bool_)
        # Kinds are informative only if one of them is called good.
        if (kinds == GOOD).any():
            is_good = (kinds == GOOD) | ((kinds == "") & (self.source.good is None))
        if self._masks is not None:
            is_good &= self.count_classes()[:, 1:].sum(1) == 0
        return is_good
