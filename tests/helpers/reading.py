"""Opened datamodules, their batches, and runs that watch them, for tests."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_data.core.types import Batch, Stage
from lit_data.datamodules import BaseDataModule
from lit_data.testing import QUIET

Data = TypeVar("Data", bound=BaseDataModule)


def opened(data: Data, stage: str = "fit") -> Data:
    """Return a datamodule whose files are open."""
    data.prepare_data()
    data.setup(stage)
    return data


def first(data: BaseDataModule, stage: Stage = "train", count: int = 4, epoch: int = 0) -> Batch:
    """Return the first samples of a stage, finished."""
    return data.transform(data.make_loader(stage).read(np.arange(count), epoch), stage)


def plan(data: BaseDataModule, count: int, stage: Stage = "train") -> Batch:
    """Return the first samples of a stage, planned."""
    return data.plan_batch(data.make_loader(stage).read(np.arange(count), 0), stage)


def read_all(data: BaseDataModule, stage: Stage = "train", epoch: int = 0) -> Batch:
    """Return all samples of a stage in the order of an epoch, finished, as one batch."""
    loader = data.make_loader(stage)
    loader.set_epoch(epoch)
    batches = [data.transform(dict(batch), stage) for batch in loader]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, by their names in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare two batches bit by bit."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        assert same, key


class Watcher(LightningModule):
    """Hands each batch of training, and of validation, to a function."""

    def __init__(
        self,
        see: Callable[[Any], object] = lambda batch: None,
        see_validation: Callable[[Any], object] = lambda batch: None,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.see, self.see_validation = see, see_validation

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see(batch)
        return self.layer(torch.ones(1, 1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see_validation(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(model: LightningModule, data: BaseDataModule, folder: Path, **options: Any) -> Trainer:
    """Train a module on the CPU, by default for one epoch and without a sanity check."""
    path = options.pop("ckpt_path", None)
    quiet = {**QUIET, "num_sanity_val_steps": 0, "enable_checkpointing": "callbacks" in options}
    trainer = Trainer(default_root_dir=folder, **(quiet | {"max_epochs": 1} | options))
    trainer.fit(model, datamodule=data, ckpt_path=path, weights_only=True)
    data.teardown("fit")
    return trainer


def assert_resumes(
    data: BaseDataModule, make: Callable[[], BaseDataModule], folder: Path, steps: Sequence[int]
) -> None:
    """Check that two epochs that go on after some of their steps have the batches of an unbroken run."""
    unbroken = []
    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit(Watcher(unbroken.append), data, folder, max_epochs=2, callbacks=[saving])
    for step in steps:
        rest = []
        path = folder / f"step={step}.ckpt"
        fit(Watcher(rest.append), make(), folder, max_epochs=2, ckpt_path=path)
        for one, other in zip(unbroken[step:], rest, strict=True):
            assert_equal(one, other)
