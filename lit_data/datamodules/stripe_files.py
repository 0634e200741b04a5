"""`StripeFiles`: images with references, their masks, and the synthetic dataset."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from lit_data.datamodules.image_files import MaskedImageFolder, stem_of
from lit_data.datasets.stripes.layouts import SourceList, list_sources, rule_of
from lit_data.errors import ConfigError, DataError, list_problems, show_path
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.image_source import ImageBank
from lit_data.io.remote import Scope
from lit_data.samples.stripes import ensure_stripe_samples

log = logging.getLogger(__name__)


SAMPLE_MASKS = "test_masks"


@dataclass(frozen=True, kw_only=True)
class StripeFiles(MaskedImageFolder):
    """The files of a stripe set.

    Args:
        layout: `channels`, `files`, `pairs` or `single`, see
            `lit_data.datasets.stripes.layouts.list_sources`.
        channels: For layout `channels`: which channel, as stored in the file, is target, ref1 and
            ref2.
        files: For `files` and `pairs`: for each role a glob with one ``*``; `patterns` is for the
            other layouts.
    """

    layout: str = "channels"
    channels: tuple[int, ...] = (0, 1, 2)
    files: Mapping[str, str] | None = None

    caches = ("store", "device", "lru", "none")
    takes_shards = True
    draw = staticmethod(ensure_stripe_samples)

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        rule = rule_of(self.layout)
        if self.layout == "channels" and len(self.channels) != rule.stored:
            raise ConfigError(f"channels={list(self.channels)} must name three: target, ref1, ref2")
        super().__post_init__()

    @override
    def _find_images(self) -> Sequence[ImageSource]:
        return self.find_images().sources

    def find_images(self) -> SourceList:
        """The files of each image, and those that are of none."""
        masks = self.mask_folder
        return list_sources(
            self.folder,
            self.layout,
            patterns=self.patterns,
            files=self.files,
            exclude=self.exclude,
            masks=(masks,) if masks else (),
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
            problems = list_problems([(path, "a mask without an image") for path in orphans])
            raise problems.make_error(
                f"{len(orphans)} masks have no image in {show_path(self.folder)}"
            )

    @property
    @override
    def _identity(self) -> str:
        return repr(
            (
                os.path.realpath(self.folder),
                self.layout,
                self.patterns,
                sorted((self.files or {}).items()),
            )
        )

    @property
    @override
    def _scope(self) -> Scope:
        patterns = (
            tuple((self.files or {}).values()) if rule_of(self.layout).roles else self.patterns
        )
        return Scope.of_images(patterns, masks=self.masks)
