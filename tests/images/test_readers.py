"""Pixels come out as stored, in any format, with every error naming the file."""

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal
from PIL import Image, ImageOps

from lit_data.core.errors import DataError
from lit_data.images.header import read_header
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image
from tests.helpers.files import save_picture

GRAY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PLANES = np.ascontiguousarray(RGB.transpose(2, 0, 1))


def _read(path: Path, **options: Any) -> np.ndarray:
    """Read in both ways, and hold the result against the header."""
    rules = ReadOptions(**options)
    image = read_image(path, rules)
    header = read_header(path, rules)
    assert (image.shape, image.dtype) == (header.shape, header.dtype)
    assert image.flags.c_contiguous
    assert image.flags.writeable
    assert image.dtype.isnative
    assert_array_equal(image, read_image(path, rules, strict=True))
    return image


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif"])
def test_channels_come_as_stored(tmp_path: Path, name: str) -> None:
    assert_array_equal(_read(save_picture(tmp_path / name, RGB)), PLANES)
    assert_array_equal(_read(save_picture(tmp_path / name, GRAY)), GRAY[None])


# the documented switch, DESIGN 4
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.tif"])
def test_cv2_order_gives_what_imread_gives(tmp_path: Path, name: str) -> None:
    path = save_picture(tmp_path / name, RGB)
    expected = cv2.imread(os.fspath(path), cv2.IMREAD_UNCHANGED).transpose(2, 0, 1)
    assert_array_equal(_read(path, cv2_order=True), expected)
    assert_array_equal(_read(path), expected[::-1])


# row 13
def test_gray_can_become_three_channels(tmp_path: Path) -> None:
    path = save_picture(tmp_path / "a.png", GRAY)
    assert_array_equal(_read(path, gray_to_rgb=True), np.stack([GRAY] * 3))
    assert_array_equal(_read(save_picture(tmp_path / "b.png", RGB), gray_to_rgb=True), PLANES)


# rows 14 and 15, and a transparent colour
@pytest.mark.parametrize(
    ("mode", "saving", "expected"),
    [
        ("LA", {}, GRAY[None]),
        ("RGBA", {}, PLANES),
        ("RGB", {"transparency": tuple(RGB[0, 0].tolist())}, PLANES),
    ],
)
def test_alpha_is_dropped_only_on_request(
    tmp_path: Path, mode: str, saving: dict[str, Any], expected: np.ndarray
) -> None:
    path = tmp_path / "a.png"
    image = Image.fromarray(GRAY if mode == "LA" else RGB).convert(mode)
    if not saving:
        image.putalpha(Image.fromarray(GRAY))
    image.save(path, **saving)
    message = rf"{len(expected)} channels? and alpha, not opaque everywhere; set data.read.alpha="
    with pytest.raises(DataError, match=f"a.png: {message}drop to read it without"):
        read_image(path)
    assert_array_equal(_read(path, alpha="drop"), expected)


def test_alpha_that_is_opaque_everywhere_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for mode, pixels, expected in (("LA", GRAY, GRAY[None]), ("RGBA", RGB, PLANES)):
        Image.fromarray(pixels).convert(mode).save(path)
        assert_array_equal(_read(path), expected)
        with pytest.raises(DataError, match=r"and alpha; set data.read.alpha"):
            _read(path, alpha="error")
    opaque = np.dstack([RGB, np.full(RGB.shape[:2], 255, np.uint8)])
    tifffile.imwrite(tmp_path / "a.tif", opaque, photometric="rgb", extrasamples=("unassalpha",))
    assert_array_equal(_read(tmp_path / "a.tif"), PLANES)


