"""Headers are read without decoding: what a file is, what it will give, and what is refused before it can do harm."""

import errno
import io
import json
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.header import read_header
from lit_data.images.read_options import ReadOptions


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(width_px: int, height_px: int, *, depth: int = 8, extra: bytes = b"") -> bytes:
    """A grey PNG without rows."""
    header = struct.pack(">IIBBBBB", width_px, height_px, depth, 0, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + chunks + _chunk(b"IEND", b"")


def _saved(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def _tiff(pixels: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def _raw_tiff(*tags: tuple[int, int, int, int], big: bool = False) -> bytes:
    """A little-endian TIFF of one directory without pixels; tags as (code, type, count, value or place)."""
    if big:
        entries = b"".join(struct.pack("<HHQQ", *tag) for tag in tags)
        return struct.pack("<2sHHHQQ", b"II", 43, 8, 0, 16, len(tags)) + entries + bytes(8)
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)


def _npy(text: str, data: bytes = b"", version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text.encode("latin1") + data


def _array(descr: str, shape: str, size: int = 0, version: int = 1) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}"
    return _npy(text, bytes(size), version)


GRAY = np.arange(48, dtype=np.uint8).reshape(6, 8)
RGB = np.arange(144, dtype=np.uint8).reshape(6, 8, 3)


# row 3
def test_the_content_decides_and_a_wrong_name_is_a_note(tmp_path: Path) -> None:
    path, strict = tmp_path / "a.png", ReadOptions(strict_extension=True)
    path.write_bytes(_saved(RGB, "JPEG"))
    header = read_header(path)
    assert header.kind == "jpeg"
    assert header.notes == ("the content is jpeg, the name ends in '.png'",)
    with pytest.raises(DataError, match=r"the content is jpeg, .*data.read.strict_extension=false"):
        read_header(path, strict)
    path.rename(tmp_path / "a.JPG")
    assert read_header(tmp_path / "a.JPG", strict).notes == ()
    path.write_bytes(_array("<f2", "(6, 8)", 96, version=2))
    header = read_header(path)
    assert (header.kind, header.shape, header.dtype) == ("npy", (1, 6, 8), np.float32)


_FRAME = b"\xff\xd8\xff\xc0\x00\x0b"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),  # row 1
        (b"<!DOCTYPE html>\n<html>", "not a PNG, .*TIFF or .npy image, starts with b'<!"),  # row 2
        (b"GIF89a" + bytes(20), "not a PNG, JPEG, BMP, TIFF or .npy image, starts with b'GIF89a"),
        (b"BMI is a text", "damaged BMP: a part of its header is missing"),
        (
            _png(40_000, 40_000),
            "is 1600000000 pixels, more than data.read.max_pixels=178956970",
        ),  # row 33
        (_png(0, 6), "no pixels: 6 x 0"),
        (_png(8, 6, depth=3), "damaged PNG header: color type 0 with 3 bits"),
        (_png(8, 6)[:20], "truncated PNG: chunk b'IHDR' needs 29 bytes, 20 found"),
        (_png(8, 6).replace(b"\0\0\0\x08\0", b"\0\0\0\x09\0"), "bad header checksum in b'IHDR'"),
        (
            _png(8, 6)[:8] + _chunk(b"gAMA", bytes(4)),
            "damaged PNG: a part of its header is missing",
        ),
        (_png(8, 6, extra=_chunk(b"acTL", struct.pack(">II", 7, 0))), "animated PNG with 7 frames"),
        (_png(8, 6, extra=_chunk(b"tEXt", b"") * 4096), "more than 4096 chunks before the pixels"),
        (b"\xff\xd8\xff", "damaged JPEG: no size of an image in its header"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2**18, "its header never ends"),
        (_FRAME + b"\x0c\x00\x06\x00\x08\x01\x01\x11\x00", "cannot handle 12-bit layers"),
        (_saved(RGB, "BMP")[:-1], "truncated BMP: 198 bytes expected, 197 found"),
        (
            _saved(RGB, "BMP").replace(b"\x18\0\0\0\0\0", b"\x18\0\x01\0\0\0"),
            "BMP with compression 1 is not read; save it as PNG",
        ),
    ],
)
def test_what_is_no_good_image_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(DataError, match=f"^{tmp_path}/a.png: .*{message}"):
        read_header(tmp_path / "a.png")


