"""Decoded store: all images of a dataset, decoded once, in one file that every worker maps."""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from rich.filesize import decimal
from typing_extensions import override

from lit_data.core.errors import DataError, list_problems, show_path
from lit_data.core.files import find_crc32
from lit_data.core.grid import SlicedImage
from lit_data.core.progress import track
from lit_data.core.types import Array, Ints, PathText
from lit_data.images.bank import ImageBank, cut_some
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import OnBad
from lit_data.images.store.arrays import keep_arrays
from lit_data.images.store.build import BuildOptions, build_store
from lit_data.images.store.index import PIXELS, StoreIndex
from lit_data.images.store.pixels import (
    WHOLE,
    BandedImage,
    BandedPixels,
    PlanarPixels,
    StoreOptions,
)
from lit_data.images.store.sources import SourceTable, find_checksum
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)


class StoredImages(ImageBank):
    """Bank of stored images, which are identified by a key.

    Attributes:
        key: SHA-256 of everything that the images were made from.
    """

    key: str

    @abstractmethod
    def open_image(self, index: int) -> Array | BandedImage:
        """Return one image [C, H, W], which can be read by slices."""

    @property
    @abstractmethod
    def source_states(self) -> Array:
        """CRC-32 and size of the first file of each image, [n, 2]; equal for equal files."""

    @abstractmethod
    def verify(self, *, progress: bool = True) -> list[str]:
        """Return a line for each image or file that changed since it was stored."""


