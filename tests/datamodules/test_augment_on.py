"""`loader.augment_on`: batches that workers finish are those that the device would have finished."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cv2
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from typing_extensions import override

from lit_data.augment import Geometry, MixUp, Pipeline, segmentation_augment, stripe_augment
from lit_data.cli import main
from lit_data.datamodules import (
    GANDataModule,
    InspectionDataModule,
    StripeDataModule,
    WatermarkDataModule,
)
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.watermarks import WatermarkSpec
from lit_data.testing import QUIET, write_images
from lit_data.types import Batch, Stage

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]
STRONG: Final[dict[str, Any]] = {
    "rotate_deg": 10.0,
    "scale": (0.9, 1.1),
    "gamma": 0.2,
    "blur_px": 0.7,
    "noise": 0.02,
}
Make = Callable[..., BaseDataModule[Any]]


class Keeper(BoringModel):
    """Keeps what its steps get: batches outlive the memory that the loader lent."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Batch] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kept.append(batch)
        return self.layer(torch.ones(1, 32)).sum()


def _stripe(folder: Path, **options: Any) -> StripeDataModule:
    if not (folder / "set").exists():
        write_images(folder / "set", 8, (96, 112))
    given = {
        "synthesis": DefectSpec(probability=1.0),
        "augment": stripe_augment(crop_px=32, **STRONG),
    } | options
    return StripeDataModule(
        str(folder / "set"), cache_dir=str(folder / "cache"), patch_px=32, stride_px=24, **given
    )


def _single(folder: Path, **options: Any) -> StripeDataModule:
    write_images(folder / "set", 8, (96, 112), channels=1)
    return _stripe(folder, layout="single", **options)


def _inspection(folder: Path, **options: Any) -> InspectionDataModule:
    if not (folder / "set").exists():
        for number, path in enumerate(write_images(folder / "set", 8, (96, 112))):
            mask = np.zeros((96, 112), np.uint8)
            mask[10 * number :][:12, 40:60] = 255
            cv2.imwrite(str(path.with_name(f"{path.stem}_mask.png")), mask)
    given = {"augment": stripe_augment(crop_px=32, **STRONG)} | options
    return InspectionDataModule(
        str(folder / "set"), cache_dir=str(folder / "cache"), patch_px=32, **given
    )


def _gan(folder: Path, **options: Any) -> GANDataModule:
    samples = {"count": 12, "size_px": [16, 16], "tiles": 2}
    given = {"augment": Geometry(flip_left_right=True)} | options
    return GANDataModule(cache_dir=str(folder / "cache"), samples=samples, image_px=16, **given)


def _watermark(folder: Path, **options: Any) -> WatermarkDataModule:
    given = {
        "synthesis": WatermarkSpec(text_count=20, size_px=(10, 30)),
        "augment": segmentation_augment(),
    } | options
    samples = {"count": 6, "size_px": [128, 96]}
    return WatermarkDataModule(
        cache_dir=str(folder / "cache"), samples=samples, patch_px=64, samples_per_image=12, **given
    )


def _train(data: BaseDataModule[Any]) -> list[Batch]:
    model = Keeper()
    L.Trainer(max_epochs=2, limit_val_batches=0, **QUIET).fit(model, data)
    return model.kept


def _loader(place: str, **options: Any) -> LoaderOptions:
    return LoaderOptions(
        **{"batch_size": 6, "num_workers": 2, "seed": 3, "augment_on": place} | options
    )


