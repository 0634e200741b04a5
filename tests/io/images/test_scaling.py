"""Images and masks scaled together: pixels, classes that survive, positions, and the way back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from lit_data.errors import ConfigError, DataError
from lit_data.io.images.decoders import ImageDecoder, ImageSource, MaskDecoder
from lit_data.io.images.masks import MaskOptions
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.scaling import ScaledDecoder, Scaling, scale_classes

SIZES = [(1, 7), (7, 1), (1, 40_000), (3, 5), (64, 48), (131, 65)]
SCALINGS = [
    Scaling(size_px=(64, 48)),
    Scaling(size_px=(5, 5)),
    Scaling(factor=0.37),
    Scaling(factor=1.7),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint8", 1), ("uint16", 3), ("int16", 4), ("float32", 1)]
)
def test_header_and_pixels_agree_for_all_sizes_dtypes_and_channels(
    tmp_path: Path, scaling: Scaling, size: tuple[int, int], dtype: str, channels: int
) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.full(size, 90, dtype))
    source, decoder = ImageSource((str(path),) * channels), ScaledDecoder(scaling, ImageDecoder())
    header, array = decoder.header(source), decoder(source).array
    assert (
        array.shape
        == (channels, header.height_px, header.width_px)
        == (channels, *scaling.stored_px(size))
    )
    assert array.dtype == header.dtype == np.dtype(dtype)
    np.testing.assert_allclose(array, 90, rtol=1e-4)  # floats are rounded
    restored = scaling.restore(array, size)
    assert restored.shape == (channels, *size)
    assert restored.max() <= array.max()


def test_no_defect_is_lost_and_the_most_frequent_class_stays() -> None:
    mask = np.zeros((60, 61), np.uint8)
    mask[7, 50] = 3  # a single pixel
    mask[20:24, 12:18] = 1
    mask[24, 12:14] = 2
    mask[40:60, 40:] = 255
    mask[45, 47] = 2  # in the middle of what is ignored
    scaled = scale_classes(mask, (10, 10))
    expected = np.zeros((10, 10), np.uint8)
    expected[1, 8] = 3
    expected[3, 2] = 1
    expected[4, 2] = 2
    expected[6:, 6:] = 255
    expected[7, 7] = 2
    np.testing.assert_array_equal(scaled, expected)


@pytest.mark.parametrize("size", [(1, 9), (10, 1), (4, 4), (23, 31), (60, 61), (90, 70)])
def test_a_scaled_mask_shows_a_defect_exactly_where_its_file_does(size: tuple[int, int]) -> None:
    mask = (np.random.default_rng(0).random((23, 31)) < 0.01).astype(np.uint8)
    scaled = scale_classes(mask, size)
    ratios = np.array(size) / mask.shape
    for y, x in np.argwhere(mask):  # each of its pixels lies in one that is marked
        row, column = np.floor((np.array([y, x]) + 0.5) * ratios).astype(int)
        assert scaled[row, column] == 1
    for y, x in np.argwhere(scaled):  # and each marked one holds, or is, one of its pixels
        (top, left), (bottom, right) = np.array([y, x]) / ratios, np.array([y + 1, x + 1]) / ratios
        marked = mask[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))]
        assert marked.any()


@pytest.mark.parametrize("size", [(300, 200), (37, 211), (1, 500)])
@pytest.mark.parametrize(
    "scaling", [Scaling(size_px=(100, 120)), Scaling(factor=0.5), Scaling(factor=1.5)]
)
def test_positions_come_back_to_the_pixel(scaling: Scaling, size: tuple[int, int]) -> None:
    mask = np.zeros((1, *size), np.uint8)
    top, left = size[0] // 3, size[1] // 2
    mask[0, top : top + 12, left : left + 20] = 1
    there_and_back = scaling.restore(scaling.scale_mask(mask).astype(np.float32), size)[0]
    found, expected = (np.argwhere(each >= 0.5) for each in (there_and_back, mask[0]))
    one_px = max(
        length / scaled for length, scaled in zip(size, scaling.scaled_px(size), strict=True)
    )
    assert np.abs(found.mean(0) - expected.mean(0)).max() <= one_px / 2
    assert np.abs(found.min(0) - expected.min(0)).max() <= one_px
    restored = scaling.restore_mask(scaling.scale_mask(mask), size)
    assert restored.shape == mask.shape
    assert (restored >= mask).all()


def test_padding_mirrors_the_mask_as_the_image() -> None:
    scaling, image = Scaling(size_px=(8, 8)), np.arange(32, dtype=np.uint8).reshape(1, 4, 8)
    padded, mask = scaling.scale_image(image), scaling.scale_mask((image > 20).astype(np.uint8))
    np.testing.assert_array_equal(padded[:, 2:6], image)
    np.testing.assert_array_equal(padded[0, 0], image[0, 2])
    np.testing.assert_array_equal(mask, padded > 20)
    np.testing.assert_array_equal(scaling.restore(padded, (4, 8)), image)


def test_fingerprints_tell_scalings_apart_and_masks_keep_what_is_ignored(tmp_path: Path) -> None:
    decoders = [
        ScaledDecoder(scaling, MaskDecoder(MaskOptions(ignore=200))) for scaling in SCALINGS
    ]
    assert len({decoder.fingerprint for decoder in decoders}) == len(SCALINGS)
    pixels = np.zeros((40, 30), np.uint8)
    pixels[:20], pixels[30, 20] = 200, 255
    tifffile.imwrite(tmp_path / "m.tif", pixels)
    mask = ScaledDecoder(Scaling(factor=0.1), decoders[0].decoder)(
        ImageSource((str(tmp_path / "m.tif"),))
    ).array
    np.testing.assert_array_equal(mask, [[[255] * 3, [255] * 3, [0] * 3, [0, 0, 1]]])


def test_an_image_that_becomes_too_large_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((30, 40), np.uint8))
    decoder = ScaledDecoder(Scaling(factor=16), ImageDecoder(ReadOptions(max_pixels=10_000)))
    with pytest.raises(
        DataError,
        match=r"a\.tif: scaled to 480 x 640 px .* read\.max_pixels=10000: choose a smaller",
    ):
        decoder.header(ImageSource((str(tmp_path / "a.tif"),)))


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 17, True, "half"])
def test_a_factor_out_of_its_range_is_refused(scale: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"scale=.* is not usable: give a number above 0 and up to 16"
    ):
        Scaling.of(None, scale)


def test_sizes_are_checked_and_exclude_a_factor() -> None:
    assert Scaling.of(None, None) is None
    assert Scaling.of(32, None) == Scaling(size_px=(32, 32))
    with pytest.raises(ConfigError, match="exclude each other"):
        Scaling.of(32, 0.5)
    with pytest.raises(ConfigError, match=r"size_px=0 is not usable"):
        Scaling.of(0, None)
