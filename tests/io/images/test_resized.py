import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.errors import ConfigError, DataError
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.resize import ResizedDecoder, fit_size
from lit_data.io.store.store import DecodedStore
from lit_data.types import Array


def _write(path: Path, height: int, width: int) -> tuple[ImageSource, Array]:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    cv2.imwrite(str(path), pixels[..., ::-1])
    return ImageSource((str(path),)), np.moveaxis(pixels, -1, 0)


@pytest.mark.parametrize(
    ("size", "fit", "expected"),
    [
        ((240, 320), (320, 320), (240, 320)),
        ((480, 640), (320, 320), (240, 320)),
        ((100, 50), (320, 320), (320, 160)),
        ((333, 500), (320, 320), (213, 320)),
        ((1, 1), (64, 32), (32, 32)),
        ((1, 4000), (320, 320), (1, 320)),
        ((4000, 3), (320, 320), (320, 1)),
        ((479, 641), (120, 160), (120, 160)),
    ],
)
def test_the_size_fills_one_direction_and_exceeds_none(
    size: tuple[int, int], fit: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert fit_size(size, fit) == expected


@pytest.mark.parametrize("size", [(40, 60), (31, 17), (8, 8), (1, 30)])
def test_header_and_pixels_agree(tmp_path: Path, size: tuple[int, int]) -> None:
    source, _ = _write(tmp_path / "a.png", *size)
    decoder = ResizedDecoder((20, 30))
    header, decoded = decoder.header(source), decoder(source)
    assert decoded.array.shape == (header.channels, header.height_px, header.width_px)
    assert decoded.array.dtype == header.dtype == np.uint8
    assert decoded.source_crc32 == ImageDecoder()(source).source_crc32


def test_shrinking_takes_means_and_an_image_that_fits_is_left_as_it_is(tmp_path: Path) -> None:
    source, pixels = _write(tmp_path / "a.png", 40, 60)
    means = pixels.reshape(3, 20, 2, 30, 2).mean((2, 4))
    assert np.abs(ResizedDecoder((20, 30))(source).array - means).max() <= 0.5
    np.testing.assert_array_equal(ResizedDecoder((40, 60))(source).array, pixels)
    np.testing.assert_array_equal(ResizedDecoder((40, 99))(source).array, pixels)


def test_enlarging_keeps_values_in_the_range_of_the_image(tmp_path: Path) -> None:
    source, pixels = _write(tmp_path / "a.png", 4, 6)
    enlarged = ResizedDecoder((40, 90))(source).array
    assert enlarged.shape == (3, 40, 60)
    assert enlarged.min() >= pixels.min()
    assert enlarged.max() <= pixels.max()
    assert np.abs(enlarged.mean() - pixels.mean()) < 12


def test_the_fingerprint_tells_sizes_and_inner_options_apart() -> None:
    decoders = [
        ResizedDecoder((20, 30)),
        ResizedDecoder((30, 20)),
        ResizedDecoder((20, 30), ImageDecoder(ReadOptions(gray_to_rgb=True))),
    ]
    assert len({decoder.fingerprint for decoder in decoders}) == 3
    assert json.loads(decoders[0].fingerprint)["of"] == json.loads(ImageDecoder().fingerprint)


def test_a_store_holds_the_small_images_and_another_size_makes_another_store(
    tmp_path: Path,
) -> None:
    sources = [_write(tmp_path / f"{n}.png", 40 + n, 60)[0] for n in range(3)]
    small = DecodedStore.build(sources, tmp_path / "stores", decoder=ResizedDecoder((20, 20)))
    large = DecodedStore.build(sources, tmp_path / "stores", decoder=ResizedDecoder((30, 30)))
    assert small.path != large.path
    assert small[1].shape == (3, 14, 20)
    assert large[1].shape == (3, 20, 30)


def test_bad_files_and_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        ResizedDecoder((20, 30))(ImageSource((str(tmp_path / "bad.png"),)))
    with pytest.raises(ConfigError, match=r"fit_px=\[0, 5\] must be at least 1"):
        ResizedDecoder((0, 5))