_SIZE = ((256, 3, 1, 8), (257, 3, 1, 6), (258, 3, 1, 8))
_STRIP = _START, _BYTES = (273, 4, 1, 0), (279, 4, 1, 48)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"II*\x00", "damaged TIFF: a part of its header is missing"),
        (
            b"II*\x00" + struct.pack("<I", 900),
            "a directory is outside the file, or they form a loop",
        ),
        (
            struct.pack("<2sHIHI", b"II", 42, 8, 0, 8),
            "a directory is outside the file, or they form a loop",
        ),
        (struct.pack("<2sHIH", b"II", 42, 8, 4097) + bytes(2**16), "number of tags 4097"),
        (
            _raw_tiff(*_SIZE[:2], (258, 3, 2_000_000_000, 8)),
            r"the values of tags \[258\] are outside",
        ),
        (
            _raw_tiff(*_SIZE, (273, 4, 2**60, 8), big=True),
            r"the values of tags \[273\] are outside",
        ),
        (_raw_tiff(*_SIZE), "1 strips or tiles expected, 0 found"),
        (
            _raw_tiff((256, 12, 0, 8), *_SIZE[1:], *_STRIP),
            "imagewidth is .* instead of a whole number",
        ),
        (_raw_tiff(*_SIZE, (273, 4, 1, 99_999), _BYTES), "truncated TIFF: 100047 bytes expected"),
        (_raw_tiff(*_SIZE, _START, (279, 4, 1, 47)), "48 bytes of pixels expected, 47 found"),
        (_raw_tiff(*_SIZE, (259, 3, 1, 34712), *_STRIP), "compression 34712 with predictor 1"),
        (_raw_tiff(*_SIZE, *_STRIP, (339, 3, 1, 6)), "bits 8 in sample format .* is not read"),
        (_raw_tiff(*_SIZE, *_STRIP, (284, 3, 1, 7)), "its planar configuration is 7"),
        (_raw_tiff(*_SIZE, *_STRIP, (32997, 4, 1, 3)), "1 samples and depth 3 is not a flat image"),
    ],
)
def test_a_hostile_or_damaged_tiff_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(DataError, match=f"^{tmp_path}/a.tif: .*{message}"):
        read_header(tmp_path / "a.tif")


def _chain(pages: int, last: int) -> bytes:
    """Directories of a page without pixels, each naming the next one, the last one that of a number."""
    tags = b"".join(struct.pack("<HHII", *tag) for tag in (*_SIZE, *_STRIP))
    size = 2 + len(tags) + 4
    following = [*range(1, pages), last]
    body = b"".join(
        struct.pack("<H", 5) + tags + struct.pack("<I", 8 + size * n) for n in following
    )
    return struct.pack("<2sHI", b"II", 42, 8) + body


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "data",
    [
        _chain(1, 0),
        _chain(150, 20) + bytes(2**25),
        _raw_tiff(*_SIZE, *([(273, 4, 2**20, 8)] * 4000)) + bytes(2**22),
        b"\xff\xd8\xff\xe0\x00\x02" + b"\x11" * 2**24,
    ],
    ids=["a loop of one", "a loop behind a hundred", "tags that share values", "no marker"],
)
def test_an_endless_header_is_refused_soon_and_takes_no_memory(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tif").write_bytes(data)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"its header never ends|or they form a loop"):
        read_header(tmp_path / "a.tif")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**18


def test_texts_of_a_png_are_not_unpacked(tmp_path: Path) -> None:
    text = _chunk(b"zTXt", b"history\0\0" + zlib.compress(bytes(2**26)))
    (tmp_path / "a.png").write_bytes(_png(8, 6, extra=text * 4))
    assert read_header(tmp_path / "a.png").shape == (1, 6, 8)


# TIFF bombs, section 3: 210 bytes made OpenCV ask for 3.6 GB and tifffile for 37 GiB
@pytest.mark.parametrize(
    ("side_px", "tags", "message"),
    [
        (100_000, [], "100000 x 100000 is 10000000000 pixels, more than data.read.max_pixels"),
        (10_000, [], "bytes that unpack to 1162791 times as many; a factor above 10000"),
        (10_000, [(277, 3, 1, 50)], "5000000000 bytes decoded, more than data.read.max_image"),
        # small image, large tile
        (8, [(322, 4, 1, 60_000), (323, 4, 1, 60_000)], "is 3600000000 pixels, more than"),
    ],
)
def test_a_tiff_bomb_is_refused(
    tmp_path: Path, side_px: int, tags: list[tuple[int, int, int, int]], message: str
) -> None:
    where = (324, 325) if side_px == 8 else (273, 279)
    segments = [(where[0], 4, 1, 8), (where[1], 4, 1, 0 if side_px == 8 else 8)]
    sides = [(256, 4, 1, side_px), (257, 4, 1, side_px)]
    data = _raw_tiff(*sides, *tags, (258, 3, 1, 8), (259, 3, 1, 8), *segments)
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_header(tmp_path / "a.tif")


def test_a_jpeg_inside_a_tiff_has_the_size_of_its_strip(tmp_path: Path) -> None:
    data = _tiff(np.zeros((64, 64, 3), np.uint8), photometric="rgb", compression="jpeg")
    size = data.index(b"\xff\xc0") + 5
    assert data[size : size + 4] == struct.pack(">HH", 64, 64)
    larger = struct.pack(">HH", 65_000, 65_000)
    (tmp_path / "a.tif").write_bytes(data[:size] + larger + data[size + 4 :])
    with pytest.raises(DataError, match="JPEG segment of 65000 x 65000 pixels instead of 64 x 64"):
        read_header(tmp_path / "a.tif")


def test_limits_can_be_moved(tmp_path: Path) -> None:
    path, most = tmp_path / "a.png", ReadOptions(max_pixels=48, max_image_bytes=144)
    path.write_bytes(_saved(RGB, "PNG"))
    assert read_header(path, most).shape == (3, 6, 8)
    for options, message in (
        ({"max_pixels": 47}, "6 x 8 is 48 pixels, more than data.read.max_pixels=47; raise that"),
        ({"max_image_bytes": 143}, "144 bytes decoded, more than data.read.max_image_bytes=143"),
        ({"max_image_bytes": 144, "as_float": True}, "576 bytes decoded, more than data.read.max"),
    ):
        with pytest.raises(DataError, match=message):
            read_header(path, ReadOptions(**options))


# .npy header, section 3
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_array("|O", "(2, 2)", 32), "array of Python objects"),
        (_array("|u1", "(9, 9)", 80), "81 bytes expected, 80 found"),
        (_array("<u2", "(2097152, 4194304)"), "17592186044416 bytes expected"),
        (_array("|u1", "(-3, -3)", 9), r"shape \(-3, -3\)"),
        (_array("<c8", "(2, 2)", 32), "array of dtype complex64"),
        (_array("<U2", "(2, 2)", 32), "array of dtype <U2"),
        (_array("|u1", "(9,)", 9), r"shape \(9,\); give \[H, W\]"),
        (_array("|u1", "(17, 9, 17)", 2601), "at most 16 channels"),
        (_npy("(" * 60_000), "damaged array header"),
        (_npy(" " * 70_000, version=2), "array header of 70000 bytes; at most 65536 are allowed"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "array header of 4294967295 bytes; at most 12"),
        (b"\x93NUMPY\x09\x00\x00\x00", "not a NumPy array of version 1, 2 or 3"),
        (b"\x93NUMPY", "not a NumPy array"),
    ],
)
def test_a_hostile_or_damaged_array_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(DataError, match=f"^{tmp_path}/a.npy: .*{message}"):
        read_header(tmp_path / "a.npy")


