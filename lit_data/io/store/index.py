"""What a store of images holds beside its pixels: where each image lies, the files behind it, how they were read."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from lit_data.io.images.header_scan import DTYPES
from lit_data.io.store.arrays import MAX_LENGTH, META_NAME, ArrayFolder, is_count
from lit_data.io.store.bands import WIDTHS, BandLayout
from lit_data.io.store.files import corrupt
from lit_data.io.store.packed import MOST_SAVED, PACKINGS, ROWS_PX, Compression, count_blocks
from lit_data.io.store.sources import SOURCE_RECORD, SourceTable
from lit_data.types import Array

KIND: Final = "images"
VERSION: Final = 2
"""Version of the layout of all files of a store; part of every key."""
PIXELS: Final = "pixels"
BLOCKS: Final = "blocks"

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
        notes: How many images the decoder had each remark about.
        skipped: (first path, what is wrong) of each source left out.
        compression: Of the pixels.

    Raises:
        ValueError: or TypeError: one of them cannot be.
    """

    dtype: str
    channels: int
    decoder: str
    on_bad: str
    notes: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    compression: Compression = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "skipped", tuple((path, fault) for path, fault in self.skipped))
        checks = {
            "dtype": self.dtype in DTYPES,
            "channels": is_count(self.channels) and 0 < self.channels < 2**32,
            "notes": isinstance(self.notes, dict) and all(map(is_count, self.notes.values())),
            "skipped": all(isinstance(text, str) for pair in self.skipped for text in pair),
            "compression": self.compression in ("none", *PACKINGS),
        }
        checks |= {name: isinstance(getattr(self, name), str) for name in ("decoder", "on_bad")}
        if wrong := [name for name, is_right in checks.items() if not is_right]:
            raise ValueError(f"wrong: {', '.join(wrong)}")

    @property
    def item_dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the pixels as stored."""
        return np.dtype(self.dtype).newbyteorder("<")

    def as_meta(self) -> dict[str, Any]:
        """For `meta.json`; as the versions wrote it that knew no compression, where there is none."""
        fields = dataclasses.asdict(self)
        if self.compression == "none":
            del fields["compression"]
        return fields


class StoreIndex(NamedTuple):
    """Everything of a store but its pixels.

    Attributes:
        folder: Its arrays.
        facts: About all images.
        images: [n] records of ``IMAGE_RECORD``.
        sources: The files behind the images.
        offsets: [n] uint64, where each image begins, in values.
        layout: Which images are in bands, and how they are compressed.
        ends: [blocks] uint64, byte at which each compressed block ends; none where nothing is
            compressed.
    """

    folder: ArrayFolder
    facts: StoreFacts
    images: Array
    sources: SourceTable
    offsets: Array
    layout: BandLayout
    ends: Array | None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the index of a store and check it.

        Raises:
            StoreError: There is no store, or it cannot be read.
            StoreCorruptError: A file is not what was written.
        """
        folder = ArrayFolder(path, KIND, VERSION)
        try:
            facts = StoreFacts(**folder.facts)
        except (ValueError, TypeError) as error:
            raise corrupt(
                folder.path / META_NAME, f"no facts of images ({error!s:.200})"
            ) from error
        images = folder.map("images", IMAGE_RECORD, check=True)
        files = folder.map("files", SOURCE_RECORD, check=True)
        names = folder.map("names", "u1", check=True)
        if {array.ndim for array in (images, files, names)} != {1}:
            raise corrupt(folder.path / META_NAME, "the index is not of one axis")
        offsets = np.cumsum(_count_values(images, facts.channels), dtype=np.uint64)
        layout, ends = _read_layout(folder, facts), None
        pixels = folder.arrays[PIXELS].shape
        if layout.compression != "none":
            ends = folder.map(BLOCKS, "<u8", check=True)
            pixels = _find_whole(images, facts.channels, layout, ends, pixels)
        problem = _find_bad_image(images, facts.channels, pixels) or _find_bad_source(
            images, files, len(names)
        )
        if problem:
            raise corrupt(folder.path / META_NAME, problem)
        offsets -= _count_values(images, facts.channels)
        table = SourceTable(names, files, images["first_source"].astype(np.int64))
        return cls(folder, facts, images, table, offsets, layout, ends)


def _read_layout(folder: ArrayFolder, facts: StoreFacts) -> BandLayout:
    if PIXELS not in folder.arrays:
        raise corrupt(folder.path / META_NAME, "it names no pixels")
    height, width = folder.arrays[PIXELS].block_px or (0, None)
    if facts.compression != "none":
        height, width = height - ROWS_PX, width or None
    if height or width not in (None, *WIDTHS):
        raise corrupt(
            folder.path / META_NAME, f"no images in blocks of {height} x {width} px are known"
        )
    return BandLayout(width, facts.item_dtype.itemsize, facts.compression)


def _find_whole(
    images: Array, channels: int, layout: BandLayout, ends: Array, packed: tuple[int, ...]
) -> tuple[int, ...]:
    """The length that the array of pixels would have if it were not compressed; nothing where its blocks are wrong."""
    heights_px, widths_px = (
        images["height_px"].astype(np.int64),
        images["width_px"].astype(np.int64),
    )
    if not len(images) or min(heights_px.min(), widths_px.min()) == 0:
        return ()
    past = np.cumsum(count_blocks(heights_px, widths_px, layout.find_widths(widths_px)))
    if ends.shape != (past[-1],) or (int(ends[-1]),) != packed or not (ends[1:] > ends[:-1]).all():
        return ()
    values, packed_bytes = (
        _count_values(images, channels),
        np.diff(ends[past - 1], prepend=np.uint64(0)),
    )
    fits = (
        values.astype(np.float64) * layout.itemsize <= MOST_SAVED * packed_bytes.astype(np.float64)
    ).all()
    return (int(values.sum()),) if fits else ()


def _count_values(images: Array, channels: int) -> Array:
    counts: Array = images["height_px"].astype(np.uint64) * images["width_px"] * np.uint64(channels)
    return counts


def _find_bad_image(images: Array, channels: int, pixels: tuple[int, ...]) -> str | None:
    if not len(images) or min(images["height_px"].min(), images["width_px"].min()) == 0:
        return "an image has no pixels"
    # In floating point first: the exact sum could wrap around at 64 bits.
    total = (images["height_px"].astype(np.float64) * images["width_px"]).sum() * channels
    if total > MAX_LENGTH or (int(_count_values(images, channels).sum()),) != pixels:
        return f"expected images of {total:.0f} values, found {pixels}"
    return None


def _find_bad_source(images: Array, files: Array, names_bytes: int) -> str | None:
    firsts, ends = images["first_source"], files["name_end"]
    if (
        not len(files)
        or firsts[0] != 0
        or firsts[-1] >= len(files)
        or (firsts[1:] <= firsts[:-1]).any()
    ):
        return "the images do not share out the source files"
    if ends[-1] != names_bytes or (ends[1:] <= ends[:-1]).any() or ends[0] == 0:
        return "the source paths do not fill their place"
    return None
