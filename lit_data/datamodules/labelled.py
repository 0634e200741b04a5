"""`LabelledImageDataModule`: single images with one label each."""

import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Unpack

import numpy as np
from typing_extensions import override

from lit_data.annotations.formats import add_label_files
from lit_data.annotations.tables import (
    describe_lack,
    read_flag_labels,
    read_labels,
    read_list_labels,
)
from lit_data.core.addresses import is_sharded
from lit_data.core.errors import ConfigError, list_some
from lit_data.core.grid import pair_px
from lit_data.core.types import NEUTRAL, Ints, PathText, Size, Stage
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image import Augment
from lit_data.datamodules.image_files import FolderKeywords
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datasets.good_names import choose_good_classes, find_good_names
from lit_data.datasets.layouts import (
    InspectionSet,
    describe_counts,
    find_labelled_set,
    leave_out_stray,
)
from lit_data.datasets.occupancy import PartialMasks
from lit_data.datasets.splits import UNDIVIDED, search_names
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import ImageDecoder
from lit_data.images.scaling import FittedDecoder
from lit_data.images.store.pixels import StoreOptions
from lit_data.loading import LoaderOptions
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelledFiles(InspectionFiles):
    """Whole images, the label of each as its kind, and the size they are scaled to.

    The label comes from `class_pattern`, a CSV file, the kind of the image's folder, or else from
    lists or the flags of LabelMe. If all images have one kind, it is ``defect`` for images with a
    mask and ``good`` for those without.

    Args:
        class_pattern: A regular expression that finds the label of an image in its path.
        size_px: (height, width) that each image is scaled to fit, and reflect-padded to.

    Raises:
        ConfigError: A set of shards, which has its own labels, gets a pattern; or an error of
            `InspectionFiles`.
    """

    store: StoreOptions = field(default_factory=partial(StoreOptions, band_px=None))
    class_pattern: str | None = None
    size_px: Size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_pattern is not None and is_sharded(self.root):
            raise ConfigError(
                f"class_pattern={self.class_pattern!r}: a set of shards is read as it was written: "
                "give data.class_pattern to the `lit-data prepare` that writes it with "
                "prepare.shards"
            )

    @property
    @override
    def decoder(self) -> FittedDecoder:
        return FittedDecoder(self.size_px, "contain", decoder=ImageDecoder(self.read))

    @cached_property
    @override
    def image_set(self) -> InspectionSet:
        if self.shards is not None:
            return super().image_set
        if self.listed is not None:
            return self.listed
        every = find_labelled_set(self.folder, self.patterns, self.exclude, self.leftovers)
        image_set = self.leave_out_others(every)
        if self.class_pattern is not None:
            add_label_files(self.leftovers, self.folder, "classes")
            return self._name_by_pattern(image_set, self.class_pattern)
        files = self.folder, image_set.images, image_set.excluded
        table = read_labels(*files, need_all=not self._is_predicted)
        if table is None and len(set(image_set.kinds)) < 2:  # one folder of all is no class
            table = read_list_labels(*files, need_all=not self._is_predicted)
            if table is None and ".json" in self.leftovers.unread:
                table = read_flag_labels(*files, need_all=not self._is_predicted)
        used = () if table is None else table.files
        add_label_files(self.leftovers, self.folder, "classes", used)
        if table is not None:
            self._warn_of_folders(image_set, table.labels)
            return replace(image_set, kinds=table.labels)
        if self._is_predicted:
            return image_set
        image_set = leave_out_stray(self.folder, image_set)
        has_classes = self.splits == "auto" and any(image_set.kinds)
        return self._leave_out_nameless(image_set) if has_classes else image_set

    def _warn_of_folders(self, image_set: InspectionSet, labels: Sequence[str]) -> None:
        """Warn of images whose label in a table is the name of another image's folder of a class."""
        known = set(image_set.kinds)
        others = []
        for path, kind, label in zip(image_set.images, image_set.kinds, labels, strict=True):
            if kind and kind != label and label in known:
                others.append(f"{self.name(path)} ({label})")
        if others:
            log.warning(
                "%s, and the table counts: %s",
                counted(
                    len(others),
                    "image has another class in the table than by its folder",
                    "images have other classes in the table than by their folders",
                ),
                list_some(others),
            )

    @property
    def _is_predicted(self) -> bool:
        """True for images that are only predicted, which need no labels."""
        return self.splits == UNDIVIDED

    def _name_by_pattern(self, image_set: InspectionSet, pattern: str) -> InspectionSet:
        names = [self.name(path) for path in image_set.images]
        kinds = []
        for kind in search_names(names, pattern, "data.class_pattern"):
            kinds.append(kind or "")
        image_set = replace(image_set, kinds=tuple(kinds))
        return image_set if self._is_predicted else self._leave_out_nameless(image_set)

    def _leave_out_nameless(self, image_set: InspectionSet) -> InspectionSet:
        named: list[int] = []
        nameless: list[int] = []
        for number, kind in enumerate(image_set.kinds):
            (named if kind else nameless).append(number)
        names = [self.name(image_set.images[number]) for number in nameless]
        cause = "[image is|images are] not in the folder of a class"
        cure = "[it is|they are] skipped; move [it|them] into one"
        if self.class_pattern is not None:
            cause = "[image has|images have] no class by data.class_pattern"
            cure = "[it is|they are] skipped"
        self.leftovers.add(cause, names, cure)
        return image_set.keep(named)

    @property
    @override
    def _listed_set(self) -> InspectionSet:
        return self.image_set

    @override
    def open_all_masks(self, bank: ImageBank) -> tuple[PartialMasks | None, set[int]]:
        return None, set()


