"""Hooks get each batch as without `AdaptiveBatchSize`: whole, on its device, and what they change holds."""

import logging
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lit_data.callbacks import AdaptiveBatchSize, SampleDigest
from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.testing import QUIET
from tests.helpers.limited_memory import FaultPlan, Point, install

ALL = ("train", "validate", "test", "predict")


class Plain(LightningModule):
    """A linear net on pairs of values and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[Tensor] = []

    def _loss(self, batch: Any) -> Tensor:
        values, _ = batch
        self.seen.append(values.clone())
        return self.layer(values).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Formatted(Plain):
    """Its transfer gives batches another form, and noise."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Tensor]:
        values, numbers = batch
        return {"x": values + torch.randn_like(values), "number": numbers}

    def _loss(self, batch: Any) -> Tensor:
        return super()._loss((batch["x"], batch["number"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch["x"])


class Watch(Callback):
    """Keeps the batches of all hooks."""

    def __init__(self) -> None:
        self.starts: list[Any] = []
        self.ends: list[Any] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.starts.append(_copy(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends.append(_copy(batch))

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end


def _copy(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: part.clone() for key, part in batch.items()}
    return [part.clone() for part in batch]


def _list_parts(batch: Any) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else batch


def make_loader() -> DataLoader[Any]:
    values = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(values, torch.arange(24)), 8)


def run(
    module: LightningModule,
    stage: str,
    *callbacks: Callback,
    point: Point | None = None,
    most: int = 3,
) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    if point is not None:
        install(module, FaultPlan(point, lambda n, step, micro: n > most, stages=ALL))
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=list(callbacks))
    if stage == "train":
        trainer.fit(module, make_loader())
        return None
    entry = {"validate": trainer.validate, "test": trainer.test, "predict": trainer.predict}[stage]
    return entry(module, make_loader(), **({} if stage == "predict" else {"verbose": False}))


def assert_same_batches(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        for part, other_part in zip(_list_parts(one), _list_parts(other), strict=True):
            assert torch.equal(part, other_part)


@pytest.mark.parametrize("stage", ALL)
@pytest.mark.parametrize("kind", [Plain, Formatted])
@pytest.mark.parametrize("point", ["forward_start", None])
def test_hooks_get_what_they_would_without(kind: type[Plain], stage: str, point: Any) -> None:
    adaptive = AdaptiveBatchSize(initial_size=None if point else 3, grow_after=None)
    whole, cut = Watch(), Watch()
    run(kind(), stage, whole)
    module = kind()
    run(module, stage, cut, adaptive, point=point)
    assert_same_batches(cut.starts, whole.starts)
    assert_same_batches(cut.ends, whole.ends)
    if stage != "predict":  # the step saw what the hooks saw
        last = torch.cat(module.seen)[-8:]
        assert torch.equal(last, _list_parts(whole.ends[-1])[0])


class Mix(Callback):
    """Changes each batch in place."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batch[0].mul_(0.5)
        batch[1] = batch[1] + 1


def test_what_a_hook_changes_holds_for_the_batch_that_fails() -> None:
    weights = []
    for point in (None, "forward_start", "backward"):
        module = Plain()
        run(module, "train", Mix(), AdaptiveBatchSize(grow_after=None), point=point)
        weights.append(module.layer.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])
    torch.testing.assert_close(weights[2], weights[0])


class InPlace(Plain):
    """Normalises its batch in place, as many do."""

    def _loss(self, batch: Any) -> Tensor:
        batch[0].sub_(1)
        return super()._loss(batch)


def test_a_batch_that_a_failed_step_changed_is_never_trained_twice() -> None:
    with pytest.raises(BatchMemoryError, match="changed its batch in place"):
        run(InPlace(), "train", AdaptiveBatchSize(grow_after=None), point="backward")
    # Evaluation keeps a copy, as tensors of inference have no versions.
    module, other = InPlace(), InPlace()
    run(module, "test", AdaptiveBatchSize(grow_after=None), point="forward_middle")
    run(other, "test", AdaptiveBatchSize(initial_size=2, grow_after=None))
    assert torch.equal(torch.cat(module.seen[-4:]), torch.cat(other.seen[-4:]))


def test_the_digest_is_that_of_whole_batches() -> None:
    digests = []
    for adaptive, point in (
        ([], None),
        ([AdaptiveBatchSize(initial_size=3, grow_after=None)], None),
        ([AdaptiveBatchSize(grow_after=None)], "backward"),
        ([AdaptiveBatchSize(grow_after=None)], "transfer"),
    ):
        digest = SampleDigest()
        run(Plain(), "train", digest, *adaptive, point=point)
        digests.append(digest.summary())
    assert digests[1:] == digests[:1] * 3


# --- attributes


class Meter:
    def __init__(self) -> None:
        self.sum = 0
        self.values: list[int] = []


class Slotted:
    __slots__ = ("sum",)

    def __init__(self) -> None:
        self.sum = 0


class Inner(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.calls: dict[str, int] = {}
        self.shapes: list[int] = []


class Counting(Plain):
    """Counts samples in every way that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Inner()
        self.number, self.list, self.dict, self.set = 0, [], {"a": {"n": 0}}, set()
        self.lists, self.counter, self.deque = defaultdict(list), Counter(), deque(maxlen=100)
        self.array, self.tensor, self.tuple = np.zeros(2), torch.zeros(2), ([], torch.zeros(1))
        self.meter, self.slotted, self.space = Meter(), Slotted(), SimpleNamespace(n=0)
        self.metrics = {"mean": MeanMetric()}
        self.hidden = [nn.BatchNorm1d(4)]
        self.generator, self.random = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def _loss(self, batch: Any) -> Tensor:
        values, _ = batch
        n = len(values)
        self.number += n
        self.list.append(n)
        self.dict["a"]["n"] += n
        self.set.add((n, self.trainer.fit_loop.epoch_loop.batch_idx))
        self.lists["n"].append(n)
        self.counter["n"] += n
        self.deque.append(n)
        self.array += n
        self.tensor += n
        self.tuple[0].append(n)
        self.tuple[1].add_(n)
        self.meter.sum += n
        self.meter.values.append(n)
        self.slotted.sum += n
        self.space.n += n
        self.metrics["mean"].update(values.sum())
        self.hidden[0](values)
        self.layer.calls["n"] = self.layer.calls.get("n", 0) + n
        self.layer.shapes.append(n)
        noise = torch.rand(n, 4, generator=self.generator) + self.random.random()
        return super()._loss((values + 0.1 * noise.float(), _))

    def state(self) -> dict[str, Any]:
        return {
            "plain": [self.number, self.list, self.dict, self.set, dict(self.lists)],
            "more": [self.counter, list(self.deque), self.array.tolist(), self.tensor.tolist()],
            "held": [self.tuple[0], self.tuple[1].tolist(), vars(self.meter), self.slotted.sum],
            "space": [self.space.n, self.metrics["mean"].compute().item()],
            "hidden": [buffer.tolist() for buffer in self.hidden[0].buffers()],
            "inner": [self.layer.calls, self.layer.shapes],
            "random": [self.generator.get_state().tolist(), self.random.random()],
            "weights": self.layer.weight.tolist(),
        }


@pytest.mark.parametrize("point", ["forward_middle", "backward"])
def test_a_repeated_step_counts_once(point: Point) -> None:
    failed, whole = Counting(), Counting()
    run(failed, "train", AdaptiveBatchSize(grow_after=None), point=point)
    run(whole, "train", AdaptiveBatchSize(initial_size=2, grow_after=None))
    expected = whole.state()
    for name, value in failed.state().items():
        assert value == expected[name], name


# --- predictions


def _predict(make: Any, most: int = 3) -> Any:
    class Predicting(Plain):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return make(self.layer(batch[0]), batch[1])

    return run(
        Predicting(),
        "predict",
        AdaptiveBatchSize(grow_after=None),
        point="forward_start",
        most=most,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda y, i: y[0, :1],
        lambda y, i: SimpleNamespace(y=y, first=y[0, :1]),
        lambda y, i: {"box": (y > 0).nonzero()},
        lambda y, i: len(y),
        lambda y, i: f"{len(y)} of {i[0]}",
        lambda y, i: [t for t in y if t.sum() > 0],
        lambda y, i: None if i[0] == 2 else y,
    ],
)
def test_predictions_that_cannot_be_joined_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be joined to that of the whole batch: return"):
        _predict(make, most=2)


def test_a_mean_of_predictions_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _predict(lambda y, i: y.sum())
    assert sum("become means over the samples" in text for text in caplog.messages) == 1


# --- two loaders


def test_loaders_of_two_sizes_are_refused_with_a_cure(caplog: pytest.LogCaptureFixture) -> None:
    class Both(Plain):
        def _loss(self, batch: Any) -> Tensor:
            return super()._loss(batch["l"]) + super()._loss(batch["u"])

    def pairs(samples: int) -> TensorDataset:
        return TensorDataset(torch.randn(samples, 4), torch.zeros(samples, 1))

    loaders = {"l": DataLoader(pairs(16), 8), "u": DataLoader(pairs(32), 16)}
    module, digest = Both(), SampleDigest()
    install(module, FaultPlan("backward", lambda n, step, micro: True, times=1))
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[AdaptiveBatchSize(), digest])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"))
    assert "cannot tell how many samples" in caught.value.__notes__[0]
    assert digest.summary() == {}
    assert any("whose samples cannot be counted" in text for text in caplog.messages)


class CountsMoved(Plain):
    """Counts in its transfer hooks what reaches them, of which more than half a batch does not fit."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.met: dict[str, int] = {"samples": 0}
        self.metric = MeanMetric()
        setattr(self, hook, self._count)

    def _count(self, batch: Any, *_: Any) -> Any:
        self.met["samples"] += len(batch[0])
        self.metric.update(batch[0])
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch


@pytest.mark.parametrize("run", ["fit", "validate"])
@pytest.mark.parametrize("hook", ["transfer_batch_to_device", "on_after_batch_transfer"])
def test_what_a_transfer_hook_counted_before_it_failed_is_undone(run: str, hook: str) -> None:
    module = CountsMoved(hook)
    data = TensorDataset(torch.arange(64.0).view(16, 4), torch.arange(16))
    callbacks = [AdaptiveBatchSize(grow_after=None)]
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=callbacks)
    getattr(trainer, run)(module, DataLoader(data, 8))
    assert module.met == {"samples": 16}
    assert module.metric.compute() == data.tensors[0].mean()


class Packed(Formatted):
    """Its transfer lays the samples along the second dimension, as recurrent nets want them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Tensor]:
        values, numbers = batch
        return {"x": values.T.repeat(2, 1), "number": numbers}  # [8, samples]

    def _loss(self, batch: Any) -> Tensor:
        return Plain._loss(self, (batch["x"][:4].T, batch["number"]))


def test_a_form_that_cannot_be_cut_is_transferred_anew() -> None:
    module = Packed()
    run(module, "train", AdaptiveBatchSize(grow_after=None), point="forward_start")
    expected = torch.cat([values for values, _ in make_loader()])
    assert torch.equal(torch.cat(module.seen), expected)


def test_what_cannot_be_undone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Counting()
    module.scores = dict.fromkeys(range(5000), 0)
    module.numbers = iter(range(9))
    with caplog.at_level(logging.WARNING):
        run(module, "train", AdaptiveBatchSize(grow_after=None), point="forward_middle", most=2)
    told = [text for text in caplog.messages if "cannot be undone" in text]
    assert sorted(told) == [
        "AdaptiveBatchSize: the failed step changed Counting.numbers, a range_iterator, and this cannot be undone",
        "AdaptiveBatchSize: the failed step changed Counting.scores, a dict of 5000 entries, and this cannot be undone",
    ]
