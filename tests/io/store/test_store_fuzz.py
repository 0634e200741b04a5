"""Header and index of a store under attack: seeded mutants give a ``StoreError`` or the very same pixels."""

import json
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lit_data.errors import StoreCorruptError, StoreError
from lit_data.io.store.header import (
    CHECKSUM,
    HEADER_NAME,
    IMAGE_RECORD,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    PIXELS_NAME,
    StoreHeader,
)
from lit_data.io.store.sources import SOURCE_RECORD, join_paths
from lit_data.io.store.store import DecodedStore

NASTY = (0, -1, 1, 2, 5, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 1.5, True, None, "", "x", [], {}, [[]])
SHAPES = ((2, 3, 4), (2, 1, 6), (2, 5, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three images of different sizes, written by hand."""
    table = join_paths([("a.png", "b.png"), ("c.png",), ("d.png",)])
    sizes = [channels * height * width for channels, height, width in SHAPES]
    images = np.zeros(3, IMAGE_RECORD)
    images["offset"] = np.cumsum([0, *sizes[:-1]])
    images["first_source"] = table.firsts
    images["channels"], images["height_px"], images["width_px"] = np.transpose(SHAPES)
    pixels = random.Random(0).randbytes(sum(sizes))
    index = images.tobytes() + table.files.tobytes() + table.names.tobytes()
    header = StoreHeader(
        key="k",
        dtype="uint8",
        channels=2,
        images=3,
        sources=4,
        pixels_bytes=len(pixels),
        names_bytes=20,
        index_crc32=zlib.crc32(index),
        decoder="fake",
        on_bad="skip",
        notes={"remark": 1},
        skipped=(("e.png", "bad"),),
    )
    write(tmp_path, header.encode(), index)
    (tmp_path / PIXELS_NAME).write_bytes(pixels)
    return tmp_path


def write(folder: Path, header: bytes, index: bytes) -> None:
    for name, content in ((HEADER_NAME, header), (INDEX_NAME, index)):
        # Not emptied first: ext4 brings files that were to the disk when they are closed, which takes 2 ms.
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(content)
            file.truncate()


def seal(fields: dict[str, object]) -> bytes:
    """A header text as it would be written, with the right checksum over wrong content."""
    fields.pop(CHECKSUM, None)
    dump: Callable[[object], bytes] = lambda value: json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"  # noqa: E731
    return dump(fields | {CHECKSUM: zlib.crc32(dump(fields))})


def flip_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change, cut out, repeat or append some bytes."""
    begin = rng.randrange(len(content))
    end = min(len(content), begin + rng.choice((1, 1, 2, 8, 64)))
    piece = content[begin:end]
    other = rng.choice((rng.randbytes(len(piece)), b"", piece * 2, bytes(len(piece)), b"\xff" * len(piece)))
    return content[:begin] + other + content[end:]


def change_header(rng: random.Random, header: bytes, index: bytes) -> tuple[bytes, bytes]:
    """Change values of the header behind a right checksum."""
    fields = json.loads(header)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*fields, "extra"])
        fields[name] = rng.choice((*NASTY, fields.get(name), rng.randrange(200)))
        if rng.random() < 0.05:
            del fields[name]
    return seal(fields), index


