"""TIFF comes out as tifffile gives it, whatever its layout."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from lit_data.core.errors import DataError
from lit_data.images.header import read_header
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 100, (37, 41), dtype=np.uint8)
RGB = RNG.integers(0, 100, (37, 41, 3), dtype=np.uint8)


def _check(path: Path, expected: np.ndarray, **options: Any) -> None:
    rules = ReadOptions(**options)
    header = read_header(path, rules)
    assert (header.shape, header.dtype) == (expected.shape, expected.dtype)
    for strict in (False, True):
        image = read_image(path, rules, strict=strict)
        np.testing.assert_array_equal(image, expected)
        assert image.flags.writeable
        assert (image.shape, image.dtype) == (expected.shape, expected.dtype)


# rows 22 and 23
@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_other_floats_become_float32_with_a_note(tmp_path: Path, dtype: str) -> None:
    pixels = (GRAY / 7).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", pixels)
    _check(tmp_path / "a.tif", pixels.astype(np.float32)[None])
    assert read_header(tmp_path / "a.tif").notes == (f"float{8 * int(dtype[1])} cast to float32",)


# row 26
@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize(
    ("samples", "dtype", "tile"),
    [(2, "u1", None), (3, "u2", None), (5, "f4", None), (3, "u1", (16, 32)), (5, "u2", (16, 32))],
)
def test_both_planar_layouts(
    tmp_path: Path, planar: str, samples: int, dtype: str, tile: tuple[int, int] | None
) -> None:
    pixels = RNG.integers(0, 100, (samples, 37, 41)).astype(dtype)
    stored = pixels if planar == "separate" else pixels.transpose(1, 2, 0)
    kind = "rgb" if samples == 3 else "minisblack"
    tifffile.imwrite(tmp_path / "a.tif", stored, planarconfig=planar, photometric=kind, tile=tile)
    _check(tmp_path / "a.tif", pixels)


# row 27
def test_a_page_is_read_on_its_own(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(GRAY, photometric="minisblack")
        writer.write(RGB[:20].astype("u2"), photometric="rgb")
    _check(tmp_path / "a.tif", GRAY[None], page=0)
    _check(tmp_path / "a.tif", RGB[:20].astype("u2").transpose(2, 0, 1), page=1)
    with pytest.raises(
        DataError, match=r"a.tif: 2 pages; choose one with data.read.page=0 to data.read.page=1"
    ):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize("scale", [1, 257])
def test_palettes_of_8_and_16_bits(tmp_path: Path, scale: int) -> None:
    colors = RNG.integers(0, 256, (3, 256)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", GRAY, photometric="palette", colormap=colors * scale)
    _check(tmp_path / "a.tif", colors[:, GRAY].astype(np.uint8))
    _check(tmp_path / "a.tif", GRAY[None], palette="index")


def test_a_palette_image_without_a_palette_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, GRAY, photometric="minisblack")
    data = path.read_bytes()
    at = data.index(struct.pack("<HHI", 262, 3, 1)) + 8
    path.write_bytes(data[:at] + b"\x03" + data[at + 1 :])
    with pytest.raises(DataError, match=r"a.tif: damaged TIFF: a palette image without a palette"):
        read_image(path)


# row 28
def test_a_cut_file_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb")
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2):
        path.write_bytes(data[:size])
        message = f"a.tif: truncated TIFF: {len(data)} bytes expected, {size} found"
        with pytest.raises(DataError, match=message):
            read_image(path)


@pytest.mark.parametrize("compression", ["lzw", "deflate", "zstd", "packbits"])
def test_damaged_compressed_pixels_are_an_error(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((64, 64), np.uint8), compression=compression)
    with tifffile.TiffFile(path) as tiff:
        place, count = tiff.pages[0].dataoffsets[0], tiff.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[place : place + count] = b"\x01" * count
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.tif: cannot be read"):
        read_image(path)


def test_tiles_that_are_not_stored_are_noted(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(16, 16), compression="deflate")
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        tags = tiff.pages[0].tags
        tags["TileByteCounts"].overwrite([0, *tags["TileByteCounts"].value[1:]])
    _check(tmp_path / "a.tif", pixels[None])
    assert read_header(tmp_path / "a.tif").notes == ("strips or tiles without data, read as empty",)
