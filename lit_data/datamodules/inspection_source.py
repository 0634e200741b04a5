"""`InspectionFiles`: single images with the masks, annotations or labels of their defects."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.annotations.formats import add_label_files
from lit_data.annotations.labels import check_classes
from lit_data.annotations.mark_files import ANNOTATION_SUFFIXES, read_annotations
from lit_data.annotations.marked import Annotated
from lit_data.annotations.tables import ListedLabels, read_labels
from lit_data.core.addresses import is_sharded
from lit_data.core.errors import ConfigError, Problems, list_problems
from lit_data.core.files import write_json
from lit_data.core.names import warn_of_names
from lit_data.core.progress import track
from lit_data.core.temp import temp_folder
from lit_data.core.types import IGNORED, Ints
from lit_data.datamodules.image_files import MaskedImageFolder
from lit_data.datasets.good_names import GOOD, name_kinds
from lit_data.datasets.layouts import (
    InspectionSet,
    describe_counts,
    find_inspection_set,
    leave_out_stray,
    leave_out_unlike,
)
from lit_data.datasets.listed import SET_FILE, read_set
from lit_data.datasets.near_duplicates import find_details, group_details
from lit_data.datasets.occupancy import PartialMasks
from lit_data.datasets.split_lists import LIST_PATHS
from lit_data.datasets.splits import UNDIVIDED
from lit_data.datasets.synthetic.surface_set import InspectionSampleSpec
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.images.mask_choice import choose_inversion, choose_mask_options, name_folder
from lit_data.images.masks import MaskOptions
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image
from lit_data.images.roots import PublishedImages
from lit_data.images.scaling import (
    OriginalSizes,
    ScaledDecoder,
    Scaling,
    check_mask_sizes,
    read_sizes,
)
from lit_data.images.scope import Scope
from lit_data.images.store.arrays import publish
from lit_data.images.store.pixels import StoreOptions
from lit_data.images.store.sources import list_sources
from lit_data.images.writing import write_png
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

ANNOTATION_FORMAT = 7  # increase it with every change of a drawn mask
_BOXES = "boxes.npy"
_DRAWN = ("coco", "labelme", "csv", "yolo", "cvat")


@dataclass(frozen=True, kw_only=True)
class InspectionFiles(MaskedImageFolder):
    """Files of an inspection dataset; by default gray images are copied to three channels.

    Args:
        masks: Folder of the masks; `None` searches for them, see `lit_data.datasets.layouts`.
        classes: Names of the classes of defects, numbered from 1: categories of annotations, numbers
            in masks, or kinds of images whose masks are black and white; `None` for one class.
        good: Globs of the names of folders with good parts; `None` recognizes them by their words,
            see `lit_data.datasets.good_names`.
        scaling: Size to which images and masks are scaled before they are stored; `None` keeps the
            size of the files.
        takes_labels: A CSV of labels may define which images are good, if no mask or folder does.
        listed: Images, masks and kinds to use instead of those below the root.

    Raises:
        ConfigError: Masks have several classes without names; or a set of shards is used with
            `scaling` or `good`.
    """

    read: ReadOptions = field(default_factory=partial(ReadOptions, gray_to_rgb=True))
    classes: Sequence[str] | None = None
    good: Sequence[str] | None = None
    scaling: Scaling | None = None
    takes_labels: bool = False
    listed: InspectionSet | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.good, str):
            raise ConfigError(f"good={self.good!r} must be a list: data.good=[{self.good}]")
        if is_sharded(self.root):
            self._refuse_scaled_shards()
            self._refuse_good_shards()
        if self.classes is not None:  # a shell passes numbers, not strings
            object.__setattr__(self, "classes", check_classes([str(name) for name in self.classes]))
        elif self.mask_read.classes > 2:
            names = ",".join(f"name{number}" for number in range(1, self.mask_read.classes))
            raise ConfigError(
                f"mask_read.classes={self.mask_read.classes}: name the classes after the "
                f"background, data.classes=[{names}]"
            )

    sample_spec = InspectionSampleSpec

    @cached_property
    def image_set(self) -> InspectionSet:
        """The images and their masks, if any."""
        if self.shards is not None:
            return read_set(self.folder)
        if self.listed is not None:
            labels = [[kind] if kind else [] for kind in self.listed.kinds]
            return replace(self.listed, kinds=name_kinds(labels, self.good))
        image_set = self._named_set
        if image_set.layout == "none":
            # No file is a mask: annotations may mark the defects.
            has_folders = GOOD in image_set.kinds  # folders to predict may have any names
            # The search of the folder has found all files, except for excluded ones.
            if self.leftovers.unread or self.exclude:
                image_set = self._draw_annotations(image_set)
            return leave_out_stray(self.folder, image_set) if has_folders else image_set
        add_label_files(self.leftovers, self.folder, "masks")
        return self._join_parts(image_set) if image_set.parts else image_set

    @cached_property
    def _named_set(self) -> InspectionSet:
        """The images and masks according to the names of the files."""
        image_set = find_inspection_set(
            self.folder,
            self.masks,
            self.patterns,
            self.exclude,
            good=self.good,
            leftovers=self.leftovers,
        )
        return self.leave_out_others(image_set)

    def leave_out_others(self, image_set: InspectionSet) -> InspectionSet:
        """Return the images that belong to the dataset, see `find_members`; for prediction all of them."""
        if self.splits != "auto":
            return image_set
        image_set = leave_out_unlike(self.folder, image_set, self.leftovers)
        excluded = [self.name(path) for path in image_set.excluded]
        members = self.find_members([self.name(path) for path in image_set.images], excluded)
        return image_set.keep(members)

    @property
    def _listed_set(self) -> InspectionSet:
        """A set with the images of `image_set`, without drawing masks if names determine the images."""
        if self.shards is not None or self.listed is not None:
            return self.image_set
        named = self._named_set
        # One image may be skipped in that case, unless annotations mark the defects.
        is_open = named.layout == "none" and GOOD in named.kinds
        return self.image_set if is_open else named

    @property
    @override
    def decoder(self) -> Decoder:
        decoder = ImageDecoder(self.read)
        return decoder if self.scaling is None else ScaledDecoder(self.scaling, decoder)

    @property
    @override
    def mask_decoder(self) -> Decoder:
        decoder = MaskDecoder(self.mask_options)
        return decoder if self.scaling is None else ScaledDecoder(self.scaling, decoder)

    @property
    @override
    def _layout(self) -> StoreOptions:
        # Bands are for patches; whole images are read faster without them.
        is_read_whole = self.scaling is not None and self.scaling.size_px is not None
        return replace(self.store, band_px=None) if is_read_whole else self.store

    @override
    def list_images(self) -> list[ImageSource]:
        return [ImageSource((str(path),)) for path in self._listed_set.images]

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        files: dict[str, Path] = {}
        mask_names: list[str | None] = []
        for number, mask in enumerate(self.image_set.masks):
            if mask is None:
                mask_names.append(None)
                continue
            name = f"{name_folder(mask)}/{number}{mask.suffix}"
            mask_names.append(name)
            files[name] = mask
        listing = {
            "layout": self.image_set.layout,
            "images": [self.name(image) for image in self.image_set.images],
            "masks": mask_names,
            "kinds": list(self.image_set.kinds),
            "where": self.image_set.where,
            "bad": [self.name(image) for image in sorted(self.image_set.bad)],
        }
        write_json(scratch / SET_FILE, listing)
        return (
            super(MaskedImageFolder, self).list_beside(scratch)
            | files
            | {SET_FILE: scratch / SET_FILE}
        )

    @override
    def describe_published(self, scratch: Path) -> PublishedImages:
        self._refuse_scaled_shards()
        images = super().describe_published(scratch)
        return replace(images, summarise=find_details, group=group_details)

    def _refuse_scaled_shards(self) -> None:
        # Shards do not have the files, so the sizes to which predictions are scaled back are unknown.
        if self.scaling is not None:
            raise ConfigError(
                "data.size_px and data.scale need the files of the images: remove them to write "
                "or read a set of shards"
            )

    def _refuse_good_shards(self) -> None:
        if self.good is not None:
            raise ConfigError(
                f"good={list(self.good)}: a set of shards is read as it was written: give data.good "
                "to the `lit-data prepare` that writes it with prepare.shards"
            )

    @cached_property
    def mask_options(self) -> MaskOptions:
        """Options for reading the masks: `mask_read`, or numbers of `classes`."""
        is_drawn = self.image_set.layout in _DRAWN
        masks = [] if is_drawn else [Path(mask.paths[0]) for mask in self.list_masks()]
        # Masks that were drawn from annotations contain numbers, whatever `mask_read` is.
        options = MaskOptions(ignore=IGNORED) if is_drawn else self.mask_read
        if self.classes is None or self._kinds_are_classes:
            return choose_mask_options(masks, options)
        numbered = replace(options, classes=len(self.classes) + 1)
        return choose_mask_options(masks, numbered, self.classes)

    def open_all_masks(self, bank: ImageBank) -> tuple[PartialMasks | None, set[int]]:
        """Decode all masks.

        Args:
            bank: The images.

        Returns:
            The masks, or None without any; and the images to skip because their mask or annotation is
                bad.

        Raises:
            DataError: Masks are bad and `on_bad` is `error`.
        """
        position_of = {str(image): n for n, image in enumerate(self.image_set.images)}
        positions = [position_of[bank.name(number)] for number in range(len(bank))]
        mask_paths = [self.image_set.masks[position] for position in positions]
        bad_images = set()
        for number, position in enumerate(positions):
            if self.image_set.images[position] in self.image_set.bad:
                bad_images.add(number)
        sources = []
        # Images with bad annotations are skipped, so their masks are not read.
        for number, path in enumerate(mask_paths):
            if path is not None and number not in bad_images:
                sources.append(ImageSource((str(path),)))
        if not sources:
            return None, bad_images
        masks = self._open_bank(sources, self.mask_decoder, "masks", "mask")
        mask_numbers = {masks.name(number): number for number in range(len(masks))}
        # A bad mask was skipped and has no number.
        of_image = np.array([mask_numbers.get(str(path), -1) for path in mask_paths], np.int64)
        if self.scaling is not None:
            # After scaling to one size, an image and a mask that do not fit would seem to fit.
            sizes_px = read_sizes(bank, ImageDecoder(self.read), self.kept_folder)
            mask_sizes_px = read_sizes(masks, MaskDecoder(self.mask_options), self.kept_folder)
            check_mask_sizes((bank, sizes_px), (masks, mask_sizes_px), of_image)
        has_path = np.array([path is not None for path in mask_paths])
        bad_images |= set(np.flatnonzero(has_path & (of_image < 0)).tolist())
        if bad_images:
            log.warning("images with bad masks are skipped: %d", len(bad_images))
        kinds = [self.image_set.kinds[position] for position in positions]
        class_numbers = self.number_kinds(kinds)
        return PartialMasks(bank, np.arange(len(bank)), masks, of_image, class_numbers), bad_images

    def describe_lack(self) -> str:
        """Return a message that no masks were found, with advice."""
        return (
            f"{self.shown_root}: no masks were found: name their folder with data.masks, "
            "see docs/masks.md for the layouts that are known, draw defects with "
            "synthesis=library, or use experiment=anomaly, which needs only good "
            f"images{self.leftovers.quote()}"
        )

    @override
    def list_masks(self) -> list[ImageSource]:
        masks = self.image_set.masks
        return [ImageSource((str(mask),)) for mask in masks if mask is not None]

    @override
    def list_others(self, bank: ImageBank) -> list[str]:
        return super().list_others(bank) + [self.name(path) for path in self.image_set.excluded]

    def find_original_sizes(self, bank: ImageBank) -> OriginalSizes | None:
        """Read the sizes of the files of scaled images from their headers; None if none is scaled."""
        if self.scaling is None:
            return None
        sizes_px = read_sizes(bank, ImageDecoder(self.read), self.kept_folder)
        return OriginalSizes(self.scaling, sizes_px)

    @property
    def _kinds_are_classes(self) -> bool:
        """True if masks are black and white, and the kind of an image is the class of its mask."""
        if self.image_set.layout in _DRAWN or self.mask_read.classes != 2:
            return False
        return not set(self.classes or ()).isdisjoint(self.image_set.kinds)

    def refuse_unshown(self) -> None:
        """Refuse to train for classes that no image shows: their names may be misspelled."""
        known = self.image_set.categories
        if self._kinds_are_classes:
            known = self.image_set.masked_kinds
        unknown = sorted({*(self.classes or known)} - known)
        if known and unknown:
            listed = ", ".join(sorted(known))
            raise ConfigError(f"data.classes names {unknown}, but the images show {listed}")

    def number_kinds(self, kinds: Sequence[str]) -> Ints | None:
        """Return the class of each image by its kind, 0 for others; None if kinds are not classes."""
        if self.classes is None or not self._kinds_are_classes:
            return None
        number_of = {name: number for number, name in enumerate(self.classes, 1)}
        unnamed = sorted({*kinds} - {GOOD, "", *number_of})
        cause = "[kind of defects is|kinds of defects are] not in data.classes"
        self.leftovers.add(cause, unnamed, "what shows [it|them] counts as background")
        return np.array([number_of.get(kind, 0) for kind in kinds], np.int64)

    def _draw_annotations(self, image_set: InspectionSet) -> InspectionSet:
        """Return the set with masks drawn once from its annotations; without annotations, with its labels.

        Raises:
            DataError: Annotations are bad and `on_bad` is `error`.
        """
        annotated = read_annotations(
            self.folder, image_set.images, image_set.excluded, self.exclude
        )
        if annotated is None or not annotated.marks:
            return self._take_labels(image_set, annotated)
        self._note_used(annotated.files)
        paths = (*annotated.files, *image_set.images)
        purpose = f"masks {ANNOTATION_FORMAT} {self.classes} {self.read.fingerprint()}"
        folder = self._make_folder(
            paths, purpose, lambda temp: self._draw(annotated, image_set.images, temp)
        )
        # Stored with the masks, so that each run lists the problems found when they were drawn.
        problems = json.loads((folder / "bad.json").read_text())
        self._report(problems["problems"])
        masks: list[Path | None] = []
        for number in range(len(image_set.images)):
            masks.append(folder / f"{number}.png" if number in annotated.marks else None)
        return replace(
            image_set,
            layout=annotated.layout,
            masks=tuple(masks),
            where=f"drawn from {annotated.layout} files{self._describe_marks(annotated)}",
            boxes=None if annotated.layout == "csv" else folder / _BOXES,
            bad=frozenset(image_set.images[number] for number in problems["images"]),
            categories=frozenset(annotated.count_categories()),
        )

    def _take_labels(self, image_set: InspectionSet, unmarked: Annotated | None) -> InspectionSet:
        """Return the set with the labels of a table, if it has one.

        Args:
            image_set: The set.
            unmarked: Content of annotation files that mark nothing, if there are any.
        """
        used = [] if unmarked is None else [*unmarked.files]
        table = self._read_labels(image_set)
        if table is not None:
            used += table.files
            kinds = name_kinds([[label] for label in table.labels], self.good)
            image_set = replace(image_set, kinds=kinds)
        self._note_used(used)
        if unmarked is not None:
            self._report_unread(unmarked.problems)
        return image_set

    def _note_used(self, files: Sequence[Path]) -> None:
        add_label_files(self.leftovers, self.folder, "masks", files, with_unknown=not files)

    def _read_labels(self, image_set: InspectionSet) -> ListedLabels | None:
        """Read a CSV of labels if no folder has good images; None if it is not needed or not found."""
        if not self.takes_labels or GOOD in image_set.kinds:
            return None
        need_all = self.splits != UNDIVIDED  # images that are only predicted need no labels
        return read_labels(self.folder, image_set.images, image_set.excluded, need_all=need_all)

    def _join_parts(self, image_set: InspectionSet) -> InspectionSet:
        """Return the set with several masks of an image joined into one, drawn once: the union of their marks."""
        paths = [path for parts in image_set.parts.values() for path in parts]
        purpose = f"parts {ANNOTATION_FORMAT} {self.mask_read}"
        folder = self._make_folder(paths, purpose, lambda temp: self._draw_parts(image_set, temp))
        joined = {mask: folder / f"{number}.png" for number, mask in enumerate(image_set.parts)}
        masks = [None if mask is None else joined.get(mask, mask) for mask in image_set.masks]
        return replace(image_set, masks=tuple(masks), parts={})

    def _draw_parts(self, image_set: InspectionSet, folder: Path) -> None:
        all_parts = image_set.parts.values()
        paths = [path for parts in all_parts for path in parts]
        read = choose_inversion(paths, self.mask_read).read
        # If black marks defects, the black pixels of all parts do.
        join = np.logical_and if self.mask_read.invert is True else np.logical_or
        for number, parts in enumerate(track(all_parts, "joining masks", len(all_parts))):
            is_marked = [read_image(path, read)[0] > 0 for path in parts]
            joined = join.reduce(is_marked).astype(np.uint8) * np.uint8(255)
            write_png(folder / f"{number}.png", joined)

    def _make_folder(
        self, paths: Sequence[Path], purpose: str, fill: Callable[[Path], None]
    ) -> Path:
        """Return the folder of masks that are created from files; the first call fills it.

        Args:
            paths: The files; if one of them changes, another folder is created.
            purpose: Text that distinguishes masks of the same files.
            fill: Function that writes the masks into a folder.
        """
        sources = list_sources([ImageSource((str(path),)) for path in paths], progress=False)
        folder = self.cache_folder / "annotations" / sources.make_key(purpose)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Written elsewhere and renamed, so that a folder is complete, also after a kill.
            with temp_folder(folder.parent) as temp:
                fill(temp)
                publish(temp, folder)
        return folder

    def _draw(self, annotated: Annotated, images: Sequence[Path], folder: Path) -> None:
        boxes_px = [np.zeros((0, 6), np.int64)]
        drawn = annotated.draw(images, self.read, self.classes)
        for image in track(drawn, "drawing masks", len(annotated.marks)):
            write_png(folder / f"{image.number}.png", image.mask)
            boxes_px.append(np.insert(image.boxes_px, 0, image.number, axis=1))
        np.save(folder / _BOXES, np.concatenate(boxes_px))
        write_json(
            folder / "bad.json",
            {"problems": list(annotated.problems.entries), "images": sorted(annotated.bad)},
        )

    def _report(self, entries: Sequence[tuple[str, str]]) -> None:
        problems = list_problems(entries)
        heading = counted(len(problems), "annotation is bad", "annotations are bad")
        if self.on_bad == "error":
            problems.raise_if_any(heading, "data.on_bad=skip skips their images")
        problems.warn_if_any(log, f"{heading}; images with bad annotations are skipped")

    def _report_unread(self, problems: Problems) -> None:
        """Report that annotation files exist, but none of them can be read."""
        heading = "no annotations can be read"
        if self.on_bad == "error":
            cure = "fix or remove them; with data.on_bad=skip images count as without annotations"
            problems.raise_if_any(heading, cure)
        problems.warn_if_any(log, f"{heading}, so the images count as without annotations")

    def _describe_marks(self, annotated: Annotated) -> str:
        """Return the number of marks of each category, and of ignored marks, in words."""
        ignored = annotated.count_ignored()
        note = f", ignored marks (iscrowd, __ignore__): {ignored}" if ignored else ""
        return self._describe_categories(annotated.count_categories()) + note

    def _describe_categories(self, counts: "dict[str, int]") -> str:
        warn_of_names(counts)
        listed = describe_counts(counts, "no label")
        if self.classes is None:
            if len(counts) < 2:
                return ""
            names = ",".join(filter(None, sorted(counts)))
            return f" ({listed}; data.classes=[{names}] tells them apart)"
        left_out = sorted(set(counts) - set(self.classes))  # their marks are background
        if left_out:
            listed += f"; not in data.classes: {', '.join(left_out)}"
        return f" ({listed})"

    @property
    @override
    def _identity(self) -> str:
        listed = self.listed
        return super()._identity + ("" if listed is None else repr((listed.images, listed.masks)))

    @property
    @override
    def scope(self) -> Scope:
        return Scope.of_images(
            self.patterns, masks=self.masks, beside=ANNOTATION_SUFFIXES, also=LIST_PATHS
        )
