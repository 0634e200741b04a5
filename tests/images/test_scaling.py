"""Images and masks scaled together: pixels, classes that survive, positions, and the way back."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions
from lit_data.images.scaling import FittedDecoder, ScaledDecoder, Scaling, scale_classes
from lit_inspect.scaling import Fit, place_centred, scale_size

SIZES = [(1, 7), (7, 1), (1, 40_000), (3, 5), (64, 48), (131, 65)]
SIZED = [
    Scaling(size_px=(64, 48)),
    Scaling(size_px=(5, 5)),
    Scaling(size_px=(30, 50), fit="stretch"),
]
SCALINGS = [*SIZED, Scaling(factor=0.37), Scaling(factor=1.7)]


def _write(path: Path, height: int, width: int) -> tuple[ImageSource, Array]:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    cv2.imwrite(str(path), pixels)
    return ImageSource((str(path),)), pixels[None]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint8", 1), ("uint16", 3), ("int16", 4), ("float32", 1)]
)
def test_header_and_pixels_agree_for_all_sizes_dtypes_and_channels(
    tmp_path: Path, scaling: Scaling, dtype: str, channels: int
) -> None:
    path = tmp_path / "a.tif"
    source, decoder = ImageSource((str(path),) * channels), ScaledDecoder(scaling, ImageDecoder())
    for size in SIZES:
        tifffile.imwrite(path, np.full(size, 90, dtype))
        header, array = decoder.header(source), decoder(source).array
        stored = (channels, *scaling.stored_px(size))
        assert array.shape == (channels, header.height_px, header.width_px) == stored
        assert array.dtype == header.dtype == np.dtype(dtype)
        assert_allclose(array, 90, rtol=1e-4)  # floats are rounded
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
    assert_array_equal(scaled, expected)


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


def test_padding_mirrors_the_mask_as_the_image() -> None:
    scaling, image = Scaling(size_px=(8, 8)), np.arange(32, dtype=np.uint8).reshape(1, 4, 8)
    padded, mask = scaling.scale_image(image), scaling.scale_mask((image > 20).astype(np.uint8))
    assert_array_equal(padded[:, 2:6], image)
    assert_array_equal(padded[0, 0], image[0, 2])
    assert_array_equal(mask, padded > 20)
    assert_array_equal(scaling.restore(padded, (4, 8)), image)
    assert_array_equal(scaling.restore_mask(mask, (4, 8)), image > 20)


def test_an_image_that_becomes_too_large_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    source, _ = _write(tmp_path / "a.tif", 30, 40)
    decoder = ScaledDecoder(Scaling(factor=16), ImageDecoder(ReadOptions(max_pixels=10_000)))
    message = r"a\.tif: scaled to 480 x 640 px .* read\.max_pixels=10000: choose a smaller"
    with pytest.raises(DataError, match=message):
        decoder.header(source)


def test_sizes_and_factors_are_checked_and_exclude_each_other() -> None:
    assert Scaling.of(None, None) is None
    assert Scaling.of(32, None) == Scaling(size_px=(32, 32))
    with pytest.raises(ConfigError, match="exclude each other"):
        Scaling.of(32, 0.5)
    with pytest.raises(ConfigError, match=r"size_px=0 is not usable"):
        Scaling.of(0, None)
    wrong = [0, -1, float("nan"), float("inf"), 17, True, "half"]
    for scale in wrong:
        with pytest.raises(ConfigError, match=r"scale=.* give a number above 0 and up to 16"):
            Scaling.of(None, scale)


@pytest.mark.parametrize(
    ("size", "fit_px", "fit", "expected"),
    [
        ((40, 24), (64, 64), "cover", (107, 64)),
        ((40, 24), (64, 64), "contain", (64, 38)),
        ((40, 24), (64, 64), "stretch", (64, 64)),
        ((40, 24), (64, 64), "keep", (40, 24)),
        ((240, 320), (320, 320), "contain", (240, 320)),
        ((333, 500), (320, 320), "contain", (213, 320)),
        ((1, 1), (64, 32), "contain", (32, 32)),
        ((1, 4000), (320, 320), "contain", (1, 320)),
        ((4000, 3), (320, 320), "contain", (320, 1)),
        ((479, 641), (120, 160), "contain", (120, 160)),
    ],
)
def test_an_image_is_scaled_as_its_fit_says(
    size: tuple[int, int], fit_px: tuple[int, int], fit: Fit, expected: tuple[int, int]
) -> None:
    assert scale_size(size, fit_px, fit) == expected


def test_what_stands_over_is_cut_and_what_is_missing_is_padded_evenly() -> None:
    image = np.arange(1, 31, dtype=np.uint8).reshape(1, 5, 6)
    assert_array_equal(place_centred(image, (2, 3), "constant"), image[:, 1:3, 1:4])
    padded = place_centred(image, (6, 10), "constant")
    assert_array_equal(padded[:, :5, 2:8], image)
    assert padded.sum() == image.sum()
    for padding, columns in (("reflect", [1, 4]), ("edge", [0, 5])):
        wider = place_centred(image, (5, 8), padding)
        assert_array_equal(wider[..., [0, 7]], image[..., columns])
    repeated = place_centred(image[:, :, :2], (5, 6), "reflect")[0, 0]
    assert_array_equal(repeated, [1, 2, 1, 2, 1, 2])


def test_each_tile_of_a_sheet_is_fitted_by_itself(tmp_path: Path) -> None:
    sheet = np.kron(np.arange(1, 5, dtype=np.uint8).reshape(2, 2), np.ones((20, 10), np.uint8))
    cv2.imwrite(str(tmp_path / "sheet.png"), sheet)
    source = ImageSource((str(tmp_path / "sheet.png"),))
    decoder = FittedDecoder((8, 8), "contain", "zeros", tiles=2)
    fitted, header = decoder(source).array[0], decoder.header(source)
    assert fitted.shape == (header.height_px, header.width_px) == (16, 16)
    for row, column in np.ndindex(2, 2):
        tile = fitted[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert set(np.unique(tile)) == {0, 1 + 2 * row + column}
        assert not tile[:, :2].any()
        assert not tile[:, 6:].any()
    undivided, _ = _write(tmp_path / "a.png", 40, 30)
    for call in (FittedDecoder((8, 8), tiles=4), FittedDecoder((8, 8), tiles=4).header):
        with pytest.raises(DataError, match=r"a\.png: a sheet of 4 x 4 views cannot be 40 x 30 px"):
            call(undivided)
