"""Large images in bands: they read as the same images whole, whatever part is asked for."""

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.core.grid import cut_patch
from lit_data.core.types import Array
from lit_data.datamodules import InspectionDataModule, StripeDataModule
from lit_data.images import DecodedStore, StoreOptions
from lit_data.images.store.pixels import BandedImage
from lit_data.images.writing import write_png
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.wings.watermarks import WatermarkDataModule, WatermarkSpec

MakeStore = Callable[..., DecodedStore]
SHAPES = ((3, 130, 1100), (3, 64, 1024), (3, 63, 2000), (3, 200, 40), (3, 257, 1024))
BANDED = [True, True, True, False, True]


def draw(dtype: str = "uint8", channels: int = 3) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, (channels, *shape[1:])).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize(("band_px", "dtype"), [(32, "uint8"), (64, "uint16"), (128, "float32")])
def test_bands_hold_the_images(make_store: MakeStore, dtype: str, band_px: int) -> None:
    images = draw(dtype)
    store = make_store(images, band_px=band_px)
    for number, image in enumerate(images):
        assert_array_equal(store[number], image)
        assert store[number].dtype == dtype
        assert not store[number].flags.writeable
    assert store.verify() == []
    copy = pickle.loads(pickle.dumps(store))
    assert_array_equal(copy[-1], images[-1])


def test_small_images_stay_whole(make_store: MakeStore) -> None:
    store = make_store(draw())
    opened = [store.open_image(number) for number in range(len(store))]
    assert [isinstance(image, BandedImage) for image in opened] == BANDED
    assert store.nbytes == sum(image.nbytes for image in draw())


@pytest.mark.parametrize(
    ("count", "step_px", "dtype"),
    [(40, 1, "uint8"), (200, 1, "uint8"), (200, 64, "uint16")],
    ids=["one by one", "gathered", "whole bands"],
)
def test_patches_of_bands_are_those_of_the_image(
    make_store: MakeStore, count: int, step_px: int, dtype: str
) -> None:
    images = draw(dtype)
    store, rng = make_store(images), np.random.default_rng(1)
    for size_px in ((1, 1), (64, 64), (100, 70), (128, 300), (300, 30), (20, 128)):
        numbers, tops, lefts = rng.integers((0, -200, -200), (5, 250, 1200), (count, 3)).T
        lefts = lefts // step_px * step_px
        rows = np.zeros((count, 3, *size_px), dtype)
        store.cut_into(numbers, tops, lefts, rows)
        places = zip(numbers.tolist(), tops.tolist(), lefts.tolist(), strict=True)
        patches = [cut_patch(images[number], top, left, size_px) for number, top, left in places]
        assert_array_equal(rows, np.stack(patches))


def test_the_file_is_let_go_with_the_store(make_store: MakeStore) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list the files that are mapped")
    store = make_store(draw())
    store[0]
    folder = str(store.path)
    assert folder in maps.read_text()
    gc.disable()
    try:
        del store
        assert folder not in maps.read_text()
    finally:
        gc.enable()


def test_an_image_is_read_by_slices(make_store: MakeStore) -> None:
    images = draw()
    opened = make_store(images).open_image(0)
    for part in (np.s_[:, 3:70, :], np.s_[:1, :, 900:], np.s_[:, -5:, 64:128], np.s_[1:, 10:10, :]):
        assert_array_equal(opened[part], images[0][part])
    assert (opened.shape, opened.dtype) == (images[0].shape, np.uint8)


def test_another_side_makes_another_store_unless_all_images_are_narrow(
    make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = [np.zeros((3, 200, 1000), np.uint8)]
    assert len({make_store(narrow, band_px=band_px).path for band_px in (64, None, 32)}) == 1
    assert "anew" not in caplog.text
    (tmp_path / "0.npy").unlink()
    images = draw()
    whole, banded = make_store(images, band_px=None), make_store(images)
    assert whole.key != banded.key
    assert (
        "rebuilding the decoded store, which has changed: store.band_px None -> 64" in caplog.text
    )
    assert make_store(images, band_px=None).path == whole.path


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (StripeDataModule, {"layout": "channels", "synthesis": DefectSpec()}),
        (InspectionDataModule, {"synthesis": DefectSpec()}),
        (WatermarkDataModule, {"synthesis": WatermarkSpec()}),
    ],
)
def test_bands_change_nothing(
    make: Callable[..., Any], options: dict[str, object], tmp_path: Path
) -> None:
    rng, taken, loader = np.random.default_rng(0), [], LoaderOptions(batch_size=8, num_workers=0)
    root = tmp_path / "images"
    for number in range(3):
        write_png(root / f"{number}.png", rng.integers(0, 256, (160, 1100, 3), np.uint8))
    for store in (StoreOptions(), StoreOptions(band_px=None)):
        given = {"root": str(root), "cache_dir": str(tmp_path), "store": store, "loader": loader}
        data = make(patch_px=96, **given, **options)
        data.prepare_data()
        data.setup("fit")
        is_banded = store.band_px is not None
        assert isinstance(data.bank.open_image(0), BandedImage) is is_banded
        taken.append([data.transform(batch, "train") for batch in data.train_dataloader()])
    for banded, whole in zip(*taken, strict=True):
        torch.testing.assert_close(banded, whole, rtol=0, atol=0)
