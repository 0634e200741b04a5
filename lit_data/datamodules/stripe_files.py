"""Where the pixels of a stripe set come from: its files, their decoded stores, and the sample set."""

import hashlib
import logging
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.set_folder import SetFolder
from lit_data.datasets.layouts import SourceList, list_sources, rule_of
from lit_data.datasets.stripe_samples import ensure_stripe_samples
from lit_data.errors import ConfigError, DataError
from lit_data.io.bank import ImageBank
from lit_data.io.checking import find_faults
from lit_data.io.decoders import Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.io.discovery import find_images, match_by_stem
from lit_data.io.files import DecodedFiles
from lit_data.io.masks import MaskOptions
from lit_data.io.options import ReadOptions
from lit_data.io.remote import Scope
from lit_data.io.store import DecodedStore
from lit_data.io.survey import OnBad

SAMPLE_MASKS = "test_masks"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StripeFiles(SetFolder):
    """The files of a stripe set; the arguments are those of `StripeDataModule`."""

    layout: str
    channels: tuple[int, ...]
    files: Mapping[str, str] | None
    patterns: tuple[str, ...]
    masks: str | None
    mask_read: MaskOptions
    read: ReadOptions
    on_bad: OnBad
    cache: str
    cache_bytes: int

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        rule = rule_of(self.layout)
        for name, choices in (("cache", ("store", "device", "lru", "none")), ("on_bad", ("error", "skip"))):
            check_choice(name, getattr(self, name), choices)
        if self.layout == "channels" and len(self.channels) != rule.stored:
            raise ConfigError(f"channels={list(self.channels)} must name three: target, ref1, ref2")
        super().__post_init__()

    @property
    def store_folder(self) -> Path:
        """Where the stores of this set lie: one folder for each root and way of finding its files."""
        identity = repr((os.path.realpath(self.folder), self.layout, self.patterns, sorted((self.files or {}).items())))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return self._cache / "stores" / f"{self.folder.name}-{digest}"

    def list_images(self) -> SourceList:
        """The files of each image."""
        masks = self.mask_folder
        return list_sources(
            self.folder, self.layout, patterns=self.patterns, files=self.files, exclude=(masks,) if masks else ()
        )

    def image_decoder(self) -> ImageDecoder:
        """How one image is made from its files."""
        if self.layout == "channels":
            return ImageDecoder(self.read, channels=self.channels)
        return ImageDecoder(replace(self.read, equal_channels="collapse"))

    def open_images(self) -> ImageBank:
        """The decoded images; the first call with `cache=store` or `cache=device` decodes them.

        Raises:
            DataError: Files are bad, or do not hold the channels that the layout needs.
        """
        bank = self._open_bank(self.list_images().sources, self.image_decoder(), "images")
        stored = rule_of(self.layout).stored
        if bank.channels != stored:
            raise DataError(
                f"layout={self.layout} needs {stored} channels for each image, the files of {bank.name(0)} give "
                f"{bank.channels}: choose another data.layout or other data.files"
            )
        return bank

    def names(self, bank: ImageBank) -> list[str]:
        """Path of each image relative to the root, with forward slashes."""
        return [Path(os.path.relpath(bank.name(number), self.folder)).as_posix() for number in range(len(bank))]

    def open_masks(self, numbers: Sequence[int], bank: ImageBank, split: str) -> tuple[ImageBank | None, Sequence[int]]:
        """Decoded masks of some images, in their order.

        Returns:
            The masks, none where the set has no masks, and the images that they are of: under `on_bad=skip` those whose
            masks are bad are left out.

        Raises:
            DataError: An image has no mask, a mask has no image, or a mask is bad.
        """
        folder = self.mask_folder
        if folder is None or not numbers:
            return None, numbers
        masks = find_images(folder).paths
        stems = {_stem(bank.name(number)) for number in range(len(bank))} | {_stem(path) for path, _ in bank.skipped}
        orphans = [str(path) for path in masks if _stem(path) not in stems]
        if orphans:
            raise DataError(f"{len(orphans)} masks have no image in {self.folder}:\n  " + "\n  ".join(orphans[:100]))
        images = [Path(bank.name(number)) for number in numbers]
        wanted = {_stem(path) for path in images}
        pairs = match_by_stem(images, [path for path in masks if _stem(path) in wanted])
        sources = [ImageSource((str(mask),)) for _, mask in pairs]
        opened = self._open_bank(sources, MaskDecoder(self.mask_read), f"masks-{split}")
        return opened, leave_out(numbers, sources, opened, split)

    def check(self) -> None:
        """Decode every image and mask strictly and keep nothing.

        Raises:
            DataError: Files are bad; all of them are listed.
        """
        self.refresh()
        folder = self.mask_folder
        masks = [ImageSource((str(path),)) for path in find_images(folder).paths] if folder else []
        images = self.list_images().sources
        problems = find_faults(images, self.image_decoder())
        problems.extend(find_faults(masks, MaskDecoder(self.mask_read)))
        problems.raise_if_any(f"{len(problems)} of {len(images) + len(masks)} images and masks are bad")

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_stripe_samples(folder, **self.samples)

    @property
    @override
    def _scope(self) -> Scope:
        patterns = tuple((self.files or {}).values()) if rule_of(self.layout).roles else self.patterns
        return Scope.of_images(patterns, masks=self.masks)

    @property
    def mask_folder(self) -> Path | None:
        """Where the masks lie, if there are any."""
        if not self.root:
            return self.folder / SAMPLE_MASKS
        return self.folder / self.masks if self.masks else None

    def _open_bank(self, sources: Sequence[ImageSource], decoder: Decoder, part: str) -> ImageBank:
        if self.cache in ("store", "device"):
            return DecodedStore.build(sources, self.store_folder / part, decoder=decoder, on_bad=self.on_bad)
        cache_bytes = self.cache_bytes if self.cache == "lru" else 0
        return DecodedFiles(sources, decoder, cache_bytes=cache_bytes, on_bad=self.on_bad)


def leave_out(numbers: Sequence[int], masks: Sequence[ImageSource], opened: ImageBank, split: str) -> Sequence[int]:
    """The images whose masks are good, and a line about the others.

    Args:
        numbers: Images of a split.
        masks: The mask of each.
        opened: The good ones.
        split: For the line.
    """
    bad = {path for path, _ in opened.skipped}
    kept = [number for number, mask in zip(numbers, masks, strict=True) if mask.paths[0] not in bad]
    if len(kept) < len(numbers):
        log.warning("%s: %d images are left out with their masks, which are bad", split, len(numbers) - len(kept))
    return kept


def _stem(path: str | Path) -> str:
    return unicodedata.normalize("NFC", Path(path).stem)
