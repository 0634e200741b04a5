"""Images decoded when they are asked for: the ``lru`` and ``none`` cache modes."""

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
        """Copy patches of images, reflect-padded where they reach past an edge.

        Args:
            images: [M] their numbers.
            tops_px: [M] first rows.
            lefts_px: [M] first columns.
            rows: [M, C, h, w], where the patches go.
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
    """Images out of which patches are cut."""

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array, /) -> None:
        """Cut patches, see `ImageBank.cut_into`."""


def cut_some(
    bank: CutsPatches, chosen: Ints, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array
) -> None:
    """Cut the patches with the numbers `chosen`; straight into the rows if they are all."""
    if len(chosen) == len(rows):
        bank.cut_into(images, tops_px, lefts_px, rows)
    elif len(chosen):
        patches = np.empty((len(chosen), *rows.shape[1:]), rows.dtype)
        bank.cut_into(images[chosen], tops_px[chosen], lefts_px[chosen], patches)
        rows[chosen] = patches


def describe_bank(bank: ImageBank) -> dict[str, int]:
    """Numbers for a report: ``images``, ``skipped``, and ``pixel_bytes`` of all decoded pixels."""
    pixels = bank.channels * int((bank.heights_px * bank.widths_px).sum())
    return {
        "images": len(bank),
        "skipped": len(bank.skipped),
        "pixel_bytes": pixels * bank.dtype.itemsize,
    }


class DecodedFiles(ImageBank):
    """Reads like a ``DecodedStore``, for sources that must not be stored.

    All headers are read once, at construction; a file whose pixels turn out bad raises when it is
    decoded. Paths are kept as flat arrays. A pickled copy has an empty cache; the paths and sizes
    of a large set are shared with it, see ``SharedState``.

    Args:
        sources: The images.
        decoder: Decodes one source.
        cache_bytes: Decoded bytes to keep in this process; 0 decodes at every access.
        on_bad: ``error`` raises one error that lists all sources with bad headers, ``skip`` leaves
            them out.
        progress: Show a bar if that takes long.

    Attributes:
        cache: The cache, for its hit counts.
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
        skipped: (first path, what is wrong) of each source that was left out.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Headers are bad, or the images do not share dtype and channels.
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
            DataError: It is bad, or it is not any more what its header said.
        """
        image = range(len(self))[index]
        return self.cache.get_or_load(image, lambda: self._decode(image))

    def _decode(self, image: int) -> Array:
        source = ImageSource(self._sources.paths(image))
        return self._survey.check(image, self._decoder(source).array, source.paths[0])

    def name(self, index: int) -> str:
        """First source path of one image."""
        return self._sources.name(self._sources.rows(range(len(self))[index]).start)
