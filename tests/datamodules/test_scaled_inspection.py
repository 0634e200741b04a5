"""`InspectionDataModule` with `size_px` or `scale`: samples, masks, stores, and what is refused."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import InspectionDataModule
from lit_data.datasets.balanced_patches import SamplingOptions
from lit_data.loading import LoaderOptions
from tests.helpers.reading import opened, read_all

SIZES = ((90, 60), (40, 120), (1, 50), (64, 64))


def _write_set(folder: Path, count: int = 12) -> Path:
    """Grey images of mixed sizes, half of them with a defect of one bright pixel row in the middle."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        size = SIZES[number % 4]
        image, mask = rng.integers(0, 100, size, dtype=np.uint8), np.zeros(size, np.uint8)
        if number % 2:
            mask[size[0] // 2, size[1] // 4 : size[1] // 2] = 255
            image[mask > 0] = 255
            cv2.imwrite(str(folder / f"{number:02}_mask.png"), mask)
        cv2.imwrite(str(folder / f"{number:02}.png"), image)
    return folder


def _data(tmp_path: Path, **options: Any) -> InspectionDataModule:
    loader = LoaderOptions(batch_size=4, num_workers=0, worker_kind="inline")
    options |= {"cache_dir": str(tmp_path / "cache"), "loader": loader}
    return opened(InspectionDataModule(str(tmp_path / "set"), **options))


@pytest.mark.parametrize("cache", ["store", "none"])
def test_a_sample_is_a_whole_image_with_its_mask(tmp_path: Path, cache: str) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path, size_px=(32, 48), cache=cache, splits={"train": 1.0})
    found = read_all(data, "train")
    assert found["image"].shape == (12, 3, 32, 48)
    assert found["mask"].shape == (12, 1, 32, 48)
    assert sorted(found["index"].tolist()) == list(range(12))
    assert found["position"].unique().tolist() == [0]
    order = found["image_index"].argsort()
    marked = found["mask"][order].flatten(1).sum(1)
    assert (marked[0::2] == 0).all()
    assert (marked[1::2] > 0).all()
    assert data.has_defect(1) is True
    assert data.has_defect(0) is False
    assert_array_equal(np.flatnonzero(data.read_mask(1).any(0)), np.arange(30, 60))  # type: ignore[union-attr]
    assert data.read_mask(2).shape == (1, 50)  # type: ignore[union-attr]


def test_a_scaled_set_is_cut_in_fewer_patches(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    plain, half = (
        _data(tmp_path, patch_px=16, scale=scale, splits={"train": 1.0}) for scale in (None, 0.5)
    )
    assert [plain.bank[0].shape, half.bank[0].shape] == [(3, 90, 60), (3, 45, 30)]
    assert len(half.dataset("train")) < len(plain.dataset("train")) / 2
    image = cv2.resize(plain.bank[0][0], (30, 45), interpolation=cv2.INTER_AREA)
    assert_array_equal(half.bank[0][0], image)
    again = _data(tmp_path, patch_px=16, scale=0.5, splits={"train": 1.0})
    assert again.bank.key == half.bank.key != plain.bank.key  # type: ignore[attr-defined]


def test_half_of_the_whole_images_that_train_show_a_defect(tmp_path: Path) -> None:
    _write_set(tmp_path / "set", 40)
    sampling = SamplingOptions(positives=0.9, random_places=True)
    data = _data(tmp_path, size_px=32, sampling=sampling, splits={"train": 1.0})
    assert read_all(data, "train")["mask"].flatten(1).any(1).float().mean() > 0.75


@pytest.mark.parametrize("options", [{"size_px": 32}, {"scale": 0.5, "patch_px": 16}])
def test_a_mask_of_another_size_is_refused_though_both_are_scaled(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = _write_set(tmp_path / "set")
    cv2.imwrite(str(folder / "01_mask.png"), np.zeros((120, 40), np.uint8))
    halved = np.zeros((65, 64), np.uint8)  # as large as its image once it is halved
    cv2.imwrite(str(folder / "03_mask.png"), halved)
    turned = r"01_mask\.png: 120 x 40, .*40 x 120 \(turned(.|\n)*03_mask\.png: 65 x 64"
    with pytest.raises(DataError, match=turned + r"(.|\n)*2 masks differ in size"):
        _data(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_px": 32, "scale": 0.5}, "exclude each other"),
        ({"size_px": 32, "patch_px": 64}, r"size_px=\[32, 32\] .* and data.patch_px=64 is"),
        ({"size_px": 32, "stride_px": 32}, "and data.stride_px=32 is for patches"),
        ({"size_px": [32]}, r"size_px=\[32\] is not usable"),
        ({"scale": 0}, "scale=0 is not usable"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InspectionDataModule("set", **options)


def test_shards_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size_px and data\.scale need the files of the images"):
        InspectionDataModule("s3://bucket/set.shards", scale=0.5)
    _write_set(tmp_path / "set")
    with pytest.raises(ConfigError, match="remove them to write or read a set of shards"):
        _data(tmp_path, size_px=32).source.publish(str(tmp_path / "a.shards"), 2**20)
