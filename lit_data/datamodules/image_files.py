"""Sources of images: files, decoders and stores."""

import copy
import logging
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
from typing_extensions import override

from lit_data.annotations.formats import add_label_files
from lit_data.core.addresses import is_sharded
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, list_problems
from lit_data.core.types import NEUTRAL, Ints, PathText
from lit_data.core.wings import find_part
from lit_data.datamodules.source import FileKeywords, Source
from lit_data.datasets.references import find_sources, rule_of
from lit_data.datasets.split_lists import LIST_PATHS, find_list_files
from lit_data.images.bank import DecodedFiles, ImageBank
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.images.discovery import compile_exclusion, find_images, match_by_stem
from lit_data.images.header import EXTENSIONS
from lit_data.images.header_scan import find_faults, report_bad
from lit_data.images.mask_choice import choose_inversion
from lit_data.images.masks import MaskOptions
from lit_data.images.read_options import ReadOptions
from lit_data.images.roots import ImageRoot, PublishedImages, ShardSet
from lit_data.images.scope import Scope
from lit_data.images.store.pixels import WHOLE, StoreOptions
from lit_data.images.store.store import DecodedStore
from lit_inspect.counts import counted
from lit_inspect.layouts import ROLES

log = logging.getLogger(__name__)


class ImageKeywords(FileKeywords, total=False):
    """Keywords of all kinds of images."""

    exclude: Annotated[Sequence[str], NEUTRAL]
    read: ReadOptions | None


class FolderKeywords(ImageKeywords, total=False):
    """Keywords of `ImageFolder`."""

    patterns: Annotated[Sequence[str], NEUTRAL]
    cache: Annotated[str, NEUTRAL]


class MaskedKeywords(FolderKeywords, total=False):
    """Keywords of images with masks."""

    masks: PathText | None
    mask_read: MaskOptions | None
    store: StoreOptions | None


