"""Images decoded on access: the ``lru`` and ``none`` cache modes."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from rich.filesize import decimal
from typing_extensions import override

from lit_data.core.bank import Bank
from lit_data.core.grid import cut_patch
from lit_data.core.recent_cache import LruCache
from lit_data.core.shared_arrays import share_state
from lit_data.core.types import Array, Ints
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import OnBad, survey_sources
from lit_data.images.store.sources import join_paths


class ImageBank(Bank):
    """Images by number, all of one dtype and one channel count, of equal or different sizes.

    Attributes:
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
    """

    channels: int
    dtype: np.dtype[Any]
    heights_px: Ints
    widths_px: Ints

    @abstractmethod
    def __getitem__(self, index: int) -> Array:
        """Return one image: [C, H, W], read-only."""

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """Copy patches of images, reflect-padded beyond the edges of an image.

        Args:
            images: [M] numbers of the images.
            tops_px: [M] first row of each patch.
            lefts_px: [M] first column of each patch.
            rows: [M, C, h, w], destination of the patches.
        """
        places = zip(images.tolist(), tops_px.tolist(), lefts_px.tolist(), strict=True)
        for row, (image, top, left) in zip(rows, places, strict=True):
            row[...] = cut_patch(self[image], top, left, rows.shape[2:])

    @override
    def count_bytes(self, numbers: Ints) -> Ints:
        pixel_bytes = self.channels * self.dtype.itemsize
        nbytes: Ints = self.heights_px[numbers] * self.widths_px[numbers] * pixel_bytes
        return nbytes


class CutsPatches(Protocol):
    """Images that patches can be cut from."""

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array, /) -> None:
        """Cut patches, see `ImageBank.cut_into`."""


def cut_some(
    bank: CutsPatches, chosen: Ints, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array
) -> None:
    """Cut the patches with the numbers `chosen`, directly into the rows if all are chosen."""
    if len(chosen) == len(rows):
        bank.cut_into(images, tops_px, lefts_px, rows)
    elif len(chosen):
        patches = np.empty((len(chosen), *rows.shape[1:]), rows.dtype)
        bank.cut_into(images[chosen], tops_px[chosen], lefts_px[chosen], patches)
        rows[chosen] = patches


def describe_bank(bank: ImageBank) -> dict[str, int]:
    """Return numbers for a report: ``images``, ``skipped`` and ``pixel_bytes``, all decoded pixels."""
    pixels = bank.channels * int((bank.heights_px * bank.widths_px).sum())
    return {
        "images": len(bank),
        "skipped": len(bank.skipped),
        "pixel_bytes": pixels * bank.dtype.itemsize,
    }


class DecodedFiles(ImageBank):
    """Images decoded on access, with the interface of a ``DecodedStore``; nothing is stored on disk.

    All headers are read once, at construction. A file with bad pixels raises an error when it is
    decoded. Paths are kept as flat arrays. A pickled copy starts with an empty cache and shares the
    paths and sizes of a large set, see ``SharedState``.

    Args:
        sources: The images.
        decoder: Decodes one source.
        cache_bytes: Decoded bytes to keep in this process; 0 decodes at every access.
        on_bad: ``error`` raises one error that lists all sources with bad headers, ``skip`` skips
            them.
        progress: Show a progress bar if reading the headers takes long.

    Attributes:
        cache: Cache of decoded images, which counts its hits.
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
        skipped: (first path, what is wrong) of each skipped source.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Headers are bad, or the images differ in dtype or number of channels.
    """

    def __init__(
        self,
        sources: Sequence[ImageSource],
        decoder: Decoder,
        *,
        cache_bytes: int,
        on_bad: OnBad = "error",
        progress: bool = True,
    ) -> None:
        self.cache: LruCache[int, Array] = LruCache(cache_bytes)
        self._decoder = decoder
        survey = survey_sources(sources, decoder, on_bad=on_bad, progress=progress)
        self._survey = survey
        self.channels = survey.channels
        self.dtype = np.dtype(survey.dtype)
        self.skipped = survey.skipped
        self.heights_px = survey.heights_px
        self.widths_px = survey.widths_px
        self._sources = join_paths(sources[image].paths for image in survey.images)

    def __len__(self) -> int:
        return len(self._survey.images)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, ("_survey", "_sources", "heights_px", "widths_px", "skipped"))

    def __repr__(self) -> str:
        cache = decimal(self.cache.max_bytes or 0)
        return f"DecodedFiles({len(self)} images, {self.channels} channels, {self.dtype}, cache {cache})"

    def __getitem__(self, index: int) -> Array:
        """Decode one image, or take it from the cache: [C, H, W], read-only.

        Raises:
            DataError: The image is bad, or no longer matches its header.
        """
        image = range(len(self))[index]
        return self.cache.get_or_load(image, lambda: self._decode(image))

    def _decode(self, image: int) -> Array:
        source = ImageSource(self._sources.paths(image))
        return self._survey.check(image, self._decoder(source).array, source.paths[0])

    def name(self, index: int) -> str:
        """Return the first source path of one image."""
        return self._sources.name(self._sources.rows(range(len(self))[index]).start)
