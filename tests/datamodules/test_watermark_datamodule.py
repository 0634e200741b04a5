from functools import partial
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.augment import segmentation_augment
from lit_data.datamodules import WatermarkDataModule
from lit_data.datasets.patch_source import ProgressiveSize
from lit_data.errors import ConfigError, DataError
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.watermarks import WatermarkSpec
from lit_data.testing import QUIET
from lit_data.types import Batch
from tests.reading import first, opened, read_all

SAMPLES = {"count": 6, "size_px": [128, 96]}
SPEC: dict[str, Any] = {"text_count": 20, "size_px": (10, 30)}

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


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
    assert {batch[key].dtype for key in ("index", "image_index", "position", "epoch")} == {
        torch.int64
    }
    assert "clean" not in _first(_data(cache))
    assert data.describe() | {"pixel_bytes": 0} == {
        "images": 6, "skipped": 0, "pixel_bytes": 0, "train_images": 4, "val_images": 1, "test_images": 1,
        "train_samples": 12, "val_samples": 4, "test_samples": 4, "fonts": 1,
    }  # fmt: skip


def test_the_alpha_is_where_and_how_much_the_image_changes(cache: str) -> None:
    spec: dict[str, Any] = {
        "mask": "alpha",
        "jpeg": 0,
        "modes": ("normal",),
        "coloured": 0,
        "lightness": (0, 0),
    }
    spec |= {"least_change": 0, "least_contrast": 0}
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
        found = read_all(_data(cache, loader=loader))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def test_training_changes_with_the_epoch_and_evaluation_never(cache: str) -> None:
    data = _data(cache)
    assert not torch.equal(_first(data, epoch=0)["image"], _first(data, epoch=1)["image"])
    loader = data.make_loader("val")
    before = [data.transform(batch, "val") for batch in loader]
    loader.set_epoch(4)
    assert not hasattr(loader.sampler, "set_epoch"), "Lightning cannot tell it the epoch"
    assert torch.equal(before[0]["mask"], first(data, "val", 4)["mask"])
    assert before[0]["mask"].any()


def test_prediction_shows_every_image_as_it_is(cache: str) -> None:
    data = _data(cache)
    dataset = data.dataset("predict")
    batch = first(data, "predict", len(dataset))
    assert "mask" not in batch
    assert set(batch["image_index"].tolist()) == set(range(6))
    places = zip(batch["image_index"].tolist(), batch["position"].tolist(), strict=True)
    for image, (number, (y, x)) in zip(batch["image"], places, strict=True):
        assert torch.equal(
            (image * 255).round().byte(), torch.tensor(data.bank[number][:, y : y + 64, x : x + 64])
        )