class LayoutKeywords(MaskedKeywords, total=False):
    """Keywords of `MaskedImageFolder`."""

    layout: str | None
    channels: Sequence[int]
    files: Annotated[Mapping[str, str] | None, NEUTRAL]


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Source):
    """Images in separate files or in shards.

    Args:
        read: How files are read: page, alpha, EXIF, limits, OpenCV's channel order.
        exclude: Globs below the root of files to skip; a folder excludes all files in it.
        patterns: Globs below the root of files to read.
        cache: `store` decodes every file once into a memory-mapped store; `device` also copies that
            store to the memory of the device once and cuts patches there; `lru` decodes on access
            and keeps `cache_bytes`; `none` decodes on each access.

    Raises:
        ConfigError: A pattern leads out of the root or is invalid, or an option cannot be used with
            shards.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    exclude: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("**/*",)
    cache: str = "store"

    caches: ClassVar[Sequence[str]] = ("store", "lru", "none")
    late_suffixes = tuple(EXTENSIONS)
    part: ClassVar[str] = "images"
    """Name of the store of the images."""

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, self.caches)
        super().__post_init__()
        compile_exclusion(self.exclude)
        if not is_sharded(self.root):
            return
        if self.exclude:
            raise ConfigError(
                f"exclude={list(self.exclude)}: a set of shards is read as it was written: give "
                "data.exclude to the `lit-data prepare` that writes it with prepare.shards"
            )
        if self.cache != "store":
            raise ConfigError(f"cache={self.cache}: a set of shards is read with data.cache=store")

    @property
    def decoder(self) -> Decoder:
        """Decoder of one image from its files."""
        return ImageDecoder(self.read)

    def keeping_numbers(self) -> Self:
        """Return this source with `ReadOptions.depth` at ``keep``, which a range of values requires."""
        return replace(self, read=replace(self.read, depth="keep"))

    def find_images(self) -> Sequence[ImageSource]:
        """Find the files of each image; this is called once."""
        sources = find_sources(
            self.folder,
            patterns=self.patterns,
            exclude=self.exclude,
            leftovers=self.leftovers,
        )
        return self.keep_members(sources)

    def keep_members(self, sources: Sequence[ImageSource]) -> Sequence[ImageSource]:
        """Return the images that belong to the set, see `find_members`."""
        members = self.find_members([self.name(source.paths[0]) for source in sources])
        return [sources[number] for number in members]

    def list_others(self, bank: ImageBank) -> list[str]:
        """Return the names of images that are not in a bank, but may be in lists."""
        return [self.name(path) for path, _ in bank.skipped]

    @cached_property
    @override
    def shards(self) -> ImageRoot | None:
        if not is_sharded(self.root):
            return None
        kind: Callable[..., ImageRoot] = find_part("ROOTS", "image_shards")
        return self.open_shards(kind)

    def list_images(self) -> Sequence[ImageSource]:
        """List the files of each image; for shards the original files.

        Raises:
            DataError: There are no images.
        """
        return self.shards.list_images() if self.shards is not None else self._images

    @cached_property
    def _images(self) -> Sequence[ImageSource]:
        return self.find_images()  # once, because it logs skipped files

    def open_images(self) -> ImageBank:
        """Open the decoded images; the first call with `cache=store` decodes them.

        Raises:
            DataError: Files are bad, or differ in dtype or number of channels.
        """
        if self.shards is not None:
            return self.shards.open_images(self.decoder)
        return self._open_bank(self.list_images(), self.decoder, self.part)

    def names(self, bank: ImageBank) -> list[str]:
        """Return the path of each image relative to the root, with forward slashes."""
        return [self.name(bank.name(number)) for number in range(len(bank))]

    def unstored(self) -> Self:
        """Return this source without a store; files that were listed are not listed again."""
        files = copy.copy(self)  # with the lists that are cached in it
        object.__setattr__(files, "cache", "none")
        return files

    @override
    def check(self) -> dict[str, int]:
        self._refuse_shards()
        self.refresh()
        sources = self.list_images()
        problems = find_faults(sources, self.decoder)
        report_bad(problems, len(sources), self.on_bad)
        return {"images": len(sources)}

    def list_published(self) -> Sequence[ImageSource]:
        """List the files of each image to write into shards; some may be bad."""
        return self.list_images()

    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """Return local files that shards need in addition to the images, by paths below the root.

        Args:
            scratch: Folder for files that must be written for the shards.
        """
        names = [self.name(source.paths[0]) for source in self.list_images()]
        return {self.name(path): path for path in find_list_files(self.folder, names)}

    @override
    def write_into(self, shards: ShardSet) -> dict[str, int]:
        return shards.write_images(self.describe_published(shards.scratch))

    def describe_published(self, scratch: Path) -> PublishedImages:
        """Return the images to write into shards; for args see `list_beside`."""
        sources = self.list_published()
        # Shards name images by their paths below the root, so that the root can be anywhere.
        names = {path: self.name(path) for source in sources for path in source.paths}
        # The beginning of the paths: some kinds of data make paths of a relative root absolute.
        path, name = next(iter(names.items()))
        return PublishedImages(
            sources=sources,
            root=Path(path.removesuffix(f"/{name}")),
            names=names,
            decoder=self.decoder,
            store=self._layout,
            on_bad=self.on_bad,
            list_beside=partial(self.list_beside, scratch),
        )

    def _open_bank(
        self, sources: Sequence[ImageSource], decoder: Decoder, part: str, item: str = "image"
    ) -> ImageBank:
        if self.cache in ("store", "device"):
            # A device cuts patches from whole images.
            layout = self._layout if self.cache == "store" else WHOLE
            folder = self.store_folder / part
            return DecodedStore.build(
                sources, folder, decoder=decoder, on_bad=self.on_bad, store=layout, item=item
            )
        cache_bytes = self.cache_bytes if self.cache == "lru" else 0
        return DecodedFiles(sources, decoder, cache_bytes=cache_bytes, on_bad=self.on_bad)

    @property
    def _layout(self) -> StoreOptions:
        """Layout of decoded images on disk."""
        return WHOLE

    @property
    @override
    def _exclusion(self) -> str:
        return repr(self.exclude) if self.exclude else ""

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns))

    @property
    @override
    def scope(self) -> Scope | None:
        return Scope.of_images(self.patterns, also=LIST_PATHS)


@dataclass(frozen=True, kw_only=True)
class MaskedImageFolder(ImageFolder):
    """Images of one or more files each, with or without masks.

    A subclass whose images or masks are in other places overrides `find_images` or `find_masks`.

    Args:
        masks: Folder (absolute or below the root) of masks, which have the stems of their images;
            `None` for no masks.
        mask_read: Options for reading masks, such as their values and palettes.
        store: Layout of decoded images on disk with `cache=store`.
        layout: With `None`, an image is one file with all its channels. `channels`, `files`, `pairs`
            and `single` have references, see `lit_data.datasets.references`.
        channels: Numbers of the channels that are target, ref1 and ref2, for layout `channels`.
        files: A glob with one ``*`` for each role, for `files` and `pairs`; other layouts use
            `patterns`.
    """

    masks: str | None = None
    mask_read: MaskOptions = field(default_factory=MaskOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    layout: str | None = None
    channels: tuple[int, ...] = (0, 1, 2)
    files: Mapping[str, str] | None = None

    takes_shards = True
    sample_masks: ClassVar[str | None] = None
    """Folder of the masks of the synthetic dataset."""

    def __post_init__(self) -> None:
        rule_of(self.layout)
        if self.layout == "channels" and len(self.channels) != len(ROLES):
            raise ConfigError(f"channels={list(self.channels)} must name three: target, ref1, ref2")
        super().__post_init__()

    @property
    @override
    def decoder(self) -> Decoder:
        if self.layout is None:
            return ImageDecoder(self.read)
        if self.layout == "channels":
            return ImageDecoder(self.read, channels=self.channels)
        # A role has one channel; gray images are often saved with three equal channels.
        return ImageDecoder(replace(self.read, equal_channels="collapse"))

    @property
    def mask_decoder(self) -> Decoder:
        """Decoder of one mask from its files."""
        return MaskDecoder(self.mask_options)

    @cached_property
    def mask_options(self) -> MaskOptions:
        """Options for reading the masks: `mask_read`, with `invert` chosen from the masks if it is `auto`."""
        return choose_inversion([Path(mask.paths[0]) for mask in self.list_masks()], self.mask_read)

    @property
    def mask_folder(self) -> Path | None:
        """Folder of the masks, if there are any."""
        name = self.masks if self.root else self.sample_masks
        return self.folder / name if name else None

    @override
    def find_images(self) -> Sequence[ImageSource]:
        sources = find_sources(
            self.folder,
            self.layout,
            patterns=self.patterns,
            files=self.files,
            exclude=self.exclude,
            masks=self.mask_folder,
            leftovers=self.leftovers,
        )
        add_label_files(self.leftovers, self.folder, "pairs")
        return self.keep_members(sources)

    @override
    def open_images(self) -> ImageBank:
        """Open the decoded images; the first call with `cache=store` or `device` decodes them.

        Raises:
            DataError: Files are bad, or do not hold the channels that the layout needs.
        """
        bank = super().open_images()
        stored = rule_of(self.layout).stored  # None for any number of channels
        if stored not in (None, bank.channels):
            raise DataError(
                f"layout={self.layout} needs {counted(stored, 'channel')} for each image, but the files of "
                f"{bank.name(0)} give {bank.channels}: choose another data.layout or other "
                "data.files"
            )
        return bank

    def find_masks(self) -> Sequence[ImageSource]:
        """Find the files of each mask, which has the stem of its image; this is called once.

        A mask of several files has one channel for each.
        """
        folder = self.mask_folder
        if folder is None:
            return []
        is_excluded = compile_exclusion(self.exclude).fullmatch
        paths = find_images(folder).paths
        return [ImageSource((str(path),)) for path in paths if not is_excluded(self.name(path))]

    def list_masks(self) -> Sequence[ImageSource]:
        """List the files of each mask; empty without masks."""
        return self._masks

    @cached_property
    def _masks(self) -> Sequence[ImageSource]:
        return self.find_masks()

    def open_masks(
        self, numbers: Sequence[int], bank: ImageBank, split: str
    ) -> tuple[ImageBank | None, Sequence[int]]:
        """Open the decoded masks of some images, in their order.

        Args:
            numbers: Numbers of the images of a split.
            bank: All images.
            split: Name of the split, for the store and for messages.

        Returns:
            The masks, or `None` if the dataset has none, and the numbers of their images; with
                `on_bad=skip` images with bad masks are skipped.

        Raises:
            DataError: An image has no mask, or a mask is bad or without an image.
        """
        masks = self.list_masks() if numbers else []
        if not masks:
            return None, numbers
        mask_of = {Path(mask.paths[0]): mask for mask in masks}
        # The folder of masks of plain images may also have masks of other images.
        if self.layout is not None:
            self._check_orphans(mask_of)
        images = [Path(bank.name(number)) for number in numbers]
        stems = {stem_of(image) for image in images}
        masks_of_split = [path for path in mask_of if stem_of(path) in stems]
        sources = [mask_of[path] for _, path in match_by_stem(images, masks_of_split)]
        # One store for each split, because splits with synthetic defects need no masks.
        opened = self._open_bank(sources, self.mask_decoder, f"masks-{split}", "mask")
        return opened, _leave_out(numbers, sources, opened, split)

    def open_known_masks(self, bank: ImageBank) -> tuple[Ints, ImageBank | None]:
        """Open the decoded masks of the images that have one.

        Args:
            bank: All images.

        Returns:
            Numbers of these images and their masks; the masks are None if there are none.
        """
        number_of = {stem_of(bank.name(number)): number for number in range(len(bank))}
        known = [mask for mask in self.list_masks() if stem_of(mask.paths[0]) in number_of]
        if not known:
            return np.zeros(0, np.int64), None
        numbers = [number_of[stem_of(mask.paths[0])] for mask in known]
        opened = self._open_bank(known, self.mask_decoder, "masks-known", "mask")
        return np.array(_leave_out(numbers, known, opened, "all"), np.int64), opened

    def _check_orphans(self, masks: Iterable[Path]) -> None:
        """Refuse masks without an image; a bad image that was skipped counts as one."""
        stems = {stem_of(image.paths[0]) for image in self.list_images()}
        orphans = [path for path in masks if stem_of(path) not in stems]
        if orphans:
            problems = list_problems([(str(path), "a mask without an image") for path in orphans])
            raise problems.make_error(
                counted(len(orphans), "mask has", "masks have") + f" no image in {self.shown_root}"
            )

    @override
    def check(self) -> dict[str, int]:
        self._refuse_shards()
        self.refresh()
        images, masks = self.list_images(), self.list_masks()
        problems = find_faults(images, self.decoder)
        problems.extend(find_faults(masks, self.mask_decoder))
        file_count = len(images) + len(masks)
        report_bad(problems, file_count, self.on_bad, what="file")
        return {"images": len(images), "masks": len(masks)}

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        paths = [Path(path) for mask in self.list_masks() for path in mask.paths]
        return super().list_beside(scratch) | {self.name(path): path for path in paths}

    @property
    @override
    def _layout(self) -> StoreOptions:
        return self.store

    @property
    @override
    def _identity(self) -> str:
        files = sorted((self.files or {}).items())
        identity = os.path.realpath(self.folder), self.patterns, self.masks, self.layout, files
        return repr(identity)

    @property
    @override
    def scope(self) -> Scope | None:
        has_roles = bool(rule_of(self.layout).roles)
        patterns = tuple((self.files or {}).values()) if has_roles else self.patterns
        return Scope.of_images(patterns, masks=self.masks, also=LIST_PATHS)


def stem_of(path: str | Path) -> str:
    """Return the name without its suffix, in one form of Unicode."""
    # macOS decomposes accents in names of files, other systems do not change them.
    return unicodedata.normalize("NFC", Path(path).stem)


def _leave_out(
    numbers: Sequence[int], masks: Sequence[ImageSource], opened: ImageBank, split: str
) -> Sequence[int]:
    """Return the images whose masks are good, and log the number of others.

    Args:
        numbers: Images of a split.
        masks: Mask of each image.
        opened: The good masks.
        split: Name of the split for the log.
    """
    bad_paths = {path for path, _ in opened.skipped}
    good_images = []
    for number, mask in zip(numbers, masks, strict=True):
        if mask.paths[0] not in bad_paths:
            good_images.append(number)
    bad_count = len(numbers) - len(good_images)
    if bad_count:
        log.warning("%s: images with bad masks are skipped: %d", split, bad_count)
    return good_images
