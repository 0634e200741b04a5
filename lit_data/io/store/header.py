"""The header of a decoded store: a small JSON file that is written in one canonical form and believed in nothing.

What may stand in it follows the rules of safetensors (https://github.com/huggingface/safetensors#format): a bounded
size, a closed list of dtypes, no key twice, and lengths that the other files are measured against.
"""

import dataclasses
import json
import mmap
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.errors import StoreCorruptError, StoreError, show_path
from lit_data.io.store.sources import SOURCE_RECORD, SourceTable
from lit_data.types import Array

HEADER_NAME = "header.json"
INDEX_NAME = "index.bin"
PIXELS_NAME = "pixels.bin"
VERSION = 1
"""Version of the layout of all files of a store; part of every key."""

DTYPES = ("uint8", "uint16", "int16", "float32")
MAX_HEADER_BYTES = 16 * 2**20
MAX_LENGTH = 2**63 - 1
CHECKSUM = "header_crc32"


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The facts of one store.

    Args:
        key: SHA-256 of everything the store was made from.
        dtype: Dtype of all pixels, one of ``DTYPES``; stored little-endian.
        channels: Channels of every image.
        images: Number of images.
        sources: Number of source files.
        pixels_bytes: Length of the pixel file.
        names_bytes: Length of the joined source paths at the end of the index file.
        index_crc32: CRC-32 of the index file.
        decoder: Fingerprint of the decoder.
        on_bad: What was asked for bad sources: ``error`` or ``skip``.
        notes: How many images the decoder had each remark about.
        skipped: (first path, what is wrong) of each source left out.
        version: Layout version.
    """

    key: str
    dtype: str
    channels: int
    images: int
    sources: int
    pixels_bytes: int
    names_bytes: int
    index_crc32: int
    decoder: str
    on_bad: str
    notes: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        checks = {
            "version": type(self.version) is int and self.version == VERSION,
            "dtype": self.dtype in DTYPES,
            "channels": _is_length(self.channels) and self.channels < 2**32,
            "images": _is_length(self.images),
            "sources": _is_length(self.sources) and self.sources >= self.images,
            "pixels_bytes": _is_length(self.pixels_bytes),
            "names_bytes": _is_length(self.names_bytes),
            "index_crc32": type(self.index_crc32) is int and 0 <= self.index_crc32 < 2**32,
            "notes": all(isinstance(note, str) and _is_length(count) for note, count in self.notes.items()),
            "skipped": all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in self.skipped),
        }
        checks |= {name: isinstance(getattr(self, name), str) for name in ("key", "decoder", "on_bad")}
        wrong = [f"{name} is {getattr(self, name)!r:.80}" for name, is_right in checks.items() if not is_right]
        if wrong:
            raise ValueError(", ".join(wrong))

    def encode(self) -> bytes:
        """Return the one canonical JSON text of this header, its own CRC-32 included."""
        fields = dataclasses.asdict(self)
        return dump_plain(fields | {CHECKSUM: zlib.crc32(dump_plain(fields))})

    @property
    def item_dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the pixels as stored."""
        return np.dtype(self.dtype).newbyteorder("<")


def read_header(folder: Path) -> StoreHeader:
    """Read and check the header of the store in ``folder``.

    Raises:
        StoreError: There is no store, or it cannot be read.
        StoreCorruptError: The header is not one that this version wrote.
    """
    path = folder / HEADER_NAME
    if not is_there(folder):
        raise StoreError(f"no decoded store at {show_path(folder)}; run `python -m lit_data prepare` to make it")
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        raw = file.read(MAX_HEADER_BYTES + 1)
    if len(raw) > MAX_HEADER_BYTES:
        raise corrupt(path, f"expected at most {MAX_HEADER_BYTES} bytes, found more")
    try:
        fields = json.loads(raw, object_pairs_hook=refuse_twice)
        header = _build_header(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise corrupt(path, f"not a header of version {VERSION} ({error!s:.200})") from error
    if header.encode() != raw:
        raise corrupt(path, "its bytes are not those that were written")
    return header


def is_there(folder: Path) -> bool:
    """Whether a store has been published at ``folder``; False also where that cannot be looked up."""
    return os.path.isdir(folder)  # noqa: PTH112 - Path.is_dir raises where a name is too long or a parent closed


def open_regular(path: Path) -> int:
    """Open a file of a store for reading, without waiting on a pipe or device that stands in its place.

    Raises:
        StoreError: It cannot be opened.
        StoreCorruptError: It is missing or not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise corrupt(path, "expected a file, found nothing") from error
    except OSError as error:
        raise StoreError(f"{show_path(path)} cannot be read: {error.strerror}; check its permissions") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise corrupt(path, "not a regular file")
    return fd


def corrupt(path: Path, problem: str) -> StoreCorruptError:
    """Make the error for a file of a store whose content is wrong."""
    folder = show_path(path.parent)
    return StoreCorruptError(
        f"{show_path(path)}: {problem}; delete the folder {folder} and run `python -m lit_data prepare` again"
    )


def _build_header(fields: Any) -> StoreHeader:  # noqa: ANN401 - whatever a JSON text holds
    expected = {field.name for field in dataclasses.fields(StoreHeader)} | {CHECKSUM}
    if not isinstance(fields, dict) or fields.keys() != expected:
        raise ValueError(f"expected the keys {sorted(expected)}")
    del fields[CHECKSUM]
    if not isinstance(fields["notes"], dict) or not isinstance(fields["skipped"], list):
        raise ValueError("notes must be an object and skipped a list")
    return StoreHeader(**(fields | {"skipped": tuple(tuple(pair) for pair in fields["skipped"])}))


def dump_plain(fields: dict[str, Any]) -> bytes:
    """Fields as JSON that is the same for the same fields."""
    return json.dumps(fields, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: a dict whose names stand once each in the text."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands there twice")
    return fields


def _is_length(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_LENGTH


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
