"""``prepare.export``: what is written is what training sees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lit_data.augment import StripeAugment
from lit_data.cli import main
from lit_data.commands.prepare import export_set
from lit_data.datamodules import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.synthesis import FAMILIES, DefectSpec
from lit_data.types import Batch

EPOCH = 3


def _open(root: Path, cache: Path, **options: Any) -> StripeDataModule:
    defaults = {
        "patch_px": 48,
        "stride_px": 40,
        "loader": LoaderOptions(batch_size=5, num_workers=0, seed=4),
    }
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
    finished = [datamodule.transform(batch, "train") for batch in loader]
    return {
        int(b["index"][n]): {key: value[n] for key, value in b.items()}
        for b in finished
        for n in range(len(b["index"]))
    }


def _decode(segmentation: dict[str, Any]) -> NDArray[np.bool_]:
    """COCO's uncompressed run lengths, column by column."""
    counts = segmentation["counts"]
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    height, width = segmentation["size"]
    return flat.reshape(width, height).T


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
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
    splits = {
        "train": sorted(path.name for path in (folder / "images").iterdir()),
        "val": [],
        "test": [],
    }
    read = _open(
        folder / "images",
        tmp_path / "cache2",
        masks=str(folder / "masks"),
        mask_splits=("train",),
        splits=splits,
        loader=LoaderOptions(batch_size=8, num_workers=0),
    )
    for batch in (read.transform(b, "train") for b in read.make_loader("train")):
        for row, number in enumerate(batch["image_index"].tolist()):
            sample = seen[int(Path(read.bank.name(number)).stem)]
            assert torch.equal(batch["image"][row], sample["image"])
            assert torch.equal(batch["mask"][row], sample["mask"])


def test_annotations_say_what_the_masks_show(tmp_path: Path) -> None:
    families = {"scratch": {}, "stain": {}, "relief": {}}
    datamodule = _open(
        _write_images(tmp_path / "images", "uint8"),
        tmp_path / "cache",
        synthesis=DefectSpec(probability=1.0, true_count=(1, 1), families=families),
    )
    done = export_set(
        datamodule, tmp_path / "export", stage="train", epoch=EPOCH, origin={"name": "x"}
    )
    content = json.loads((tmp_path / "export" / "annotations.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    seen = _samples(datamodule, EPOCH)
    masks = {
        image["id"]: seen[image["index"]]["mask"][0].numpy() > 0 for image in content["images"]
    }
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
    distractors = json.loads((tmp_path / "export" / "distractors.json").read_text())["annotations"]
    assert done["distractors"] == len(distractors)
    assert all(entry["channels"] and entry["channels"] != [0] for entry in distractors)
    about = json.loads((tmp_path / "export" / "export.json").read_text())
    assert about == {"name": "x", "stage": "train", "epoch": EPOCH}


def test_an_export_goes_into_a_new_folder_only(tmp_path: Path) -> None:
    datamodule = _open(
        _write_images(tmp_path / "images", "uint8"), tmp_path / "cache", synthesis=DefectSpec()
    )
    with pytest.raises(
        ConfigError, match=r"prepare.export=.*images is not empty: name a new folder"
    ):
        export_set(datamodule, tmp_path / "images", stage="train", epoch=0, origin={})


@pytest.mark.slow
def test_the_command_exports(tmp_path: Path) -> None:
    words = [
        "prepare",
        "experiment=stripe",
        "synthesis=library",
        "augment=none",
        f"paths.runs={tmp_path}/runs",
    ]
    words += [
        f"data.root={_write_images(tmp_path / 'images', 'uint8')}",
        f"paths.cache={tmp_path}/cache",
    ]
    words += ["data.patch_px=48", f"prepare.export={tmp_path}/export", "prepare.export_stage=val"]
    assert main(words) == 0
    summary = json.loads(next((tmp_path / "runs").rglob("summary.json")).read_text())
    assert summary["prepare/exported_samples"] == summary["prepare/val_patches"] > 0
    assert (
        len(list((tmp_path / "export" / "masks").iterdir())) == summary["prepare/exported_samples"]
    )
    assert main([*words, "prepare.export_stage=predict"]) == 2