# row 16
def test_sixteen_bits_are_kept(tmp_path: Path) -> None:
    deep = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1365
    cv2.imwrite(os.fspath(tmp_path / "a.png"), deep)
    assert_array_equal(_read(tmp_path / "a.png"), deep[None])
    cv2.imwrite(os.fspath(tmp_path / "b.png"), np.stack([deep, deep // 2, deep // 3], -1))
    assert_array_equal(_read(tmp_path / "b.png"), np.stack([deep // 3, deep // 2, deep]))


# row 17
def test_one_bit_becomes_black_and_white(tmp_path: Path) -> None:
    Image.fromarray(GRAY > 100).save(tmp_path / "a.png", bits=1)
    assert_array_equal(_read(tmp_path / "a.png"), np.where(GRAY > 100, 255, 0)[None])


# row 18, and the same for BMP and TIFF
@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif"])
def test_a_palette_is_expanded_or_kept(tmp_path: Path, name: str) -> None:
    palette = np.array([[255, 0, 0], [0, 255, 0], [10, 20, 30], [4, 5, 6]], np.uint8)
    indices = np.arange(45, dtype=np.uint8).reshape(5, 9) % 4
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    assert image.mode == "P"
    image.save(tmp_path / name)
    assert_array_equal(_read(tmp_path / name), palette[indices].transpose(2, 0, 1))
    assert_array_equal(_read(tmp_path / name, palette="index"), indices[None])
    with pytest.raises(
        DataError, match=r"a palette image; set data.read.palette=expand for its colors or =index"
    ):
        read_image(tmp_path / name, ReadOptions(palette="error"))


def test_transparency_of_a_palette_counts_as_alpha_of_its_colors(tmp_path: Path) -> None:
    image = Image.fromarray(GRAY % 2)
    image.putpalette([1, 2, 3, 4, 5, 6])
    image.save(tmp_path / "a.png", transparency=0)
    with pytest.raises(DataError, match="alpha"):
        read_image(tmp_path / "a.png")
    assert_array_equal(_read(tmp_path / "a.png", palette="index"), GRAY[None] % 2)
    assert _read(tmp_path / "a.png", alpha="drop")[:, 0, 0].tolist() == [1, 2, 3]


def test_an_index_beyond_the_palette_is_an_error(tmp_path: Path) -> None:
    image = Image.fromarray(GRAY % 7)
    image.putpalette(bytes(768))
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    start, end = data.index(b"PLTE"), data.index(b"IDAT") - 4
    palette = b"PLTE" + bytes(12)
    palette = struct.pack(">I", 12) + palette + struct.pack(">I", zlib.crc32(palette))
    (tmp_path / "a.png").write_bytes(data[: start - 4] + palette + data[end:])
    with pytest.raises(DataError, match="index 6 in a palette of 4 colors"):
        read_image(tmp_path / "a.png")


# row 19
def test_a_cmyk_jpeg_is_three_channels_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(RGB).convert("CMYK").save(path)
    assert _read(path).shape == (3, 6, 8)
    assert read_header(path).notes == ("CMYK JPEG, converted to RGB without a color profile",)


# row 20
@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.jpg"])
def test_an_orientation_is_applied_only_on_request(tmp_path: Path, name: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        pixels = np.repeat(np.repeat(GRAY, 8, 0), 8, 1)  # whole JPEG blocks
        path = save_picture(tmp_path / name, pixels, exif=exif)
        if name == "a.tif":
            tifffile.imwrite(path, pixels, extratags=[(274, 3, 1, orientation, True)])
        stored = _read(path)
        assert stored.shape == (1, 48, 64)
        with Image.open(save_picture(tmp_path / "b.png", stored[0], exif=exif)) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
        assert_array_equal(_read(path, exif="apply"), expected[None])


# rows 44 and DESIGN 4
def test_equal_channels_collapse_and_different_ones_are_shown(tmp_path: Path) -> None:
    pixels = np.stack([GRAY] * 3, -1)
    path = save_picture(tmp_path / "a.png", pixels)
    assert_array_equal(_read(path, equal_channels="collapse"), GRAY[None])
    pixels[4, 3, 1] = 7
    save_picture(path, pixels)
    with pytest.raises(DataError, match=r"that differ, first at row 4, column 3 \(175, 7, 175\)"):
        read_image(path, ReadOptions(equal_channels="collapse"))
    assert_array_equal(_read(path), pixels.transpose(2, 0, 1))


def test_integers_become_floats_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([[-1, 2**24]], np.int64))
    image = _read(path, as_float=True)
    assert (image.dtype, image.tolist()) == (np.float32, [[[-1.0, 16777216.0]]])
    assert read_header(path, ReadOptions(as_float=True)).notes == ("int64 cast to float32",)
    assert _read(path).dtype == np.int64


@pytest.mark.parametrize(
    ("shape", "expected", "dtype"),
    [
        ((6, 8), (1, 6, 8), "|u1"),
        ((3, 6, 8), (3, 6, 8), ">u2"),
        ((6, 8, 3), (3, 6, 8), "<i4"),
        ((6, 8, 3), (3, 6, 8), ">f4"),
        ((3, 8, 3), (3, 8, 3), ">f4"),
        ((16, 2, 40), (16, 2, 40), "?"),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_in_any_order(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...], dtype: str, order: str
) -> None:
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 100, dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    image = _read(tmp_path / "a.npy")
    is_last = array.ndim == 3 and array.shape != expected
    planes = array.transpose(2, 0, 1) if is_last else array.reshape(expected)
    assert_array_equal(image, planes)
    assert image.dtype == array.dtype.newbyteorder("=")


def test_errors_of_libraries_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cv2.error("out of\nmemory")

    path = save_picture(tmp_path / "a.png", RGB)
    for decode, message in (
        (fail, r"a.png: OpenCV refuses it"),
        (lambda *_: None, r"a.png: damaged png: OpenCV cannot decode it"),
        (lambda *_: GRAY, r"gives uint8 \(6, 8\) but the header states uint8 \(6, 8, 3\)"),
    ):
        monkeypatch.setattr(cv2, "imdecode", decode)
        with pytest.raises(DataError, match=message):
            read_image(path)
    monkeypatch.setattr(np, "load", fail)
    np.save(tmp_path / "a.npy", PLANES)
    with pytest.raises(DataError, match=r"a.npy: cannot be read \(error: out of\\nmemory\)"):
        read_image(tmp_path / "a.npy")
