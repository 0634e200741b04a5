"""One datamodule, several runs: each trains all of its samples, whatever another one has restored."""

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, Batch, FieldSpec, Ints, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET

BATCHES, EPOCHS = 5, 2


class Numbers:
    fields: Mapping[str, FieldSpec] = {
        "index": FieldSpec((), "int64"),
        "epoch": FieldSpec((), "int64"),
    }

    def __len__(self) -> int:
        return BATCHES * 4

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["index"][:] = indices
        rows["epoch"][:] = epoch


class Data(BaseDataModule):
    batch_keys = ("index", "epoch")

    def __init__(self, **options: Any) -> None:
        super().__init__(loader=LoaderOptions(batch_size=4, **({"num_workers": 0} | options)))

    def build_dataset(self, stage: Stage) -> Numbers:
        return Numbers()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.lr = 0.01
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((int(batch["epoch"][0]), batch["index"].tolist()))
        loss = self.layer(batch["index"].float()[:, None] / 100).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None: ...

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return batch["index"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _trainer(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options})


def _train(data: Data, **options: Any) -> list[tuple[int, list[int]]]:
    model = Model()
    _trainer(**options).fit(model, datamodule=data)
    return model.seen


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return one of a run that stopped inside its first epoch."""
    trainer = _trainer(max_steps=3)
    trainer.fit(Model(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "inside.ckpt")
    return tmp_path / "inside.ckpt"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("resizable", [False, True])
def test_scoring_a_checkpoint_does_not_move_the_next_training(
    checkpoint: Path, stage: str, resizable: bool
) -> None:
    data, whole = Data(resizable=resizable), _train(Data())
    getattr(_trainer(), stage)(Model(), datamodule=data, ckpt_path=checkpoint, weights_only=True)
    assert _train(data) == whole
    model, trainer = Model(), _trainer()
    trainer.fit(model, datamodule=data)
    getattr(trainer, stage)(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    assert model.seen == whole + whole[3:]
    assert _train(data) == whole


def test_a_resumed_run_leaves_nothing_to_the_next_one(checkpoint: Path) -> None:
    whole = _train(Data())
    data = Data()
    for limit in ({"max_steps": 3}, {"limit_train_batches": 0}, {}):
        model = Model()
        _trainer(**limit).fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        assert model.seen == ([] if limit else whole[3:])
        assert _train(data) == whole


def test_a_search_of_the_learning_rate_keeps_the_place_in_the_data(checkpoint: Path) -> None:
    data = Data()
    _trainer(max_steps=3).fit(Model(), datamodule=data)
    model = Model()
    trainer = _trainer()
    Tuner(trainer).lr_find(model, datamodule=data, num_training=4)
    model.seen.clear()
    trainer.fit(model, datamodule=data)
    assert model.seen == _train(Data())


@pytest.mark.filterwarnings("ignore:.*num_training_batches:UserWarning")
@pytest.mark.parametrize("resizable", [False, True])
def test_loaders_that_are_made_anew_go_on_with_the_epochs(resizable: bool) -> None:
    assert _train(Data(resizable=resizable), reload_dataloaders_every_n_epochs=1) == _train(Data())
    model, data, trainer = Model(), Data(resizable=resizable), _trainer(max_epochs=1)
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(model, datamodule=data)
    assert model.seen == _train(Data())


class Within(Callback):
    """Runs another Trainer with the same datamodule in the middle of an epoch."""

    def __init__(self, data: Data, stage: str) -> None:
        self.data, self.stage, self.places = data, stage, []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            getattr(_trainer(max_epochs=1), self.stage)(Model(), datamodule=self.data)
        if trainer.global_step >= 3:
            assert self.data.trainer is trainer
            self.places.append(self.data.state_dict()["train_loader"]["batches"])


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_another_trainer_runs_within_a_training(stage: str, kind: str) -> None:
    data = Data(worker_kind=kind, num_workers=0 if kind == "inline" else 1)
    within = Within(data, stage)
    assert _train(data, callbacks=[within], max_epochs=1) == _train(Data(), max_epochs=1)
    assert within.places == [3, 4, 5]


def test_a_state_that_no_run_takes_is_reported() -> None:
    data = Data()
    loader = data.train_dataloader()
    next(iter(loader))
    state = data.state_dict()
    data = Data()
    data.load_state_dict(state)
    rest = [batch["index"].tolist() for batch in data.train_dataloader()]
    assert len(rest) == BATCHES - 1
    data.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"fit\(ckpt_path=\.\.\.\) restores"):
        assert _train(data) == _train(Data())


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("kind", ["inline", "process"])
def test_copies_of_a_datamodule_are_independent(duplicate: Any, kind: str) -> None:
    data = Data(worker_kind=kind, num_workers=0 if kind == "inline" else 1)
    _train(data, max_epochs=1)
    other = duplicate(data)
    assert other.trainer is None
    assert data.trainer is not None
    assert _train(other) == _train(data) == _train(Data())
    other.batch_size = 2
    assert data.batch_size == 4


class Beside(Data):
    """Has a loader of torch beside or around its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        return batch | {"tens": batch["index"] // 10}

    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), DataLoader(torch.zeros(4, 2))]

    def train_dataloader(self) -> Any:
        own = super().train_dataloader()
        if self.kind == "list":
            return own
        return CombinedLoader({"a": own, "b": DataLoader(torch.zeros(4, 2))})


@pytest.mark.parametrize("hook", ["plan_batch", "finish_batch"])
def test_an_error_of_a_class_of_ones_own_stays_what_it_is(hook: str) -> None:
    def fail(batch: Batch, stage: Stage) -> Batch:
        raise KeyError("not a key of a batch")

    data = Beside("list")
    setattr(data, hook, fail)
    with pytest.raises(KeyError, match="not a key of a batch"):
        _trainer().fit(Model(), datamodule=data)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("list", r"loader 1 of val gave a batch that .* of Beside has made \(Tensor\): let plan_b"),
        ("dict", r"loader 0 of train gave .* \(dict with the keys \['a', 'b'\]\): let plan_batch"),
    ],
)
def test_a_batch_of_another_loader_is_named(kind: str, message: str) -> None:
    class Scored(Model):
        def validation_step(
            self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
        ) -> None: ...

    with pytest.raises(ConfigError, match=message):
        _trainer().fit(Scored(), datamodule=Beside(kind))
