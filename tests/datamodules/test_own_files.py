"""A root that is one file, and lists of paths and arrays in the place of a folder."""

import os
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from lightning import Trainer
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule
from lit_data.datamodules.image_files import ImageFolder
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.loading import LoaderOptions
from lit_data.models import SegmentationModule, UNet
from lit_data.wings.detection.source import DetectionSource

LOADER = LoaderOptions(batch_size=4, num_workers=0)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _draw(count: int) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8] | None]]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 120, (48, 64, 3), np.uint8) for _ in range(count)]
    masks: list[NDArray[np.uint8] | None] = []
    for number, image in enumerate(images):
        mask = np.zeros((48, 64), np.uint8)
        mask[10:20, 5 + number : 25 + number] = 255
        masks.append(mask if number % 2 else None)
        image[mask > 0] += np.uint8(100 * (number % 2))
    return images, masks


def test_one_file_is_a_folder_of_one_image(tmp_path: Path) -> None:
    folder = tmp_path / "Läufe 1"
    for name in ("images/ä b.png", "images/other.png", "masks/ä b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), np.full((20, 30, 3), 70, np.uint8))
    (folder / "images/labels.csv").write_text("image,label\nother.png,good\n")
    (folder / "images/classes.txt").write_text("dent\n")
    place: dict[str, Any] = {"root": folder / "images/ä b.png", "cache_dir": tmp_path / "cache"}
    alone = {"splits": {"train": 1.0}}
    sources: list[ImageFolder] = [
        ImageFolder.of(**place, **alone),
        InspectionFiles.of(**place, **alone),
        DetectionSource.of(**place, **alone, size_px=(32, 32), classes=["dent"]),
    ]
    for source in sources:
        [image] = source.list_images()
        assert source.name(image.paths[0]) == "ä b.png"
        assert source.shown_root.endswith("images/ä b.png")  # and not its copy in the cache
        assert Path(image.paths[0]).read_bytes() == place["root"].read_bytes()
    # A file that was written anew is read anew.
    place["root"].unlink()
    cv2.imwrite(str(place["root"]), np.full((8, 9, 3), 200, np.uint8))
    assert InspectionFiles.of(**place, **alone).open_images()[0].shape == (3, 8, 9)
    with pytest.raises(DataError, match="no image matches"):
        InspectionFiles.of(root=folder / "images/labels.csv", cache_dir=tmp_path).list_images()


def test_what_was_made_of_one_file_is_removed_after_a_day(tmp_path: Path) -> None:
    def read(name: str) -> Path:
        cv2.imwrite(str(tmp_path / name), np.full((20, 30, 3), 70, np.uint8))
        source = ImageFolder.of(root=tmp_path / name, cache_dir=tmp_path / "cache")
        source.store_folder.mkdir(parents=True)
        return source.folder

    first = read("first.png")
    second = read("second.png")
    assert first.is_dir()
    a_day_ago_s = time.time() - 25 * 3600
    os.utime(first, (a_day_ago_s, a_day_ago_s))
    third = read("third.png")
    assert {*first.parent.iterdir()} == {second, third}
    stores = (tmp_path / "cache/stores").iterdir()
    assert {path.name.partition("-")[0] for path in stores} == {second.name, third.name}


def test_arrays_train_and_are_predicted(tmp_path: Path) -> None:
    images, masks = _draw(12)
    data = InspectionDataModule.from_files(
        images,
        masks=masks,
        cache_dir=tmp_path,
        patch_px=16,
        loader=LOADER,
        splits={"train": 0.5, "val": 0.25, "test": 0.25},
        near_duplicates="apart",
    )
    model = SegmentationModule(UNet(width=2, depth=1), false_alarms_per_patch=None, baseline=False)
    trainer = Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, **QUIET)
    trainer.fit(model, datamodule=data)
    numbers = {number for part in data.split_images.values() for number in part.tolist()}
    assert numbers == set(range(12))
    assert 4 <= len(data.split_images["train"]) <= 8
    assert [data.has_defect(number) for number in range(4)] == [False, True, False, True]
    assert np.array_equal(data.bank[5], images[5].transpose(2, 0, 1))
    answers = trainer.predict(model, datamodule=data)
    assert answers is not None
    assert sum(len(answer["probability"]) for answer in answers) == 12 * 3 * 4


def test_paths_anywhere_have_the_masks_and_labels_of_the_lists(tmp_path: Path) -> None:
    images, masks = _draw(4)
    paths = [tmp_path / f"{'ab'[n % 2]}/{n}.png" for n in range(4)]
    mask_paths = [None if mask is None else tmp_path / f"m{n}.png" for n, mask in enumerate(masks)]
    for path, pixels in zip([*paths, *mask_paths], [*images, *masks], strict=True):
        if path is not None and pixels is not None:
            path.parent.mkdir(exist_ok=True)
            cv2.imwrite(str(path), pixels)
    (tmp_path / "a/labels.csv").write_text("image,label\nnone.png,good\n")
    files: Any = {"cache_dir": tmp_path / "cache", "loader": LOADER}
    data = InspectionDataModule.from_files(paths, masks=mask_paths, **files)
    data.setup("predict")
    assert data.source.names(data.bank) == ["a/0.png", "b/1.png", "a/2.png", "b/3.png"]
    mask = data.read_mask(3)
    assert mask is not None
    assert np.array_equal(mask > 0, np.asarray(masks[3]) > 0)
    kinds = ["OK", "scratch", "OK", ""]
    labelled = InspectionDataModule.from_files(list(map(str, paths)), labels=kinds, **files)
    labelled.setup("predict")
    assert labelled.image_kinds == ["good", "scratch", "good", ""]
    classes = LabelledImageDataModule.from_files(images, labels=["x", "y", "x", "y"], **files)
    classes.setup("predict")
    assert classes.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("images", "more", "error", "message"),
    [
        ([], {}, ConfigError, "there are no images"),
        ([[1]], {}, ConfigError, r"images\[0\] is a list: give a path or a NumPy array"),
        (["a.png"], {"masks": []}, ConfigError, "1 image and 0 masks: give one for each"),
        (["a.png", "b.png"], {"labels": ["x"]}, ConfigError, "2 images and 1 label: give one for each"),
        (["a.png"], {"labels": ["a", "b"]}, ConfigError, "1 image and 2 labels"),
        (["a.png", "a.png"], {}, DataError, "a.png is listed twice"),
        ([np.zeros((3, 40, 40), np.uint8)], {}, DataError, r"images\[0\].*array.transpose\(1, 2, 0\)"),
        ([np.zeros((4, 4))], {}, DataError, r"dtype float64; .* array.astype"),
        ([np.zeros((4, 0), np.uint8)], {}, DataError, r"shape \[4, 0\]"),
        (
            [np.zeros((4, 4), np.uint8)],
            {"masks": [np.zeros((4, 4, 3), np.uint8)]},
            DataError,
            r"masks\[0\].*give \[H, W\]",
        ),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(
    images: list[Any], more: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        InspectionDataModule.from_files(images, cache_dir=tmp_path, **more)
