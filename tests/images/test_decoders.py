"""Sources become arrays that fit a store: stacked, of its dtypes, with headers that tell the truth."""

import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.images.masks import MaskOptions
from lit_data.images.read_options import ReadOptions
from lit_data.images.scaling import FittedDecoder, ScaledDecoder, Scaling
from tests.helpers.files import save_picture

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PLANES = RGB.transpose(2, 0, 1)
GRAY = RGB[..., 0]


def _png(path: Path, pixels: np.ndarray) -> str:
    return str(save_picture(path, pixels))


def _npy(path: Path, pixels: np.ndarray) -> str:
    np.save(path, pixels)
    return str(path)


def _decode(decoder: Decoder, *paths: str) -> np.ndarray:
    """Decode, also after pickling, and hold the result against the header."""
    source = ImageSource(paths)
    decoded = pickle.loads(pickle.dumps(decoder))(source)
    header = decoder.header(source)
    assert (header.channels, header.height_px, header.width_px) == decoded.array.shape
    assert header.dtype == decoded.array.dtype
    assert decoded.source_crc32 == tuple(zlib.crc32(Path(path).read_bytes()) for path in paths)
    return decoded.array


def test_a_source_has_paths_and_channels_are_numbers() -> None:
    for paths in ((), "a.png"):
        with pytest.raises(ConfigError, match="must be a tuple of at least one path"):
            ImageSource(paths)
    for channels in ((), (0, -1)):
        with pytest.raises(ConfigError, match="must be numbers of channels from 0, or None"):
            ImageDecoder(channels=channels)


def test_files_are_stacked_and_channels_picked(tmp_path: Path) -> None:
    one, two = _png(tmp_path / "1.png", RGB), _png(tmp_path / "2.png", GRAY + 1)
    for paths, channels, expected in (
        ((one, two), None, [*PLANES, GRAY + 1]),
        ((two, one), None, [GRAY + 1, *PLANES]),
        ((one,), None, PLANES),
        ((one, two), (3, 0), [GRAY + 1, GRAY]),
    ):
        found = _decode(ImageDecoder(channels=channels), *paths)
        assert_array_equal(found, np.stack(expected))


# row 13
def test_a_missing_channel_is_named_with_both_counts(tmp_path: Path) -> None:
    path, decoder = _png(tmp_path / "a.png", GRAY), ImageDecoder(channels=(0, 1, 2))
    message = r"channels=\(0, 1, 2\) needs 3 channels, found 1; set data.read.gray_to_rgb=true"
    for call in (decoder, decoder.header):
        with pytest.raises(DataError, match=f"a.png: {message}"):
            call(ImageSource((path,)))
    copied = _decode(ImageDecoder(ReadOptions(gray_to_rgb=True), channels=(0, 1, 2)), path)
    assert_array_equal(copied, np.stack([GRAY] * 3))
    with pytest.raises(DataError, match=r"channels=\(4,\) needs 5 channels, found 3$"):
        ImageDecoder(channels=(4,)).header(ImageSource((_png(tmp_path / "b.png", RGB),)))


# rows 16, 20 and 43
def test_files_of_one_image_agree_in_size_and_depth(tmp_path: Path) -> None:
    first, smaller = _png(tmp_path / "1.png", RGB), _png(tmp_path / "2.png", RGB[:5])
    message = r"1.png is 6 x 8 pixels, .*2.png is 5 x 8; they must have the same size"
    for call in (ImageDecoder().header, MaskDecoder().header, ImageDecoder()):
        with pytest.raises(DataError, match=message):
            call(ImageSource((first, smaller)))
    turned = _png(tmp_path / "2.png", RGB.transpose(1, 0, 2))
    with pytest.raises(
        DataError, match=r"2.png is 8 x 6: one of them is rotated, .*set data.read.exif=apply"
    ):
        ImageDecoder().header(ImageSource((first, turned)))
    deeper = _npy(tmp_path / "3.npy", RGB.astype(np.uint16))
    with pytest.raises(DataError, match=r"1.png is uint8, .*3.npy is uint16; the files of one"):
        ImageDecoder().header(ImageSource((first, deeper)))


