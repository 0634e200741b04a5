"""Index of a store: where each image lies, which files are behind it, how these were read."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from lit_data.io.images.header_scan import DTYPES
from lit_data.io.store.arrays import MAX_LENGTH, META_NAME, ArrayFolder, is_count
from lit_data.io.store.bands import WIDTHS, BandLayout
from lit_data.io.store.files import corrupt
from lit_data.io.store.sources import SOURCE_RECORD, SourceTable
from lit_data.types import Array

KIND: Final = "images"
VERSION: Final = 4
"""Version of the layout of all files of a store; part of every key."""
PIXELS: Final = "pixels"

IMAGE_RECORD = np.dtype(
    [("first_source", "<u8"), ("height_px", "<u4"), ("width_px", "<u4"), ("crc32", "<u4")]
)
"""The first row of an image among the files, its size, the CRC-32 of its pixels."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The facts of one store.

    Args:
        dtype: Dtype of all pixels, one of ``DTYPES``; stored little-endian.
        channels: Channels of every image.
        decoder: Fingerprint of the decoder.
        on_bad: What was asked for bad sources: ``error`` or ``skip``.
        notes: Number of images that the decoder had each remark about.
        skipped: (first path, what is wrong) of each source left out.
        band_px: Width of the bands of wide images; None: no image is in bands.

    Raises:
        ValueError: or TypeError: one of them cannot be.
    """

    dtype: str
    channels: int
    decoder: str
    on_bad: str
    notes: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    band_px: int | None = None

    def __post_init__(self) -> None:
        pairs = tuple((path, fault) for path, fault in self.skipped)  # JSON knows lists only
        object.__setattr__(self, "skipped", pairs)
        is_band = is_count(self.band_px) and self.band_px in WIDTHS
        checks = {
            "dtype": self.dtype in DTYPES,
            "channels": is_count(self.channels) and 0 < self.channels < 2**32,
            "decoder": isinstance(self.decoder, str),
            "on_bad": isinstance(self.on_bad, str),
            "notes": isinstance(self.notes, dict) and all(map(is_count, self.notes.values())),
            "skipped": all(isinstance(text, str) for pair in pairs for text in pair),
            "band_px": self.band_px is None or is_band,
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
        """Layout of its images."""
        return BandLayout(self.band_px, self.item_dtype.itemsize)

    def as_meta(self) -> dict[str, Any]:
        """Return the fields for `meta.json`."""
        return dataclasses.asdict(self)


class StoreIndex(NamedTuple):
    """Everything of a store but its pixels.

    Attributes:
        folder: Its arrays.
        facts: About all images.
        images: [n] records of ``IMAGE_RECORD``.
        sources: The files behind the images.
        offsets: [n] uint64, where each image begins, in values.
    """

    folder: ArrayFolder
    facts: StoreFacts
    images: Array
    sources: SourceTable
    offsets: Array

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
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
        images = folder.map("images", IMAGE_RECORD, check=True)
        files = folder.map("files", SOURCE_RECORD, check=True)
        names = folder.map("names", "u1", check=True)
        if not images.ndim == files.ndim == names.ndim == 1:
            raise corrupt(meta_path, "the index is not of one axis")
        if PIXELS not in folder.arrays:
            raise corrupt(meta_path, "it names no pixels")
        # The images are checked first: what is said of sources needs at least one image.
        problem = _describe_bad_image(images, facts.channels, folder.arrays[PIXELS].shape)
        problem = problem or _describe_bad_source(images, files, len(names))
        if problem:
            raise corrupt(meta_path, problem)
        lengths = _count_values(images, facts.channels)
        offsets = np.cumsum(lengths, dtype=np.uint64) - lengths
        sources = SourceTable(names, files, images["first_source"].astype(np.int64))
        return cls(folder, facts, images, sources, offsets)


def _count_values(images: Array, channels: int) -> Array:
    """Return the number of values of each image: [n] uint64."""
    areas_px = images["height_px"].astype(np.uint64) * images["width_px"]
    counts: Array = areas_px * np.uint64(channels)
    return counts


def _describe_bad_image(images: Array, channels: int, pixels_shape: tuple[int, ...]) -> str | None:
    """Say why the images cannot be those of the array of pixels; None if they can."""
    heights_px, widths_px = images["height_px"], images["width_px"]
    if len(images) == 0 or (heights_px == 0).any() or (widths_px == 0).any():
        return "an image has no pixels"
    # In floating point first: the exact sum could wrap around at 64 bits.
    value_count = (heights_px.astype(np.float64) * widths_px).sum() * channels
    is_equal = value_count <= MAX_LENGTH and pixels_shape == (
        int(_count_values(images, channels).sum()),
    )
    if not is_equal:
        return f"expected images of {value_count:.0f} values, found {pixels_shape}"
    return None


def _describe_bad_source(images: Array, files: Array, names_bytes: int) -> str | None:
    """Say why the files and their names cannot be those of the images; None if they can."""
    if len(files) == 0:
        return "the images do not share out the source files"
    first_rows, name_ends = images["first_source"], files["name_end"]
    if first_rows[0] != 0 or first_rows[-1] >= len(files) or not _is_rising(first_rows):
        return "the images do not share out the source files"
    if name_ends[0] == 0 or name_ends[-1] != names_bytes or not _is_rising(name_ends):
        return "the source paths do not fill their place"
    return None


def _is_rising(numbers: Array) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())
