from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.augment import segmentation_augment
from lit_data.core.errors import ConfigError, DataError
from lit_data.datasets.patch_source import ProgressiveSize
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.wings.watermarks import WatermarkDataModule, WatermarkSpec
from tests.helpers.reading import Watcher, assert_equal, first, fit, opened, plan, read_all

SAMPLES = {"count": 6, "size_px": [128, 96]}
SPEC = {"text_count": 20, "size_px": (10, 30)}

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


def _data(
    cache_dir: str, *, setup: bool = True, spec: Any = None, **options: Any
) -> WatermarkDataModule:
    loader = LoaderOptions(
        seed=3, **({"batch_size": 4, "worker_kind": "inline"} | options.pop("loader", {}))
    )
    given = {"samples": SAMPLES, "patch_px": 64, "samples_per_image": 3} | options
    synthesis = (
        options.pop("synthesis") if "synthesis" in given else WatermarkSpec(**(SPEC | (spec or {})))
    )
    data = WatermarkDataModule(
        cache_dir=cache_dir, loader=loader, **(given | {"synthesis": synthesis})
    )
    return opened(data) if setup else data


_first = partial(first, count=8)


def test_a_batch_is_what_the_table_says(cache: str) -> None:
    data = _data(cache, clean=True)
    batch = _first(data)
    assert batch.keys() == set(data.batch_keys)
    for key, channels in (("image", 3), ("mask", 1), ("clean", 3)):
        assert batch[key].shape == (8, channels, 64, 64)
        assert batch[key].dtype == torch.float32
        assert batch[key].min() >= 0
        assert batch[key].max() <= 1
    assert set(batch["mask"].unique().tolist()) == {0, 1}
    assert batch["position"].shape == (8, 2)
    assert {batch[key].dtype for key in ("index", "image_index", "epoch")} == {torch.int64}
    assert "clean" not in _first(_data(cache))
    assert data.describe() | {"pixel_bytes": 0} == {
        "images": 6, "skipped": 0, "pixel_bytes": 0, "train_images": 4, "val_images": 1, "test_images": 1,
        "train_samples": 12, "val_samples": 4, "test_samples": 4, "fonts": 1,
    }  # fmt: skip


def test_the_alpha_is_where_and_how_much_the_image_changes(cache: str) -> None:
    spec = {"mask": "alpha", "jpeg": 0, "modes": ("normal",), "coloured": 0}
    spec |= {"lightness": (0, 0), "least_change": 0, "least_contrast": 0}
    batch = _first(_data(cache, clean=True, spec=spec), count=12)
    alpha, changed = batch["mask"], batch["clean"] - batch["image"]
    assert alpha.max() > 0.2
    np.testing.assert_allclose(changed, alpha * batch["clean"], atol=0.5001 / 255)
    seen = (alpha > 2 / 255) & (batch["clean"] > 0.5)
    assert torch.equal(changed[seen] > 0, torch.ones(int(seen.sum()), dtype=torch.bool))
    assert not changed[(alpha == 0).expand_as(changed)].any()


def test_samples_do_not_depend_on_workers_or_batches(cache: str) -> None:
    data = _data(cache)
    expected = read_all(data)
    for loader in (
        {"batch_size": 5},
        {"worker_kind": "thread", "num_workers": 2, "micro_batch_size": 1},
    ):
        assert_equal(read_all(_data(cache, loader=loader)), expected)


def test_training_changes_with_the_epoch_and_evaluation_never(cache: str) -> None:
    data = _data(cache)
    assert not torch.equal(_first(data, epoch=0)["image"], _first(data, epoch=1)["image"])
    loader = data.make_loader("val")
    before = [data.transform(batch, "val") for batch in loader]
    loader.sampler.set_epoch(4)  # as Lightning does
    after = [data.transform(batch, "val") for batch in loader]
    assert torch.equal(before[0]["mask"], after[0]["mask"])
    assert torch.equal(before[0]["mask"], first(data, "val", 4)["mask"])
    assert before[0]["mask"].any()


@pytest.mark.timeout(120)
def test_training_sizes_grow_with_the_epoch_while_workers_live_on(
    cache: str, tmp_path: Path
) -> None:
    workers = {"worker_kind": "thread", "num_workers": 2, "batch_size": 6}
    data = _data(cache, setup=False, progressive=[[0, 32], [1, 48], [2, 96]], loader=workers)
    trained = []
    validated = set()
    model = Watcher(
        lambda batch: trained.append(batch["image"].shape[-1]),
        lambda batch: validated.add(batch["image"].shape[-1]),
    )
    trainer = fit(model, data, tmp_path, max_epochs=3)
    assert trained == [32, 32, 48, 48, 96, 96]
    assert validated == {64}
    assert getattr(trainer.train_dataloader, "batch_size", 0) == 6