class Model(L.LightningModule):
    """Notes the sizes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 1, 1)
        self.seen: dict[str, list[int]] = {"train": [], "val": []}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch["image"].shape[-1])
        return ((self.layer(batch["image"]) - batch["mask"]) ** 2).mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen["val"].append(batch["image"].shape[-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.timeout(120)
def test_training_sizes_grow_with_the_epoch_while_workers_live_on(
    cache: str, tmp_path: Path
) -> None:
    data = _data(
        cache,
        setup=False,
        progressive=[[0, 32], [1, 48], [2, 96]],
        loader={"worker_kind": "thread", "num_workers": 2, "batch_size": 6},
    )
    model = Model()
    trainer = L.Trainer(**QUIET, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(model, datamodule=data)
    assert model.seen["train"] == [32, 32, 48, 48, 96, 96]
    assert set(model.seen["val"]) == {64}
    assert getattr(trainer.train_dataloader, "batch_size", 0) == 6


def test_augmentation_moves_the_mask_and_the_clean_image_along(cache: str) -> None:
    still = {
        "gain": 0,
        "contrast": 0,
        "gamma": 0,
        "blur_px": 0,
        "noise": 0,
        "rotate_deg": 0,
        "scale": (1, 1),
    }
    data = _data(cache, clean=True, augment=segmentation_augment(**still), spec={"jpeg": 0})  # type: ignore[arg-type]
    batch, plain = _first(data), _first(_data(cache, clean=True, spec={"jpeg": 0}))
    assert not torch.equal(batch["image"], plain["image"])
    for row in range(8):
        turned = [
            torch.rot90(flip, turns, (1, 2))
            for turns in range(4)
            for flip in _flips(_stack(plain, row))
        ]
        assert any(torch.equal(_stack(batch, row), each) for each in turned)
    planned = data.plan_batch(data.make_loader("train").read(np.arange(8), 0), "train")
    before = data.inspect("train").draw(planned)
    assert before is not None
    assert torch.equal(before["image"], plain["image"])


def _stack(batch: Batch, row: int) -> Tensor:
    return torch.cat([batch[key][row] for key in ("image", "mask", "clean")])


def _flips(image: Tensor) -> list[Tensor]:
    return [image, image.flip(1), image.flip(2), image.flip(1, 2)]


def test_what_was_planned_is_told(cache: str) -> None:
    data = _data(cache)
    planned = data.plan_batch(data.make_loader("train").read(np.arange(8), 0), "train")
    rows = data.inspect("train").describe_plan(planned, [0, 1, 2])
    assert {row["index"] for row in rows} <= set(planned["index"][:3].tolist())
    assert all(
        row["text"] in WatermarkSpec(**SPEC).words and row["font"] == "built in" for row in rows
    )
    assert data.inspect("predict").describe_plan(_plain(planned), [0]) == []


def _plain(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key not in ("cover", "under")}


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
    options: dict[str, Any] = {"root": str(folder), "masks": "masks", "splits": splits}
    data = _data(cache, synthesis=None, **options)
    batch = first(data, "test", 2)
    assert torch.equal(
        batch["mask"][0, 0], torch.from_numpy(_mirrored(data.bank[3][0] * 0, (5, 20, 10, 25)))
    )
    assert data.check_sources() == {
        "images": 4,
        "masks": 4,
        "train_samples": 6,
        "val_samples": 1,
        "test_samples": 2,
    }
    assert data.verify_sources() == []
    mixed = _data(cache, mask_splits=["test"], **options)
    assert "cover" in mixed.dataset("train").fields
    assert "mask" in mixed.dataset("test").fields
    (folder / "masks" / "2.png").unlink()
    with pytest.raises(DataError, match="1 images without a mask"):
        _data(cache, synthesis=None, **options)


def _mirrored(mask: Any, box: tuple[int, int, int, int]) -> Any:
    mask[box[0] : box[1], box[2] : box[3]] = 1
    return np.pad(mask, ((0, 64), (0, 64)), mode="reflect")[:64, :64].astype(np.float32)


def test_bad_files_are_listed_or_left_out(cache: str, folder: Path) -> None:
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:900])
    with pytest.raises(DataError, match=r"cut\.png"):
        _data(cache, root=str(folder), splits={"train": 1.0}, patterns=["*.png"])
    data = _data(cache, root=str(folder), splits={"train": 1.0}, patterns=["*.png"], on_bad="skip")
    assert data.describe()["skipped"] == 1
    with pytest.raises(DataError, match="1 of 5 images and masks are bad"):
        data.check_sources()
    assert (
        len(
            _data(
                cache, root=str(folder), splits={"train": 1.0}, patterns=["?.png"], cache="lru"
            ).bank
        )
        == 4
    )
    assert (
        len(
            _data(cache, root=str(folder), splits={"train": 1.0}, exclude=["cut.png", "masks"]).bank
        )
        == 4
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"synthesis": DefectSpec()},
            "synthesis is a DefectSpec, which draws no watermarks: set synthesis=watermark",
        ),
        ({"masks": "masks"}, "the drawn backgrounds have no masks"),
        ({"cache": "device"}, "cache='device' is unknown: choose one of store, lru, none"),
        ({"mask_splits": ["predict"]}, "names no split: choose from train, val, test"),
        ({"batch_format": ["image", "boxes"]}, "batch_format names unknown keys"),
        ({"patch_px": 0}, "patch_px=0 is not usable"),
        (
            {
                "progressive": ProgressiveSize(((0, 32),)),
                "augment": segmentation_augment(crop_px=32),
            },
            "leave crop_px out of the augmentation",
        ),
    ],
)
def test_options_out_of_range_are_refused(
    cache: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _data(cache, setup=False, **options)
