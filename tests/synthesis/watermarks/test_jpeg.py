import cv2
import numpy as np
import pytest
import torch

from lit_data.samples.watermarks import draw_photo
from lit_data.synthesis.watermarks.blend import compress
from lit_data.types import Array


def _photo(height_px: int = 96, width_px: int = 128) -> Array:
    return draw_photo(np.random.default_rng(2), (height_px, width_px))


def _compress(images: Array, quality: list[float]) -> Array:
    found = compress(torch.from_numpy(images).div(255), torch.tensor(quality)).numpy() * 255
    np.testing.assert_allclose(found, np.rint(found), atol=1e-4)
    return np.rint(found).astype(np.int64)


@pytest.mark.parametrize("quality", [10, 40, 50, 75, 95, 100])
@pytest.mark.parametrize("size_px", [(96, 128), (57, 41)])
def test_it_does_what_a_file_does(quality: int, size_px: tuple[int, int]) -> None:
    photo = _photo(*size_px)
    pixels = np.ascontiguousarray(np.moveaxis(photo, 0, -1)[..., ::-1])
    file = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    expected = np.moveaxis(cv2.imdecode(file, cv2.IMREAD_COLOR)[..., ::-1], -1, 0).astype(np.int64)
    found = _compress(photo[None], [quality])[0]
    off, lost = np.abs(found - expected), np.abs(expected - photo).mean()
    assert off.mean() < 0.25 * lost
    assert np.median(off) <= 1
    assert np.abs(found - photo).mean() == pytest.approx(lost, rel=0.1, abs=0.1)


def test_lower_quality_loses_more_and_a_grey_image_keeps_its_level() -> None:
    photo = _photo()
    lost = [
        np.abs(_compress(photo[None], [quality])[0] - photo).mean()
        for quality in (95, 80, 50, 20, 5)
    ]
    assert lost == sorted(lost)
    grey = np.full((1, 3, 16, 24), 128, np.uint8)
    assert (_compress(grey, [30.0]) == 128).all()