def test_augmentation_moves_the_mask_and_the_clean_image_along(cache: str) -> None:
    still = dict.fromkeys(("gain", "contrast", "gamma", "blur_px", "noise"), 0)
    augment = segmentation_augment(**still, rotate_deg=0, scale=(1, 1))
    data = _data(cache, clean=True, augment=augment, spec={"jpeg": 0})
    batch, plain = _first(data), _first(_data(cache, clean=True, spec={"jpeg": 0}))
    assert not torch.equal(batch["image"], plain["image"])
    moved, still_there = (
        torch.cat([found[key] for key in ("image", "mask", "clean")], 1) for found in (batch, plain)
    )
    for row, image in enumerate(still_there):
        flips = (image, image.flip(1), image.flip(2), image.flip(1, 2))
        turned = [torch.rot90(flip, turns, (1, 2)) for turns in range(4) for flip in flips]
        assert any(torch.equal(moved[row], each) for each in turned)
    before = data.inspect("train").draw(plan(data, 8))
    assert before is not None
    assert torch.equal(before["image"], plain["image"])


def test_what_was_planned_is_told(cache: str) -> None:
    data = _data(cache)
    planned = plan(data, 8)
    rows = data.inspect("train").describe_plan(planned, [0, 1, 2])
    assert {row["index"] for row in rows} <= set(planned["index"][:3].tolist())
    assert {row["text"] for row in rows} <= set(WatermarkSpec(**SPEC).words)
    assert {row["font"] for row in rows} == {"built in"}
    undrawn = {key: value for key, value in planned.items() if key not in ("cover", "under")}
    assert data.inspect("predict").describe_plan(undrawn, [0]) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of several sizes and kinds, with masks."""
    rng, root = np.random.default_rng(0), tmp_path / "set"
    (root / "masks").mkdir(parents=True)
    for number in range(4):
        shape = [(90, 70), (40, 30, 3), (64, 64, 3), (30, 100)][number]
        cv2.imwrite(str(root / f"{number}.png"), rng.integers(0, 256, shape, dtype=np.uint8))
        mask = np.zeros(shape[:2], np.uint8)
        mask[5:20, 10:25] = 255
        cv2.imwrite(str(root / "masks" / f"{number}.png"), mask)
    return root


def test_masks_of_a_folder_take_the_place_of_drawn_watermarks(cache: str, folder: Path) -> None:
    splits = {"train": ["0.png", "1.png"], "val": ["2.png"], "test": ["3.png"]}
    options = {"root": str(folder), "masks": "masks", "splits": splits}
    data = _data(cache, synthesis=None, **options)
    batch = first(data, "test", 2)
    assert torch.equal(
        batch["mask"][0, 0], torch.from_numpy(_mirrored(data.bank[3][0] * 0, (5, 20, 10, 25)))
    )
    samples = {"train_samples": 6, "val_samples": 1, "test_samples": 2}
    assert data.check_sources() == {"images": 4, "masks": 4, **samples}
    assert data.verify_sources() == []
    mixed = _data(cache, mask_splits=["test"], **options)
    assert "cover" in mixed.dataset("train").fields
    assert "mask" in mixed.dataset("test").fields
    (folder / "masks" / "2.png").unlink()
    with pytest.raises(DataError, match="1 image without a mask"):
        _data(cache, synthesis=None, **options)


def _mirrored(mask: Any, box: tuple[int, int, int, int]) -> Any:
    mask[box[0] : box[1], box[2] : box[3]] = 1
    return np.pad(mask, ((0, 64), (0, 64)), mode="reflect")[:64, :64].astype(np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"synthesis": DefectSpec()},
            "synthesis is a DefectSpec, which draws no watermarks: set synthesis=watermark",
        ),
        ({"masks": "masks"}, "the synthetic backgrounds have no masks"),
        ({"cache": "device"}, "cache='device' is unknown: choose one of store, lru, none"),
        ({"mask_splits": ["predict"]}, "does not name a split: choose from train, val, test"),
        ({"batch_format": ["image", "boxes"]}, "batch_format names unknown keys"),
        ({"patch_px": 0}, "patch_px=0 is not usable"),
        (
            {
                "progressive": ProgressiveSize(((0, 32),)),
                "augment": segmentation_augment(crop_px=32),
            },
            "remove crop_px from the augmentation",
        ),
    ],
)
def test_options_out_of_range_are_refused(
    cache: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _data(cache, setup=False, **options)
