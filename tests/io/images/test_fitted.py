import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.errors import ConfigError, DataError
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.scaling import (
    Fit,
    FittedDecoder,
    ScaledDecoder,
    Scaling,
    place_centred,
    scale_size,
)
from lit_data.io.store.store import DecodedStore
from lit_data.types import Array


def _write(path: Path, height: int, width: int) -> tuple[ImageSource, Array]:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    cv2.imwrite(str(path), pixels)
    return ImageSource((str(path),)), pixels[None]


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


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch", "keep"])
@pytest.mark.parametrize("size", [(40, 24), (1, 7), (64, 64), (131, 65)])
def test_header_and_pixels_agree_whatever_the_fit(
    tmp_path: Path, size: tuple[int, int], fit: Fit
) -> None:
    source, pixels = _write(tmp_path / "a.png", *size)
    decoder = FittedDecoder((64, 48), fit)
    header, decoded = decoder.header(source), decoder(source)
    assert (
        decoded.array.shape == (1, 64, 48) == (header.channels, header.height_px, header.width_px)
    )
    assert decoded.array.dtype == np.uint8
    assert decoded.source_crc32 == ImageDecoder()(source).source_crc32
    np.testing.assert_array_equal(FittedDecoder(size, fit)(source).array, pixels)


def test_what_stands_over_is_cut_and_what_is_missing_is_padded_evenly() -> None:
    image = np.arange(1, 31, dtype=np.uint8).reshape(1, 5, 6)
    np.testing.assert_array_equal(place_centred(image, (2, 3), "zeros"), image[:, 1:3, 1:4])
    padded = place_centred(image, (6, 10), "zeros")
    np.testing.assert_array_equal(padded[:, :5, 2:8], image)
    assert padded.sum() == image.sum()
    np.testing.assert_array_equal(
        place_centred(image, (5, 8), "reflect")[..., [0, 7]], image[..., [1, 4]]
    )
    np.testing.assert_array_equal(
        place_centred(image, (5, 8), "border")[..., [0, 7]], image[..., [0, 5]]
    )
    np.testing.assert_array_equal(
        place_centred(image[:, :, :2], (5, 6), "reflect")[0, 0], [1, 2, 1, 2, 1, 2]
    )


def test_shrinking_takes_means_and_enlarging_keeps_the_range(tmp_path: Path) -> None:
    source, pixels = _write(tmp_path / "a.png", 40, 60)
    means = pixels.reshape(1, 20, 2, 30, 2).mean((2, 4))
    assert np.abs(FittedDecoder((20, 30))(source).array - means).max() <= 0.5
    source, pixels = _write(tmp_path / "b.png", 4, 6)
    enlarged = FittedDecoder((40, 60))(source).array
    assert pixels.min() <= enlarged.min()
    assert enlarged.max() <= pixels.max()
    assert np.abs(enlarged.mean() - pixels.mean()) < 12


def test_a_store_holds_small_images_without_padding_where_none_is_asked_for(tmp_path: Path) -> None:
    sources = [_write(tmp_path / f"{n}.png", 40 + n, 60)[0] for n in range(3)]
    stores = []
    for size_px in ((20, 20), (30, 30)):
        decoder = ScaledDecoder(Scaling(size_px=size_px, is_padded=False), ImageDecoder())
        stores.append(DecodedStore.build(sources, tmp_path / "stores", decoder=decoder))
    assert stores[0].path != stores[1].path
    assert [store[1].shape for store in stores] == [(1, 14, 20), (1, 20, 30)]


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


def test_a_sheet_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    source, _ = _write(tmp_path / "a.png", 40, 30)
    for call in (FittedDecoder((8, 8), tiles=4), FittedDecoder((8, 8), tiles=4).header):
        with pytest.raises(DataError, match=r"a\.png: a sheet of 4 x 4 views cannot be 40 x 30 px"):
            call(source)


def test_the_fingerprint_tells_all_options_apart() -> None:
    options: list[dict[str, Any]] = [{}, {"fit": "keep"}, {"padding": "zeros"}, {"tiles": 2}]
    decoders = [FittedDecoder((20, 30), **each) for each in options] + [FittedDecoder((30, 20))]
    assert len({decoder.fingerprint for decoder in decoders}) == 5
    assert json.loads(decoders[0].fingerprint)["of"] == json.loads(ImageDecoder().fingerprint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_px": (0, 5)}, "must be at least 1"),
        ({"tiles": 0}, "tiles=0 must be at least 1"),
        ({"fit": "crop"}, "fit='crop' is unknown: choose one of cover, contain, stretch, keep"),
        (
            {"padding": "mirror"},
            "padding='mirror' is unknown: choose one of reflect, border, zeros",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FittedDecoder(**({"size_px": (8, 8)} | options))
