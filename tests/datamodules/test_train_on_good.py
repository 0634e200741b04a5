"""``data.train_on=good``: which images train and which are scored, in each layout."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import InspectionDataModule
from lit_data.datasets.splits import UNDIVIDED
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from tests.helpers.reading import opened


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


def test_the_protocol_of_the_field_is_held_and_any_other_layout_refused(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set")
    data = _open(tmp_path, train_on="all", protocol="mvtec")
    train, val, test = (_names(data, split) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (12, 2, 6)
    assert all(name.startswith("train/good/") for name in (*train, *val))
    with pytest.raises(ConfigError, match=r"remove data\.splits and data\.folds"):
        _open(tmp_path, protocol="mvtec", folds=5)
    with pytest.raises(ConfigError, match="protocol='mvtech'"):
        _open(tmp_path, protocol="mvtech")
    folds = [_open(tmp_path, folds=4, fold=fold) for fold in range(4)]
    tested = [name for fold in folds for name in _names(fold, "test")]
    assert sorted(tested) == sorted(folds[0].source.names(folds[0].bank))
    assert not [name for fold in folds for name in _names(fold, "train") if "crack" in name]
    (tmp_path / "set/ground_truth").rename(tmp_path / "set/masks")
    with pytest.raises(ConfigError, match=r"needs the folders train/good .*found: layout folder"):
        _open(tmp_path, protocol="mvtec")


def test_identical_images_that_are_good_and_defective_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_anomaly_set(tmp_path / "set")
    good, defective = (tmp_path / "set/test" / name for name in ("good/t0.png", "crack/c0.png"))
    defective.write_bytes(good.read_bytes())
    _open(tmp_path)
    _open(tmp_path, splits=UNDIVIDED)
    assert [text for text in caplog.messages if "identical" in text] == [
        "1 image is identical to another image with a different class: test/crack/c0.png "
        "(defective) and test/good/t0.png (good); correct the labels"
    ]


def test_without_masks_folders_say_which_images_of_test_show_a_defect(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set", masks=False)
    data = _open(tmp_path)
    assert [len(_names(data, split)) for split in ("train", "val", "test")] == [12, 2, 6]
    for split in ("train", "val"):
        batch = next(iter(data.make_loader(split)))
        assert "unmarked" not in batch
        assert not batch["mask"].any()
    for batch in data.make_loader("test"):
        names = [data.source.names(data.bank)[number] for number in batch["image_index"].tolist()]
        assert batch["unmarked"].tolist() == ["crack" in name for name in names]
        for mask, is_unmarked in zip(batch["mask"], batch["unmarked"], strict=True):
            assert (mask == (255 if is_unmarked else 0)).all()


def test_defects_that_some_folder_has_no_masks_of_are_no_clean_pixels(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set")
    _write(tmp_path / "set/test/stain/s0.png")
    data = _open(tmp_path)
    names = data.source.names(data.bank)
    truths = {name: data.has_defect(number) for number, name in enumerate(names)}
    assert truths["test/stain/s0.png"] is truths["test/crack/c0.png"] is True
    assert truths["test/good/t0.png"] is False
    stain = names.index("test/stain/s0.png")
    assert data.read_mask(stain) is None
    assert data.unmarked is not None
    assert np.flatnonzero(data.unmarked).tolist() == [stain]
    assert data.describe()["test_positive_images"] == 4
    for batch in data.make_loader("test"):
        is_stain = batch["image_index"] == stain
        assert torch.equal(batch["unmarked"], is_stain)
        assert (batch["mask"][is_stain] == 255).all()
        assert (batch["mask"][~is_stain] <= 1).all()
    assert not _open(tmp_path, train_on="all", splits={"train": 1.0}).has_defect(stain)


def test_defects_without_masks_are_left_out_where_drawn_ones_are_scored(tmp_path: Path) -> None:
    _write_anomaly_set(tmp_path / "set", masks=False)
    data = _open(tmp_path, synthesis=DefectSpec())
    assert not [name for name in _names(data, "test") if "crack" in name]
    assert data.unmarked is None


def test_defects_that_cannot_train_validate(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _write_kinds(tmp_path / "set" / split, "normal", "anomaly")
    data = _open(tmp_path)
    train, val, test = (_names(data, split) for split in ("train", "val", "test"))
    assert not [name for name in train if "anomaly" in name]
    assert len([name for name in val if name.startswith("train/anomaly/")]) == 8
    assert len(test) == 16


def test_a_table_of_labels_stands_for_folders(tmp_path: Path) -> None:
    rows = ["image,label"]
    for number in range(20):
        _write(tmp_path / "set" / f"{number}.png")
        rows.append(f"{number}.png,{'ok' if number < 14 else 'scratch'}")
    table = tmp_path / "set" / "labels.csv"
    table.write_text("\n".join(rows))
    data = _open(tmp_path)
    assert len(_names(data, "train")) == 10
    assert [data.has_defect(data.source.names(data.bank).index(f"{n}.png")) for n in (3, 17)] == [
        False,
        True,
    ]
    table.write_text("\n".join(rows[:-1]))
    with pytest.raises(DataError, match=r"19\.png.*without a label"):
        _open(tmp_path)
    assert len(_open(tmp_path, "predict", splits="none").bank) == 20
    table.write_text("\n".join(rows).replace("ok", "0").replace("scratch", "1"))
    with pytest.raises(ConfigError, match=r"found: 0, 1"):
        _open(tmp_path).dataset("train")
    assert len(_names(_open(tmp_path, good=["0"]), "train")) == 10


def test_a_folder_of_good_images_trains_and_validates(tmp_path: Path) -> None:
    for number in range(20):
        _write(tmp_path / "set" / f"{number}.png")
    data = _open(tmp_path)
    assert [len(_names(data, split)) for split in ("train", "val", "test")] == [17, 3, 0]
    batch = next(iter(data.make_loader("train")))
    assert batch["mask"].shape == (8, 1, 32, 32)
    assert not batch["mask"].any()
    predicting = _open(tmp_path, "predict", splits="none")
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
    with pytest.raises(ConfigError, match=r"train has no image without a defect"):
        _open(tmp_path).dataset("train")
    with pytest.raises(ConfigError, match="train_on='some'"):
        _open(tmp_path, train_on="some")
    assert len(_open(tmp_path, "predict", splits="none").dataset("predict")) == 6 * 4


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
    assert {name.split("/")[0] for name in _names(data, "train")} == {good}
    for split in ("val", "test"):
        assert {name.split("/")[0] for name in _names(data, split)} == {good, bad}


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
