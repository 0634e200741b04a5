"""Many patches cut in one call are those cut one by one, wherever they lie."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lit_data.grid import cut_patch
from lit_data.io import DecodedStore, ImageDecoder, ImageSource
from lit_data.types import Array

SIZES = {
    "equal": [(30, 40)] * 4,
    "different": [(30, 40), (1, 50), (25, 4), (64, 21)],
    "tiny": [(1, 3)],
}


def make_store(folder: Path, images: Sequence[Array]) -> DecodedStore:
    sources = []
    for number, image in enumerate(images):
        np.save(folder / f"{number}.npy", image)
        sources.append(ImageSource((str(folder / f"{number}.npy"),)))
    return DecodedStore.build(sources, folder / "store", decoder=ImageDecoder(), progress=False)


@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint8", 1), ("uint8", 3), ("uint16", 2), ("int16", 1), ("float32", 3)]
)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("size_px", [(1, 1), (16, 20), (9, 60)])
def test_patches_are_those_of_the_images(
    tmp_path: Path, dtype: str, channels: int, sizes: str, size_px: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 1000, (channels, *size)).astype(dtype) for size in SIZES[sizes]]
    store = make_store(tmp_path, images)
    numbers = rng.integers(0, len(images), 60)
    tops, lefts = rng.integers(-50, 80, 60), rng.integers(-70, 70, 60)
    expected = np.stack(
        [
            cut_patch(images[number], top, left, size_px)
            for number, top, left in zip(
                numbers.tolist(), tops.tolist(), lefts.tolist(), strict=True
            )
        ]
    )
    rows = np.zeros((60, channels, *size_px), dtype)
    store.cut_into(numbers, tops, lefts, rows)
    np.testing.assert_array_equal(rows, expected)
    larger = np.zeros((60, channels, size_px[0] + 2, size_px[1] + 3), dtype)
    store.cut_into(numbers, tops, lefts, larger[..., : size_px[0], : size_px[1]])
    np.testing.assert_array_equal(larger[..., : size_px[0], : size_px[1]], expected)
    assert not larger[..., size_px[0] :, :].any()
    assert not larger[..., size_px[1] :].any()


def test_no_patches_are_asked_for(tmp_path: Path) -> None:
    store = make_store(tmp_path, [np.zeros((1, 5, 6), np.uint8)])
    nothing = np.zeros(0, np.int64)
    store.cut_into(nothing, nothing, nothing, np.zeros((0, 1, 2, 2), np.uint8))
