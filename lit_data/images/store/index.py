"""Index of a store: the position of each image, its source files, and how they were decoded."""

import dataclasses
import logging
import os
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lit_data.core.errors import DataError, StoreError, show_path
from lit_data.core.progress import count_threads, ordered_map, track
from lit_data.core.types import Array, PathText
from lit_data.images.header_scan import DTYPES
from lit_data.images.store.arrays import MAX_LENGTH, META_NAME, ArrayFolder, is_count
from lit_data.images.store.files import corrupt, is_there
from lit_data.images.store.pixels import WIDTHS, BandLayout, ImageExtents
from lit_data.images.store.sources import KEY_DIGITS, SOURCE_RECORD, SourceTable, find_checksum
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

KIND = "images"
VERSION = 4
"""Version of the layout of all files of a store; part of every key."""
PIXELS = "pixels"

IMAGE_RECORD = np.dtype(
    [("first_source", "<u8"), ("height_px", "<u4"), ("width_px", "<u4"), ("crc32", "<u4")]
)
"""Record of an image: its first row among the files, its size, and the CRC-32 of its pixels."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts of one store.

    Args:
        dtype: Dtype of all pixels, one of ``DTYPES``; stored little-endian.
        channels: Channels of every image.
        decoder: Fingerprint of the decoder.
        on_bad: Treatment of bad sources: ``error`` or ``skip``.
        notes: Number of images with each note of the decoder.
        skipped: (first path, what is wrong) of each skipped source.
        band_px: Width of the bands of wide images; None if no image is in bands.

    Raises:
        ValueError: A value is not allowed.
        TypeError: A value has the wrong type.
    """

    dtype: str
    channels: int
    decoder: str
    on_bad: str
    notes: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    band_px: int | None = None

    def __post_init__(self) -> None:
        pairs = tuple((path, fault) for path, fault in self.skipped)  # JSON has only lists
        object.__setattr__(self, "skipped", pairs)
        is_width = is_count(self.band_px) and self.band_px in WIDTHS
        # The file that they come from is not trusted.
        checks = {
            "dtype": self.dtype in DTYPES,
            "channels": is_count(self.channels) and 0 < self.channels < 2**32,
            "decoder": isinstance(self.decoder, str),
            "on_bad": isinstance(self.on_bad, str),
            "notes": isinstance(self.notes, dict) and all(map(is_count, self.notes.values())),
            "skipped": all(isinstance(text, str) for pair in pairs for text in pair),
            "band_px": self.band_px is None or is_width,
        }
        wrong_names = [name for name, is_right in checks.items() if not is_right]
        if wrong_names:
            raise ValueError(f"wrong: {', '.join(wrong_names)}")

    @property
    def item_dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the pixels as stored."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def layout(self) -> BandLayout:
        """Layout of the images."""
        return BandLayout(self.band_px, self.item_dtype.itemsize)

    def as_meta(self) -> dict[str, Any]:
        """Return the fields for `meta.json`."""
        return dataclasses.asdict(self)


class StoreIndex(NamedTuple):
    """Everything in a store except its pixels.

    Attributes:
        folder: Arrays of the store.
        facts: Facts about all images.
        extents: Size and position of each image among the pixels.
        crcs: [n] CRC-32 of the pixels of each image.
        sources: Source files of the images.
    """

    folder: ArrayFolder
    facts: StoreFacts
    extents: ImageExtents
    crcs: Array
    sources: SourceTable

    @classmethod
    def open(cls, path: PathText) -> Self:
        """Map the index of a store and check it.

        Raises:
            StoreError: There is no store, or it cannot be read.
            StoreCorruptError: A file is not what was written.
        """
        folder = ArrayFolder(path, KIND, VERSION)
        meta_path = folder.path / META_NAME
        try:
            facts = StoreFacts(**folder.facts)
        except (ValueError, TypeError) as error:
            raise corrupt(meta_path, f"no facts of images ({error!s:.200})") from error
        if PIXELS not in folder.arrays:
            raise corrupt(meta_path, "it names no pixels")
        images = folder.map("images", IMAGE_RECORD, check=True)
        files = folder.map("files", SOURCE_RECORD, check=True)
        names = folder.map("names", "u1", check=True)
        try:
            _check_sources(images["first_source"], files["name_end"], len(names))
            extents = _lay_out(images, facts.channels, folder.arrays[PIXELS].shape)
        except ValueError as error:
            raise corrupt(meta_path, str(error)) from error
        sources = SourceTable(names, files, images["first_source"].astype(np.int64))
        return cls(folder, facts, extents, images["crc32"], sources)


