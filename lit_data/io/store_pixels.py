"""Decoding sources into the pixel file of a new store, in order, and collecting what the index needs to know."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lit_data.errors import DataError, show_path
from lit_data.io.decoders import Decoder, ImageSource
from lit_data.io.ordered import ordered_map
from lit_data.io.store_index import IMAGE_RECORD
from lit_data.io.store_sources import SourceTable
from lit_data.io.store_writer import write_all
from lit_data.io.survey import Survey
from lit_data.types import Array

MAX_NOTES = 100
"""Different remarks that are counted one by one."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """One image, ready to be written.

    Args:
        pixels: [C, H, W], contiguous and little-endian.
        crc32: Of the pixels.
        notes: Remarks of the decoder, without the path.
        source_crc32: Of each of its files.
    """

    pixels: Array
    crc32: int
    notes: tuple[str, ...]
    source_crc32: tuple[int, ...]


class PixelWriter:
    """Appends decoded images to a pixel file.

    Args:
        fd: Open for writing, at the start of the file.
        sources: Files of all images that may come, in order.

    Attributes:
        notes: How many images each remark was made about.
        size_bytes: Bytes written.
    """

    def __init__(self, fd: int, sources: SourceTable) -> None:
        self.notes: Counter[str] = Counter()
        self.size_bytes = 0
        self._fd = fd
        self._sources = sources
        self._images = np.zeros(len(sources.firsts), IMAGE_RECORD)
        self._crcs = sources.files["crc32"].copy()

    def append(self, number: int, image: DecodedImage) -> None:
        """Write one image; numbers must rise from call to call."""
        write_all(self._fd, image.pixels.data)
        self._images[number] = (self.size_bytes, 0, *image.pixels.shape, image.crc32)
        rows = self._sources.rows(number)
        self._crcs[rows.start : rows.stop] = image.source_crc32
        self.size_bytes += image.pixels.nbytes
        for note in image.notes:
            self.notes[note if note in self.notes or len(self.notes) < MAX_NOTES else "other remarks"] += 1

    def finish(self) -> tuple[Array, SourceTable]:
        """Return the records of the images that were written, and their files."""
        files = self._sources.files.copy()
        files["crc32"] = self._crcs
        written = np.flatnonzero(self._images["channels"])
        table = SourceTable(self._sources.names, files, self._sources.firsts).take(written)
        images = self._images[written]
        images["first_source"] = table.firsts
        return images, table


def decode_images(
    decoder: Decoder, sources: Sequence[ImageSource], survey: Survey, workers: int
) -> Iterator[DecodedImage | str]:
    """Decode the good sources of a survey in threads, a few ahead of the one that is taken.

    Args:
        decoder: Decodes one source.
        sources: All sources.
        survey: Which of them are good.
        workers: Number of threads.

    Yields:
        Each image in order, or what is wrong with it.
    """

    def decode(image: int) -> DecodedImage | str:
        source = sources[survey.images[image]]
        try:
            decoded = decoder(source)
            pixels = survey.check(image, decoded.array, source.paths[0])
        except (DataError, OSError) as error:
            return str(error)
        notes = tuple(_cut_path(note, source.paths) for note in decoded.notes)
        return DecodedImage(pixels, zlib.crc32(pixels.data), notes, decoded.source_crc32)

    return ordered_map(decode, range(len(survey.images)), workers)


def _cut_path(note: str, paths: Sequence[str]) -> str:
    """Leave the path out, so that equal remarks about many files are counted as one."""
    for path in paths:
        note = note.removeprefix(f"{show_path(path)}: ")
    return note
