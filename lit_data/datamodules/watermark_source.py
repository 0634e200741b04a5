"""Where the pixels of a watermark set come from: its images, masks that there are, and the drawn backgrounds."""

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.set_folder import SetFolder
from lit_data.datamodules.stripe_files import leave_out
from lit_data.datasets.layouts import describe_no_images
from lit_data.datasets.watermark_samples import ensure_watermark_samples
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

CACHES: Final = ("store", "lru", "none")


@dataclass(frozen=True, kw_only=True)
class WatermarkSource(SetFolder):
    """The files of a watermark set; the arguments are those of `WatermarkDataModule`."""

    patterns: tuple[str, ...]
    masks: str | None
    mask_read: MaskOptions
    read: ReadOptions
    on_bad: OnBad
    cache: str
    cache_bytes: int

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        for name, choices in (("cache", CACHES), ("on_bad", ("error", "skip"))):
            check_choice(name, getattr(self, name), choices)
        if self.masks and not self.root:
            raise ConfigError("the drawn backgrounds have no masks: set data.root, or leave data.masks out")
        super().__post_init__()

    @property
    def mask_folder(self) -> Path | None:
        """Where the masks lie, if there are any."""
        return self.folder / self.masks if self.masks else None

    def open_images(self) -> ImageBank:
        """The decoded images; the first call with `cache=store` decodes them.

        Raises:
            DataError: Files are bad, or not all have one dtype and number of channels.
        """
        return self._open_bank(self._list_images(), ImageDecoder(self.read), "images")

    def names(self, bank: ImageBank) -> list[str]:
        """Path of each image relative to the root, with forward slashes."""
        return [Path(os.path.relpath(bank.name(number), self.folder)).as_posix() for number in range(len(bank))]

    def open_masks(self, numbers: Sequence[int], bank: ImageBank, split: str) -> tuple[ImageBank | None, Sequence[int]]:
        """Decoded masks of some images, in their order.

        Returns:
            The masks, none where the set has no masks, and the images that they are of: under `on_bad=skip` those whose
            masks are bad are left out.

        Raises:
            DataError: An image has no mask, or a mask is bad.
        """
        folder = self.mask_folder
        if folder is None or not numbers:
            return None, numbers
        images = [Path(bank.name(number)) for number in numbers]
        wanted = {_stem(path) for path in images}
        pairs = match_by_stem(images, [path for path in find_images(folder).paths if _stem(path) in wanted])
        sources = [ImageSource((str(mask),)) for _, mask in pairs]
        opened = self._open_bank(sources, MaskDecoder(self.mask_read), f"masks-{split}")
        return opened, leave_out(numbers, sources, opened, split)

    def check(self) -> dict[str, int]:
        """Decode every image and mask strictly and keep nothing.

        Raises:
            DataError: Files are bad; all of them are listed.
        """
        self.refresh()
        folder, images = self.mask_folder, self._list_images()
        masks = [ImageSource((str(path),)) for path in find_images(folder).paths] if folder else []
        problems = find_faults(images, ImageDecoder(self.read))
        problems.extend(find_faults(masks, MaskDecoder(self.mask_read)))
        problems.raise_if_any(f"{len(problems)} of {len(images) + len(masks)} images and masks are bad")
        return {"images": len(images), "masks": len(masks)}

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_watermark_samples(folder, **self.samples)

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns, masks=self.masks)

    def _list_images(self) -> list[ImageSource]:
        masks = self.mask_folder
        found = find_images(self.folder, patterns=self.patterns).paths
        images = [path for path in found if masks is None or not path.is_relative_to(masks)]
        if not images:
            raise DataError(describe_no_images(self.folder, [masks] if masks else []))
        return [ImageSource((str(path),)) for path in images]

    def _open_bank(self, sources: Sequence[ImageSource], decoder: Decoder, part: str) -> ImageBank:
        if self.cache == "store":
            identity = repr((os.path.realpath(self.folder), self.patterns, self.masks))
            digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:12]
            folder = self._cache / "stores" / f"{self.folder.name}-{digest}" / part
            return DecodedStore.build(sources, folder, decoder=decoder, on_bad=self.on_bad)
        cache_bytes = self.cache_bytes if self.cache == "lru" else 0
        return DecodedFiles(sources, decoder, cache_bytes=cache_bytes, on_bad=self.on_bad)


def _stem(path: str | Path) -> str:
    return unicodedata.normalize("NFC", Path(path).stem)
