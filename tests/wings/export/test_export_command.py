"""``prepare.export``: what is written is what training sees."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.app.cli import main
from lit_data.app.prepare import export_set
from lit_data.augment import StripeAugment
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Bools
from lit_data.datamodules import InspectionDataModule, StripeDataModule
from lit_data.images.masks import MaskOptions
from lit_data.loading import LoaderOptions
from lit_data.synthesis import FAMILIES, DefectSpec

EPOCH = 3


def _open(root: Path, cache: Path, **options: Any) -> StripeDataModule:
    loader = LoaderOptions(batch_size=5, num_workers=0, seed=4)
    defaults = {"patch_px": 48, "stride_px": 40, "loader": loader}
    datamodule = StripeDataModule(str(root), cache_dir=str(cache), **(defaults | options))
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def _write_images(folder: Path, dtype: str) -> Path:
    folder.mkdir()
    for number in range(5):
        values = 0.3 + 0.4 * np.random.default_rng(number).random((3, 60, 90))
        top = 1 if dtype == "float32" else np.iinfo(dtype).max
        np.save(folder / f"{number}.npy", (values * top).astype(dtype))
    return folder


def _samples(datamodule: StripeDataModule, epoch: int) -> dict[int, Batch]:
    loader = datamodule.make_loader("train")
    loader.set_epoch(epoch)
    samples = {}
    for batch in loader:
        finished = datamodule.transform(batch, "train")
        for row, index in enumerate(finished["index"].tolist()):
            samples[index] = {key: value[row] for key, value in finished.items()}
    return samples


def _decode(segmentation: dict[str, Any]) -> Bools:
    """COCO's uncompressed run lengths, column by column."""
    counts = segmentation["counts"]
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    height, width = segmentation["size"]
    return flat.reshape(width, height).T


@pytest.mark.parametrize(
    ("dtype", "augment"), [("uint8", True), ("uint16", False), ("float32", True)]
)
def test_an_export_reads_back_as_what_training_saw(
    tmp_path: Path, dtype: str, augment: bool
) -> None:
    synthesis = DefectSpec(probability=1.0, families={name: {} for name in FAMILIES})
    options = {"synthesis": synthesis, "augment": StripeAugment() if augment else None}
    datamodule = _open(_write_images(tmp_path / "images", dtype), tmp_path / "cache", **options)
    folder = tmp_path / "export"
    done = export_set(datamodule, folder, stage="train", epoch=EPOCH, origin={})
    seen = _samples(datamodule, EPOCH)
    assert done["samples"] == len(seen) == len(list((folder / "images").iterdir()))
    names = sorted(path.name for path in (folder / "images").iterdir())
    splits = {"train": names, "val": [], "test": []}
    masks = {"masks": str(folder / "masks"), "mask_splits": ("train",)}
    read = _open(folder / "images", tmp_path / "cache2", splits=splits, **masks)
    for batch in (read.transform(b, "train") for b in read.make_loader("train")):
        for row, number in enumerate(batch["image_index"].tolist()):
            sample = seen[int(Path(read.bank.name(number)).stem)]
            assert torch.equal(batch["image"][row], sample["image"])
            assert torch.equal(batch["mask"][row], sample["mask"])


def test_annotations_say_what_the_masks_show(tmp_path: Path) -> None:
    families = {"scratch": {}, "stain": {}, "relief": {}}
    synthesis = DefectSpec(probability=1.0, true_count=(1, 1), families=families)
    images, folder = _write_images(tmp_path / "images", "uint8"), tmp_path / "export"
    datamodule = _open(images, tmp_path / "cache", synthesis=synthesis)
    done = export_set(datamodule, folder, stage="train", epoch=EPOCH, origin={"name": "x"})
    content = json.loads((folder / "annotations.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    seen = _samples(datamodule, EPOCH)
    masks = {}
    for image in content["images"]:
        masks[image["id"]] = seen[image["index"]]["mask"][0].numpy() > 0
    assert done["defects"] == len(content["annotations"]) > 5
    assert {names[entry["category_id"]] for entry in content["annotations"]} == set(families)
    for entry in content["annotations"]:
        mask = _decode(entry["segmentation"])
        rows, columns = np.nonzero(mask)
        assert entry["bbox"] == [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
        assert entry["area"] == mask.sum()
        assert masks[entry["image_id"]][mask].all()
        assert entry["change"] >= 0.02
        assert entry["severity"] > 0
    distractors = json.loads((folder / "distractors.json").read_text())["annotations"]
    assert done["distractors"] == len(distractors)
    assert all(entry["channels"] and entry["channels"] != [0] for entry in distractors)
    about = json.loads((folder / "export.json").read_text())
    assert about == {"name": "x", "stage": "train", "epoch": EPOCH}
    text = r"prepare.export=.*images is not empty: name a new folder"
    with pytest.raises(ConfigError, match=text):
        export_set(datamodule, images, stage="train", epoch=0, origin={})


def test_masks_of_classes_keep_their_numbers_and_ignored_pixels(tmp_path: Path) -> None:
    numbers = np.zeros((64, 64), np.uint8)
    numbers[:8], numbers[8:16], numbers[16:24] = 1, 2, 255
    for name in ("images", "masks"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"set/images/{number}.png"), pixels)
        cv2.imwrite(str(tmp_path / f"set/masks/{number}.png"), numbers)
    datamodule = InspectionDataModule(
        tmp_path / "set",
        classes=["dent", "spot"],
        mask_read=MaskOptions(ignore=255),
        patch_px=64,
        splits={"train": 1.0},
        cache_dir=str(tmp_path / "cache"),
        loader=LoaderOptions(batch_size=2, num_workers=0),
    )
    datamodule.prepare_data()
    datamodule.setup("fit")
    export_set(datamodule, tmp_path / "out", stage="train", epoch=0, origin={})
    written = sorted((tmp_path / "out" / "masks").iterdir())
    assert len(written) == 3
    for path in written:
        assert np.array_equal(cv2.imread(str(path), cv2.IMREAD_UNCHANGED), numbers)


@pytest.mark.slow
def test_the_command_exports(tmp_path: Path) -> None:
    images = _write_images(tmp_path / "images", "uint8")
    words = ["prepare", "experiment=stripe", "synthesis=library", "augment=none"]
    words += [f"data.root={images}", f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    words += ["data.patch_px=48", f"prepare.export={tmp_path}/export", "prepare.export_stage=val"]
    assert main(words) == 0
    summary = json.loads(next((tmp_path / "runs").rglob("summary.json")).read_text())
    masks = list((tmp_path / "export" / "masks").iterdir())
    assert len(masks) == summary["prepare/exported_samples"] == summary["prepare/val_patches"] > 0
    assert main([*words, "prepare.export_stage=predict"]) == 2
