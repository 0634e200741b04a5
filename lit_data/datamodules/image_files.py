"""Sources of images: what their files are, how they are decoded, and how they are stored."""

import copy
import logging
import os
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.source import FileKeywords, Source
from lit_data.errors import ConfigError
from lit_data.io.discovery import compile_exclusion, find_images, match_by_stem
from lit_data.io.images.decoders import Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.io.images.header_scan import SKIPPING, find_faults
from lit_data.io.images.image_source import DecodedFiles, ImageBank
from lit_data.io.images.masks import MaskOptions
from lit_data.io.images.options import ReadOptions
from lit_data.io.remote import Scope
from lit_data.io.shards.index import is_sharded
from lit_data.io.shards.publish import ImagePublisher, PublishOptions, SetWriter
from lit_data.io.shards.store import ShardedImages
from lit_data.io.store.bands import WHOLE, StoreOptions
from lit_data.io.store.store import DecodedStore
from lit_data.types import PathText

log = logging.getLogger(__name__)


class ImageKeywords(FileKeywords, total=False):
    """Keywords of `ImageSet`."""

    exclude: Sequence[str]
    read: ReadOptions | None


class FolderKeywords(ImageKeywords, total=False):
    """Keywords of `ImageFolder`."""

    patterns: Sequence[str]
    cache: str


class MaskedKeywords(FolderKeywords, total=False):
    """Keywords of `MaskedImageFolder`."""

    masks: PathText | None
    mask_read: MaskOptions | None
    store: StoreOptions | None


