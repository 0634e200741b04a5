import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lit_data.callbacks import PruneTrial
from lit_data.errors import ConfigError


class Trial:
    """Gives up at a step."""

    def __init__(self, last: int = 1000) -> None:
        self.last = last
        self.values = {}

    def report(self, value: float, step: int) -> None:
        self.values[step] = value

    def should_prune(self) -> bool:
        return max(self.values) >= self.last


class Model(BoringModel):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val/score", float(self.current_epoch) + 0.5)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        return None


def make_trainer(folder: Path, callback: Callback, epochs: int = 5, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_epochs=epochs, limit_train_batches=4, limit_val_batches=1,
        callbacks=[callback], default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")
        yield


def test_each_validation_is_reported_and_training_stops_where_it_is_given_up(
    tmp_path: Path,
) -> None:
    trial = Trial(last=2)
    callback = PruneTrial(trial, "val/score")
    trainer = make_trainer(tmp_path, callback)
    trainer.fit(Model())
    assert trial.values == {0: 0.5, 1: 1.5, 2: 2.5}
    assert trainer.current_epoch == 3
    assert callback.summary() == {"pruned_after": 3, "val/score": 2.5}
    trainer.validate(Model(), verbose=False)  # no validation of a training
    assert list(trial.values) == [0, 1, 2]


def test_an_undefined_metric_is_not_compared(tmp_path: Path) -> None:
    class Undefined(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("val/score", float("nan") if self.current_epoch < 2 else 1.0)

    trial = Trial(last=0)
    trainer = make_trainer(tmp_path, PruneTrial(trial, "val/score"))
    trainer.fit(Undefined())
    assert trial.values == {2: 1.0}
    assert trainer.current_epoch == 3


def test_a_training_that_is_good_enough_runs_to_its_end(tmp_path: Path) -> None:
    trial = Trial()
    callback = PruneTrial(trial, "val/score")
    make_trainer(tmp_path, callback, epochs=2, val_check_interval=2).fit(Model())
    assert trial.values == {0: 0.5, 1: 0.5, 2: 1.5, 3: 1.5}
    assert callback.summary() == {}


def test_validations_are_counted_on_from_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, PruneTrial(Trial(), "val/score"), epochs=2)
    trainer.fit(Model())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trial = Trial(last=3)
    callback = PruneTrial(trial, "val/score")
    make_trainer(tmp_path, callback).fit(Model(), ckpt_path=str(tmp_path / "two.ckpt"))
    assert trial.values == {2: 2.5, 3: 3.5}
    assert callback.summary()["pruned_after"] == 4


def test_a_metric_that_is_not_logged_is_named(tmp_path: Path) -> None:
    message = r"sweep\.metric=val/scor cannot prune jobs, .*: choose one of val/score, or hydra/swe"
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, PruneTrial(Trial(), "val/scor")).fit(Model())


def test_a_rank_without_a_trial_follows_the_first(tmp_path: Path) -> None:
    callback = PruneTrial(None)
    trainer = make_trainer(tmp_path, callback)
    trainer.strategy.broadcast = lambda value, src=0: value or value is False  # type: ignore[method-assign,assignment]
    trainer.fit(Model())
    assert trainer.current_epoch == 1


def test_a_damaged_count_is_refused() -> None:
    with pytest.raises(ValueError, match="PruneTrial"):
        PruneTrial(None).load_state_dict({"validations": torch.tensor(1.5)})
