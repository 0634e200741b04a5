"""``data.train_on=good``: which images train and which are scored, in each layout."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.datamodules import InspectionDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from tests.reading import opened


def _write(path: Path, *, marked: bool | None = None, seed: int = 0) -> None:
    """An image of noise; a mask where `marked` says whether it marks a square."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng([seed, *path.name.encode()]).integers(
        0, 256, (40, 48), dtype=np.uint8
    )
    if marked is not None:
        pixels = np.zeros((40, 48), np.uint8)
        pixels[4:12, 4:12] = 255 * marked
    cv2.imwrite(str(path), pixels)


def _open(tmp_path: Path, stage: str = "fit", **options: Any) -> InspectionDataModule:
    loader = LoaderOptions(batch_size=8, num_workers=0, worker_kind="inline")
    settings = {"cache_dir": str(tmp_path / "cache"), "patch_px": 32, "train_on": "good"}
    data = InspectionDataModule(str(tmp_path / "set"), loader=loader, **(settings | options))
    return opened(data, stage)


def _names(data: InspectionDataModule, split: str) -> list[str]:
    names = data.source.names(data.bank)
    return [names[number] for number in data.split_images[split].tolist()]


def _write_anomaly_set(folder: Path, *, masks: bool = True) -> None:
    for number in range(14):
        _write(folder / "train" / "good" / f"g{number}.png")
    for number in range(3):
        _write(folder / "test" / "good" / f"t{number}.png")
        _write(folder / "test" / "crack" / f"c{number}.png")
        if masks:
            _write(folder / "ground_truth" / "crack" / f"c{number}_mask.png", marked=True)


def test_the_anomaly_layout_keeps_its_protocol(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set")
    data = _open(tmp_path)
    train, val, test = (_names(data, split) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (12, 2, 6)
    assert all(name.startswith("train/good/") for name in (*train, *val))
    assert all(name.startswith("test/") for name in test)


def test_the_protocol_of_the_field_is_held_and_any_other_layout_refused(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set")
    data = _open(tmp_path, train_on="all", protocol="mvtec")
    train, val, test = (_names(data, split) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (12, 2, 6)
    assert all(name.startswith("train/good/") for name in (*train, *val))
    with pytest.raises(ConfigError, match=r"leave data\.splits and data\.folds out"):
        _open(tmp_path, protocol="mvtec", folds=5)
    with pytest.raises(ConfigError, match="protocol='mvtech'"):
        _open(tmp_path, protocol="mvtech")
    folds = [_open(tmp_path, folds=4, fold=fold) for fold in range(4)]
    tested = [name for fold in folds for name in _names(fold, "test")]
    assert sorted(tested) == sorted(folds[0].source.names(folds[0].bank))
    assert not [name for fold in folds for name in _names(fold, "train") if "crack" in name]
    (tmp_path / "set/ground_truth").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"needs the layout anomaly, .*\(found: none\)"):
        _open(tmp_path, protocol="mvtec")


def test_without_masks_defective_images_are_in_no_split(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set", masks=False)
    data = _open(tmp_path)
    names = [name for split in ("train", "val", "test") for name in _names(data, split)]
    assert len(names) == 17
    assert not any("crack" in name for name in names)


def test_a_folder_of_good_images_trains_and_validates(tmp_path: Path) -> None:
    for number in range(20):
        _write(tmp_path / "set" / f"{number}.png")
    data = _open(tmp_path)
    assert [len(_names(data, split)) for split in ("train", "val", "test")] == [17, 3, 0]
    batch = next(iter(data.make_loader("train")))
    assert batch["mask"].shape == (8, 1, 32, 32)
    assert not batch["mask"].any()
    predicting = _open(tmp_path, "predict", splits={"train": 1.0})
    assert predicting.read_mask(0) is None
    assert len(predicting.bank) == 20


def test_with_masks_defective_images_are_shared_out_over_val_and_test(tmp_path: Path) -> None:
    for number in range(40):
        _write(tmp_path / "set" / f"{number:02}.png")
        _write(tmp_path / "set" / f"{number:02}_mask.png", marked=number < 10)
    data = _open(tmp_path)
    bad = {f"{number:02}.png" for number in range(10)}
    assert not bad & set(_names(data, "train"))
    assert len(_names(data, "train")) == 21
    assert [len(bad & set(_names(data, split))) for split in ("val", "test")] == [5, 5]
    shares = _open(tmp_path, splits={"train": 0.5, "test": 0.5})
    assert len(_names(shares, "train")) == 15
    assert bad <= set(_names(shares, "test"))
    assert not _names(shares, "val")
    listed = {"train": ["00.png", "20.png", "21.png"], "val": ["22.png"], "test": ["01.png"]}
    assert _names(_open(tmp_path, splits=listed), "train") == ["20.png", "21.png"]


def test_a_set_without_good_images_is_refused(tmp_path: Path) -> None:
    for number in range(6):
        _write(tmp_path / "set" / f"{number}.png")
        _write(tmp_path / "set" / f"{number}_mask.png", marked=True)
    with pytest.raises(ConfigError, match=r"no image of train is without a defect"):
        _open(tmp_path).dataset("train")
    with pytest.raises(ConfigError, match="train_on='some'"):
        _open(tmp_path, train_on="some")
    assert len(_open(tmp_path, "predict", splits={"train": 1.0}).dataset("predict")) == 6 * 4


def _write_kinds(folder: Path, *kinds: str, count: int = 8) -> None:
    for place, kind in enumerate(kinds):
        for number in range(count):
            _write(folder / kind / f"{number}.png", seed=place)


@pytest.mark.parametrize(
    ("good", "bad"), [("ok", "not_ok"), ("Gut", "Fehler"), ("intact", "damaged"), ("iO", "niO")]
)
def test_no_defect_trains_whatever_its_folder_is_called(
    good: str, bad: str, tmp_path: Path
) -> None:
    _write_kinds(tmp_path / "set", good, bad)
    data = _open(tmp_path)
    names = [name for split in ("train", "val", "test") for name in _names(data, split)]
    assert {name.split("/")[0] for name in names} == {good}


def test_folders_that_do_not_tell_are_asked_about_unless_they_are_only_predicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_kinds(tmp_path / "set", "A", "B")
    data = _open(tmp_path)
    asks = r"no folder is known to hold good parts \(found: A, B\).*'data\.good=\[\"A\"\]'"
    with pytest.raises(ConfigError, match=asks):
        data.dataset("train")
    assert data.describe()["train_images"] == 0
    assert "no folder is known to hold good parts" in caplog.text
    assert len(_open(tmp_path, "predict").dataset("predict")) > 0
    chosen = _open(tmp_path, good=["B"])
    assert {name[0] for name in _names(chosen, "train")} == {"B"}
    with pytest.raises(ConfigError, match=r"must be a list: data\.good=\[B\]"):
        _open(tmp_path, good="B")
