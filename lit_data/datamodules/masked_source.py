"""`MaskedImageFolder`: images of a folder with masks that have their stems."""

import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from lit_data.datamodules.source import ImageFolder
from lit_data.errors import ConfigError
from lit_data.io.discovery import compile_exclusion, find_images, match_by_stem
from lit_data.io.images.decoders import ImageSource, MaskDecoder
from lit_data.io.images.header_scan import SKIPPING, find_faults
from lit_data.io.images.image_source import ImageBank
from lit_data.io.images.masks import MaskOptions
from lit_data.io.store.bands import StoreOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MaskedImageFolder(ImageFolder):
    """Images that may have masks.

    Args:
        masks: Folder (absolute or below the root) of masks with the stems of their images, or
            `None`.
        mask_read: How masks are read: their values, palettes.
        store: How decoded images lie on the disk with `cache=store`.
    """

    masks: str | None
    mask_read: MaskOptions = field(default_factory=MaskOptions)
    store: StoreOptions = field(default_factory=StoreOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache != "store" and self.store.compression != "none":
            raise ConfigError(
                f"store.compression={self.store.compression} needs data.cache=store, not {self.cache}"
            )

    @property
    @override
    def _layout(self) -> StoreOptions:
        return self.store

    @property
    def mask_folder(self) -> Path | None:
        """Where the masks lie, if there are any."""
        return self.folder / self.masks if self.masks else None

    def open_masks(
        self, numbers: Sequence[int], bank: ImageBank, split: str
    ) -> tuple[ImageBank | None, Sequence[int]]:
        """Decoded masks of some images, in their order.

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
        wanted = {stem_of(path) for path in images}
        pairs = match_by_stem(images, [path for path in masks if stem_of(path) in wanted])
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
            DataError: ImageSource are bad; all of them are listed.
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
    """The name without its suffix, in one form of Unicode."""
    return unicodedata.normalize("NFC", Path(path).stem)


def _leave_out(
    numbers: Sequence[int], masks: Sequence[ImageSource], opened: ImageBank, split: str
) -> Sequence[int]:
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
        log.warning(
            "%s: %d images are left out with their masks, which are bad",
            split,
            len(numbers) - len(kept),
        )
    return kept
