"""`DetectionSource`: images with boxes, their decoded store, and the synthetic dataset."""

import json
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
from typing_extensions import override

from lit_data.annotations.labels import LabelTable
from lit_data.annotations.voc import Difficult
from lit_data.core.checks import check_choice, check_fraction
from lit_data.core.errors import ConfigError, DataError, Problems, show_path
from lit_data.core.files import replacing
from lit_data.core.grid import pair_px
from lit_data.core.types import Ints, PathText, Size
from lit_data.datamodules.image_files import ImageFolder, ImageKeywords
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datasets.balanced_splits import split_stratified
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource
from lit_data.images.header_scan import find_faults, report_bad
from lit_data.images.masks import MaskOptions
from lit_data.images.scaling import ScaledDecoder, Scaling
from lit_data.images.scope import Scope, find_fault
from lit_data.images.store.pixels import WHOLE, StoreOptions
from lit_data.images.store.sources import describe_options
from lit_data.wings.detection.files import (
    DetectionFiles,
    LabelFormat,
    find_detection_files,
    list_dataset,
)
from lit_data.wings.detection.masks import find_mask_boxes
from lit_data.wings.detection.sample_set import DetectionSampleSpec
from lit_data.wings.detection.windows import Windows, choose_stride, cut_windows
from lit_inspect.npy import NPY_LOCK

log = logging.getLogger(__name__)

BoxesFrom = Literal["labels", "masks"]

_LABELS = "boxes.npz"
_ALL = {"train": 1.0}
_SIZE_PX = 320


class DetectionKeywords(ImageKeywords, total=False):
    """Keywords of `DetectionSource` that a datamodule passes on."""

    label_format: LabelFormat
    annotations: PathText | None
    difficult: Difficult
    boxes_from: BoxesFrom
    masks: PathText | None
    mask_read: MaskOptions | None
    min_visible: float


