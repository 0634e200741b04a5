"""Where the pixels of a stripe set come from: its files, their decoded stores, and the sample set."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from lit_data.datamodules.source import MaskedImageFolder, stem_of
from lit_data.datasets.layouts import SourceList, list_sources, rule_of
from lit_data.datasets.stripe_samples import ensure_stripe_samples
from lit_data.errors import ConfigError, DataError
from lit_data.io.bank import ImageBank
from lit_data.io.decoders import ImageDecoder, ImageSource
from lit_data.io.remote import Scope

SAMPLE_MASKS = "test_masks"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StripeFiles(MaskedImageFolder):
    """The files of a stripe set.

    Args:
        layout: `channels`, `files`, `pairs` or `single`, see `lit_data.datasets.layouts.list_sources`.
        channels: For layout `channels`: which channel, as stored in the file, is target, ref1 and ref2.
        files: For `files` and `pairs`: for each role a glob with one ``*``; `patterns` is for the other layouts.
    """

    layout: str
    channels: tuple[int, ...]
    files: Mapping[str, str] | None

    caches = ("store", "device", "lru", "none")

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        rule = rule_of(self.layout)
        if self.layout == "channels" and len(self.channels) != rule.stored:
            raise ConfigError(f"channels={list(self.channels)} must name three: target, ref1, ref2")
        super().__post_init__()

    @override
    def list_images(self) -> Sequence[ImageSource]:
        return self.find_images().sources

    def find_images(self) -> SourceList:
        """The files of each image, and those that are of none."""
        masks = self.mask_folder
        return list_sources(
            self.folder, self.layout, patterns=self.patterns, files=self.files, exclude=(masks,) if masks else ()
        )

    @property
    @override
    def decoder(self) -> ImageDecoder:
        if self.layout == "channels":
            return ImageDecoder(self.read, channels=self.channels)
        return ImageDecoder(replace(self.read, equal_channels="collapse"))

    @override
    def open_images(self) -> ImageBank:
        """The decoded images; the first call with `cache=store` or `cache=device` decodes them.

        Raises:
            DataError: Files are bad, or do not hold the channels that the layout needs.
        """
        bank = super().open_images()
        stored = rule_of(self.layout).stored
        if bank.channels != stored:
            raise DataError(
                f"layout={self.layout} needs {stored} channels for each image, the files of {bank.name(0)} give "
                f"{bank.channels}: choose another data.layout or other data.files"
            )
        return bank

    @property
    @override
    def mask_folder(self) -> Path | None:
        return super().mask_folder if self.root else self.folder / SAMPLE_MASKS

    @override
    def _check_masks(self, masks: Sequence[Path], bank: ImageBank) -> None:
        stems = {stem_of(bank.name(number)) for number in range(len(bank))} | {
            stem_of(path) for path, _ in bank.skipped
        }
        orphans = [str(path) for path in masks if stem_of(path) not in stems]
        if orphans:
            raise DataError(f"{len(orphans)} masks have no image in {self.folder}:\n  " + "\n  ".join(orphans[:100]))

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.layout, self.patterns, sorted((self.files or {}).items())))

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_stripe_samples(folder, **self.samples)

    @property
    @override
    def _scope(self) -> Scope:
        patterns = tuple((self.files or {}).values()) if rule_of(self.layout).roles else self.patterns
        return Scope.of_images(patterns, masks=self.masks)