def change_index(rng: random.Random, header: bytes, index: bytes) -> tuple[bytes, bytes]:
    """Change records of the index behind right checksums."""
    records = bytearray(index)
    images = np.frombuffer(records, IMAGE_RECORD, 3)
    files = np.frombuffer(records, SOURCE_RECORD, 4, images.nbytes)
    for _ in range(rng.choice((1, 1, 2, 3))):
        array = rng.choice((images, images, files))
        name = rng.choice(array.dtype.names)
        info = np.iinfo(array.dtype[name])
        value = rng.choice((0, 1, 2, 6, 12, 24, info.max, info.max // 2, info.min, rng.randrange(100)))
        array[name][rng.randrange(len(array))] = value
    content = bytes(records)
    return seal(json.loads(header) | {"index_crc32": zlib.crc32(content)}), content


def mutate(rng: random.Random, header: bytes, index: bytes) -> tuple[bytes, bytes]:
    kind = rng.randrange(5)
    if kind == 0:
        return flip_bytes(rng, header), index
    if kind == 1:
        return header, flip_bytes(rng, index)
    if kind == 2:
        content = flip_bytes(rng, index)
        return seal(json.loads(header) | {"index_crc32": zlib.crc32(content)}), content
    return (change_header if kind == 3 else change_index)(rng, header, index)


def read_all(folder: Path) -> bytes:
    """All pixels, by every way a store gives facts about an image."""
    store = DecodedStore.open(folder)
    for number in range(len(store)):
        assert store[number].shape == (store.channels, store.heights_px[number], store.widths_px[number])
        store.name(number)
    store.verify(progress=False)
    return b"".join(store[number].tobytes() for number in range(len(store)))


def test_mutants_give_an_error_or_the_same_pixels(folder: Path) -> None:
    rng = random.Random(0)
    header, index = (folder / HEADER_NAME).read_bytes(), (folder / INDEX_NAME).read_bytes()
    pixels = read_all(folder)
    refused = 0
    for _ in range(10_000):
        write(folder, *mutate(rng, header, index))
        try:
            assert read_all(folder) == pixels
        except StoreError:
            refused += 1
    assert 5_000 < refused < 10_000  # some are harmless, such as another size or remark behind a right checksum


def edit_index(folder: Path, part: str, row: int, field: str, value: int) -> None:
    content = bytearray((folder / INDEX_NAME).read_bytes())
    images = np.frombuffer(content, IMAGE_RECORD, 3)
    files = np.frombuffer(content, SOURCE_RECORD, 4, images.nbytes)
    {"images": images, "files": files}[part][field][row] = value
    header = json.loads((folder / HEADER_NAME).read_bytes()) | {"index_crc32": zlib.crc32(content)}
    write(folder, seal(header), bytes(content))


@pytest.mark.parametrize(
    ("part", "row", "field", "value", "message"),
    [
        ("images", 1, "channels", 3, "an image has not the 2 channels of the header"),
        ("images", 1, "height_px", 0, "an image has no pixels"),
        ("images", 1, "height_px", 2, "expected images of 56 bytes, found 68"),
        # together with a huge width the sum passes 64 bits
        ("images", 1, "height_px", 2**32 - 1, "expected images of 56 bytes, found 51539607584"),
        ("images", 1, "offset", 23, "the images overlap or leave holes"),
        ("images", 1, "offset", 25, "the images overlap or leave holes"),
        ("images", 0, "offset", 2**64 - 1, "the images overlap or leave holes"),
        ("images", 0, "first_source", 1, "the images do not share out the source files"),
        ("images", 2, "first_source", 2, "the images do not share out the source files"),
        ("images", 2, "first_source", 4, "the images do not share out the source files"),
        ("files", 3, "name_end", 21, "the source paths do not fill their place"),
        ("files", 1, "name_end", 5, "the source paths do not fill their place"),
        ("files", 0, "name_end", 0, "the source paths do not fill their place"),
    ],
)
def test_rules_of_the_index(folder: Path, part: str, row: int, field: str, value: int, message: str) -> None:
    edit_index(folder, part, row, field, value)
    with pytest.raises(StoreCorruptError, match=f"index.bin: {message}; delete the folder"):
        DecodedStore.open(folder)


def test_lengths_that_wrap_around_at_64_bits(folder: Path) -> None:
    for row in range(3):
        edit_index(folder, "images", row, "height_px", 2**31)
        edit_index(folder, "images", row, "width_px", 2**31)
    with pytest.raises(StoreCorruptError, match=r"index.bin: the images are larger than any file"):
        DecodedStore.open(folder)


def test_bare_flip_in_the_index(folder: Path) -> None:
    content = bytearray((folder / INDEX_NAME).read_bytes())
    content[-1] ^= 1
    (folder / INDEX_NAME).write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r"index.bin: expected CRC-32 [0-9a-f]{8}, found [0-9a-f]{8}; delete"):
        DecodedStore.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"dtype": "object"}, "dtype is 'object'"),
        ({"channels": 0}, "channels is 0"),
        ({"images": 2**63}, "images is 9223372036854775808"),
        ({"sources": 2}, "sources is 2"),
        ({"pixels_bytes": True}, "pixels_bytes is True"),
        ({"names_bytes": 1.5}, "names_bytes is 1.5"),
        ({"index_crc32": -1}, "index_crc32 is -1"),
        ({"notes": {"remark": "1"}}, "notes is {'remark': '1'}"),
        ({"notes": 1}, "notes must be an object and skipped a list"),
        ({"skipped": [["a.png"]]}, r"skipped is \(\('a.png',\),\)"),
        ({"decoder": None}, "decoder is None"),
        ({"extra": 1}, "expected the keys"),
    ],
)
def test_rules_of_the_header(folder: Path, change: dict[str, object], message: str) -> None:
    fields = json.loads((folder / HEADER_NAME).read_bytes()) | change
    (folder / HEADER_NAME).write_bytes(seal(fields))
    with pytest.raises(StoreCorruptError, match=rf"header.json: not a header of version 1 \({message}"):
        DecodedStore.open(folder)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a header of version 1"),
        (b"[]", "expected the keys"),
        (b'{"key": 1, "key": 2}', "a key stands there twice"),
        (b"[" * 100_000, "not a header of version 1"),
        (b"9" * 5000, "not a header of version 1"),
        (b'"\xff"', "not a header of version 1"),
        (b"NaN", "expected the keys"),
        (b" " * (MAX_HEADER_BYTES + 1), "expected at most 16777216 bytes, found more"),
    ],
    ids=["empty", "list", "twice", "deep", "long number", "not UTF-8", "NaN", "too long"],
)
def test_texts_that_are_no_header(folder: Path, raw: bytes, message: str) -> None:
    (folder / HEADER_NAME).write_bytes(raw)
    with pytest.raises(StoreCorruptError, match=f"header.json: .*{message}"):
        DecodedStore.open(folder)


def test_header_in_another_form(folder: Path) -> None:
    raw = (folder / HEADER_NAME).read_bytes()
    for other in (raw + b" ", raw.replace(b'"skip"', b'"stop"')):
        (folder / HEADER_NAME).write_bytes(other)
        with pytest.raises(StoreCorruptError, match=r"header.json: its bytes are not those that were written"):
            DecodedStore.open(folder)


def test_header_survives_odd_texts() -> None:
    header = StoreHeader("k", "uint8", 1, 1, 1, 1, 1, 0, "d", "skip", {"\n\udcff": 1}, (("\udcff", "\0"),))
    assert replace(header).encode() == header.encode()
    assert json.loads(header.encode())["skipped"] == [["\udcff", "\0"]]
