"""`EMA`: what is scored, kept and gone on from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_data.callbacks import AMP, EMA
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET

KEY = "weights_of_last_step"


class _Module(LightningModule):
    """Steps by -1 each, and has a threshold that every validation sets, as `SegmentationModule` does."""

    threshold: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.norm = nn.BatchNorm1d(1)
        nn.init.zeros_(self.layer.weight)
        self.register_buffer("threshold", torch.tensor(0.5))
        self.validated = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer.weight.sum() + 0 * self.norm(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.layer.weight.item())

    def on_validation_epoch_end(self) -> None:
        self.threshold.fill_(float(self.current_epoch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=1.0)


def _average(steps: int, decay: float) -> list[float]:
    """The average after each step, of weights -1, -2, ..."""
    averages, average = [], 0.0
    for step in range(1, steps + 1):
        rate = min(decay, (1 + step) / (10 + step))
        average = rate * average - (1 - rate) * step
        averages.append(average)
    return averages


def _fit(
    folder: Path,
    epochs: int = 3,
    start: str | None = None,
    *callbacks: Callback,
    kind: type[_Module] = _Module,
    **options: Any,
) -> _Module:
    module = kind()
    data = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    only_weights = options.pop("save_weights_only", False)
    last = ModelCheckpoint(
        folder,
        filename="{epoch}",
        save_top_k=-1,
        enable_version_counter=False,
        save_weights_only=only_weights,
    )
    defaults = {"max_epochs": epochs, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    callbacks = (EMA(decay=0.4), *callbacks, last)
    trainer = Trainer(**(QUIET | defaults | options), callbacks=list(callbacks))
    validated = DataLoader(data.dataset, batch_size=8)
    trainer.fit(module, data, validated, ckpt_path=start, weights_only=True)
    return module


def test_validation_checkpoints_and_the_trained_module_have_the_average(tmp_path: Path) -> None:
    module = _fit(tmp_path)
    averages = _average(12, 0.4)
    assert module.validated == pytest.approx([averages[3], averages[7], averages[11]])
    assert module.layer.weight.item() == pytest.approx(averages[11])
    checkpoint = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["layer.weight"].item() == pytest.approx(averages[7])
    assert checkpoint[KEY]["layer.weight"].item() == -8.0
    # Lightning's own averages the threshold of validation as if it were a weight.
    assert checkpoint["state_dict"]["threshold"].item() == 1.0
    assert module.threshold.item() == 2.0
    assert checkpoint["state_dict"]["norm.num_batches_tracked"].item() == 8
    means = [checkpoint[key]["norm.running_mean"].item() for key in ("state_dict", KEY)]
    assert means[0] != means[1]


def test_a_resumed_run_ends_as_one_that_was_not_broken_off(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole")
    _fit(tmp_path / "part", 1)
    resumed = _fit(tmp_path / "part", 3, str(tmp_path / "part" / "epoch=0.ckpt"))
    assert resumed.validated == whole.validated[1:]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor)


class _Saver(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_that_is_saved_while_validation_runs_is_right(tmp_path: Path) -> None:
    _fit(tmp_path, 1, None, _Saver(tmp_path / "inside.ckpt"))
    inside = torch.load(tmp_path / "inside.ckpt", weights_only=True)
    assert inside["state_dict"]["layer.weight"].item() == pytest.approx(_average(4, 0.4)[3])
    assert inside[KEY]["layer.weight"].item() == -4.0


def test_steps_of_accumulated_gradients_count_once(tmp_path: Path) -> None:
    module = _fit(tmp_path, 1, accumulate_grad_batches=2)
    assert module.layer.weight.item() == pytest.approx(_average(2, 0.4)[1])


class _Tied(_Module):
    """Two names of one tensor, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(1, 1, bias=False)
        self.again.weight = self.layer.weight
        self.row = nn.Parameter(self.layer.weight.data[0], requires_grad=False)


@pytest.mark.parametrize("save_weights_only", [True, False])
def test_all_names_of_a_weight_are_averaged_in_every_kind_of_checkpoint(
    tmp_path: Path, save_weights_only: bool
) -> None:
    _fit(tmp_path, 1, kind=_Tied, save_weights_only=save_weights_only)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    average = pytest.approx(_average(4, 0.4)[3])
    for name in ("layer.weight", "again.weight", "row"):
        assert checkpoint["state_dict"][name].item() == average
    assert (KEY in checkpoint) != save_weights_only


