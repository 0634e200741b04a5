"""White is white whatever the depth of a file, and no colour model is taken for another."""

import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from lit_data.core.errors import DataError
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.header import read_header
from lit_data.images.masks import read_mask
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image
from lit_inspect import images as runtime
from lit_inspect.errors import ImageError

NARROW = [*range(2, 8), *range(9, 16)]


def _ramp(bits: int) -> np.ndarray:
    """Numbers of some bits, the largest last."""
    numbers = np.linspace(0, 2**bits - 1, 48).round()
    return numbers.reshape(6, 8).astype("u1" if bits <= 8 else "u2")


def _pack(numbers: np.ndarray, bits: int) -> bytes:
    """Rows of whole bytes, of numbers without gaps between them."""
    wide = numbers.astype(">u2").view(np.uint8).reshape(*numbers.shape, 2)
    return np.packbits(
        np.unpackbits(wide, axis=2)[..., 16 - bits :].reshape(6, -1), axis=1
    ).tobytes()


def _write_tiff(
    path: Path, numbers: np.ndarray, bits: int, photometric: int = 1, **extra: np.ndarray
) -> Path:
    """A page of any depth, which tifffile does not write; with 768 numbers of a palette at its end."""
    data = extra.get("pixels", np.frombuffer(_pack(numbers, bits), np.uint8)).tobytes()
    depths = extra.get("depths", np.array([bits], "<u2"))
    tags = {256: 8, 257: 6, 259: 1, 262: photometric, 273: 8, 278: 6, 279: len(data)}
    rows = [struct.pack("<HHII", code, 4, 1, value) for code, value in tags.items()]
    rows.append(struct.pack("<HHI4s", 258, 3, len(depths), depths.tobytes()))
    rows.append(struct.pack("<HHII", 277, 3, 1, len(depths)))
    if "palette" in extra:
        place = 8 + len(data)
        data += extra["palette"].tobytes()
        rows.append(struct.pack("<HHII", 320, 3, extra["palette"].size, place))
    if "alpha" in extra:
        rows.append(struct.pack("<HHII", 338, 3, 1, int(extra["alpha"])))
    directory = struct.pack("<H", len(rows)) + b"".join(sorted(rows, key=lambda row: row[1::-1]))
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory + bytes(4))
    return path


def _decode(path: Path, **options: Any) -> np.ndarray:
    return ImageDecoder(ReadOptions(**options))(ImageSource((str(path),))).array


@pytest.mark.parametrize("bits", NARROW)
def test_numbers_of_a_few_bits_are_scaled_to_their_dtype(tmp_path: Path, bits: int) -> None:
    numbers = _ramp(bits)
    path = _write_tiff(tmp_path / "a.tif", numbers, bits)
    assert_array_equal(read_image(path)[0], numbers)
    white = 255 if bits < 8 else 65535
    scaled = _decode(path)
    assert_array_equal(scaled[0], np.rint(numbers / (2**bits - 1) * white))
    assert_array_equal(_decode(path, depth="keep")[0], numbers)
    assert_array_equal(_decode(path, as_float=True)[0], numbers)
    decoded = ImageDecoder()(ImageSource((str(path),)))
    assert f"{bits} bits per sample, scaled so that {2**bits - 1} is {white}" in decoded.notes[0]
    inverted = _write_tiff(tmp_path / "b.tif", numbers, bits, photometric=0)
    assert_array_equal(_decode(inverted, invert="photometric"), white - scaled)
    with pytest.raises(ImageError, match="rare kind"):
        runtime.open_image(path, runtime.ReadOptions())


MODELS = {
    4: "a transparency mask",
    6: "YCbCr without JPEG",
    8: r"CIE L\*a\*b\*",
    9: r"ICC L\*a\*b\*",
    10: r"ITU L\*a\*b\*",
    32803: "the raw mosaic of a camera",
    32844: "LogL",
    32845: "LogLuv",
    34892: "raw data of a camera",
    999: "an unknown color model",
}


@pytest.mark.parametrize("photometric", MODELS)
def test_colour_models_that_are_neither_grey_nor_rgb_are_refused(
    tmp_path: Path, photometric: int
) -> None:
    gray = _write_tiff(tmp_path / "g.tif", _ramp(8), 8, photometric)
    color = tmp_path / "c.tif"
    tifffile.imwrite(color, np.dstack([_ramp(8)] * 3), photometric="rgb", compression="deflate")
    rgb, other = (
        struct.pack("<HHIHH", 262, 3, 1, 2, 0),
        struct.pack("<HHIHH", 262, 3, 1, photometric, 0),
    )
    color.write_bytes(color.read_bytes().replace(rgb, other))
    for path in (gray, color):
        with pytest.raises(DataError, match=f"TIFF of {MODELS[photometric]}.* -colorspace sRGB"):
            read_header(path)
        with pytest.raises(DataError, match="which is neither gray nor RGB"):
            read_mask(path)
        with pytest.raises(ImageError, match="rare kind"):
            runtime.open_image(path, runtime.ReadOptions())