# rows 9 to 12
def test_what_is_no_readable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken.png").symlink_to("gone.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "a.png").write_bytes(_saved(RGB, "PNG"))
    messages = {
        "missing/sub/x.png": f"no such file; the nearest existing folder is {tmp_path}$",
        "fifo.png": r"not a regular file \(a named pipe\)",
        "folder.png": r"not a regular file \(a folder\)",
        "/dev/zero": r"not a regular file \(a device\)",
        "broken.png": "a broken link to gone.png",
        "loop.png": "a circular link, to loop.png",
        "n" * 300 + ".png": r"cannot be read, ENAMETOOLONG",
        "zero\0.png": "cannot be read .ValueError: .*embedded null",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=message):
            read_header(tmp_path / name)

    def refuse(*_: object, **__: object) -> None:  # root may read everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"a.png: cannot be read, EACCES \(Permission denied\)"):
        read_header(tmp_path / "a.png")


# row 27
def test_a_file_of_several_pages_wants_one_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        for height_px in (4, 5, 6):
            writer.write(np.zeros((height_px, 8), np.uint8), photometric="minisblack")
    with pytest.raises(
        DataError, match=r"a.tif: 3 pages; choose one with data.read.page=0 to data.read.page=2"
    ):
        read_header(path)
    assert [read_header(path, ReadOptions(page=page)).height_px for page in range(3)] == [4, 5, 6]
    assert read_header(path, ReadOptions(page=1)).pages == 3
    with pytest.raises(DataError, match="page=3 does not exist; the file has the pages 0 to 2"):
        read_header(path, ReadOptions(page=3))
    (tmp_path / "a.png").write_bytes(_saved(RGB, "PNG"))
    with pytest.raises(
        DataError, match="page=1 does not exist; only TIFF files have several pages"
    ):
        read_header(tmp_path / "a.png", ReadOptions(page=1))


@pytest.mark.parametrize(
    "text",
    ["ImageJ=1.53\nimages=4\nslices=4\n", json.dumps({"shape": [4, 6, 8]})],
    ids=["imagej", "shaped"],
)
def test_images_hidden_behind_one_page_are_found(tmp_path: Path, text: str) -> None:
    tifffile.imwrite(tmp_path / "a.tif", GRAY, description=text, metadata=None)
    with pytest.raises(DataError, match="4 images inside one page; save each as a separate page"):
        read_header(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", GRAY, description='{"shape": [four]}', metadata=None)
    assert read_header(tmp_path / "b.tif").shape == (1, 6, 8)


def test_an_orientation_is_noted(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    for kind in ("JPEG", "PNG"):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(_saved(RGB, kind, exif=exif))
        header, turned = read_header(path), read_header(path, ReadOptions(exif="apply"))
        assert header.shape == (3, 6, 8)
        assert header.notes == (
            "orientation 6 not applied; data.read.exif=apply turns images as viewers show them",
        )
        assert (turned.shape, turned.notes) == ((3, 8, 6), ("orientation 6 applied",))
    for damaged in (
        b"",
        b"II*\0",
        b"MM\0*\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        b"nothing",
    ):
        path.write_bytes(_png(8, 6, extra=_chunk(b"eXIf", damaged)))
        assert read_header(path).notes == ()
