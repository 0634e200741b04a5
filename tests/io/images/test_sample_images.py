"""Real files: every pixel as tifffile or OpenCV gives it, every header true."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.images.header import read_header
from lit_data.io.images.masks import MaskOptions, read_mask
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.readers import read_image

pytestmark = pytest.mark.data


def _pages(path: Path) -> Iterator[tuple[ReadOptions, np.ndarray]]:
    """Each page as tifffile gives it, channels first, and the rules that give the same."""
    with tifffile.TiffFile(path) as tiff:
        for number, page in enumerate(tiff.pages):
            pixels = page.asarray()
            planes = (
                pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, page.axes.index("S"), 0)
            )
            if planes.dtype in (np.float16, np.float64):
                planes = planes.astype(np.float32)
            alpha = [place for place, kind in enumerate(page.extrasamples) if kind in (1, 2)]
            planes = np.delete(
                planes, [len(planes) - len(page.extrasamples) + place for place in alpha], axis=0
            )
            yield ReadOptions(page=number, palette="index", alpha="drop"), planes


def test_every_tiff_is_what_tifffile_gives(shared_data: Path) -> None:
    pages, patterns = 0, ("tiff/**/*", "documents/*.tif", "inspection/**/*.tif")
    for path in find_images(shared_data, patterns=patterns).paths:
        for rules, expected in _pages(path):
            header = read_header(path, rules)
            assert header.kind == "tiff"
            assert (header.shape, header.dtype) == (expected.shape, expected.dtype)
            for strict in (False, True):
                image = read_image(path, rules, strict=strict)
                assert_array_equal(image, expected, err_msg=str(path))
                assert image.dtype == expected.dtype
            pages += 1
    assert pages == 52 + 34 + 4 + 1 + 2 + 1 + 1 + 4 + 24


def test_what_takes_a_choice_says_so(shared_data: Path) -> None:
    refused = {}
    for path in find_images(shared_data / "tiff").paths:
        try:
            read_image(path)
        except DataError as error:
            refused[path.name] = str(error).removeprefix(f"{path}: ")
    assert refused == {
        "4D-series.ome.tif": "35 pages; choose one with data.read.page=0 to data.read.page=34",
        "multipage.tif": "2 pages; choose one with data.read.page=0 to data.read.page=1",
        "multipage_rgb.tif": "2 pages; choose one with data.read.page=0 to data.read.page=1",
        "shapes_multi_color.tif": "5 pages; choose one with data.read.page=0 to data.read.page=4",
        "shapes_multi_size.tif": "2 pages; choose one with data.read.page=0 to data.read.page=1",
        "shapes_tiled_multi.tif": "3 pages; choose one with data.read.page=0 to data.read.page=2",
        "strike.tif": "3 channel(s) and alpha, not opaque everywhere; set data.read.alpha=drop to read it without",
    }


def test_palettes_are_expanded_as_opencv_does(shared_data: Path) -> None:
    names = [
        "exampletiffs/shapes_lzw_palette.tif",
        "libtiff-test/palette-1c-8b.tiff",
        "libtiffpic/flower-palette-08.tif",
    ]
    for name in names:
        path = shared_data / "tiff" / name
        expected = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)[..., ::-1].transpose(2, 0, 1)
        assert_array_equal(read_image(path), expected)


def test_a_page_stored_on_its_side_is_turned_on_request(shared_data: Path) -> None:
    path = shared_data / "tiff" / "exampletiffs" / "poppies.tif"
    assert read_header(path).shape == (3, 756, 1008)
    upright = read_image(path, ReadOptions(exif="apply"))
    assert_array_equal(upright, np.rot90(read_image(path), -1, (1, 2)))


def test_other_images_are_what_opencv_gives(shared_data: Path) -> None:
    paths = find_images(shared_data, patterns=("**/*.png", "**/*.jpg")).paths
    assert len(paths) > 1500
    for path in paths:
        expected = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED)
        planes = expected[None] if expected.ndim == 2 else expected[..., 2::-1].transpose(2, 0, 1)
        header, image = read_header(path), read_image(path)
        assert_array_equal(image, planes, err_msg=str(path))
        assert (header.shape, header.dtype) == (image.shape, image.dtype)


def test_a_volume_is_no_image(shared_data: Path) -> None:
    message = r"array of shape \(20, 512, 512\); give \[H, W\], \[C, H, W\] or \[H, W, C\]"
    with pytest.raises(DataError, match=message):
        read_header(shared_data / "ct" / "abdomen_20x512x512_hu_int16.npy")


def test_real_masks_are_binary(shared_data: Path) -> None:
    paths = find_images(shared_data / "inspection" / "meiwei-masks").paths
    assert len(paths) == 100
    for path in paths:  # white is number 215 of their palettes
        expected = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) // 255
        assert_array_equal(read_mask(path, MaskOptions(palette="expand"))[0], expected)
    with pytest.raises(DataError, match=r"values 0, 215; .* data\.mask_read\.palette=expand"):
        read_mask(paths[0])


def test_gray_stored_three_times_collapses(shared_data: Path) -> None:
    paths = find_images(shared_data / "inspection" / "xsdd").paths
    sizes = {read_image(path, ReadOptions(equal_channels="collapse")).shape for path in paths}
    assert sizes == {(1, 128, 128), (1, 128, 122), (1, 128, 130)}


def test_the_listing_is_complete(shared_data: Path) -> None:
    listing = find_images(shared_data / "inspection" / "ir-modules")
    assert len(listing.paths) == 1282
    assert listing.ignored == {"of another type": 2}
