"""Real files: every pixel as tifffile or OpenCV gives it, every header true."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from lit_data.core.errors import DataError
from lit_data.images.discovery import find_images
from lit_data.images.header import read_header
from lit_data.images.masks import MaskOptions, read_mask
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image

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


def test_real_masks_are_binary(shared_data: Path) -> None:
    paths = find_images(shared_data / "inspection" / "meiwei-masks").paths
    assert len(paths) == 100
    for path in paths:  # white is number 215 of their palettes
        expected = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) // 255
        assert_array_equal(read_mask(path, MaskOptions(palette="expand"))[0], expected)
    with pytest.raises(DataError, match=r"values 0, 215; .* data\.mask_read\.palette=expand"):
        read_mask(paths[0])