class LabelledImageDataModule(InspectionDataModule):
    """Whole images with one label each.

    A batch is a dict like that of `InspectionDataModule`, with ``label`` [B] int64, the number of
    the image's class from 0, instead of ``mask``, except when predicting. Options are those of
    `InspectionDataModule`, except:

    Args:
        classes: Names of the classes, in the order of their numbers; images of other classes are
            skipped. None takes all classes, ``good`` and the like first, the others by name.
        class_pattern: A regular expression whose match, or the match of its first group, in the path
            of an image below the root is its class; None uses a CSV file or folders.
        good: Globs of the classes of good parts, which verdicts need; None uses their names, see
            `lit_data.datasets.good_names`.
        size_px: Size of a sample, one number or (height, width), which images are scaled to fit,
            and reflect-padded to.

    Raises:
        ConfigError: An option is out of its range; later, unknown classes are named.
    """

    labels: Ints
    _good_kinds: Set[str] = frozenset()
    batch_keys: Sequence[str] = (
        "image",
        "label",
        "index",
        "image_index",
        "position",
        "epoch",
    )

    def __init__(
        self,
        root: PathText | None = None,
        *,
        classes: Sequence[str] | None = None,
        class_pattern: Annotated[str | None, NEUTRAL] = None,
        good: Sequence[str] | None = None,
        size_px: int | Size = 128,
        near_duplicates: Annotated[Literal["together", "apart"], NEUTRAL] = "together",
        groups: Annotated[str | None, NEUTRAL] = None,
        folds: Annotated[int | None, NEUTRAL] = None,
        fold: Annotated[int, NEUTRAL] = 0,
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        augment: Augment = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[FolderKeywords],
    ) -> None:
        size_px = pair_px("size_px", size_px)
        if isinstance(good, str):
            raise ConfigError(f"good={good!r} must be a list: data.good=[{good}]")
        super().__init__(
            root,
            classes=classes,
            near_duplicates=near_duplicates,
            groups=groups,
            folds=folds,
            fold=fold,
            patch_px=size_px,
            value_range=value_range,
            loader=loader,
            augment=augment,
            batch_format=batch_format,
            **options,
        )
        # Options are checked like those of images with masks; then labels replace masks.
        self.source = LabelledFiles.of(
            root=root, classes=classes, class_pattern=class_pattern, size_px=size_px, **options
        )
        self.good = None if good is None else tuple(map(str, good))

    @property
    def good_classes(self) -> tuple[str, ...]:
        """Classes of good parts; empty if no name or every name is that of good parts."""
        return choose_good_classes(self.classes or (), self.good)

    @override
    def _describe_plans(self) -> str:
        counts = Counter(self.source.image_set.kinds)
        classes = f" ({describe_counts(counts, 'no class')})" if any(counts) else ""
        return f"{counted(counts.total(), 'image')}{classes}"

    @override
    def has_defect(self, number: int) -> bool | None:
        kind = self._kinds[number]
        if not kind or not self.good_classes:
            return None
        return kind not in self._good_kinds

    @override
    def list_truths(self) -> Sequence[str]:
        return self._kinds

    @override
    def describe_doubt(self) -> str:
        """Return the reason why no class shows which images are good, with advice; else empty."""
        if self.good_classes:
            return ""
        names = ", ".join(self.classes or ()) or "none"
        return (
            f"no class is known to hold good parts (classes: {names}), so images get no verdict: if "
            "one does, name it, such as 'data.good=[\"NAME\"]'"
        )

    @override
    def check_files(self) -> None:
        self._check_classes()

    @override
    def open_split_masks(self, stage: Stage) -> tuple[Ints, None]:
        if stage == "train" or not set(self.image_kinds) & set(self.classes or ()):
            self._check_classes()  # other images need not show every class that was learned
        return self.split_images[stage], None

    @override
    def describe(self) -> dict[str, Any]:
        report = super().describe()
        del report["images_with_masks"]  # there are none
        for split, numbers in self.split_images.items():
            report[f"{split}_patches"] = len(numbers)
        try:
            self._check_classes()
        except ConfigError as error:  # which `fit` refuses
            log.warning("%s", error)
        return report

    @override
    def count_classes(self, split: Stage | None = None) -> Ints:
        labels = self.labels if split is None else self.labels[self.split_images[split]]
        return np.equal(labels[:, None], np.arange(len(self.classes or ()))).astype(np.int64)

    @override
    def find_classes(self) -> tuple[str, ...]:
        names = set(self.source.image_set.kinds) - {""}
        good = find_good_names(names)
        return tuple(sorted(names, key=lambda name: (name not in good, name)))

    @override
    def open_source(self) -> None:
        super().open_source()
        if self.classes is None:
            self.classes = self.find_classes() or None
            numbered = (f"{number} {name}" for number, name in enumerate(self.classes or ()))
            log.info("classes: %s", ", ".join(numbered))
        self._check_good()
        # Images that are only predicted may have classes that the model does not know.
        kinds = {*self.image_kinds, *self.good_classes} - {""}
        self._good_kinds = find_good_names(kinds, self.good)
        number_of = {name: number for number, name in enumerate(self.classes or ())}
        self.labels = np.array([number_of.get(kind, -1) for kind in self.image_kinds], np.int64)
        named = zip(self.source.names(self.bank), self.image_kinds, strict=True)
        others = [name for name, kind in named if kind and kind not in number_of]
        self.source.leftovers.add(
            "[image has|images have] a class that data.classes does not name",
            others,
            "[it is|they are] not in any split; data.classes=null uses all",
        )
        # Images of classes that were not requested are in no split, but are predicted.
        self.split_images = {
            split: numbers[self.labels[numbers] >= 0]
            for split, numbers in self.split_images.items()
        }

    def _check_good(self) -> None:
        if self.good is not None and not self.good_classes:
            raise ConfigError(
                f"data.good={list(self.good)} must name some of the classes, and not all: "
                f"{', '.join(self.classes or ()) or 'none is known'}"
            )

    def _check_classes(self) -> None:
        known = sorted(set(self.source.image_set.kinds) - {""})
        if len(known) < 2:
            names = [self.source.name(path) for path in self.source.image_set.images]
            lack = describe_lack(self.source.folder, known, names)
            raise ConfigError(f"{lack}{self.source.leftovers.quote()}")
        missing = [name for name in self.classes or () if name not in known]
        if missing:
            raise ConfigError(
                f"data.classes names {missing}, but the labels are {', '.join(known)}: name them "
                f"in the order of their numbers, 'data.classes=[{','.join(known)}]'"
            )
