"""`LabelledImageDataModule`: whole images with one label each, such as those in a folder for each kind of defect."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import FolderKeywords
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datamodules.source import name_options
from lit_data.datasets.detection.voc import NameIndex
from lit_data.datasets.inspection.annotations import (
    CLASS_COLUMNS,
    IMAGE_COLUMNS,
    choose_column,
    read_table,
)
from lit_data.datasets.inspection.layouts import InspectionSet, find_inspection_set, leave_out_stray
from lit_data.datasets.inspection.occupancy import PartialMasks
from lit_data.datasets.inspection.patches import InspectionDataset
from lit_data.errors import ConfigError, DataError, Problems, show_path
from lit_data.grid import pair_px
from lit_data.io.discovery import check_inside, list_shown
from lit_data.io.images.decoders import ImageDecoder
from lit_data.io.images.image_source import ImageBank
from lit_data.io.images.resize import FittedDecoder
from lit_data.io.store.bands import StoreOptions
from lit_data.loading import LoaderOptions
from lit_data.types import Batch, PathText, PlannedBatch, Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelledFiles(InspectionFiles):
    """Images, the label of each, and the size they are brought to.

    The label is what a CSV file says, else the kind of the image's folder; where all are of one
    kind, ``defect`` for images with a mask and ``good`` for those without.

    Args:
        size_px: (height, width) that each image is scaled to fit; what is missing is mirrored on.
    """

    store: StoreOptions = field(default_factory=partial(StoreOptions, band_px=None))
    size_px: tuple[int, int]

    @property
    @override
    def decoder(self) -> FittedDecoder:
        return FittedDecoder(self.size_px, "contain", decoder=ImageDecoder(self.read))

    @cached_property
    def found(self) -> InspectionSet:
        """The images, with their labels as kinds."""
        if self.shards is not None:
            return super().found
        found = find_inspection_set(self.folder, None, self.patterns, self.exclude)
        labels = self._read_labels(found)
        found = found if labels else leave_out_stray(self.folder, found)
        if labels is None and len(set(found.kinds)) < 2 and any(found.masks):
            labels = tuple("good" if mask is None else "defect" for mask in found.masks)
        return replace(
            found, kinds=labels or found.kinds, masks=(None,) * len(found.images), layout="none"
        )

    @override
    def open_all_masks(self, bank: ImageBank) -> tuple[PartialMasks | None, set[int]]:
        return None, set()

    def _read_labels(self, found: InspectionSet) -> tuple[str, ...] | None:
        """The labels of a table with a column of images and one of classes; None where there is
        none.

        Raises:
            DataError: It names images that are not there, or leaves some out: all are listed.
        """
        index = NameIndex(found.images, found.excluded)
        for path in list_shown(self.folder, "*.csv"):
            check_inside(path, self.folder)
            columns, rows = read_table(path)
            image, label = (
                choose_column(columns, known) for known in (IMAGE_COLUMNS, CLASS_COLUMNS)
            )
            told = [(str(row[image]), str(row[label])) for row in rows] if image and label else []
            if told:
                return self._match(found, index, told, str(path))
        return None

    def _match(
        self, found: InspectionSet, index: NameIndex, told: Sequence[tuple[str, str]], path: str
    ) -> tuple[str, ...]:
        labels, problems = dict[int, str](), Problems()
        for place, (name, label) in enumerate(told, 2):
            try:
                number = index.find(name)
            except DataError as error:
                problems.add(f"{path}, row {place}", str(error))
                continue
            if number >= index.count:
                continue
            if labels.setdefault(number, label) != label:
                problems.add(
                    f"{path}, row {place}",
                    f"a second label {label!r} of {name}, beside {labels[number]!r}",
                )
        for number, image in enumerate(found.images):
            if number not in labels:
                problems.add(image, f"an image that {show_path(path)} gives no label")
        problems.raise_if_any(f"{len(problems)} labels are bad")
        return tuple(labels[number] for number in range(len(found.images)))


class LabelledImageDataModule(InspectionDataModule):
    """Whole images with one label each.

    A batch is a dict as that of `InspectionDataModule`, with ``label`` [B] int64, the number of the
    image's class from 0, in place of ``mask``; not when predicting. Options are those of
    `InspectionDataModule`, but for:

    Args:
        classes: Names of the classes, in the order of their numbers; images of others are left out.
            None takes all of them, ``good`` first and the others by name.
        size_px: Size of a sample, one number or (height, width): images are scaled to fit, and what
            is missing is mirrored on.

    Raises:
        ConfigError: An option is out of its range; later, that classes are named which there are
            not.
    """

    batch_keys: ClassVar[Sequence[str]] = (
        "image",
        "label",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    @name_options(LabelledFiles)
    def __init__(
        self,
        root: PathText | None = None,
        *,
        classes: Sequence[str] | None = None,
        size_px: int | tuple[int, int] = 128,
        similar: Literal["together", "apart"] = "together",
        groups: str | None = None,
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[FolderKeywords],
    ) -> None:
        size_px = pair_px("size_px", size_px)
        super().__init__(
            root,
            classes=classes,
            similar=similar,
            groups=groups,
            patch_px=size_px,
            value_range=value_range,
            loader=loader,
            augment=augment,
            batch_format=batch_format,
            **options,
        )
        self.source = LabelledFiles.of(root=root, classes=classes, size_px=size_px, **options)

    @override
    def build_dataset(self, stage: Stage) -> InspectionDataset:
        """The images of one stage, whole; all of them to predict."""
        margin_px = self.margins_px[stage]
        if stage == "predict":
            return InspectionDataset(self.bank, self.grid, margin_px=margin_px)
        self._check_classes()
        images = self.split_images[stage]
        return InspectionDataset(
            self.bank, self.grid, images=images, margin_px=margin_px, labels=self._labels
        )

    @override
    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        finished = super().finish_batch(batch, stage)
        return finished | ({"label": batch["label"]} if "label" in batch else {})

    @override
    def describe(self) -> dict[str, Any]:
        about = {
            key: value for key, value in super().describe().items() if key != "images_with_masks"
        }
        return about | {
            f"{split}_patches": len(numbers) for split, numbers in self.split_images.items()
        }

    @override
    def count_classes(self, split: Stage | None = None) -> NDArray[np.int64]:
        labels = self._labels if split is None else self._labels[self.split_images[split]]
        counts: NDArray[np.int64] = (labels[:, None] == np.arange(len(self.classes or ()))).astype(
            np.int64
        )
        return counts

    @override
    def find_classes(self) -> tuple[str, ...]:
        kinds = set(self.source.found.kinds) - {""}
        return tuple(sorted(kinds, key=lambda kind: (kind != "good", kind)))

    @override
    def open_source(self) -> None:
        super().open_source()
        if self.classes is None:
            self.classes = self.find_classes() or None
            numbered = (f"{number} {name}" for number, name in enumerate(self.classes or ()))
            log.info("classes: %s", ", ".join(numbered))
        names = list(self.classes or ())
        self._labels = np.array(
            [names.index(k) if k in names else -1 for k in self.image_kinds], np.int64
        )
        self.split_images = {
            split: part[self._labels[part] >= 0] for split, part in self.split_images.items()
        }

    def _check_classes(self) -> None:
        known = sorted(set(self.image_kinds) - {""})
        if len(known) < 2:
            raise ConfigError(
                f"{show_path(self.source.folder)}: nothing says what its images show: a folder for each class does, or "
                f"a CSV with the columns image and label (found: {', '.join(known) or 'no labels'})"
            )
        missing = [name for name in self.classes or () if name not in known]
        if missing:
            raise ConfigError(
                f"data.classes names {missing}, but the labels are {', '.join(known)}: name them in the order of their "
                f"numbers, 'data.classes=[{','.join(known)}]'"
            )