@pytest.mark.parametrize("make", [_stripe, _single, _inspection, _gan, _watermark])
@pytest.mark.parametrize("kind", ["thread", "process", "inline"])
def test_batches_are_the_same_to_the_bit(tmp_path: Path, make: Make, kind: str) -> None:
    device = _train(make(tmp_path, loader=_loader("device", worker_kind=kind)))
    options = (
        {"start_method": "forkserver"} if (make, kind) == (_stripe, "process") else {}
    )  # the datamodule is sent to the workers
    data = make(tmp_path, loader=_loader("worker", worker_kind=kind, micro_batch_size=2, **options))
    worker = _train(data)
    assert len(device) == len(worker) > 2
    for one, other in zip(device, worker, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(
                value, other[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert data.describe_loaders()["augmentation"]["backend"] == "cpu"


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_a_run_that_goes_on_gets_the_same_batches(tmp_path: Path) -> None:
    """Place and numbers of samples are the loader's, whoever finishes them."""
    whole = _train(_stripe(tmp_path, loader=_loader("worker")))
    step = len(whole) // 2 + 2  # inside the second epoch
    saving = ModelCheckpoint(tmp_path / "kept", "half", every_n_train_steps=step)
    quiet = QUIET | {"enable_checkpointing": True, "max_epochs": 2, "limit_val_batches": 0}
    L.Trainer(callbacks=[saving], **quiet).fit(
        Keeper(), _stripe(tmp_path, loader=_loader("worker"))
    )
    rest, data = Keeper(), _stripe(tmp_path, loader=_loader("device"))
    saved = tmp_path / "kept" / "half.ckpt"
    L.Trainer(**quiet | {"enable_checkpointing": False}).fit(
        rest, data, ckpt_path=saved, weights_only=False
    )
    for one, other in zip(whole[step:], rest.kept, strict=True):
        assert torch.equal(one["image"], other["image"])


def test_auto_leaves_to_the_main_thread_what_it_reads(tmp_path: Path) -> None:
    data = _stripe(tmp_path, loader=_loader("auto", num_workers=0))
    _train(data)
    assert data.describe_loaders()["augmentation"] == {
        "backend": "device", "reason": "the main thread reads the samples", "cpu_us": None, "device_us": None,
    }  # fmt: skip


@pytest.mark.parametrize(("least_us", "chosen"), [(0, "cpu"), (10**9, "device")])
def test_auto_is_by_the_time_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_us: int, chosen: str
) -> None:
    monkeypatch.setattr("lit_data.datamodules.placement.LEAST_US", least_us)
    data = _stripe(tmp_path, loader=_loader("auto", worker_kind="thread"))
    _train(data)
    found = data.describe_loaders()["augmentation"]
    assert (found["backend"], found["cpu_us"] > 0) == (chosen, True)


class Blended(StripeDataModule):
    """Shows each sample through its neighbour in the batch."""

    @override
    def finish_batch(self, batch: Any, stage: Stage) -> Batch:
        finished = super().finish_batch(batch, stage)
        return finished | {"image": (finished["image"] + finished["image"].roll(1, 0)) / 2}


def _blended(folder: Path, loader: LoaderOptions) -> StripeDataModule:
    write_images(folder / "set", 8, (96, 112))
    return Blended(
        str(folder / "set"),
        cache_dir=str(folder / "cache"),
        patch_px=32,
        synthesis=DefectSpec(),
        loader=loader,
    )


def _mixed(folder: Path, loader: LoaderOptions) -> GANDataModule:
    return _gan(folder, augment=Pipeline([MixUp(probability=1.0)]), loader=loader)


def _on_the_device(folder: Path, loader: LoaderOptions) -> StripeDataModule:
    return _stripe(folder, cache="device", loader=loader)


def _own_module(folder: Path, loader: LoaderOptions) -> StripeDataModule:
    return _stripe(folder, augment=torch.nn.Identity(), loader=loader)


@pytest.mark.parametrize("make", [_blended, _mixed, _on_the_device, _own_module])
def test_what_looks_at_a_whole_batch_stays_on_the_device(tmp_path: Path, make: Make) -> None:
    data = make(tmp_path, loader=_loader("auto", worker_kind="thread"))
    assert _train(data)
    assert "augmentation" not in data.describe_loaders()
    with pytest.raises(
        ConfigError, match=rf"{type(data).__name__} .*set data.loader.augment_on=auto"
    ):
        _train(make(tmp_path / "other", loader=_loader("worker")))


def test_without_a_trainer_the_loader_gives_what_transform_takes(tmp_path: Path) -> None:
    data = _stripe(tmp_path, loader=_loader("worker", worker_kind="thread"))
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].dtype == torch.uint8
    assert data.transform(batch, "train")["image"].dtype == torch.float32


@pytest.mark.slow
def test_the_command_says_who_augments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "trainer=cpu",
        "trainer.max_epochs=1",
        "data.samples.count=6",
        "data.loader.worker_kind=thread",
    ]
    assert (
        main(
            [
                "fit",
                "+experiment=stripe",
                *words,
                "data.loader.augment_on=worker",
                "hydra.run.dir=run",
            ]
        )
        == 0
    )
    assert (
        json.loads(Path("run/loader.json").read_text())["augmentation"]["reason"] == "as configured"
    )
