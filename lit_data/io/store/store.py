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
from lit_data.io.store.index import PIXELS, StoreIndex
from lit_data.types import Array

log = logging.getLogger(__name__)


CHUNK_BYTES = 2**20


class DecodedStore:
    """Images by number, as read-only views of a memory map. Make one with ``build`` or ``open``.

    Workers and later runs share one copy of the pixels in the page cache. The files of a store are never changed: a
    rebuild makes new ones, and a process that has the old ones open reads on. A store pickles as its path alone, and
    many threads may read it at once.

    On disk it is a folder of arrays (see ``arrays``): ``pixels``, ``images`` (see ``index``), ``files`` and ``names``
    (see ``sources``).

    Attributes:
        path: The folder of this store.
        key: SHA-256 over sources, decode options and layout version.
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
        pixels: [N], the values of all images, planar [C, H, W], image after image.
        nbytes: Bytes of all pixels.
        notes: How many images the decoder had each remark about.
        skipped: (first path, what is wrong) of each source that was left out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._folder, facts, images, self._sources, offsets = StoreIndex.open(self.path)
        self.key, self.channels, self.dtype = self._folder.key, facts.channels, facts.item_dtype
        self.notes, self.skipped = facts.notes, facts.skipped
        self.heights_px = images["height_px"].astype(np.int64)
        self.widths_px = images["width_px"].astype(np.int64)
        self._crcs = images["crc32"]
        self.pixels: Array = self._folder.map(PIXELS, facts.item_dtype)
        self.nbytes = self.pixels.nbytes
        self._offsets = offsets.astype(np.int64)
        self._equal = self._view_equal_sizes()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a store and check what it says of itself.

        Args:
            path: The folder of one store.

        Raises:
            StoreError: There is no store, or it cannot be read.
            StoreCorruptError: A file is not what was written.
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
        height_px, width_px, begin = (
            self.heights_px.item(index),
            self.widths_px.item(index),
            self._offsets.item(index),
        )
        values = self.pixels[begin : begin + self.channels * height_px * width_px]
        return values.reshape(self.channels, height_px, width_px)

    def __repr__(self) -> str:
        size = decimal(self.nbytes)
        return f"DecodedStore({len(self)} images, {self.channels} channels, {self.dtype}, {size}, {self.path})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self.path),)

    def name(self, index: int) -> str:
        """First source path of one image."""
        return self._sources.name(self._sources.rows(range(len(self))[index]).start)

    @property
    def source_states(self) -> Array:
        """[n, 2] CRC-32 and size of the first file of each image: equal for files that are equal to the byte."""
        files = self._sources.files[self._sources.firsts]
        return np.stack((files["crc32"].astype(np.int64), files["size_bytes"]), axis=1)

    def check_size(self) -> None:
        """See `ArrayFolder.check_size`.

        Raises:
            StoreCorruptError: A file is not as long as it should be.
        """
        self._folder.check_size()

    def verify(self, *, progress: bool = True) -> list[str]:
        """Read every byte and every source file again and compare them with their checksums.

        Args:
            progress: Show a bar if it takes long.

        Returns:
            One line for each image or file that is not what it was at the build.

        Raises:
            StoreCorruptError: The pixel file is not as long as it should be.
        """
        self.check_size()
        arrays = self._folder.find_damages()
        images = track(self._find_bad_images(), "checking images", len(self), enabled=progress)
        files = track(self._find_bad_files(), "checking sources", len(self._sources.files), enabled=progress)
        return [line for line in (*arrays, *images, *files) if line]

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
        return self.pixels.reshape(len(self), self.channels, height_px, width_px)


def _checksum(path: str) -> int:
    crc32 = 0
    with open_source(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
