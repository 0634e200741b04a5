"""Whole images with labels: of folders, of tables, and of masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import LabelledImageDataModule
from lit_data.loading import LoaderOptions
from tests.helpers.reading import opened, read_all


def _write(folder: Path, kinds: dict[str, int], size: tuple[int, int] = (40, 60)) -> Path:
    rng = np.random.default_rng(0)
    for place, (kind, count) in enumerate(kinds.items()):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            image = rng.integers(20 + 80 * place, 40 + 80 * place, (*size, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / kind / f"{kind}{number}.png"), image)
    return folder


def _data(tmp_path: Path, **options: Any) -> LabelledImageDataModule:
    loader = LoaderOptions(batch_size=8, num_workers=0, worker_kind="inline")
    settings = {"cache_dir": str(tmp_path / "cache"), "size_px": 32, "loader": loader, **options}
    return opened(LabelledImageDataModule(str(tmp_path / "set"), **settings))


def test_folders_are_labels_and_images_are_whole(tmp_path: Path) -> None:
    _write(tmp_path / "set", {"dent": 10, "good": 20})
    data = _data(tmp_path, classes=["good", "dent"])
    found = read_all(data, "train")
    assert found["image"].shape == (21, 3, 32, 32)
    assert "mask" not in found
    bright = found["image"][:, 0, 16, 3] > 0.2  # good is the second kind
    assert torch.equal(found["label"], torch.where(bright, 0, 1))
    assert data.count_classes("train").sum(0).tolist() == [14, 7]
    assert "label" not in read_all(data, "predict")
    assert data.describe()["train_images"] == 21


@pytest.mark.parametrize("separator", [";", "\t"])
def test_tables_of_spreadsheets_label_images(separator: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "set", {"all": 4})
    rows = [f"all{number}.png{separator}{'ab'[number % 2]}" for number in range(4)]
    (folder / "labels.csv").write_text("\n".join([f"image{separator}label", *rows]))
    assert _data(tmp_path, splits={"train": 1.0}).labels.tolist() == [0, 1, 0, 1]


def test_blanks_and_missing_cells_of_a_table_are_no_classes(tmp_path: Path) -> None:
    folder = _write(tmp_path / "set", {"all": 5})
    labels = (",a", ",b ", ", a", ",b", "")
    rows = [f"all{number}.png{label}" for number, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["image,label", *rows]))
    data = _data(tmp_path, splits={"train": 1.0})
    assert data.classes == ("a", "b")
    assert data.labels.tolist() == [0, 1, 0, 1, -1]


def test_a_table_without_names_of_columns_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path / "set", {"all": 4})
    (folder / "labels.csv").write_text("all0.png 1.0 mono\nall1.png 0.0 poly\n")
    with pytest.raises(
        ConfigError, match=r"labels\.csv with the columns \['all0\.png 1\.0 mono'\]"
    ):
        _data(tmp_path).dataset("train")


def test_a_table_says_labels_and_its_faults_are_listed_together(tmp_path: Path) -> None:
    _write(tmp_path / "set", {"a": 6})
    rows = [f"a{number}.png,{'ok' if number % 2 else 'bad'}" for number in range(6)]
    table = tmp_path / "set" / "labels.csv"
    table.write_text("\n".join(["Image,Label", *rows]))
    shares = {"train": 0.5, "val": 0.5}
    data = _data(tmp_path, classes=["ok", "bad"], splits=shares)
    assert data.count_classes()[:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert len(read_all(data, "train")["label"]) == 3
    table.write_text("\n".join(["Image,Label", *rows[:4], "a0.png,ok", "x.png,ok"]))
    with pytest.raises(
        DataError, match=r"(.*\n){3}.*a5\.png: an image without.*\n4 labels are bad"
    ):
        _data(tmp_path, classes=["ok", "bad"], splits=shares)


def test_a_table_behind_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "set", {"a": 6, "b": 6})
    (tmp_path / "other.csv").write_text("image,label\na0.png,token\n")
    (tmp_path / "set" / "labels.csv").symlink_to(tmp_path / "other.csv")
    leads_out = r"labels\.csv: leads out of the data folder, to .*/other\.csv"
    with pytest.raises(DataError, match=leads_out) as caught:
        _data(tmp_path)
    assert "token" not in str(caught.value)


def test_masks_say_what_is_good_where_folders_say_nothing(tmp_path: Path) -> None:
    folder = _write(tmp_path / "set", {"images": 8})
    (folder / "masks").mkdir()
    for number in range(0, 8, 2):
        cv2.imwrite(str(folder / "masks" / f"images{number}.png"), np.full((40, 60), 255, np.uint8))
    data = _data(tmp_path, classes=["good", "defect"])
    assert data.count_classes().sum(0).tolist() == [4, 4]


def test_labels_that_contradict_each_other_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write(tmp_path / "set", {"dent": 4, "good": 4})
    content = (folder / "good" / "good0.png").read_bytes()
    (folder / "dent" / "same.png").write_bytes(content)
    (folder / "good" / "same.png").write_bytes(content)
    _data(tmp_path)
    text = (
        "2 images are identical to another image with a different class: dent/same.png (dent) and"
    )
    assert text in caplog.text
    (folder / "dent" / "same.png").unlink()
    rows = [f"{path.parent.name}/{path.name},{path.parent.name}" for path in folder.glob("*/*")]
    rows = [row.replace("dent0.png,dent", "dent0.png,good") for row in rows]
    (folder / "labels.csv").write_text("\n".join(["image,label", *rows]))
    caplog.clear()
    assert _data(tmp_path).count_classes().sum(0).tolist() == [6, 3]
    text = "1 image has another class in the table than by its folder, and the table counts: dent/dent0"
    assert text in caplog.text
    assert "identical" not in caplog.text
    (folder / "labels.csv").write_text("\n".join(["image,label,label", *rows]))
    with pytest.raises(DataError, match=r"labels\.csv: several columns are named 'label'"):
        _data(tmp_path)


def test_classes_are_those_of_the_folders_unless_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path / "set", {"dent": 4, "good": 4, "hole": 4})
    caplog.set_level("INFO")
    data = _data(tmp_path)
    assert data.classes == data.find_classes() == ("good", "dent", "hole")
    assert "classes: 0 good, 1 dent, 2 hole" in caplog.text
    assert data.count_classes().sum(0).tolist() == [4, 4, 4]
    with pytest.raises(ConfigError, match=r"names \['spot'\], but the labels are dent, good, hole"):
        _data(tmp_path, classes=["good", "spot"]).dataset("train")
    assert len(_data(tmp_path, classes=["good", "spot"]).dataset("test")) > 0  # of a trained model
    assert len(_data(tmp_path, classes=["good", "dent"]).dataset("train")) < 8  # holes are left out
    _write(tmp_path / "other" / "set", {"all": 5})
    with pytest.raises(ConfigError, match=r"its images have no labels"):
        _data(tmp_path / "other", classes=["good"]).dataset("test")
    caplog.clear()
    _data(tmp_path / "other").describe()  # by which `prepare` says what there is
    assert "text file with an image and its label in each line (found: all)" in caplog.text


@pytest.mark.parametrize(
    "kinds",
    [
        ("good", "very_good", "bad"),
        ("cap", "label"),
        ("mask", "no_mask"),
        ("gt", "seg"),
        ("ok", "OK"),
        ("photos", "drawings"),
        ("data", "rgb", "x"),
    ],
)
def test_each_folder_is_a_class_of_its_own(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for kind in kinds:
        _write_photos(tmp_path / "set" / kind, "{}.png")
    data = _data(tmp_path, splits={"train": 1.0})
    assert set(data.classes or ()) == set(kinds)
    assert data.count_classes().sum(0).tolist() == [4] * len(kinds)


def test_masks_of_labelled_photos_are_no_photos(tmp_path: Path) -> None:
    for kind in ("MT_Free", "MT_Crack"):
        _write_photos(tmp_path / "set" / kind, "{}.jpg")
        for number in range(4):
            mask = np.zeros((40, 60), np.uint8)
            mask[:9] = 255
            cv2.imwrite(str(tmp_path / "set" / kind / f"{number}.png"), mask)
    data = _data(tmp_path, splits={"train": 1.0})
    assert data.classes == ("MT_Free", "MT_Crack")
    assert len(data.bank) == 8


def _write_photos(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        draws = np.random.default_rng([number, *f"{folder.name}{name}".encode()])
        photo = draws.integers(0, 256, (40, 60, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / name.format(number)), photo)


_BY_NUMBER = r"([^/\d]+?)[-_. ]?\d+\.\w+$"


def _write_numbered(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        for number in range(6):
            image = np.random.default_rng(number).integers(0, 255, (40, 60), np.uint8)
            cv2.imwrite(str(folder / f"{name}_{number}.png"), image)


def test_names_of_files_give_classes_by_a_pattern(tmp_path: Path) -> None:
    _write_numbered(tmp_path / "set", ["crack", "rolled-in_scale"])
    with pytest.raises(
        ConfigError, match=r"If the file names hold the class \(crack 6, rolled-in_scale 6\)"
    ) as info:
        _data(tmp_path).dataset("train")
    assert f"'data.class_pattern=\"{_BY_NUMBER}\"'" in str(info.value)
    data = _data(tmp_path, class_pattern=_BY_NUMBER)
    assert data.classes == ("crack", "rolled-in_scale")
    assert data.count_classes().sum(0).tolist() == [6, 6]


def test_images_that_a_pattern_is_not_found_in_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_numbered(tmp_path / "set", ["crack", "good", "notes"])
    caplog.set_level("INFO")
    data = _data(tmp_path, class_pattern="crack|good")
    assert data.count_classes().sum(0).tolist() == [6, 6]
    assert "6 images have no class by data.class_pattern" in caplog.text
    with pytest.raises(ConfigError, match=r"data.class_pattern='dent' matches none of the names"):
        _data(tmp_path, class_pattern="dent")


def test_a_folder_without_classes_is_refused_before_its_images_are_decoded(tmp_path: Path) -> None:
    folder = _write(tmp_path / "set", {"all": 5})
    data = LabelledImageDataModule(folder, cache_dir=tmp_path / "cache")
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(ConfigError, match=r"its images have no labels"):
        trainer.fit(BoringModel(), datamodule=data)
    assert not (tmp_path / "cache" / "stores").exists()
