"""Strict reading finds what a decoder lets pass."""

import io
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import decode_strict, read_image

SMOOTH = cv2.GaussianBlur(
    np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8), (0, 0), 2
)


def _saved(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(SMOOTH).save(buffer, kind, **options)
    return buffer.getvalue()


# row 8: a flipped bit of a JPEG cannot be seen at first; the stored CRC finds it later
def test_the_file_is_fingerprinted(tmp_path: Path) -> None:
    data, jpeg = _saved("PNG"), bytearray(_saved("JPEG"))
    (tmp_path / "a.png").write_bytes(data)
    decoded = decode_strict(tmp_path / "a.png")
    assert_array_equal(decoded.array, SMOOTH.transpose(2, 0, 1))
    assert (decoded.source_crc32, decoded.notes) == (zlib.crc32(data), ())
    jpeg[-40] ^= 1
    (tmp_path / "a.jpg").write_bytes(jpeg)
    assert decode_strict(tmp_path / "a.jpg").source_crc32 == zlib.crc32(jpeg)


# row 7: OpenCV gives a full-size array for most of these when it reads the file itself
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100, "subsampling": 0}])
def test_a_jpeg_cut_anywhere_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    data = _saved("JPEG", **options)
    path = tmp_path / "a.jpg"
    for size in np.linspace(1, len(data) - 1, 30).astype(int):
        path.write_bytes(data[:size])
        for strict in (False, True):
            with pytest.raises(DataError, match=r"a.jpg: (truncated or damaged JPEG|not a PNG)"):
                read_image(path, strict=strict)


def test_a_jpeg_whose_header_claims_four_times_the_height_is_refused(tmp_path: Path) -> None:
    data = bytearray(_saved("JPEG"))
    frame = data.index(b"\xff\xc0") + 5
    data[frame : frame + 2] = (4 * int.from_bytes(data[frame : frame + 2], "big")).to_bytes(
        2, "big"
    )
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(DataError, match="premature end of data segment"):
        decode_strict(tmp_path / "a.jpg")


def test_a_whole_jpeg_may_have_a_thumbnail_and_a_tail(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[37500] = _saved("JPEG")  # a maker note that holds an image of its own, with an end marker
    data = _saved("JPEG", exif=exif)
    for whole in (data, data + bytes(100), data + _saved("JPEG")):
        (tmp_path / "a.jpg").write_bytes(whole)
        assert decode_strict(tmp_path / "a.jpg").array.shape == (3, 40, 60)
    (tmp_path / "a.jpg").write_bytes(data[:-50])
    with pytest.raises(DataError, match="truncated or damaged JPEG: Premature end of JPEG file"):
        decode_strict(tmp_path / "a.jpg")


# rows 4, 5 and 6
@pytest.mark.parametrize("strict", [False, True])
def test_a_png_cut_or_flipped_anywhere_is_an_error(tmp_path: Path, strict: bool) -> None:
    data, path = _saved("PNG"), tmp_path / "a.png"
    for size in [*np.linspace(1, len(data) - 13, 30).astype(int), len(data) - 12, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=r"a.png: (truncated|damaged|not a) .*PNG"):
            read_image(path, strict=strict)
    for place in np.random.default_rng(0).choice(len(data), 60, replace=False):
        flipped = bytearray(data)
        flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"a.png: .*(checksum|truncated|damaged|not a) ?(PNG)?"):
            read_image(path, strict=strict)


def test_a_chunk_that_claims_gigabytes_is_refused_before_opencv_makes_room(tmp_path: Path) -> None:
    data = _saved("PNG")
    place = data.index(b"IDAT")
    (tmp_path / "a.png").write_bytes(data[: place - 4] + b"\x7f\xff\xff\x00" + data[place:])
    with pytest.raises(DataError, match="damaged PNG: Truncated File Read"):
        read_image(tmp_path / "a.png")


# row 29
@pytest.mark.parametrize(
    ("name", "value"), [("a.npy", np.nan), ("a.tif", np.nan), ("a.npy", np.inf), ("a.tif", -np.inf)]
)
def test_bad_floats_are_counted_and_located(tmp_path: Path, name: str, value: float) -> None:
    path, pixels, filling = tmp_path / name, np.zeros((5, 7), np.float32), ReadOptions(nan_fill=9)
    pixels[3, 4] = pixels[4, 1] = value
    np.save(path, pixels) if name == "a.npy" else tifffile.imwrite(path, pixels)
    message = (
        "2 NaN or infinite pixels, the first in channel 0 at row 3, column 4; data.read.nan_fill=0"
    )
    with pytest.raises(DataError, match=f"{name}: {message}"):
        decode_strict(path)
    filled = decode_strict(path, filling).array
    assert np.flatnonzero(filled).tolist() == [25, 29]
    assert filled[0, 3, 4] == 9
    assert_array_equal(read_image(path, filling), filled)
    assert_array_equal(read_image(path), pixels[None])  # without checks, as stored


# row 31
@pytest.mark.parametrize(
    ("low", "high", "noted"),
    [(0, 255, True), (3, 1.5, True), (0, 1, False), (-1, 9, False), (0, 4095, False)],
)
def test_floats_beyond_one_are_noted(tmp_path: Path, low: float, high: float, noted: bool) -> None:
    np.save(tmp_path / "a.npy", np.array([[low, high]], np.float32))
    notes = " ".join(decode_strict(tmp_path / "a.npy").notes)
    assert ("set data.read.value_range=[0,255]" in notes) is bool(notes) is noted