class _Fails(_Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise ZeroDivisionError


class _FailsInThirdStep(_Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "steps"), [(_Fails, 4), (_FailsInThirdStep, 2)])
@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_training_that_an_error_ends_leaves_the_average_and_nothing_else(
    tmp_path: Path, kind: type[_Module], steps: int, place: str, weights_only: bool
) -> None:
    class Saver(Callback):
        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=weights_only)

    module, ema = kind(), EMA(decay=0.4)
    callbacks = [Saver(), ema] if place == "before" else [ema, Saver()]
    data = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    options = QUIET | {"max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(**options, callbacks=callbacks)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, data, data)
    average = pytest.approx(_average(steps, 0.4)[-1])
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert saved["state_dict"]["layer.weight"].item() == average
    if not weights_only:
        assert saved[KEY]["layer.weight"].item() == -steps
    assert module.layer.weight.item() == average
    assert "save_checkpoint" not in vars(trainer)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    with torch.no_grad():
        module.layer.weight.fill_(7.0)  # by hand
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    later = torch.load(tmp_path / "later.ckpt", weights_only=True)
    assert later["state_dict"]["layer.weight"].item() == module.layer.weight.item() == 7.0
    assert KEY not in later


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_average_is_that_of_the_weights_in_mixed_precision(
    tmp_path: Path, place: str, precision: Any
) -> None:
    amp, ema = AMP(precision, init_scale=2.0), EMA(decay=0.4)
    module = _Module()
    data = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    callbacks = [amp, ema] if place == "before" else [ema, amp]
    trainer = Trainer(**QUIET, max_epochs=3, callbacks=callbacks)
    trainer.fit(module, data, data)
    assert module.layer.weight.dtype == torch.float32
    assert module.layer.weight.item() == pytest.approx(_average(12, 0.4)[11])


def test_small_steps_move_the_average_of_bfloat16() -> None:
    module, data = nn.Linear(1, 1, bias=False).bfloat16(), EMA(decay=0.999)
    nn.init.zeros_(module.weight)
    trainer = SimpleNamespace(global_step=0)
    data.load_state_dict({"step_count": 10**6})  # warmed up
    data.on_train_start(trainer, module)
    nn.init.ones_(module.weight)
    for step in range(1, 3001):
        trainer.global_step = step
        data.on_train_batch_end(trainer, module, None, None, 0)
    data.on_train_end(trainer, module)
    assert module.weight.item() == pytest.approx(1 - 0.999**3000, abs=0.004)


@pytest.mark.parametrize("other", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_another_average_beside_it_is_refused(tmp_path: Path, other: Callback) -> None:
    with pytest.raises(ConfigError, match=r"EMA: \w+ averages the weights too.*remove one of them"):
        _fit(tmp_path, 1, None, other)


def test_a_decay_out_of_range_and_spread_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay=1.0 must be between 0 and 1"):
        EMA(decay=1.0)
    trainer = Trainer(**QUIET)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(ConfigError, match=r"FSDPStrategy shards the weights.*callbacks.ema=null"):
        EMA().setup(trainer, _Module(), "fit")


class _BreaksItsDevice(_FailsInThirdStep):
    is_broken = False

    def training_step(self, *args: Any) -> Any:
        try:
            return super().training_step(*args)
        except ZeroDivisionError:
            self.is_broken = True
            raise

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("the device does not answer")
        return super().named_parameters(*args, **options)


def test_an_average_that_cannot_be_read_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    module, ema = _BreaksItsDevice(), EMA(decay=0.4)
    data = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[ema])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, data)
    assert "the module keeps the weights of its last step" in caplog.text
    assert module.layer.weight.item() == -2.0
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.parametrize(
    ("kind", "options"), [(_Tied, {}), (_Module, {"precision": "bf16-true"})], ids=["tied", "bf16"]
)
def test_any_module_goes_on_exactly(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    whole = _fit(tmp_path / "whole", kind=kind, **options)
    _fit(tmp_path / "part", 1, kind=kind, **options)
    start = str(tmp_path / "part" / "epoch=0.ckpt")
    resumed = _fit(tmp_path / "part", 3, start, kind=kind, **options)
    assert resumed.validated == whole.validated[1:]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor)


def test_a_checkpoint_that_is_saved_after_training_goes_on_from_the_weights(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    options = QUIET | {"num_sanity_val_steps": 0}
    module, whole = _Module(), _Module()
    trainer = Trainer(**options, max_epochs=1, callbacks=[EMA(decay=0.4)])
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    Trainer(**options, max_epochs=2, callbacks=[EMA(decay=0.4)]).fit(whole, data)
    resumed = _Module()
    Trainer(**options, max_epochs=2, callbacks=[EMA(decay=0.4)]).fit(
        resumed, data, ckpt_path=tmp_path / "after.ckpt", weights_only=True
    )
    assert resumed.layer.weight.item() == whole.layer.weight.item()
    nn.init.zeros_(module.layer.weight)
    trainer.save_checkpoint(tmp_path / "changed.ckpt")
    changed = torch.load(tmp_path / "changed.ckpt", weights_only=True)
    assert changed["state_dict"]["layer.weight"].item() == 0.0
    assert KEY not in changed