@dataclass(frozen=True, kw_only=True)
class DetectionSource(ImageFolder):
    """Images with boxes, in the layouts of the label formats.

    Args:
        label_format: `auto`, `yolo`, `coco`, `voc` or `none`, see `find_detection_files`.
        classes: Names of the classes in the order of their numbers; by default those of the
            dataset.
        annotations: The only COCO file to read, relative to the root.
        difficult: VOC objects marked as difficult: True keeps them, False skips them, `ignore`
            makes them regions in which nothing is learned or scored.
        boxes_from: `labels`, or `masks` for a box around each connected part of the masks, in the
            layouts of `InspectionFiles`.
        masks: Folder of the masks, see `InspectionFiles`.
        mask_read: Options for reading masks, see `InspectionFiles`.
        size_px: (height, width) of a sample.
        patch_px: (height, width) of windows of images at full resolution; None scales whole images
            to `size_px`.
        stride_px: (down, right) from one window to the next; None for that of `choose_stride`.
        min_visible: A window keeps a box if it shows at least this fraction of the box's area.
    """

    label_format: LabelFormat = "auto"
    classes: tuple[str, ...] | None = None
    annotations: str | None = None
    difficult: Difficult = "ignore"
    boxes_from: BoxesFrom = "labels"
    masks: str | None = None
    mask_read: MaskOptions = field(default_factory=MaskOptions)
    size_px: Size
    patch_px: Size | None = None
    stride_px: Size | None = None
    min_visible: float = 0.25

    def __post_init__(self) -> None:
        check_fraction("min_visible", self.min_visible)
        check_choice("boxes_from", self.boxes_from, get_args(BoxesFrom))
        if self.boxes_from == "masks":
            self._check_masks()
        elif self.masks is not None:
            raise ConfigError(
                f"masks={self.masks} is for boxes_from=masks: set that, or remove masks"
            )
        if self.stride_px is not None:
            _check_stride(self.stride_px, self.patch_px)
        super().__post_init__()

    def _check_masks(self) -> None:
        if self.root is None:
            raise ConfigError("boxes_from=masks needs data.root: the synthetic dataset has labels")
        if self.label_format != "auto" or self.annotations is not None:
            raise ConfigError(
                "boxes_from=masks reads no labels: remove label_format and annotations"
            )
        # Boxes come from the pixels of masks, so every file of a server is needed at the start.
        object.__setattr__(self, "late_suffixes", ())

    takes_shards = True
    part = "detection"
    sample_spec = DetectionSampleSpec

    def open(self) -> tuple[DetectionFiles, ImageBank]:
        """Open the good images with their boxes, splits and pixels; the first call decodes them.

        Raises:
            DataError: Files or boxes are bad; all of them are listed.
        """
        files = self._files
        # Unreadable images are known only now; their boxes are dropped with them.
        bank = self.open_images()
        return _leave_out(files, {path for path, _ in bank.skipped}), bank

    def cut(self, files: DetectionFiles, bank: ImageBank, fill: float) -> Windows | None:
        """Return the windows of images with the boxes that they show; None if samples are whole images.

        Args:
            files: Boxes of the images.
            bank: The images.
            fill: Pixel value beyond an image that is smaller than a window.
        """
        if self.patch_px is None:
            return None
        stride_px = self.stride_px or choose_stride(files.labels, files.sizes_px, self.patch_px)
        return cut_windows(
            files.labels,
            bank,
            patch_px=self.patch_px,
            stride_px=stride_px,
            least_visible=self.min_visible,
            fill=fill,
        )

    def find_classes(self) -> tuple[str, ...]:
        """Return the names of the classes, without decoding images.

        Raises:
            DataError: Labels are bad.
        """
        return self._files.labels.classes

    @property
    @override
    def decoder(self) -> Decoder:
        if self.patch_px is not None:
            return ImageDecoder(self.read)
        scaling = Scaling(size_px=self.size_px, is_padded=False)
        return ScaledDecoder(scaling, ImageDecoder(self.read))

    @property
    @override
    def _layout(self) -> StoreOptions:
        return WHOLE if self.patch_px is None else StoreOptions()

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """Write the boxes and splits in one file, in the same form for all label formats."""
        labels = self._files.labels
        listing = {
            "images": [self.name(path) for path in self._files.images],
            "classes": labels.classes,
            "splits": self._files.splits,
            "fractions": self._files.fractions,
            "options": self._labelling,
        }
        # Names may contain bytes that are not UTF-8; they come back as they were.
        text = json.dumps(listing).encode("utf-8", "surrogateescape")
        with replacing(scratch / _LABELS) as file:
            np.savez(
                file,
                told=np.frombuffer(text, np.uint8),
                boxes=labels.boxes,
                ends=labels.ends,
                sizes_px=self._files.sizes_px,
            )
        return {_LABELS: scratch / _LABELS}

    def check(self) -> dict[str, int]:
        """Decode every image strictly and check every label, and keep nothing.

        Raises:
            DataError: Something is wrong; all faults are listed.
        """
        self._refuse_shards()
        self.refresh()
        files = self._find(check=True)
        return {"images": len(files.images), "boxes": len(files.labels.boxes)}

    @override
    def find_images(self) -> list[ImageSource]:
        return _list_sources(self._files.images)

    @override
    def list_published(self) -> list[ImageSource]:
        # Image sizes, which boxes are checked against, are only read for `list_beside`.
        if self.boxes_from == "masks":
            return self.find_images()
        listing = list_dataset(self.folder, **self._listing_options)
        return _list_sources(listing.locate_images())

    @cached_property
    def _files(self) -> DetectionFiles:
        return self._find()

    @property
    @override
    def scope(self) -> Scope | None:
        return None  # labels are files of many kinds

    @property
    def _labelling(self) -> str:
        """Options that determine boxes and splits, as JSON."""
        names = ["label_format", "classes", "annotations", "difficult", "splits", "split_seed"]
        if self.boxes_from == "masks":
            names += ["boxes_from", "masks"]
        return json.dumps({name: getattr(self, name) for name in names}, default=_to_plain)

    def _find(self, *, check: bool = False) -> DetectionFiles:
        """Find the images with their boxes; with `check`, decode all of them."""
        if self.shards is not None:
            return self._read_shards()
        if self.boxes_from == "masks":
            masked_files = self._masked_files
            files = find_mask_boxes(masked_files)
            self.leftovers.extend(masked_files.leftovers)
            if check:
                problems = self._find_damaged(files.images)
                report_bad(problems, len(files.images), self.on_bad)
            else:
                log.info("%s: %s", self.shown_root, masked_files.image_set.describe())
            return files
        return find_detection_files(
            self.folder,
            difficult=self.difficult,
            seed=self.split_seed,
            read=self.read,
            examine=self._find_damaged if check else None,
            leftovers=self.leftovers,
            **self._listing_options,
        )

    def _find_damaged(self, images: Sequence[str]) -> Problems:
        return find_faults(_list_sources(images), ImageDecoder(self.read))

    @property
    def _masked_files(self) -> InspectionFiles:
        """Images and masks that boxes are made from."""
        shared = {each.name: getattr(self, each.name) for each in fields(ImageFolder)}
        return InspectionFiles(
            **shared, masks=self.masks, mask_read=self.mask_read, classes=self.classes
        )

    @property
    def _listing_options(self) -> dict[str, Any]:
        names = ("label_format", "classes", "annotations", "splits", "on_bad", "exclude")
        return {name: getattr(self, name) for name in names}

    def _read_shards(self) -> DetectionFiles:
        """Read the boxes of a dataset of shards, if they were written with the current options.

        Raises:
            ConfigError: They were written with other options.
        """
        files, written = _read_files(self.folder)
        options = json.loads(self._labelling)
        if options["classes"] == list(files.labels.classes):  # named as in the dataset
            options["classes"] = written.get("classes")
        if options["splits"] == _ALL:  # to predict, whatever the splits were
            options["splits"] = written.get("splits")
            numbers = list(range(len(files.images)))
            everything = {"train": numbers, "val": [], "test": []}
            files = replace(files, splits=everything, fractions=None)
        changes = describe_options(json.dumps(written), json.dumps(options))
        if changes:
            listed = ", ".join(change.removeprefix("decoder.") for change in changes)
            raise ConfigError(
                f"{self.root}: its boxes were read with other options: {listed}: set them as they "
                "were, or run `lit-data prepare` with prepare.shards again"
            )
        return files