def locate_store(folder: Path, key: str) -> Path | None:
    """Return the store with a key, or one whose files have the same content as when it was built.

    A key contains the change times of the files, which `cp -p` and `chmod` change too. If only these
    differ, the files are compared once, and a link with the new key leads to the store.
    """
    path = folder / key
    if os.path.islink(path):  # noqa: PTH114 - False for a name that is too long
        path = folder / path.readlink()
    if is_there(path):
        return path
    for other in folder.glob(f"{key[:KEY_DIGITS]}*") if is_there(folder) else ():
        if not other.is_symlink() and is_there(other) and _has_same_content(other):
            with suppress(OSError):  # a read-only folder: the next run compares again
                (folder / key).unlink(missing_ok=True)
                (folder / key).symlink_to(other.name)
            return other
    return None


def _has_same_content(path: Path) -> bool:
    """Compare the files of a store, which has none that it skipped, with their checksums."""
    try:
        index = StoreIndex.open(path)
    except StoreError:
        return False
    if index.facts.skipped:  # which have no checksum
        return False
    files = index.sources.files

    def is_same(row: int) -> bool:
        try:
            return find_checksum(index.sources.name(row)) == int(files["crc32"][row])
        except DataError:
            return False

    log.info(
        "%s: files have new change times, but the same sizes and modification times: comparing %s "
        "with the decoded store",
        show_path(path.parent),
        counted(len(files), "file"),
    )
    compared = ordered_map(is_same, range(len(files)), count_threads())
    with closing(track(compared, "comparing files", len(files), enabled=True)) as results:
        return all(results)


def _lay_out(images: Array, channels: int, pixels_shape: tuple[int, ...]) -> ImageExtents:
    """Return the extents of the images, which are adjacent in the array of pixels.

    Raises:
        ValueError: The images do not fill the array of pixels.
    """
    heights_px, widths_px = (
        images["height_px"].astype(np.int64),
        images["width_px"].astype(np.int64),
    )
    if min(heights_px.min(), widths_px.min()) == 0:
        raise ValueError("an image has no pixels")
    # In floating point first, since integers could wrap around at 64 bits.
    value_count = (heights_px.astype(np.float64) * widths_px).sum() * channels
    if value_count <= MAX_LENGTH:
        counts = heights_px * widths_px * channels
        ends = np.cumsum(counts)
        if pixels_shape == (ends[-1],):
            return ImageExtents(channels, heights_px, widths_px, ends - counts)
    raise ValueError(f"expected images of {value_count:.0f} values, found {pixels_shape}")


def _check_sources(first_rows: Array, name_ends: Array, names_bytes: int) -> None:
    """Refuse a table in which a file belongs to no image, or a part of the names to no file.

    Raises:
        ValueError: The table is such, or is empty.
    """
    if not _is_rising(first_rows) or first_rows[0] != 0 or first_rows[-1] >= len(name_ends):
        raise ValueError("the images do not use each source file once")
    if not _is_rising(name_ends) or name_ends[0] == 0 or name_ends[-1] != names_bytes:
        raise ValueError("the source paths have another size than stated")


def _is_rising(numbers: Array) -> bool:
    """Return True if there are numbers, and they strictly increase."""
    return len(numbers) > 0 and bool((numbers[1:] > numbers[:-1]).all())
