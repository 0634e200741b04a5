"""The index file of a decoded store: one record per image, one per source file, then all source paths joined.

Flat arrays over a memory map: half a million images cost no Python objects, and workers share the pages.
"""

import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from lit_data.io.store_header import INDEX_NAME, MAX_LENGTH, StoreHeader, corrupt, open_regular
from lit_data.io.store_sources import SOURCE_RECORD, SourceTable
from lit_data.types import Array

IMAGE_RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("first_source", "<u8"),
        ("channels", "<u4"),
        ("height_px", "<u4"),
        ("width_px", "<u4"),
        ("crc32", "<u4"),
    ]
)
"""Where an image begins in the pixel file, its first row among the sources, its shape, the CRC-32 of its pixels."""


def map_file(path: Path, expected_bytes: int) -> mmap.mmap:
    """Map a file of a store for reading.

    Raises:
        StoreError: It cannot be opened.
        StoreCorruptError: It has not the length that the header says.
    """
    fd = open_regular(path)
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes != expected_bytes:
            raise corrupt(path, f"expected {expected_bytes} bytes, found {found_bytes}")
        return mmap.mmap(fd, expected_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def read_index(folder: Path, header: StoreHeader) -> tuple[Array, SourceTable]:
    """Map the index file and check it against the header.

    Args:
        folder: The store.
        header: Its header.

    Returns:
        [n] records of ``IMAGE_RECORD``, and the files behind the images.

    Raises:
        StoreCorruptError: A length, the checksum, a shape or an offset is wrong.
    """
    path = folder / INDEX_NAME
    images_bytes = header.images * IMAGE_RECORD.itemsize
    sources_bytes = header.sources * SOURCE_RECORD.itemsize
    data = map_file(path, images_bytes + sources_bytes + header.names_bytes)
    if zlib.crc32(data) != header.index_crc32:
        raise corrupt(path, f"expected CRC-32 {header.index_crc32:08x}, found {zlib.crc32(data):08x}")
    images = np.frombuffer(data, IMAGE_RECORD, header.images)
    records = np.frombuffer(data, SOURCE_RECORD, header.sources, images_bytes)
    names = np.frombuffer(data, np.uint8, header.names_bytes, images_bytes + sources_bytes)
    problem = _find_bad_image(images, header) or _find_bad_source(images, records, header)
    if problem:
        raise corrupt(path, problem)
    return images, SourceTable(names, records, images["first_source"].view(np.int64))


def _find_bad_image(images: Array, header: StoreHeader) -> str | None:
    item_bytes = header.channels * header.item_dtype.itemsize
    areas_px = images["height_px"].astype(np.uint64) * images["width_px"]
    if (images["channels"] != header.channels).any():
        return f"an image has not the {header.channels} channels of the header"
    if areas_px.min() == 0:
        return "an image has no pixels"
    # In floating point first: the exact sum below could wrap around at 64 bits.
    if areas_px.sum(dtype=np.float64) * item_bytes > MAX_LENGTH / 2:
        return "the images are larger than any file"
    lengths = areas_px * np.uint64(item_bytes)
    ends = np.cumsum(lengths)
    if ends[-1] != header.pixels_bytes:
        return f"expected images of {header.pixels_bytes} bytes, found {ends[-1]}"
    if (images["offset"] != ends - lengths).any():
        return "the images overlap or leave holes"
    return None


def _find_bad_source(images: Array, records: Array, header: StoreHeader) -> str | None:
    firsts, ends = images["first_source"], records["name_end"]
    if firsts[0] != 0 or firsts[-1] >= header.sources or (firsts[1:] <= firsts[:-1]).any():
        return "the images do not share out the source files"
    if ends[-1] != header.names_bytes or (ends[1:] <= ends[:-1]).any() or ends[0] == 0:
        return "the source paths do not fill their place"
    return None