@dataclass(frozen=True, kw_only=True)
class ImageSet(Source):
    """Images, which may lie in shards.

    Args:
        read: How files are read: page, alpha, EXIF, limits, OpenCV's channel order.
        exclude: Globs below the root of files that are left out; a folder stands for all in it.

    Raises:
        ConfigError: A pattern leaves the root or cannot be understood, or the root is a set of
            shards.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_exclusion(self.exclude)
        if self.exclude and is_sharded(self.root):
            raise ConfigError(
                f"exclude={list(self.exclude)}: a set of shards is read as it was written: give data.exclude to the "
                "`python -m lit_data prepare` that writes it with prepare.shards"
            )

    @property
    @override
    def _exclusion(self) -> str:
        return repr(self.exclude) if self.exclude else ""

    @property
    @abstractmethod
    def decoder(self) -> Decoder:
        """Decoder of one image from its files."""

    @abstractmethod
    def _find_images(self) -> Sequence[ImageSource]:
        """Find the files of each image."""

    @cached_property
    @override
    def shards(self) -> ShardedImages | None:
        return self._find_shards(ShardedImages, self.cache_bytes)

    def list_images(self) -> Sequence[ImageSource]:
        """List the files of each image; of a set of shards those that were, which are not here.

        Raises:
            DataError: There are none.
        """
        return self.shards.list_images() if self.shards is not None else self._listed

    @cached_property
    def _listed(self) -> Sequence[ImageSource]:
        return self._find_images()  # once, as it logs what it leaves out

    @override
    def _publish(self, writer: SetWriter, shard_bytes: int) -> dict[str, int]:
        sources = self.list_images()
        names = {path: self.name(path) for source in sources for path in source.paths}
        publisher = ImagePublisher(
            writer, self.decoder, names, self._choose_publishing(shard_bytes)
        )
        return publisher.write(sources, self.list_beside(writer.scratch))

    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """Return local files that a set of shards needs beside the images, by paths below the root.

        Args:
            scratch: Folder for files that have to be written for it.
        """
        return {}

    def _choose_publishing(self, shard_bytes: int) -> PublishOptions:
        return PublishOptions(
            shard_bytes=shard_bytes, store=self._layout or WHOLE, on_bad=self.on_bad
        )

    @override
    def check(self) -> dict[str, int]:
        self._refuse_shards()
        self.refresh()
        sources = self.list_images()
        problems = find_faults(sources, self.decoder)
        problems.raise_if_any(f"{len(problems)} of {len(sources)} images are bad", SKIPPING)
        return {"images": len(sources)}

    @property
    def _layout(self) -> StoreOptions | None:
        """Layout of decoded images on the disk; by default whole images."""
        return None


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageSet):
    """Images that are stored as they are.

    Args:
        patterns: Globs below the root.
        cache: `store` decodes every file once into a memory-mapped store; `device` puts that store
            into the memory of the device once and cuts patches there; `lru` decodes on access and
            keeps `cache_bytes`; `none` decodes on each access.
    """

    patterns: tuple[str, ...] = ("**/*",)
    cache: str = "store"

    caches: ClassVar[Sequence[str]] = ("store", "lru", "none")

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, self.caches)
        super().__post_init__()
        if is_sharded(self.root) and self.cache != "store":
            raise ConfigError(f"cache={self.cache}: a set of shards is read with data.cache=store")

    part: ClassVar[str] = "images"
    """Name of the store of the images."""

    @property
    @override
    def decoder(self) -> Decoder:
        return ImageDecoder(self.read)

    @override
    def _find_images(self) -> Sequence[ImageSource]:
        paths = find_images(self.folder, patterns=self.patterns, exclude=self.exclude).paths
        return [ImageSource((str(path),)) for path in paths]

    def unstored(self) -> Self:
        """Return these files without a store; what was listed of them is not listed again."""
        files = copy.copy(self)
        object.__setattr__(files, "cache", "none")
        return files

    def open_images(self) -> ImageBank:
        """Open the decoded images; the first call with `cache=store` decodes them.

        Raises:
            DataError: Files are bad, or not all have one dtype and number of channels.
        """
        if self.shards is not None:
            return self.shards.open_images(self.decoder.fingerprint)
        return self._open_bank(self.list_images(), self.decoder, self.part)

    def names(self, bank: ImageBank) -> list[str]:
        """Return the path of each image relative to the root, with forward slashes."""
        return [self.name(bank.name(number)) for number in range(len(bank))]

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns)

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns))

    def _open_bank(self, sources: Sequence[ImageSource], decoder: Decoder, part: str) -> ImageBank:
        if self.cache in ("store", "device"):
            # A device cuts patches out of whole images.
            layout = self._layout if self.cache == "store" else None
            folder = self.store_folder / part
            return DecodedStore.build(
                sources, folder, decoder=decoder, on_bad=self.on_bad, store=layout
            )
        cache_bytes = self.cache_bytes if self.cache == "lru" else 0
        return DecodedFiles(sources, decoder, cache_bytes=cache_bytes, on_bad=self.on_bad)


@dataclass(frozen=True, kw_only=True)
class MaskedImageFolder(ImageFolder):
    """Images that may have masks.

    Args:
        masks: Folder (absolute or below the root) of masks with the stems of their images, or
            `None`.
        mask_read: How masks are read: their values, palettes.
        store: How decoded images lie on the disk with `cache=store`.
    """

    masks: str | None = None
    mask_read: MaskOptions = field(default_factory=MaskOptions)
    store: StoreOptions = field(default_factory=StoreOptions)

    @property
    @override
    def _layout(self) -> StoreOptions:
        return self.store

    @property
    def mask_folder(self) -> Path | None:
        """Folder of the masks, if there are any."""
        return self.folder / self.masks if self.masks else None

    def open_masks(
        self, numbers: Sequence[int], bank: ImageBank, split: str
    ) -> tuple[ImageBank | None, Sequence[int]]:
        """Open the decoded masks of some images, in their order.

        Returns:
            The masks, `None` where the set has no masks, and the images that they are of: under
            `on_bad=skip` those whose masks are bad are left out.

        Raises:
            DataError: An image has no mask, or a mask is bad.
        """
        folder = self.mask_folder
        if folder is None or not numbers:
            return None, numbers
        masks = self._list_masks(folder)
        self._check_masks(masks, bank)
        images = [Path(bank.name(number)) for number in numbers]
        stems = {stem_of(path) for path in images}
        masks_of_split = [path for path in masks if stem_of(path) in stems]
        pairs = match_by_stem(images, masks_of_split)
        sources = [ImageSource((str(mask),)) for _, mask in pairs]
        opened = self._open_bank(sources, MaskDecoder(self.mask_read), f"masks-{split}")
        return opened, _leave_out(numbers, sources, opened, split)

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        folder = self.mask_folder
        return {self.name(path): path for path in self._list_masks(folder)} if folder else {}

    def check(self) -> dict[str, int]:
        """Decode every image and mask strictly and keep nothing.

        Raises:
            DataError: Files are bad; all of them are listed.
        """
        self._refuse_shards()
        self.refresh()
        folder, images = self.mask_folder, self.list_images()
        masks = [ImageSource((str(path),)) for path in self._list_masks(folder)] if folder else []
        problems = find_faults(images, self.decoder)
        problems.extend(find_faults(masks, MaskDecoder(self.mask_read)))
        problems.raise_if_any(
            f"{len(problems)} of {len(images) + len(masks)} images and masks are bad", SKIPPING
        )
        return {"images": len(images), "masks": len(masks)}

    def _list_masks(self, folder: Path) -> list[Path]:
        excludes = compile_exclusion(self.exclude).fullmatch
        return [path for path in find_images(folder).paths if not excludes(self.name(path))]

    def _check_masks(self, masks: Sequence[Path], bank: ImageBank) -> None:
        """Refuse masks that must not be there; by default any may."""


def stem_of(path: str | Path) -> str:
    """Return the name without its suffix, in one form of Unicode."""
    return unicodedata.normalize("NFC", Path(path).stem)


def _leave_out(
    numbers: Sequence[int], masks: Sequence[ImageSource], opened: ImageBank, split: str
) -> Sequence[int]:
    """Return the images whose masks are good, and log how many others there are.

    Args:
        numbers: Images of a split.
        masks: The mask of each.
        opened: The good ones.
        split: For the log.
    """
    bad_paths = {path for path, _ in opened.skipped}
    good_images = []
    for number, mask in zip(numbers, masks, strict=True):
        if mask.paths[0] not in bad_paths:
            good_images.append(number)
    bad_count = len(numbers) - len(good_images)
    if bad_count:
        log.warning("%s: %d images are left out with their masks, which are bad", split, bad_count)
    return good_images
