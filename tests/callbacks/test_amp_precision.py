from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch.utils.data import DataLoader

from lit_data.app.checkpoints import take_precision
from lit_data.callbacks import precision as plugin
from lit_data.callbacks.amp import AMP
from lit_data.callbacks.precision import choose_precision
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET
from tests.helpers.notes import Notes

SCALE, BATCHES = 1024.0, 6


class Model(LightningModule):
    """Gradients overflow in the given batches of each epoch."""

    def __init__(self, *bad: int, fused: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 4, sparse=sparse)
        self.layer = torch.nn.Linear(4, 3)
        self.bad, self.fused, self.sparse = bad, fused, sparse
        self.notes = Notes("amp/")
        self.dtypes = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self.layer(self.embedding(batch))
        self.dtypes.append(out.dtype)
        loss = out.float().square().mean()
        return loss * float("inf") if batch_idx in self.bad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, fused=self.fused)


class Gaussian(Model):
    """Learns without an optimizer."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> None:
        return None


def train(model: Model, *callbacks: Callback, ckpt: Path | None = None, **options: Any) -> Trainer:
    data = torch.randint(5, (BATCHES, 2), generator=torch.Generator().manual_seed(0))
    settings = QUIET | {"max_epochs": 1, "log_every_n_steps": 1, "logger": model.notes} | options
    trainer = Trainer(**settings, callbacks=list(callbacks))
    loader = DataLoader(data, batch_size=None)
    trainer.fit(model, loader, ckpt_path=ckpt, weights_only=True)
    return trainer


@pytest.mark.parametrize(
    ("wanted", "device", "fast", "chosen"),
    [
        ("auto", "cuda", True, "bf16"),
        ("auto", "cuda", False, "fp16"),
        ("auto", "cpu", True, "bf16"),
        ("auto", "cpu", False, "fp32"),
        ("auto", "hpu", False, "fp32"),
        ("bf16", "cpu", False, "bf16"),
        ("fp16", "mps", False, "fp16"),
    ],
)
def test_the_precision_for_a_device(
    wanted: Any, device: str, fast: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "has_fast_bf16", lambda device_type: fast)
    assert choose_precision(wanted, device) == chosen


def test_a_device_without_autocast_is_refused() -> None:
    text = "precision is 'bf16' on the device 'hpu' - allowed there: 'auto' and 'fp32'"
    with pytest.raises(ConfigError, match=text):
        choose_precision("bf16", "hpu")


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_resumed_run_is_the_run_that_never_stopped(when: str, tmp_path: Path) -> None:
    whole, first, second = Model(0, 5), Model(0, 5), Model(0, 5)
    amps = [AMP("fp16", init_scale=SCALE, growth_interval=3) for _ in range(3)]
    train(whole, amps[0], max_epochs=2)
    saver = [ModelCheckpoint(tmp_path, "x")] if when == "during" else []
    trainer = train(first, amps[1], *saver, enable_checkpointing=bool(saver))
    if when == "after":
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    train(second, amps[2], ckpt=tmp_path / "x.ckpt", max_epochs=2)
    assert repr(first.notes.rows + second.notes.rows) == repr(whole.notes.rows)  # a norm is NaN
    assert torch.equal(second.layer.weight, whole.layer.weight)
    summary = {"amp/precision": "fp16", "amp/skipped_steps": 4}
    assert amps[2].summary() == amps[0].summary() == summary
    assert amps[2].state_dict()["in_a_row"] == {"0": 1}


def test_runs_go_on_with_lightnings_plugin_and_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    theirs = LightningMixedPrecision("16-mixed", "cpu", scaler)
    train(Model(5), plugins=[theirs]).save_checkpoint(tmp_path / "theirs.ckpt")
    model = Model()
    amp = AMP("fp16", growth_interval=7)
    trainer = train(model, amp, ckpt=tmp_path / "theirs.ckpt", max_epochs=2)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    assert [values["amp/scale"] for values in model.notes.rows] == [SCALE / 2] * BATCHES
    train(Model(), ckpt=tmp_path / "ours.ckpt", max_epochs=3, plugins=[theirs])
    assert scaler.get_scale() == SCALE  # it grew in the 7th step after the one that was skipped
    assert scaler.state_dict()["_growth_tracker"] == 5


@pytest.mark.parametrize(
    ("asked", "goes_on_in"), [("fp16", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")]
)
def test_a_run_that_fell_back_goes_on_so_unless_it_asks_for_more(
    asked: Any, goes_on_in: str, tmp_path: Path
) -> None:
    first = AMP("fp16", init_scale=SCALE, fall_back_after=3, fall_back_to="bf16")
    train(Model(1, 2, 3), first).save_checkpoint(tmp_path / "x.ckpt")
    again, second = Model(), AMP(asked)
    train(again, second, ckpt=tmp_path / "x.ckpt", max_epochs=2)
    assert set(again.dtypes) == {{"bf16": torch.bfloat16, "fp32": torch.float32}[goes_on_in]}
    assert second.summary() == {"amp/precision": goes_on_in, "amp/skipped_steps": 3}


@pytest.mark.filterwarnings("ignore:.*no optimizer", "ignore:.*returned `None`")
def test_statistics_that_no_optimizer_learns_are_in_float32_in_scores_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "has_fast_bf16", lambda device_type: True)
    model, amp = Gaussian(), AMP()
    train(model, amp).save_checkpoint(tmp_path / "x.ckpt")
    assert set(model.dtypes) == {torch.float32}
    assert amp.has_fallen_back

    scores = Gaussian()
    trainer = Trainer(**QUIET, callbacks=[AMP()])
    take_precision(trainer, tmp_path / "x.ckpt")
    trainer.test(scores, DataLoader(torch.randint(5, (BATCHES, 2)), batch_size=None))
    assert set(scores.dtypes) == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "algorithm"), [("fp32", "value"), ("bf16", "norm"), ("fp16", "value")]
)
def test_gradients_of_a_fused_optimizer_are_clipped_like_those_of_any(
    precision: Any, algorithm: str
) -> None:
    weights = []
    for fused, limit in ((False, 0.05), (True, 0.05), (False, None)):
        model = Model(fused=fused)
        options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
        train(model, AMP(precision, init_scale=SCALE), **options)
        weights.append(model.layer.weight)
    plain, clipped_by_fused, unclipped = weights
    torch.testing.assert_close(clipped_by_fused, plain, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(unclipped, plain, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_on_cuda(precision: Any) -> None:
    model, amp = Model(2), AMP(precision, init_scale=SCALE, fall_back_after=50)
    train(model, amp, accelerator="gpu", devices=1)
    assert set(model.dtypes) == {{"fp16": torch.float16, "bf16": torch.bfloat16}[precision]}
    assert amp.summary() == {
        "amp/precision": precision,
        "amp/skipped_steps": int(precision == "fp16"),
    }
