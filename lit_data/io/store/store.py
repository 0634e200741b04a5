"""The decoded store: all images of a data set, decoded once, in one file that every worker maps and none copies."""

import logging
import operator
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from rich.filesize import decimal

from lit_data.errors import DataError, show_path
from lit_data.io.images.decoders import Decoder, ImageSource
from lit_data.io.images.header_scan import OnBad
from lit_data.io.progress import track
from lit_data.io.source import open_source
from lit_data.io.store.build import BuildOptions, build_store
from lit_data.io.store.header import PIXELS_NAME, corrupt, map_file, read_header, read_index
from lit_data.types import Array

log = logging.getLogger(__name__)


CHUNK_BYTES = 2**20


class DecodedStore:
    """Images by number, as read-only views of a memory map. Make one with ``build`` or ``open``.

    Workers and later runs share one copy of the pixels in the page cache. The files of a store are never changed: a
    rebuild makes new ones, and a process that has the old ones open reads on. A store pickles as its path alone, and
    many threads may read it at once.

    On disk it is a folder of three files: ``pixels.bin`` (planar [C, H, W] little-endian pixels, image after image),
    ``index.bin`` (see ``store_index``) and ``header.json`` (see ``store_header``).

    Attributes:
        path: The folder of this store.
        key: SHA-256 over sources, decode options and layout version.
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
        nbytes: Bytes of all pixels.
        notes: How many images the decoder had each remark about.
        skipped: (first path, what is wrong) of each source that was left out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        header = read_header(self.path)
        images, self._sources = read_index(self.path, header)
        self.key, self.channels, self.dtype = header.key, header.channels, header.item_dtype
        self.nbytes, self.notes, self.skipped = header.pixels_bytes, header.notes, header.skipped
        self.heights_px = images["height_px"].astype(np.int64)
        self.widths_px = images["width_px"].astype(np.int64)
        self._crcs = images["crc32"]
        self._offsets = images["offset"]
        self._map = map_file(self.path / PIXELS_NAME, header.pixels_bytes)
        self._equal = self._view_equal_sizes()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a store and check header, index and file sizes against each other.

        Args:
            path: The folder of one store.

        Raises:
            StoreError: There is no store, or it cannot be read.
            StoreCorruptError: The files are not what the header says.
        """
        return cls(path)

    @classmethod
    def build(
        cls,
        sources: Sequence[ImageSource],
        folder: str | os.PathLike[str],
        *,
        decoder: Decoder,
        on_bad: OnBad = "error",
        workers: int = 2,
        wait_s: float = 3600,
        rebuild: bool = True,
        progress: bool = True,
    ) -> Self:
        """Open the store of these sources, building it first where it does not exist.

        Args:
            sources: The images, at least one.
            folder: Holds the stores of one data set, each in a folder named by its key.
            decoder: Decodes one source.
            on_bad: ``error`` raises one error that lists all bad sources, ``skip`` leaves them out and lists them.
            workers: Threads that decode.
            wait_s: Longest wait for another process that builds in the same folder.
            rebuild: False raises instead of building anew after sources or options changed.
            progress: Show bars on work that takes longer than two seconds.

        Raises:
            ConfigError: An argument is not allowed.
            DataError: Sources are bad, or do not share one dtype and number of channels.
            StoreStaleError: A store exists but does not fit any more, and ``rebuild`` is off.
            StoreSpaceError: The disk has no room.
            StoreBusyError: Another process still builds after ``wait_s``.
            StoreCorruptError: The store exists and is damaged.
            StoreError: The folder cannot be read or written.
        """
        options = BuildOptions(on_bad=on_bad, workers=workers, wait_s=wait_s, rebuild=rebuild, progress=progress)
        store = cls(build_store(sources, Path(folder), decoder, options))
        where = show_path(folder)
        if store.skipped:
            log.warning("%s: skipped %d bad images; the first: %s", where, len(store.skipped), store.skipped[0][1])
        for note, images in store.notes.items():
            log.info("%s: %d images: %s", where, images, note)
        return store

    def __len__(self) -> int:
        return len(self.heights_px)

    def __getitem__(self, index: int) -> Array:
        """One image: [C, H, W], a read-only view of the map."""
        if self._equal is not None:
            view: Array = self._equal[operator.index(index)]
            return view
        shape = (self.channels, self.heights_px.item(index), self.widths_px.item(index))
        return np.ndarray(shape, self.dtype, self._map, self._offsets.item(index))

    def __repr__(self) -> str:
        size = decimal(self.nbytes)
        return f"DecodedStore({len(self)} images, {self.channels} channels, {self.dtype}, {size}, {self.path})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self.path),)

    def name(self, index: int) -> str:
        """First source path of one image."""
        return self._sources.name(self._sources.rows(range(len(self))[index]).start)

    def check_size(self) -> None:
        """Compare the length of the mapped file with the header; cheap.

        Reading past the end of a file that was cut short kills a process (SIGBUS) and cannot be caught, so whoever
        sees a worker die that way asks here first.

        Raises:
            StoreCorruptError: The file is not as long as it should be.
        """
        found_bytes = self._map.size()
        if found_bytes != self.nbytes:
            raise corrupt(self.path / PIXELS_NAME, f"expected {self.nbytes} bytes, found {found_bytes}")

    def verify(self, *, progress: bool = True) -> list[str]:
        """Read every pixel and every source file again and compare them with their checksums.

        Args:
            progress: Show a bar if it takes long.

        Returns:
            One line for each image or file that is not what it was at the build.

        Raises:
            StoreCorruptError: The pixel file is not as long as it should be.
        """
        self.check_size()
        images = track(self._find_bad_images(), "checking images", len(self), enabled=progress)
        files = track(self._find_bad_files(), "checking sources", len(self._sources.files), enabled=progress)
        return [line for line in (*images, *files) if line]

    def _find_bad_images(self) -> Iterator[str]:
        for image, expected in enumerate(self._crcs.tolist()):
            found = zlib.crc32(self[image].data)
            what = f"{show_path(self.name(image))}: the stored pixels have CRC-32 {found:08x}, expected {expected:08x}"
            yield "" if found == expected else what

    def _find_bad_files(self) -> Iterator[str]:
        for row, expected in enumerate(self._sources.files["crc32"].tolist()):
            path = self._sources.name(row)
            try:
                found = _checksum(path)
            except DataError as error:
                yield str(error)
                continue
            what = f"{show_path(path)}: the source has CRC-32 {found:08x}, expected {expected:08x}; it changed"
            yield "" if found == expected else what

    def _view_equal_sizes(self) -> Array | None:
        height_px, width_px = self.heights_px.item(0), self.widths_px.item(0)
        if (self.heights_px != height_px).any() or (self.widths_px != width_px).any():
            return None
        return np.ndarray((len(self), self.channels, height_px, width_px), self.dtype, self._map)


def _checksum(path: str) -> int:
    crc32 = 0
    with open_source(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
