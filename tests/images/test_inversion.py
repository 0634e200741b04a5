"""`ReadOptions.invert`: what is turned round, to which values, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.header import read_header
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image

GRAY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def _read(path: Path, **options: Any) -> np.ndarray:
    """Read in all ways, and hold the result against the header."""
    rules = ReadOptions(**options)
    image, header = read_image(path, rules), read_header(path, rules)
    assert (image.shape, image.dtype) == (header.shape, header.dtype)
    assert image.flags.c_contiguous
    assert_array_equal(image, read_image(path, rules, strict=True))
    return image


def _write(path: Path, pixels: np.ndarray, photometric: str = "miniswhite", **options: Any) -> Path:
    tifffile.imwrite(path, pixels, photometric=photometric, **options)
    return path


def _tiny_tiff(width_px: int, bits: int, tag: tuple[int, int, int], pixels: bytes) -> bytes:
    """A page of one row that tifffile does not write; a tag is (code, type, value)."""
    size = [(256, 3, width_px), (257, 3, 1), (258, 3, bits)]
    tags = sorted([*size, (273, 4, 8), (278, 3, 1), (279, 4, len(pixels)), tag])
    entries = b"".join(struct.pack("<HHII", code, kind, 1, value) for code, kind, value in tags)
    head = struct.pack("<2sHI", b"II", 42, 10) + pixels.ljust(2, b"\0")
    return head + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("pixels", "white"),
    [
        (GRAY, 255),
        (GRAY.astype(np.uint16) * 257, 65535),
        (GRAY.astype(">u2") * 257, 65535),
        (GRAY.astype(np.uint32) * 2**24, 2**32 - 1),
    ],
)
def test_whole_numbers_are_inverted(tmp_path: Path, pixels: np.ndarray, white: int) -> None:
    order = ">" if pixels.dtype.byteorder == ">" else "<"
    path = _write(tmp_path / "a.tif", pixels, byteorder=order)
    assert_array_equal(_read(path), pixels[None])
    inverted = white - pixels[None].astype(np.int64)
    for rule in ("photometric", True):
        assert_array_equal(_read(path, invert=rule), inverted)
    as_float = _read(path, invert=True, as_float=True)  # cast behind it, so not in floats
    assert_array_equal(as_float, inverted.astype(np.float32))


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.npy"])
def test_photometric_leaves_alone_what_does_not_say_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, GRAY)
    else:
        Image.fromarray(GRAY).save(path)
    assert_array_equal(_read(path, invert="photometric"), GRAY[None])
    assert_array_equal(_read(path, invert=True), 255 - GRAY[None])
    assert read_header(path, ReadOptions(invert=True)).notes == ("inverted",)


@pytest.mark.parametrize(("compression", "inverted"), [(3, True), (1, False)])
def test_only_faxes_are_white_is_zero_by_default(
    tmp_path: Path, compression: int, inverted: bool
) -> None:
    (tmp_path / "a.tif").write_bytes(_tiny_tiff(8, 1, (259, 3, compression), b"\0"))
    assert read_header(tmp_path / "a.tif").stored.white_is_zero == inverted


def test_colours_of_a_palette_are_inverted_and_its_numbers_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    image = Image.fromarray((GRAY > 100).astype(np.uint8))
    image.putpalette([255, 0, 0, 10, 20, 30])
    image.save(path)
    assert_array_equal(_read(path, invert=True), 255 - _read(path))
    message = "invert=True, but palette numbers have no white; set data.read.palette="
    with pytest.raises(DataError, match=f"a.png: {message}"):
        read_header(path, ReadOptions(invert=True, palette="index"))


@pytest.mark.parametrize("dtype", ["int8", "int16", "float16", "float32", "float64"])
def test_what_has_no_white_is_refused(tmp_path: Path, dtype: str) -> None:
    path = _write(tmp_path / "a.tif", (GRAY // 2).astype(dtype), "minisblack")
    assert_array_equal(_read(path, invert="photometric"), GRAY[None] // 2)
    message = f"but {dtype} has no defined white"
    with pytest.raises(DataError, match=f"a.tif: invert=True, {message}; remove invert"):
        read_header(path, ReadOptions(invert=True))
    white_is_zero = _write(tmp_path / "b.tif", (GRAY // 2).astype(dtype))
    with pytest.raises(DataError, match=f"b.tif: invert='photometric', {message}"):
        read_image(white_is_zero, ReadOptions(invert="photometric"))


def test_fax_pages_come_out_black_on_white(shared_data: Path) -> None:
    for name in ("fax2d.tif", "g3test.tif", "eurotext.tif", "phototest.tif"):
        path = shared_data / "documents" / name
        stored = read_image(path)
        assert stored.mean() < 0.2
        inverted = read_image(path, ReadOptions(invert="photometric"))
        assert_array_equal(inverted, ~stored)
