"""What a Trainer is told of splits that hold no images, or nothing that scores are made of."""

import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_data.core.errors import ConfigError
from lit_data.datamodules import InspectionDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.volumes.datasets.windows import WindowSpec

LOADER = LoaderOptions(batch_size=2, num_workers=0)


def names(*numbers: int, suffix: str = ".png") -> list[str]:
    return [f"{number}{suffix}" for number in numbers]


def split(suffix: str = ".png", folder: str = "") -> dict[str, list[str]]:
    """Of six samples the first three train; those of val show nothing, that of test does."""
    parts = {"train": (0, 1, 2), "val": (3, 4), "test": (5,)}
    return {
        part: [f"{folder}{name}" for name in names(*of, suffix=suffix)]
        for part, of in parts.items()
    }


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)


def open_masks(root: Path, **options: Any) -> BaseDataModule:
    write_images(root / "set" / "images")
    (root / "set" / "masks").mkdir()
    for number in range(6):
        mask = np.zeros((32, 32), np.uint8)
        mask[4:9, 4:9] = 255 * (number not in (3, 4))
        cv2.imwrite(str(root / "set" / "masks" / f"{number}.png"), mask)
    settings = {"splits": split(folder="images/"), "patch_px": 32} | options
    return InspectionDataModule(
        str(root / "set"), cache_dir=str(root / "cache"), loader=LOADER, **settings
    )


def open_boxes(root: Path, **options: Any) -> BaseDataModule:
    write_images(root / "set" / "images")
    (root / "set" / "labels").mkdir()
    for number in range(6):
        box = "" if number in (3, 4) else "0 0.5 0.5 0.25 0.25\n"
        (root / "set" / "labels" / f"{number}.txt").write_text(box)
    (root / "set" / "data.yaml").write_text("names: [dent]\n")
    settings = {"splits": split(folder="images/"), "size_px": 32} | options
    return DetectionDataModule(
        str(root / "set"), cache_dir=str(root / "cache"), loader=LOADER, **settings
    )


def open_volumes(root: Path, **options: Any) -> BaseDataModule:
    (root / "set").mkdir(parents=True)
    for number in range(6):
        volume = np.full((8, 16, 16), -1000, np.int16)
        volume[2:6, 4:12, 4:12] = 300
        np.save(root / "set" / f"{number}.npy", volume)
        labels = (volume > 0) & (number not in (3, 4))
        np.save(root / "set" / f"{number}_labels.npy", labels.astype(np.uint8))
    settings = {"splits": split(suffix=""), "sample": "windows", "classes": ["bone"]} | options
    windows = WindowSpec(size=(8, 16, 16))
    return CTDataModule(
        str(root / "set"),
        cache_dir=str(root / "cache"),
        loader=LOADER,
        windows=windows,
        processes=1,
        **settings,
    )


def set_up(data: BaseDataModule, stage: str = "fit") -> None:
    data.prepare_data()
    data.trainer = Trainer(**QUIET)
    data.setup(stage)
    data.setup(stage)  # as a command does, and then its Trainer


KINDS = [(open_masks, "marked defects"), (open_boxes, "boxes"), (open_volumes, "labeled voxels")]


@pytest.mark.parametrize(("open_data", "lack"), KINDS)
def test_a_validation_split_without_anything_to_find_is_told_once(
    open_data: Any, lack: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = open_data(tmp_path)
    set_up(data)
    told = [record.getMessage() for record in caplog.records if "val split" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"the val split has no {lack}, so its scores are undefined")
    assert "data.splits={train: 0.7" in told[0]
    assert data.find_lack("train") == data.find_lack("test") == ""


def test_good_parts_alone_are_no_lack_where_they_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = {"train": ["images/3.png"], "val": ["images/4.png"], "test": ["images/5.png"]}
    data = open_masks(tmp_path, train_on="good", splits=few)
    set_up(data)
    assert "val split" not in caplog.text
    assert data.find_lack("val") == ""
    assert data.find_lack("test") == "good images"


@pytest.mark.parametrize(
    ("stage", "empty"), [("fit", "train"), ("validate", "val"), ("test", "test")]
)
def test_a_split_that_is_read_first_and_holds_no_images_is_refused_in_setup(
    stage: str, empty: str, tmp_path: Path
) -> None:
    splits = {part: numbers for part, numbers in split(folder="images/").items() if part != empty}
    with pytest.raises(ConfigError, match=f"the {empty} split holds no images: choose images"):
        set_up(open_masks(tmp_path, splits=splits), stage)


def test_without_validation_images_the_start_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits = {part: numbers for part, numbers in split(folder="images/").items() if part != "val"}
    caplog.set_level(logging.WARNING)
    set_up(open_masks(tmp_path, splits=splits))
    assert caplog.text.count("the val split has no images") == 1


def open_folders(root: Path, unmasked: str, **options: Any) -> InspectionDataModule:
    """Folders named after splits, in which every image has a mask but those of one of them."""
    for part in ("train", "val", "test"):
        write_images(root / "set" / part / "images")
        (root / "set" / part / "masks").mkdir()
        for number in range(6 if part != unmasked else 0):
            mask = np.full((32, 32), 255 * (number % 2), np.uint8)
            cv2.imwrite(str(root / "set" / part / "masks" / f"{number}.png"), mask)
    data = InspectionDataModule(
        str(root / "set"), cache_dir=str(root / "cache"), loader=LOADER, patch_px=32, **options
    )
    data.prepare_data()
    return data


@pytest.mark.parametrize("unmasked", ["val", "test"])
def test_a_split_without_masks_where_all_others_have_one_is_not_scored_as_good(
    unmasked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = open_folders(tmp_path, unmasked)
    assert len(data.split_images[unmasked]) == 0
    assert f"6 images are all of the split {unmasked} and have no mask" in caplog.text
    assert "they are skipped, because it is unknown which are good" in caplog.text
    names = data.source.names(data.bank)
    known = [data.has_defect(number) for number in range(len(names))]
    for name, has_defect in zip(names, known, strict=True):
        assert (has_defect is None) == name.startswith(unmasked)


def test_a_trainer_with_a_loader_alone_is_told_once_where_batches_are_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.zeros(1, 32)).sum()

    data = open_masks(tmp_path)
    data.prepare_data()
    settings = QUIET | {"max_epochs": 2, "limit_val_batches": 0}
    Trainer(**settings).fit(Model(), data.train_dataloader())
    told = "has the loader of a datamodule but not the datamodule"
    assert caplog.text.count(told) == 1
    caplog.clear()
    Trainer(**settings).fit(Model(), datamodule=data)
    assert told not in caplog.text
