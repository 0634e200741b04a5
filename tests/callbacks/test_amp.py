import math
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.callbacks import precision as plugin
from lit_data.callbacks.amp import AMP
from lit_data.callbacks.events import Event
from lit_data.core.errors import ConfigError, LitDataError
from lit_data.testing import QUIET
from tests.helpers.notes import Notes

SCALE, BATCHES = 1024.0, 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Model(LightningModule):
    """A loss that is not finite in some batches; notes dtypes, weights before each batch and gradient norms."""

    def __init__(self, bad: range = range(0), factor: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.bad, self.factor = bad, factor
        self.dtypes = []
        self.weights = []
        self.norms = []
        self.notes = Notes("amp/")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.weights.append(self.layer.weight.detach().clone())
        loss = self.validation_step(batch).float().square().mean()
        return loss * self.factor if batch_idx in self.bad else loss

    def validation_step(self, batch: Tensor) -> Tensor:
        out = self.layer(batch)
        self.dtypes.append(out.dtype)
        return out

    test_step = predict_step = validation_step

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Listener(Callback):
    def __init__(self) -> None:
        self.events = []

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        self.events.append(event)


def loader() -> DataLoader[Tensor]:
    data = torch.rand(BATCHES, 2, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=None)


def train(model: Any, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = make_trainer(*callbacks, **{"logger": model.notes, **options})
    trainer.fit(model, loader())
    return trainer


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    settings = QUIET | {"max_epochs": 1, "log_every_n_steps": 1} | options
    return Trainer(**settings, callbacks=list(callbacks))


@pytest.fixture(params=[True, False])
def fast_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(plugin, "has_fast_bf16", lambda device_type: request.param)
    return bool(request.param)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_stage_runs_in_the_precision_and_the_trainer_gets_its_plugin_back(
    precision: Any,
) -> None:
    model, amp = Model(), AMP(precision, init_scale=SCALE)
    trainer = make_trainer(amp)
    before = trainer.strategy.precision_plugin
    for stage in ("fit", "validate", "test", "predict", "fit"):
        model.dtypes.clear()
        getattr(trainer, stage)(model, loader())
        assert set(model.dtypes) <= {DTYPES[precision]}
        assert trainer.strategy.precision_plugin is before
        trainer.fit_loop.max_epochs = 2
    assert len(model.dtypes) == BATCHES
    assert amp.summary() == {"amp/precision": precision, "amp/skipped_steps": 0}


@pytest.mark.parametrize(("precision", "clip"), [("bf16", 0.1), ("fp16", None), ("fp16", 0.1)])
def test_training_is_that_of_lightnings_own_plugin(precision: Any, clip: float | None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if precision == "fp16" else None
    flag = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[precision]
    theirs, ours = Model(), Model()
    train(theirs, plugins=[LightningMixedPrecision(flag, "cpu", scaler)], gradient_clip_val=clip)
    train(ours, AMP(precision, init_scale=SCALE), gradient_clip_val=clip)
    assert torch.equal(ours.layer.weight, theirs.layer.weight)
    assert [values["amp/grad_norm"] for values in ours.notes.rows] == ours.norms == theirs.norms
    assert clip is None or min(ours.norms) > clip


@pytest.mark.parametrize(("flag", "precision"), [("bf16-mixed", "fp32"), ("64-true", "bf16")])
def test_a_trainer_that_sets_the_precision_is_refused(flag: str, precision: Any) -> None:
    message = rf"Trainer\(precision='{flag}'\) .* already - allowed: '32-true'.* - remove that"
    with pytest.raises(ConfigError, match=message):
        train(Model(), AMP(precision), precision=flag)


@pytest.mark.parametrize("flag", ["bf16-mixed", "64-true"])
def test_auto_leaves_a_trainer_its_own_precision(flag: str) -> None:
    model, plain, amp = Model(), Model(), AMP()
    trainer = train(model, amp, precision=flag)
    train(plain, precision=flag)
    assert torch.equal(model.layer.weight, plain.layer.weight)
    assert set(model.dtypes) == set(plain.dtypes)
    assert trainer.precision == flag
    assert amp.summary() == {}
    assert not any(name.startswith("amp/") for row in model.notes.rows for name in row)


def test_a_second_amp_is_refused() -> None:
    class Other(AMP):
        """Lightning itself refuses two callbacks of the same class and state key."""

    text = r"precision='bf16-mixed'\) sets the precision by MixedPrecision already"
    with pytest.raises(ConfigError, match=text):
        train(Model(), AMP("bf16"), Other("bf16"))


def test_one_bad_batch_skips_its_window_once(caplog: pytest.LogCaptureFixture) -> None:
    model, listener, amp = Model(range(4, 5)), Listener(), AMP("fp16", init_scale=SCALE)
    train(model, amp, listener, accumulate_grad_batches=3)
    weights = [*model.weights, model.layer.weight]
    is_skipped = [torch.equal(weights[index], weights[index + 1]) for index in (2, 5, 7)]
    assert is_skipped == [False, True, False]
    assert [values["amp/scale"] for values in model.notes.rows] == [SCALE, SCALE / 2, SCALE / 2]
    assert [values["amp/skipped_steps"] for values in model.notes.rows] == [0, 1, 1]
    (event,) = listener.events
    assert (event.name, event.values) == ("precision", {"scale": SCALE / 2})
    assert event.text.endswith("skipped in batch 3-5 of epoch 0; the loss scale is 512 now")
    assert event.text in caplog.messages


@pytest.mark.parametrize(("fall_back_to", "every"), [("auto", 1), ("fp32", 1), ("auto", 4)])
def test_many_skips_in_a_row_fall_back(
    fast_bf16: bool, fall_back_to: Any, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, listener = Model(range(1, 4)), Listener()
    amp = AMP("fp16", init_scale=SCALE, fall_back_after=3, fall_back_to=fall_back_to)
    train(model, amp, listener, log_every_n_steps=every)
    target = fall_back_to if fall_back_to != "auto" else "bf16" if fast_bf16 else "fp32"
    assert model.dtypes == [torch.float16] * 4 + [DTYPES[target]] * 4
    assert amp.summary() == {"amp/precision": target, "amp/skipped_steps": 3}
    assert model.notes.rows[-1]["amp/scale"] == 1
    assert listener.events[-1].values == {"scale": 1.0}
    text = f"AMP: 3 or more optimizer steps in a row were skipped in fp16; continuing in {target}"
    assert listener.events[-1].text == text
    assert f"{text}. To avoid it, lower" in caplog.text
    assert all(torch.isfinite(weight).all() for weight in model.weights)


def test_a_rank_falls_back_when_another_must(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trainer = Model(), make_trainer(AMP("bf16"))
    monkeypatch.setattr(
        trainer.strategy, "reduce_boolean_decision", lambda decision, all: len(model.weights) == 3
    )
    trainer.fit(model, loader())
    assert model.dtypes == [torch.bfloat16] * 3 + [torch.float32] * 5


@pytest.mark.parametrize(
    ("precision", "what"), [("fp16", "optimizer steps .* were skipped"), ("fp32", "no finite")]
)
def test_or_the_run_ends_with_an_error(precision: Any, what: str) -> None:
    amp = AMP(precision, init_scale=SCALE, fall_back_after=2, fall_back_to="raise")
    model, trainer = Model(range(8)), make_trainer(amp)
    text = f"2 or more .*{what}.* - allowed: fewer than fall_back_after - lower the"
    with pytest.raises(LitDataError, match=text):
        trainer.fit(model, loader())
    assert len(model.dtypes) == 2
    assert type(trainer.strategy.precision_plugin) is LightningPrecision


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_losses_that_are_not_finite_end_bf16(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, amp = Model(range(1, 8), factor), AMP("bf16", fall_back_after=3)
    train(model, amp, accumulate_grad_batches=2)
    assert model.dtypes == [torch.bfloat16] * 4 + [torch.float32] * 4
    assert "the loss is not finite in batch 2, 3 of epoch 0" in caplog.text
    assert "had no finite loss in bf16 and the weights are not finite: resume from" in caplog.text
    assert amp.summary() == {"amp/precision": "fp32", "amp/skipped_steps": 0}


class Pair(LightningModule):
    """Two optimizers under manual optimisation; both losses overflow in the given batches, or one of them."""

    def __init__(self, bad: range = range(0), worse: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])
        self.bad, self.worse = bad, worse
        self.notes = Notes("amp/")

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            overflows = batch_idx in self.bad and self.worse in (index, None)
            optimizer.zero_grad()
            loss = self.nets[1](self.nets[0](batch)).float().square().mean()
            self.manual_backward(loss * (math.inf if overflows else 1.0))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), 0.01) for net in self.nets]


@pytest.mark.parametrize("worse", [0, 1])
def test_optimizers_share_a_scale_and_step_apart(worse: int) -> None:
    model, amp = Pair(range(2, 4), worse), AMP("fp16", init_scale=SCALE)
    before = [net.weight.detach().clone() for net in model.nets]
    train(model, amp, limit_train_batches=4)
    last = model.notes.rows[-1]
    assert (last["amp/scale"], last["amp/skipped_steps"]) == (SCALE / 4, 2)
    assert set(last) == {"amp/scale", "amp/skipped_steps", "amp/grad_norm"}
    for net, weight in zip(model.nets, before, strict=True):
        assert not torch.equal(net.weight, weight)