def test_a_palette_with_alpha_gives_its_colours(tmp_path: Path) -> None:
    indices = np.arange(48, dtype=np.uint8).reshape(6, 8)
    palette = np.arange(768, dtype=np.uint16).reshape(3, 256) * 85
    both = np.dstack([indices, np.full_like(indices, 255)])
    extra = {"pixels": both, "depths": np.array([8, 8], "<u2"), "palette": palette.astype("<u2")}
    path = _write_tiff(tmp_path / "a.tif", indices, 8, 3, **extra, alpha=np.array(2))
    assert_array_equal(read_image(path, ReadOptions(alpha="drop")), (palette >> 8)[:, indices])
    with pytest.raises(DataError, match="alpha=drop"):
        read_image(path)
    path = _write_tiff(tmp_path / "b.tif", indices, 8, 3, **extra, alpha=np.array(0))
    with pytest.raises(
        DataError, match=r"palette image with 1 unnamed channels .* -type TrueColor"
    ):
        read_image(path)


def _bmp(pixels: np.ndarray, masks: tuple[int, ...] = (), info_bytes: int = 40) -> bytes:
    """Rows from the bottom; the masks follow a header of 40 bytes, and lie in longer ones."""
    height, width = pixels.shape
    rows = [row.tobytes().ljust(-(-row.nbytes // 4) * 4, b"\0") for row in pixels[::-1]]
    bits = 8 * pixels.itemsize
    compression = (3 if len(masks) == 3 or info_bytes > 40 else 6) if masks else 0
    info = struct.pack("<IiiHHI", info_bytes, width, height, 1, bits, compression) + bytes(20)
    info = (info + struct.pack(f"<{len(masks)}I", *masks)).ljust(info_bytes, b"\0")
    start = 14 + len(info)
    return (
        struct.pack("<2sIII", b"BM", start + sum(map(len, rows)), 0, start) + info + b"".join(rows)
    )


PACKINGS = {
    "5 5 5, no masks": (np.uint16, (), 40, (0x7C00, 0x3E0, 0x1F)),
    "5 6 5": (np.uint16, (0xF800, 0x7E0, 0x1F), 40, None),
    "5 6 5, V3": (np.uint16, (0xF800, 0x7E0, 0x1F), 56, None),
    "5 6 5, V4": (np.uint16, (0xF800, 0x7E0, 0x1F), 108, None),
    "5 6 5, V5": (np.uint16, (0xF800, 0x7E0, 0x1F), 124, None),
    "X, B, G, R bytes": (np.uint32, (0xFF000000, 0xFF0000, 0xFF00), 40, None),
    "alpha in front, V5": (np.uint32, (0xFF000000, 0xFF0000, 0xFF00, 0xFF), 124, None),
    "common bytes": (np.uint32, (0xFF0000, 0xFF00, 0xFF), 108, None),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_bmp_are_decoded_by_their_masks(tmp_path: Path, name: str) -> None:
    dtype, stored_masks, info_bytes, implied = PACKINGS[name]
    masks = implied or stored_masks
    rng = np.random.default_rng(0)
    packed = rng.integers(0, np.iinfo(dtype).max, (5, 7), dtype, endpoint=True)
    packed[0, 0] = np.iinfo(dtype).max
    path = tmp_path / "a.bmp"
    path.write_bytes(_bmp(packed, stored_masks, info_bytes))
    planes = []
    for mask in masks:
        shift = (mask & -mask).bit_length() - 1
        planes.append(np.rint((packed & mask) / (1 << shift) * 255 / (mask >> shift)))
    image = read_image(path, ReadOptions(alpha="drop"))
    assert_array_equal(image, planes[:3])
    assert image[:, 0, 0].tolist() == [255, 255, 255]
    assert_array_equal(image, read_image(path, ReadOptions(alpha="drop"), strict=True))
    if len(masks) == 4:
        assert_array_equal(read_image(path, ReadOptions(alpha="only"))[0], planes[3])
    if name == "common bytes":
        inspected = runtime.open_image(path, runtime.ReadOptions(alpha="drop"))
        assert_array_equal(inspected.read(0, 5), image)
    else:
        with pytest.raises(ImageError, match="save it as PNG"):
            runtime.open_image(path, runtime.ReadOptions(alpha="drop"))


@pytest.mark.parametrize(
    "masks", [(0, 0x7E0, 0x1F), (0xF900, 0x7E0, 0x1F), (0x3, 0x1C, 0x20), (0xF00, 0xF0, 0xF)]
)
def test_rare_packings_of_a_bmp_are_refused_with_a_cure(
    tmp_path: Path, masks: tuple[int, ...]
) -> None:
    (tmp_path / "a.bmp").write_bytes(_bmp(np.zeros((2, 2), np.uint16), masks))
    with pytest.raises(DataError, match=r"Unsupported BMP bitfields layout; .* save it as PNG"):
        read_header(tmp_path / "a.bmp")


@pytest.mark.parametrize("stray", [b"junk", b"\xff\xff\xff", b"\x12\x00\xff\x00", bytes(3000)])
def test_stray_bytes_in_the_header_of_a_jpeg_are_passed_over(tmp_path: Path, stray: bytes) -> None:
    picture = cv2.GaussianBlur(
        np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8), (9, 9), 3
    )
    data = cv2.imencode(".jpg", picture)[1].tobytes()
    (tmp_path / "a.jpg").write_bytes(data)
    segment_end = 4 + int.from_bytes(data[4:6], "big")
    (tmp_path / "b.jpg").write_bytes(data[:segment_end] + stray + data[segment_end:])
    expected = read_image(tmp_path / "a.jpg")
    for strict in (False, True):
        assert_array_equal(read_image(tmp_path / "b.jpg", strict=strict), expected)
    inspected = runtime.open_image(tmp_path / "b.jpg", runtime.ReadOptions())
    assert_array_equal(inspected.read(0, 40), expected)
