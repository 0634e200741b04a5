"""A Trainer that is interrupted anywhere and goes on from its checkpoint trains each sample of each epoch once."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_data.core.rng import uniform
from lit_data.core.types import Array, Batch, FieldSpec, Ints, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET

LENGTH, EPOCHS = 22, 2


class Stop(Exception):
    """The power goes off."""


class Drawn:
    def __init__(self) -> None:
        self.fields = {
            "x": FieldSpec((3,), "float32"),
            "index": FieldSpec((), "int64"),
            "epoch": FieldSpec((), "int64"),
        }

    def __len__(self) -> int:
        return LENGTH

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["x"][:], rows["index"][:], rows["epoch"][:] = (
            uniform(5, 2, indices, epoch, 3),
            indices,
            epoch,
        )


class Data(BaseDataModule):
    batch_keys = ("x", "index", "epoch")

    def build_dataset(self, stage: Stage) -> Drawn:
        return Drawn()


class Model(LightningModule):
    """Notes what it is trained on, and stops where it is told to."""

    def __init__(
        self, stop_before: int | None = None, sizes: Mapping[int, int] | None = None
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.stop_before, self.sizes = stop_before, sizes or {}
        self.seen = []
        self.validated = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.stop_before is not None and self.global_step == self.stop_before:
            raise Stop
        self.seen += list(zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True))
        if self.global_step in self.sizes:
            self.trainer.train_dataloader.batch_size = self.sizes[self.global_step]
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated += batch["index"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _trainer(folder: Path, **options: Any) -> Trainer:
    defaults = {**QUIET, "max_epochs": EPOCHS, "num_sanity_val_steps": 0}
    return Trainer(default_root_dir=folder, **(defaults | options))


def _data(batch_size: int = 4, **options: Any) -> Data:
    return Data(loader=LoaderOptions(batch_size=batch_size, micro_batch_size=3, seed=3, **options))


EVERYTHING = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(LENGTH))


@pytest.mark.parametrize(
    ("when", "resizable"),
    [("batch", False), ("batch", True), ("epoch", False), ("validation", True)],
)
def test_every_checkpoint_of_a_run_can_be_gone_on_from(
    tmp_path: Path, when: str, resizable: bool
) -> None:
    options = {
        "batch": {"every_n_train_steps": 1},
        "epoch": {"save_on_train_epoch_end": True},
        "validation": {},
    }[when]
    saving = ModelCheckpoint(tmp_path / "all", filename="{step}", save_top_k=-1, **options)
    whole = Model()
    _trainer(tmp_path, callbacks=[saving], enable_checkpointing=True).fit(
        whole, datamodule=_data(resizable=resizable)
    )
    assert Counter(whole.seen) == EVERYTHING
    assert len(whole.validated) == EPOCHS * LENGTH
    paths = {int(path.stem.split("=")[1]): path for path in (tmp_path / "all").glob("*.ckpt")}
    assert len(paths) == (EPOCHS * 6 if when == "batch" else EPOCHS)
    for steps, path in sorted(paths.items()):
        seen_before = LENGTH * (steps // 6) + [0, 4, 8, 12, 16, 20, 22][steps % 6]
        again = Model()
        _trainer(tmp_path).fit(
            again, datamodule=_data(resizable=resizable), ckpt_path=path, weights_only=True
        )
        assert whole.seen[:seen_before] + again.seen == whole.seen, f"from step {steps}"
        for mine, other in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
@pytest.mark.parametrize("limit", ["limit_train_batches", "overfit_batches"])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_went_on_before_can_be_gone_on_from_anywhere(
    tmp_path: Path, limit: str, steps: int
) -> None:
    def fit(start: Path | None = None, folder: Path | None = None) -> Model:
        model, saving = Model(), ModelCheckpoint(folder, "{step}", every_n_train_steps=1)
        saving.save_top_k = -1 if folder else 0
        options = {limit: 3, "callbacks": [saving], "enable_checkpointing": True}
        _trainer(tmp_path, **options).fit(
            model, datamodule=_data(), ckpt_path=start, weights_only=True
        )
        return model

    whole = fit(folder=tmp_path / "first")
    fit(tmp_path / f"first/step={steps}.ckpt", tmp_path / "second")
    paths = list((tmp_path / "second").glob("*.ckpt"))
    assert len(paths) == EPOCHS * 3 - steps
    for path in paths:
        seen_before = int(path.stem.removeprefix("step=")) * 4
        assert fit(path).seen == whole.seen[seen_before:], path.name


class StopEarly(Callback):
    """Stops as `max_time` and early stopping do."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.steps


@pytest.mark.parametrize("resizable", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("steps", [2, 6, 9, 11])
def test_an_epoch_that_a_limit_has_cut_is_gone_on_with(
    tmp_path: Path, steps: int, is_early: bool, resizable: bool
) -> None:
    whole, cut, again = Model(), Model(), Model()
    _trainer(tmp_path).fit(whole, datamodule=_data())
    saving = ModelCheckpoint(tmp_path, save_last=True)
    callbacks = [saving, *([StopEarly(steps)] if is_early else [])]
    _trainer(
        tmp_path,
        callbacks=callbacks,
        enable_checkpointing=True,
        max_steps=-1 if is_early else steps,
    ).fit(cut, datamodule=_data(resizable=resizable))
    trainer = _trainer(tmp_path)
    data, path = _data(resizable=resizable), tmp_path / "last.ckpt"
    trainer.fit(again, datamodule=data, ckpt_path=path, weights_only=True)
    assert cut.seen + again.seen == whole.seen
    assert (trainer.current_epoch, trainer.global_step) == (EPOCHS, EPOCHS * 6)


@pytest.mark.parametrize("resizable", [False, True])
@pytest.mark.parametrize("batch_size", [3, 11])
def test_going_on_with_another_batch_size(tmp_path: Path, resizable: bool, batch_size: int) -> None:
    for stop in (1, 5, 6, 7):
        model = Model(stop_before=stop)
        trainer = _trainer(tmp_path, callbacks=[_SaveAtStop(tmp_path)])
        with pytest.raises(Stop):
            trainer.fit(model, datamodule=_data(resizable=resizable))
        again = Model()
        data = _data(batch_size, resizable=resizable)
        _trainer(tmp_path).fit(
            again, datamodule=data, ckpt_path=tmp_path / "stop.ckpt", weights_only=True
        )
        assert Counter(model.seen + again.seen) == EVERYTHING, f"stopped before step {stop}"
        assert len(again.validated) == (EPOCHS - stop // 6) * LENGTH


class _SaveAtStop(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        trainer.save_checkpoint(self.folder / "stop.ckpt")


def test_sizes_that_change_inside_epochs_train_everything_and_validate(tmp_path: Path) -> None:
    for kind, num_workers in (("inline", 0), ("thread", 2), ("process", 2)):
        model = Model(sizes={0: 2, 3: 9, 4: 1, 7: 5, 9: 22})
        data = _data(resizable=True, worker_kind=kind, num_workers=num_workers)
        _trainer(tmp_path).fit(model, datamodule=data)
        assert Counter(model.seen) == EVERYTHING
        assert len(model.validated) == EPOCHS * LENGTH
