from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_data.callbacks.amp import AMP
from lit_data.callbacks.precision.history import WatchedScaler
from lit_data.errors import ConfigError
from tests.notes import Notes

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")

SCALE, BATCHES = 1024.0, 6


class Gan(L.LightningModule):
    """Two optimizers; the loss of one of them overflows in the given batches."""

    def __init__(self, how: str, bad: range = range(0), worse: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])
        self.how, self.bad, self.worse = how, bad, worse
        self.notes = Notes("amp/")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            factor = float("inf") if batch_idx in self.bad and index == self.worse else 1.0
            self.step(
                optimizer,
                lambda: self.nets[1](self.nets[0](batch)).float().square().mean() * factor,  # noqa: B023
            )

    def step(self, optimizer: Any, measure: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        if self.how == "closure":
            optimizer.step(lambda: self.manual_backward(measure()))
            return
        if self.how == "toggled":
            with optimizer.toggle_model():
                self.manual_backward(measure())
        elif self.how == "named":
            self.trainer.strategy.backward(measure(), optimizer)
        else:
            self.manual_backward(measure())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), 0.01) for net in self.nets]


def train(
    model: Gan, *callbacks: L.Callback, ckpt: Path | None = None, epochs: int = 1
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        max_epochs=epochs,
        log_every_n_steps=1,
        logger=model.notes,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.rand(BATCHES, 2, 4, generator=torch.Generator().manual_seed(0))
    loader: DataLoader[torch.Tensor] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, loader, ckpt_path=ckpt, weights_only=True)
    return trainer


@pytest.mark.parametrize("how", ["toggled", "closure", "named"])
@pytest.mark.parametrize("worse", [0, 1])
def test_each_optimizer_has_its_scale(how: str, worse: int) -> None:
    model, amp = (
        Gan(how, range(2, 4), worse),
        AMP("fp16", init_scale=SCALE, scaler_per_optimizer=True),
    )
    train(model, amp)
    last, other = model.notes.rows[-1], 1 - worse
    assert (last[f"amp/scale_{worse}"], last[f"amp/scale_{other}"]) == (SCALE / 4, SCALE)
    assert (last[f"amp/skipped_steps_{worse}"], last[f"amp/skipped_steps_{other}"]) == (2, 0)
    assert (last["amp/scale"], last["amp/skipped_steps"]) == (SCALE / 4, 2)
    plain = Gan(how)
    train(plain, AMP("fp16", init_scale=SCALE))
    assert model.notes.rows[0]["amp/grad_norm"] == plain.notes.rows[0]["amp/grad_norm"]


def test_one_scale_for_all_counts_a_row_for_each_optimizer() -> None:
    model, amp = (
        Gan("plain", range(1, 6)),
        AMP("fp16", init_scale=SCALE, fall_back_after=3, fall_back_to="fp32"),
    )
    train(model, amp)
    assert [values["amp/scale"] for values in model.notes.rows] == [
        SCALE,
        SCALE / 2,
        SCALE / 4,
        1,
        1,
        1,
    ]
    assert "amp/scale_0" not in model.notes.rows[0]
    assert amp.summary() == {"amp/precision": "fp32", "amp/skipped_steps": 3}


def test_a_loss_for_no_known_optimizer_is_refused() -> None:
    amp = AMP("fp16", scaler_per_optimizer=True)
    with pytest.raises(
        ConfigError,
        match=r"which of 2 optimizers a loss is for - call manual_backward between toggle",
    ):
        train(Gan("plain"), amp)


def test_all_scales_are_resumed(tmp_path: Path) -> None:
    first = Gan("toggled", range(1, 3), 1)
    amp = AMP("fp16", init_scale=SCALE, scaler_per_optimizer=True)
    train(first, amp).save_checkpoint(tmp_path / "x.ckpt")
    second = Gan("toggled")
    train(second, AMP("fp16", scaler_per_optimizer=True), ckpt=tmp_path / "x.ckpt", epochs=2)
    for key in ("amp/scale_0", "amp/scale_1", "amp/skipped_steps_1"):
        assert second.notes.rows[-1][key] == first.notes.rows[-1][key]


def test_the_scalers_are_where_other_callbacks_look() -> None:
    class Look(L.Callback):
        seen: Any = None

        def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
            plugin: Any = trainer.strategy.precision_plugin
            self.seen = plugin.scalers, plugin.scaler, trainer.scaler

    look = Look()
    train(Gan("toggled"), AMP("fp16", scaler_per_optimizer=True), look)
    scalers, scaler, same = look.seen
    assert [type(each) for each in scalers] == [WatchedScaler] * 2
    assert scalers[1] is scaler is same