@pytest.mark.parametrize(
    ("pixels", "dtype", "notes"),
    [
        (GRAY, "uint8", ()),
        (GRAY.astype(np.uint16), "uint16", ()),
        (GRAY.astype(np.int16), "int16", ()),
        (GRAY / np.float32(255), "float32", ()),
        (GRAY.astype(np.int8), "int16", ("int8 cast to int16",)),
        (GRAY > 99, "uint8", ("bool cast to uint8",)),
    ],
)
def test_dtypes_of_a_store_are_kept_and_others_cast_with_a_note(
    tmp_path: Path, pixels: np.ndarray, dtype: str, notes: tuple[str, ...]
) -> None:
    path = _npy(tmp_path / "a.npy", pixels)
    array = _decode(ImageDecoder(), path)
    assert array.dtype == dtype
    assert_array_equal(array, pixels[None] * (255 if pixels.dtype == bool else 1))
    assert ImageDecoder()(ImageSource((path,))).notes == notes


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_wide_integers_need_a_cast(tmp_path: Path, dtype: str) -> None:
    path = _npy(tmp_path / "a.npy", GRAY.astype(dtype))
    for call in (ImageDecoder().header, ImageDecoder()):
        with pytest.raises(
            DataError, match=f"a store cannot hold {dtype}; set data.read.as_float=true"
        ):
            call(ImageSource((path,)))
    assert _decode(ImageDecoder(ReadOptions(as_float=True)), path).dtype == np.float32


def test_fingerprints_differ_exactly_when_pixels_may() -> None:
    decoders = [
        ImageDecoder(),
        ImageDecoder(ReadOptions(page=1)),
        ImageDecoder(channels=(0, 1)),
        ImageDecoder(channels=(1, 0)),
        MaskDecoder(),
        MaskDecoder(MaskOptions(classes=3)),
        MaskDecoder(MaskOptions(scale="0_1")),
        ScaledDecoder(Scaling(size_px=(64, 48)), MaskDecoder()),
        ScaledDecoder(Scaling(size_px=(64, 48), fit="stretch"), MaskDecoder()),
        ScaledDecoder(Scaling(factor=0.5), MaskDecoder()),
        ScaledDecoder(Scaling(factor=0.5), ImageDecoder()),
        FittedDecoder((20, 30)),
        FittedDecoder((30, 20)),
        FittedDecoder((20, 30), fit="keep"),
        FittedDecoder((20, 30), padding="zeros"),
        FittedDecoder((20, 30), tiles=2),
    ]
    prints = [decoder.fingerprint for decoder in decoders]
    assert len(set(prints)) == len(prints)
    assert all(isinstance(json.loads(text), dict) for text in prints)
    assert ImageDecoder(ReadOptions(), channels=(1, 0)).fingerprint == prints[3]


def test_masks_become_classes(tmp_path: Path) -> None:
    mask = (GRAY > 99).astype(np.uint8)
    one, two = _png(tmp_path / "1.png", mask * 255), _png(tmp_path / "2.png", mask)
    assert_array_equal(_decode(MaskDecoder(), one), mask[None])
    assert_array_equal(_decode(MaskDecoder(), one, two), np.stack([mask, mask]))
    wrong = _png(tmp_path / "3.png", GRAY)
    assert MaskDecoder().header(ImageSource((wrong,))) == (1, 6, 8, np.dtype(np.uint8))
    with pytest.raises(DataError, match=r"^\S*3.png: mask with the values"):
        MaskDecoder()(ImageSource((wrong,)))


def test_decoding_is_strict(tmp_path: Path) -> None:
    path = Path(_png(tmp_path / "a.png", RGB))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    for decoder in (ImageDecoder(), MaskDecoder()):
        with pytest.raises(DataError, match="bad header checksum"):
            decoder(ImageSource((str(path),)))