class DecodedStore(StoredImages):
    """Images by number, as read-only views of a memory map. Make one with ``build`` or ``open``.

    Workers and later runs share one copy of the pixels in the page cache. The files of a store
    never change: a rebuild creates new ones, and a process that has the old ones open can still
    read them. A store is pickled as its path, and many threads may read it at once.

    On disk it is a folder of arrays (see ``arrays``): ``pixels``, ``images`` (see ``index``),
    ``files`` and ``names`` (see ``sources``).

    Attributes:
        path: The folder of this store.
        key: SHA-256 over sources, decode options and layout version.
        channels: Channels of every image.
        dtype: Dtype of every image: uint8, uint16, int16 or float32.
        heights_px: [n] int64, rows of each image.
        widths_px: [n] int64, columns of each image.
        pixels: [N] values of all images, one after another: planar [C, H, W], or in bands, see
            `bands`.
        nbytes: Number of bytes of all pixels as stored.
        notes: Number of images with each note of the decoder.
        skipped: (first path, what is wrong) of each skipped source.
    """

    def __init__(self, path: PathText) -> None:
        self.path = Path(path).absolute()
        index = StoreIndex.open(self.path)
        facts = index.facts
        self._extents = index.extents
        self._folder = index.folder
        self._sources = index.sources
        self.key = index.folder.key
        self.channels = facts.channels
        self.dtype = facts.item_dtype
        self.notes = facts.notes
        self.skipped = facts.skipped
        self.heights_px = self._extents.heights_px
        self.widths_px = self._extents.widths_px
        self._crcs = index.crcs
        self.pixels: Array = self._folder.map(PIXELS, facts.item_dtype)
        self.nbytes = self.pixels.nbytes
        self._is_banded = facts.layout.find_banded(self.widths_px)
        self._planar = PlanarPixels(self.pixels, self._extents)
        self._banded: BandedPixels | None = None
        if facts.band_px is not None and self._is_banded.any():
            # A separate map, since the kernel reads ahead in one that is read in order.
            mapped, values = self._folder.map_again(PIXELS)
            self._banded = BandedPixels(mapped, values, facts.band_px, self._extents)

    @classmethod
    def open(cls, path: PathText) -> Self:
        """Open a store and check its metadata.

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
        folder: PathText,
        *,
        decoder: Decoder,
        on_bad: OnBad = "error",
        wait_s: float = 3600,
        rebuild: bool = True,
        progress: bool = True,
        store: StoreOptions | None = None,
        item: str = "image",
    ) -> Self:
        """Open the store of these sources, and build it first if it does not exist.

        Args:
            sources: The images, at least one.
            folder: Folder of the stores of one dataset, each in a folder named by its key.
            decoder: Decodes one source.
            on_bad: ``error`` raises one error that lists all bad sources, ``skip`` skips and lists
                them.
            wait_s: Longest wait for another process that builds in the same folder.
            rebuild: False raises an error instead of a rebuild if sources or options changed.
            progress: Show progress bars for work that takes longer than two seconds.
            store: Layout of images on the disk; by default whole.
            item: What one image is called while it is stored: ``image`` or ``mask``.

        Raises:
            ConfigError: An argument is not allowed.
            DataError: Sources are bad, or differ in dtype or number of channels.
            StoreStaleError: A store exists but is out of date, and ``rebuild`` is False.
            StoreSpaceError: The disk has not enough space.
            StoreBusyError: Another process is still building after ``wait_s``.
            StoreCorruptError: The store exists and is damaged.
            StoreError: The folder cannot be read or written.
        """
        options = BuildOptions(on_bad, wait_s, rebuild, progress, store or WHOLE, item=item)
        opened = cls(build_store(sources, Path(folder), decoder, options))
        bad = list_problems(opened.skipped)
        skipped = counted_of(len(bad), len(sources), "image", "is", "are")
        bad.warn_if_any(log, f"{skipped} bad and skipped")
        for note, images in opened.notes.items():
            log.info("%s: %s: %s", show_path(folder), counted(images, "image"), note)
        return opened

    def __len__(self) -> int:
        return len(self.heights_px)

    def __getitem__(self, index: int) -> Array:
        """Return one image [C, H, W], read-only: a view of the map, or a copy if it is in bands."""
        image = self.open_image(index)
        if isinstance(image, BandedImage):
            image = np.ascontiguousarray(image)
            image.flags.writeable = False
        return image

    @override
    def open_image(self, index: int) -> Array | BandedImage:
        if self._banded is not None and self._is_banded.item(index):
            return self._banded.open(range(len(self))[index])  # negative indices count from the end
        values = self._extents.cut_out(self.pixels, index)
        return values.reshape(self._extents.shape(index))

    @override
    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        if self._banded is None:
            self._planar.cut_into(images, tops_px, lefts_px, rows)
            return
        is_banded = self._is_banded[images]
        for pixels, is_theirs in ((self._banded, is_banded), (self._planar, ~is_banded)):
            cut_some(pixels, np.flatnonzero(is_theirs), images, tops_px, lefts_px, rows)

    def __repr__(self) -> str:
        images = f"{len(self)} images, {self.channels} channels, {self.dtype}"
        return f"DecodedStore({images}, {decimal(self.nbytes)}, {self.path})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self.path),)

    def name(self, index: int) -> str:
        """Return the first source path of one image."""
        image = range(len(self))[index]  # negative indices count from the end
        return self._sources.name(self._sources.rows(image).start)

    @property
    @override
    def source_states(self) -> Array:
        return self._sources.first_states

    @override
    def check_size(self) -> None:
        self._folder.check_size()

    @override
    def verify(self, *, progress: bool = True) -> list[str]:
        """Read every byte and every source file again and compare them with their checksums.

        Args:
            progress: Show a progress bar if it takes long.

        Returns:
            One line for each image or file that changed since the build.

        Raises:
            StoreCorruptError: The pixel file has another length than it should.
        """
        self.check_size()
        image_count = len(self)
        file_count = len(self._sources.files)
        # The checksums of the index, of each image, and of each source file.
        damages = [*self._folder.find_damages()]
        damages += track(self.find_bad_images(), "checking images", image_count, enabled=progress)
        damages += track(self._find_bad_files(), "checking sources", file_count, enabled=progress)
        return [line for line in damages if line]

    def find_bad_images(self) -> Iterator[str]:
        """Read every image, and yield what is wrong with it, or ""."""
        for image, expected in enumerate(self._crcs.tolist()):
            crc32 = find_crc32(self[image].data)
            if crc32 == expected:
                yield ""
            else:
                name = show_path(self.name(image))
                yield f"{name}: the stored pixels have CRC-32 {crc32:08x}, expected {expected:08x}"

    def _find_bad_files(self) -> Iterator[str]:
        for row, expected in enumerate(self._sources.files["crc32"].tolist()):
            path = self._sources.name(row)
            try:
                crc32 = find_checksum(path)
            except DataError as error:
                yield str(error)
                continue
            if crc32 == expected:
                yield ""
            else:
                yield (
                    f"{show_path(path)}: the source has CRC-32 {crc32:08x}, "
                    f"expected {expected:08x}; it changed"
                )

    @property
    def sources(self) -> SourceTable:
        """Source files of the images."""
        return self._sources


def cut_middle(bank: ImageBank, number: int, side_px: int) -> Array:
    """Return the middle of an image, [C, h, w] with sides of up to `side_px`."""
    image: SlicedImage = bank[number]
    if isinstance(bank, StoredImages):
        image = bank.open_image(number)  # reads only the part that is cut
    channels, height, width = image.shape
    top, left = max(0, height - side_px) // 2, max(0, width - side_px) // 2
    rows, columns = slice(top, top + side_px), slice(left, left + side_px)
    return np.asarray(image[slice(channels), rows, columns])


def keep_found(
    folder: Path | None,
    bank: ImageBank,
    inputs: Sequence[Array | None],
    kind: str,
    make: Callable[[], Mapping[str, Ints]],
    version: int = 1,
) -> dict[str, Ints]:
    """Return arrays [n] int64 that need a pass over the dataset, from the folder if possible.

    Args:
        folder: Folder that keeps the arrays; None keeps nothing.
        bank: Images of the dataset; arrays are kept only for a store, which has a key.
        inputs: Other arrays that the result depends on.
        kind: Kind of content, in one word.
        make: Computes the arrays.
        version: Version of `make`, which increases if it computes something else.
    """
    if folder is None or not isinstance(bank, StoredImages):
        return dict(make())
    digest = hashlib.sha256(repr((kind, version, bank.key)).encode())
    for array in inputs:
        digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
    arrays = keep_arrays(folder, digest.hexdigest()[:32], kind, version, make)
    return {name: arrays.map(name, np.int64) for name in arrays.arrays}
