from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.augment import Geometry
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import HasPoses
from lit_data.loading import LoaderOptions
from lit_data.wings.gan import GANDataModule
from tests.helpers.reading import assert_equal, first, opened, plan, read_all

SAMPLES = {"count": 6, "size_px": [16, 16], "tiles": 2}

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


def _data(cache_dir: str | Path, *, setup: bool = True, **options: Any) -> GANDataModule:
    loader = LoaderOptions(
        seed=3, **({"batch_size": 4, "worker_kind": "inline"} | options.pop("loader", {}))
    )
    given = {"samples": SAMPLES, "image_px": 16} | options
    data = GANDataModule(cache_dir=str(cache_dir), loader=loader, **given)
    return opened(data) if setup else data


def _write(
    path: Path, shape: tuple[int, ...] = (16, 16, 3), *, seed: int = 0, dtype: Any = np.uint8
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    most = np.iinfo(dtype).max
    cv2.imwrite(
        str(path), np.random.default_rng(seed).integers(0, most, shape, dtype=dtype, endpoint=True)
    )


def test_a_batch_of_drawn_objects_is_what_the_table_says(cache: str) -> None:
    data = _data(cache, labels="folders")
    batch = first(data, "predict", 24)
    assert batch.keys() == set(data.batch_keys)
    assert (batch["image"].shape, batch["image"].dtype) == ((24, 3, 16, 16), torch.float32)
    assert 0 <= batch["image"].min() < batch["image"].max() <= 1
    assert (batch["pose"].shape, batch["pose"].dtype) == ((24, 2), torch.float32)
    whole = [key for key in data.batch_keys if key not in ("image", "pose")]
    assert {batch[key].dtype for key in whole} == {torch.int64}
    assert isinstance(data, HasPoses)
    assert data.poses is not None
    assert torch.equal(batch["pose"], data.poses[batch["view"]])
    assert torch.rad2deg(data.poses).round().tolist() == [[0, 0], [180, 0], [0, 60], [180, 60]]
    assert (data.channels, data.num_labels, data.image_px) == (3, 5, (16, 16))
    assert [data.table.classes[label] for label in batch["label"][::4]] == [
        Path(data.bank.name(number)).parent.name for number in range(6)
    ]
    assert data.describe() | {"pixel_bytes": 0} == {
        "images": 6, "skipped": 0, "pixel_bytes": 0, "objects": 6, "views": 4, "labels": 5, "train_samples": 16,
        "val_samples": 4, "test_samples": 4,
    }  # fmt: skip
    assert data.verify_sources() == []
    counts = {"images": 6, "objects": 6, "train_objects": 4, "val_objects": 1, "test_objects": 1}
    assert data.check_sources() == counts


def test_each_split_has_whole_objects(cache: str) -> None:
    data = _data(cache, splits={"train": 0.5, "val": 0.5})
    shown = [set(first(data, stage, 12)["object"].tolist()) for stage in ("train", "val")]
    assert [len(each) for each in shown] == [3, 3]
    assert not shown[0] & shown[1]
    with pytest.raises(ConfigError, match="the test split holds no images"):
        data.test_dataloader()
    same = _data(cache, splits="same")
    assert {len(same.dataset(stage)) for stage in ("train", "val", "test")} == {24}  # type: ignore[arg-type]


def test_samples_do_not_depend_on_workers_or_batches(cache: str) -> None:
    augment = Geometry(flip_left_right=True)
    data = _data(cache, augment=augment)
    expected = read_all(data)
    for loader in (
        {"batch_size": 5},
        {"worker_kind": "thread", "num_workers": 2, "micro_batch_size": 1},
    ):
        assert_equal(read_all(_data(cache, augment=augment, loader=loader)), expected)


def test_augmentation_changes_training_images_alone(cache: str) -> None:
    data, plain = _data(cache, augment=Geometry(flip_left_right=True)), _data(cache)
    batch, before = first(data, count=16), first(plain, count=16)
    flipped = (batch["image"] == before["image"].flip(-1)).flatten(1).all(1)
    kept = (batch["image"] == before["image"]).flatten(1).all(1)
    assert flipped.any()
    assert kept.any()
    assert (flipped | kept).all()
    assert torch.equal(batch["pose"], before["pose"])
    drawn = data.inspect("train").draw(plan(data, 16))
    assert drawn is not None
    assert torch.equal(drawn["image"], before["image"])
    assert data.inspect("train").whole_values() is None
    whole = plain.inspect("train").whole_values()
    assert whole is not None
    assert (whole[0], whole[1].bounds) == ("uint8", (0, 255))
    assert torch.equal(first(data, "val")["image"], first(plain, "val")["image"])


def test_a_folder_of_views_is_an_object(cache: str, tmp_path: Path) -> None:
    for number in range(8):
        _write(tmp_path / "AB"[number // 4] / f"{number % 4 * 5}.png", (20, 16), seed=number)
    splits = {"train": ["A"], "val": ["B"]}
    options = {"root": str(tmp_path), "splits": splits, "labels": "views"}
    data = _data(cache, views="folders", azimuth_deg=(-90, 90), elevation_deg=(10, 20), **options)
    batch = first(data, "val")
    assert batch["image"].shape == (4, 1, 16, 16)
    assert batch["label"].tolist() == batch["view"].tolist() == [0, 1, 2, 3]
    shown = [Path(data.bank.name(int(image))).stem for image in batch["image_index"]]
    assert shown == ["0", "5", "10", "15"]
    assert torch.rad2deg(batch["pose"]).round().tolist() == [[-90, 10], [0, 10], [-90, 20], [0, 20]]
    assert torch.equal(data.inspect("val").views_of(1), batch["image"])
    assert _data(cache, **(options | {"labels": "none", "splits": "auto"})).poses is None, (
        "nothing says there are views"
    )
    (tmp_path / "B" / "15.png").unlink()
    with pytest.raises(
        DataError,
        match=r"B: 3 views; the near(.|\n)*1 of 2 objects does not have 4 views like the others",
    ):
        _data(cache, views="folders", **options)


def test_a_sheet_has_tiles_of_the_size_of_a_sample_or_as_many_as_it_is_told(
    cache: str, tmp_path: Path
) -> None:
    for number in range(3):
        _write(tmp_path / f"{number}.png", (48, 48, 3), seed=number)
    whole = first(_data(cache, root=str(tmp_path), image_px=48), "predict", 1)["image"]
    measured = _data(cache, root=str(tmp_path), views="sheet")
    assert torch.equal(first(measured, "predict", 5)["image"][4], whole[0, :, 16:32, 16:32])
    halves = _data(cache, root=str(tmp_path), views="sheet", tiles=2, image_px=24)
    assert torch.equal(first(halves, "predict", 2)["image"][1], whole[0, :, :24, 24:])
    with pytest.raises(
        DataError,
        match=r"(?s)0\.png: 2 x 1.5 views of 24 x 32 px.*equal numbers of rows and columns",
    ):
        _data(cache, root=str(tmp_path), views="sheet", image_px=(24, 32))
    _write(tmp_path / "3.png", (32, 32, 3))
    with pytest.raises(
        DataError,
        match=r"3\.png: 4 views(.|\n)*1 of 4 objects does not have 9 views like the others",
    ):
        _data(cache, root=str(tmp_path), views="sheet")


@pytest.mark.parametrize(("value_range", "scale"), [(None, 65535), ((0, 1000), 1000)])
def test_values_become_shares_of_their_range(
    cache: str, tmp_path: Path, value_range: Any, scale: int
) -> None:
    for number in range(3):
        _write(tmp_path / f"{number}.png", (16, 16), seed=number, dtype=np.uint16)
    data = _data(cache, root=str(tmp_path), value_range=value_range)
    expected = np.minimum(np.stack([data.bank[number] for number in range(3)]) / scale, 1)
    np.testing.assert_allclose(first(data, "predict", 3)["image"], expected, rtol=1e-6)


def test_patches_of_large_images_are_new_in_each_epoch_of_training(
    cache: str, tmp_path: Path
) -> None:
    for number in range(3):
        _write(tmp_path / f"{number}.png", (40, 33), seed=number)
    data = _data(cache, root=str(tmp_path), fit="patches", samples_per_image=5)
    assert [len(data.dataset(stage)) for stage in ("train", "val", "predict")] == [5, 9, 27]  # type: ignore[arg-type]
    assert not torch.equal(first(data)["image"], first(data, epoch=1)["image"])
    assert torch.equal(first(data, "val")["image"], first(data, "val", epoch=1)["image"])
    with pytest.raises(
        ConfigError, match=r"holds views, and fit=patches cuts them: set data\.views=none"
    ):
        _data(cache, fit="patches")


def test_bad_files_are_listed_or_left_out_with_their_object(
    cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(12):
        _write(tmp_path / "ABC"[number // 4] / f"{number % 4}.png", seed=number)
    bad = tmp_path / "B" / "2.png"
    bad.write_bytes(bad.read_bytes()[:300])
    options = {"root": str(tmp_path), "views": "folders", "splits": {"train": 1.0}}
    with pytest.raises(DataError, match=r"B/2\.png"):
        _data(cache, **options)
    data = _data(cache, on_bad="skip", **options)
    assert data.table.objects == ("A", "C")
    assert (data.describe()["skipped"], data.describe()["train_samples"]) == (1, 8)
    data.check_sources()
    assert "1 of 12 images is bad and skipped" in caplog.text
    bad.write_bytes((tmp_path / "A" / "2.png").read_bytes())
    lru = _data(cache, cache="lru", **options)
    assert torch.equal(first(lru, "predict", 4)["image"], first(data, "predict", 4)["image"])
    with pytest.raises(ConfigError, match="only a store can be verified"):
        lru.verify_sources()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": "films"}, "views='films' is unknown: choose one of auto, none, folders, sheet"),
        (
            {"labels": "names"},
            "labels='names' is unknown: choose one of none, folders, views, objects",
        ),
        (
            {"fit": "crop"},
            "fit='crop' is unknown: choose one of cover, contain, stretch, keep, patches",
        ),
        ({"cache": "device"}, "cache='device' is unknown: choose one of store, lru, none"),
        ({"tiles": 2}, "tiles=2 divides sheets: set data.views=sheet"),
        (
            {"views": "sheet", "fit": "patches"},
            "views=sheet with fit=patches: patches have no pose",
        ),
        ({"augment": Geometry(crop_px=8)}, r"the augmentation of train crops to \(8, 8\)"),
        ({"batch_format": ["image", "mask"]}, "batch_format names unknown keys"),
        ({"image_px": 0}, "image_px=0 is not usable"),
    ],
)
def test_options_out_of_range_are_refused(
    cache: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _data(cache, setup=False, **options)
