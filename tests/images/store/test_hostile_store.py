"""A store under attack: what no version wrote is refused, and the error says what is wrong."""

import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import StoreCorruptError
from lit_data.core.types import Array
from lit_data.images.store.arrays import (
    MAX_META_BYTES,
    META_NAME,
    ArrayFolder,
    ArrayWriter,
    encode_meta,
    read_meta,
)
from lit_data.images.store.index import IMAGE_RECORD, KIND, PIXELS, VERSION, StoreFacts
from lit_data.images.store.sources import join_paths
from lit_data.images.store.store import DecodedStore

SHAPES = ((2, 3, 4), (2, 1, 6), (2, 5, 2))
FACTS = StoreFacts("uint8", 2, "fake", "skip", {"remark": 1}, (("e.png", "bad"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three images of different sizes, written by hand."""
    table = join_paths([("a.png", "b.png"), ("c.png",), ("d.png",)])
    images = np.zeros(3, IMAGE_RECORD)
    images["first_source"] = table.firsts
    _, images["height_px"], images["width_px"] = np.transpose(SHAPES)
    pixels = np.frombuffer(random.Random(0).randbytes(56), np.uint8)
    writer = ArrayWriter(tmp_path)
    for name, array in (("images", images), ("files", table.files), ("names", table.names)):
        writer.add(name, array)
    writer.add(PIXELS, pixels)
    writer.finish(KIND, VERSION, "k", FACTS.as_meta())
    return tmp_path


def write(path: Path, content: bytes) -> None:
    # Not emptied first: ext4 brings files that were to the disk when they are closed, which takes 2
    # ms.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(content)
        file.truncate()


def change_meta(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what `meta.json` says, behind a right checksum."""
    fields = read_meta(folder / META_NAME)
    change(fields)
    write(folder / META_NAME, encode_meta(fields))


def change_array(folder: Path, name: str, change: Callable[[Array], object]) -> None:
    """Change the values of an array, behind a right checksum."""
    path, about = folder / f"{name}.npy", ArrayFolder(folder, KIND, VERSION).arrays[name]
    content = bytearray(path.read_bytes())
    change(np.frombuffer(content, about.dtype, offset=len(about.header)))
    write(path, bytes(content))
    crc32 = zlib.crc32(content[len(about.header) :])
    change_meta(folder, lambda fields: fields["arrays"][name].update(crc32=crc32))


SHARED = "the images do not use each source file once"
UNFILLED = "the source paths have another size than stated"


@pytest.mark.parametrize(
    ("part", "row", "field", "value", "message"),
    [
        ("images", 1, "height_px", 0, "an image has no pixels"),
        ("images", 1, "height_px", 2, r"expected images of 68 values, found \(56,\)"),
        ("images", 1, "height_px", 2**32 - 1, r"expected images of 51539607584 values, found \(56"),
        ("images", 0, "first_source", 1, SHARED),
        ("images", 2, "first_source", 2, SHARED),
        ("images", 2, "first_source", 4, SHARED),
        ("files", 3, "name_end", 21, UNFILLED),
        ("files", 1, "name_end", 5, UNFILLED),
        ("files", 0, "name_end", 0, UNFILLED),
    ],
)
def test_rules_of_the_index(
    folder: Path, part: str, row: int, field: str, value: int, message: str
) -> None:
    change_array(folder, part, lambda records: records[field].__setitem__(row, value))
    with pytest.raises(StoreCorruptError, match=f"meta.json: {message}.*; delete the folder"):
        DecodedStore.open(folder)


def test_lengths_that_wrap_around_at_64_bits(folder: Path) -> None:
    for field in ("height_px", "width_px"):
        change_array(folder, "images", lambda records, field=field: records[field].fill(2**31))
    with pytest.raises(StoreCorruptError, match=r"expected images of \d{20} values"):
        DecodedStore.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "wrong: dtype"),
        ({"channels": 0}, "wrong: channels"),
        ({"notes": {"remark": "1"}}, "wrong: notes"),
        ({"notes": 1}, "wrong: notes"),
        ({"skipped": [["a.png"]]}, "not enough values to unpack"),
        ({"decoder": None}, "wrong: decoder"),
        ({"band_px": 48}, "wrong: band_px"),
        ({"extra": 1}, "unexpected keyword argument 'extra'"),
    ],
)
def test_rules_of_the_facts(folder: Path, change: dict[str, object], message: str) -> None:
    change_meta(folder, lambda fields: fields["facts"].update(change))
    with pytest.raises(StoreCorruptError, match=rf"meta.json: no facts of images \(.*{message}"):
        DecodedStore.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"descr": "|O"}, "not an array of"),
        ({"descr": "<u99"}, "not an array of"),
        ({"descr": [["a", "|O8"]]}, "not an array of"),
        ({"descr": []}, "not an array of"),
        ({"shape": [2**63]}, "not an array of"),
        ({"shape": [-1]}, "not an array of"),
        ({"shape": [True]}, "not an array of"),
        ({"shape": [2**40, 2**40]}, "not an array of"),
        ({"shape": 5}, "not iterable"),
        ({"crc32": -1}, "not an array of"),
        ({"extra": 1}, "unexpected keyword argument 'extra'"),
    ],
)
def test_rules_of_the_arrays(folder: Path, change: dict[str, object], message: str) -> None:
    change_meta(folder, lambda fields: fields["arrays"]["pixels"].update(change))
    with pytest.raises(StoreCorruptError, match=rf"json: no images of version 4 \(.*{message}"):
        DecodedStore.open(folder)


@pytest.mark.parametrize(
    "change", [{"version": 1}, {"kind": "masks"}, {"arrays": []}, {"facts": 1}]
)
def test_rules_of_the_folder(folder: Path, change: dict[str, object]) -> None:
    change_meta(folder, lambda fields: fields.update(change))
    with pytest.raises(StoreCorruptError, match=r"meta.json: no images of version 4 \("):
        DecodedStore.open(folder)


NO_TEXT = "not a text that was written"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", NO_TEXT),
        (b"[]", NO_TEXT),
        (b'{"key": 1, "key": 2}', "a key appears twice"),
        (b"[" * 100_000, NO_TEXT),
        (b"9" * 5000, NO_TEXT),
        (b'"\xff"', NO_TEXT),
        (b"NaN", NO_TEXT),
        (b" " * (MAX_META_BYTES + 1), "expected at most 16777216 bytes, found more"),
    ],
    ids=range(8),
)
def test_texts_that_are_no_meta(folder: Path, raw: bytes, message: str) -> None:
    (folder / META_NAME).write_bytes(raw)
    with pytest.raises(StoreCorruptError, match=f"meta.json: .*{message}"):
        DecodedStore.open(folder)


def test_meta_in_another_form_and_with_odd_texts(folder: Path, tmp_path: Path) -> None:
    raw = (folder / META_NAME).read_bytes()
    for other in (raw + b" ", raw.replace(b'"skip"', b'"stop"')):
        (folder / META_NAME).write_bytes(other)
        with pytest.raises(StoreCorruptError, match=r"its bytes are not those that were written"):
            DecodedStore.open(folder)
    facts = StoreFacts("uint8", 1, "d", "skip", {"\n\udcff": 1}, (("\udcff", "\0"),))
    (tmp_path / META_NAME).write_bytes(encode_meta(facts.as_meta()))
    assert StoreFacts(**read_meta(tmp_path / META_NAME)) == facts