def _check_stride(stride_px: Size, patch_px: Size | None) -> None:
    if patch_px is None:
        raise ConfigError(f"stride_px={list(stride_px)} is the distance of windows: set patch_px")
    if any(np.greater(stride_px, patch_px)):
        raise ConfigError(
            f"stride_px={list(stride_px)} leaves gaps between windows of "
            f"patch_px={list(patch_px)}: set at most that"
        )


def _list_sources(paths: Sequence[str]) -> list[ImageSource]:
    return [ImageSource((path,)) for path in paths]


def _to_plain(value: Any) -> dict[str, Any] | list[Any]:  # noqa: ANN401 - what a configuration holds
    return dict(value) if isinstance(value, Mapping) else list(value)


def _read_files(folder: Path) -> tuple[DetectionFiles, dict[str, Any]]:
    """Read the file of `DetectionSource.list_beside` in a dataset of shards: boxes, and their options.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with NPY_LOCK, np.load(folder / _LABELS, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("told", "boxes", "ends", "sizes_px")}
        listing = json.loads(arrays["told"].tobytes().decode("utf-8", "surrogateescape"))
        if any(find_fault(name) for name in listing["images"]):
            raise ValueError("a name leads out of the folder")
        images = tuple(str(folder / name) for name in listing["images"])
        labels = LabelTable(tuple(listing["classes"]), arrays["boxes"], arrays["ends"])
        fractions = listing.get("fractions")
        options = json.loads(listing["options"])
        if not isinstance(options, dict):
            raise ValueError("it has no valid options")
        splits = listing["splits"]
        return DetectionFiles(images, labels, splits, arrays["sizes_px"], fractions), options
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, ConfigError) as error:
        raise DataError(
            f"{show_path(folder / _LABELS)}: not the boxes of a set of shards ({error!s:.80})"
        ) from error


def choose_size(size_px: int | Size | None, patch_px: int | Size | None) -> Size:
    """Return (height, width) of a sample.

    Raises:
        ConfigError: Both sizes are given.
    """
    if size_px is not None and patch_px is not None:
        raise ConfigError(
            f"size_px={size_px} scales whole images and patch_px={patch_px} cuts windows out of "
            "them: leave one of them null"
        )
    if patch_px is not None:
        return pair_px("patch_px", patch_px)
    if size_px is not None:
        return pair_px("size_px", size_px)
    return _SIZE_PX, _SIZE_PX


def keep_groups_together(files: DetectionFiles, groups: Ints, seed: int) -> DetectionFiles:
    """Split images again so that each group is in one of the splits that are fractions.

    Images with the same classes are spread over the splits.

    Args:
        files: Images; splits that are not fractions stay as they are.
        groups: [I] number of the group of each image.
        seed: Seed of the split.
    """
    if files.fractions is None or len(np.unique(groups)) == len(groups):
        return files
    shared = sorted(number for split in files.fractions for number in files.splits[split])
    strata = files.labels.strata
    parts = split_stratified(
        [strata[number] for number in shared], groups[shared], files.fractions, seed=seed
    )
    splits = dict(files.splits)
    for split, part in parts.items():
        splits[split] = [shared[rank] for rank in part.tolist()]
    return replace(files, splits=splits)


def _leave_out(files: DetectionFiles, paths: Set[str]) -> DetectionFiles:
    """Return the files without some images."""
    if not paths:
        return files
    good_numbers = [number for number, path in enumerate(files.images) if path not in paths]
    # Boxes and splits refer to images by number, and the numbers move up.
    new_number_of = {number: new for new, number in enumerate(good_numbers)}
    boxes = [files.labels.of(number) for number in good_numbers]
    ends = np.cumsum([len(part) for part in boxes], dtype=np.int64)
    splits = {}
    for split, numbers in files.splits.items():
        splits[split] = [new_number_of[number] for number in numbers if number in new_number_of]
    return DetectionFiles(
        tuple(files.images[number] for number in good_numbers),
        LabelTable(files.labels.classes, np.concatenate(boxes), ends),
        splits,
        files.sizes_px[good_numbers],
        files.fractions,
    )
