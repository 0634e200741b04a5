"""Where the pixels of a watermark set come from: its images, masks that there are, and the drawn backgrounds."""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from lit_data.datamodules.source import MaskedImageFolder
from lit_data.datasets.layouts import describe_no_images
from lit_data.datasets.watermark_samples import ensure_watermark_samples
from lit_data.errors import ConfigError, DataError
from lit_data.io.decoders import ImageSource
from lit_data.io.discovery import find_images
from lit_data.io.options import ReadOptions
from lit_data.io.remote import Scope


@dataclass(frozen=True, kw_only=True)
class WatermarkSource(MaskedImageFolder):
    """The files of a watermark set; by default grey images are copied to three channels and alpha is dropped."""

    read: ReadOptions = field(default_factory=partial(ReadOptions, gray_to_rgb=True, alpha="drop"))

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        if self.masks and not self.root:
            raise ConfigError("the drawn backgrounds have no masks: set data.root, or leave data.masks out")
        super().__post_init__()

    @override
    def list_images(self) -> list[ImageSource]:
        masks = self.mask_folder
        found = find_images(self.folder, patterns=self.patterns).paths
        images = [path for path in found if masks is None or not path.is_relative_to(masks)]
        if not images:
            raise DataError(describe_no_images(self.folder, [masks] if masks else []))
        return [ImageSource((str(path),)) for path in images]

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns, self.masks))

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_watermark_samples(folder, **self.samples)

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns, masks=self.masks)
