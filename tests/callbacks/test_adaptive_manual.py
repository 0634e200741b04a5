"""Manual optimisation under AdaptiveBatchSize: modules that cut their batches get smaller micro-batches, others an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.callbacks.wrapping import wrap
from lit_data.core.batch_form import cut_evenly
from lit_data.core.errors import BatchMemoryError
from lit_data.testing import QUIET
from tests.callbacks.test_adaptive_twins import assert_same
from tests.helpers.limited_memory import out_of_memory
from tests.helpers.notes import Notes

BATCH, BATCHES = 8, 4

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


def _record() -> tuple[Callable[[int], None], Callable[[], list[int]]]:
    """Return a way to note numbers and one to read them, out of the reach of what puts a step back."""
    numbers: list[int] = []
    return numbers.append, numbers.copy


class Pair(LightningModule):
    """Two nets that learn in turn, in micro-batches, with noise, dropout, batch norm and a metric.

    Args:
        point: Where memory runs out: `first`, `second` or `backward`; nowhere by default.
        fitting: Most samples that fit there.
        begin: Batches before it does.
        size: Samples at once; none: the whole batch.
    """

    def __init__(
        self, point: str = "", *, fitting: int = 4, begin: int = 0, size: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.point, self.fitting, self.begin = point, fitting, begin
        self.micro_batch_size = size
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen = MeanMetric()
        self.refuse, self.refused = _record()
        self.counted = 0

    def add_gradients(self, optimizer: Any, learn: Callable[[Any], Any], batch: Any) -> Any:
        with self.toggled_optimizer(optimizer):
            return learn(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for name, optimizer, learn in (("first", first, self.fool), ("second", second, self.judge)):
            loss = self.add_gradients(optimizer, learn, batch)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.log(name, loss, on_step=True, on_epoch=True)

    def fool(self, batch: Tensor) -> Tensor:
        return self.add_up(batch, "first", lambda part: -self.critic(self.make(part)).mean())

    def judge(self, batch: Tensor) -> Tensor:
        def measure(part: Tensor) -> Tensor:
            return (self.critic(self.make(part).detach()) - self.critic(part)).mean()

        return self.add_up(batch, "second", measure)

    def make(self, part: Tensor) -> Tensor:
        return self.generator(torch.randn(len(part), 4) + np.random.rand())  # noqa: NPY002

    def add_up(self, batch: Tensor, name: str, measure: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros(())
        for start, stop in cut_evenly(len(batch), self.micro_batch_size or len(batch)):
            loss = measure(batch[start:stop]) * (stop - start) / len(batch)
            self.counted += 1
            self.seen.update(loss.detach())
            self.check(name, stop - start)
            if name == "second":
                loss.register_hook(lambda gradient, n=stop - start: self.check("backward", n))
            self.manual_backward(loss)
            total += loss.detach()
        return total

    def check(self, point: str, samples: int) -> None:
        is_reached = self.trainer.fit_loop.total_batch_idx >= self.begin
        if point == self.point and samples > self.fitting and is_reached:
            self.refuse(samples)
            raise out_of_memory()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(net.parameters(), lr=2e-3) for net in (self.generator, self.critic)
        ]


def _fit(module: LightningModule, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    """Train; everything that a run leaves behind."""
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    images = torch.randn(BATCH * BATCHES, 6, generator=torch.Generator().manual_seed(0))
    defaults = {"max_epochs": 2, "log_every_n_steps": 1, "callbacks": list(callbacks)}
    ckpt = options.pop("ckpt_path", None)
    trainer = Trainer(**(QUIET | defaults | options))
    trainer.fit(module, DataLoader(images, BATCH), ckpt_path=ckpt)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "random": (torch.get_rng_state(), np.random.get_state()),  # noqa: NPY002
        "steps": trainer.global_step,
        "logged": dict(trainer.callback_metrics),
        "trained": [parameter.requires_grad for parameter in module.parameters()],
        "training": [part.training for part in module.modules()],
        "counted": getattr(module, "counted", 0),
        "mean": module.seen.metric_state if isinstance(module, Pair) else {},
        "scale": trainer.precision_plugin.state_dict(),
    }


def _follow(module: Pair, point: str, begin: int) -> Pair:
    """Let a twin use from a half of a batch on the size that fits."""

    def add_gradients(call: Callable[..., Any], optimizer: Any, learn: Any, batch: Any) -> Any:
        is_late = module.trainer.fit_loop.total_batch_idx >= begin
        if is_late and (point == "first" or learn.__name__ == "judge"):
            module.micro_batch_size = 4
        return call(optimizer, learn, batch)

    wrap(module, "add_gradients", add_gradients)
    return module


def _make_scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


@pytest.mark.parametrize(
    ("point", "begin", "scaled"),
    [("first", 0, True), ("first", 3, False), ("second", 3, True), ("backward", 0, False)],
)
def test_a_half_of_a_step_that_failed_is_that_which_never_did(
    point: str, begin: int, scaled: bool
) -> None:
    failing, adaptive = Pair(point, begin=begin), AdaptiveBatchSize(grow_after=None)
    failed = _fit(failing, adaptive, plugins=[_make_scaler()] if scaled else None)
    twin = _follow(Pair(), point, begin)
    assert failing.refused() == [8]
    assert_same(failed, _fit(twin, plugins=[_make_scaler()] if scaled else None))
    assert adaptive.summary() == {"batch/ooms": 1, "batch/size": 4}


def test_sizes_are_halved_until_one_fits_and_logged() -> None:
    notes, module = Notes("batch/"), Pair("second", fitting=2, begin=1)
    _fit(module, AdaptiveBatchSize(grow_after=None), max_epochs=1, logger=notes)
    assert module.refused() == [8, 4]
    sizes = [(row["batch/size"], row["batch/pieces"]) for row in notes.rows]
    assert sizes == [(8, 1), (2, 4), (2, 4), (2, 4)]
    assert [row["batch/ooms"] for row in notes.rows] == [0, 2, 2, 2]
    assert module.micro_batch_size is None, "the module has its own size back"


@pytest.mark.parametrize(("size", "options"), [(4, {}), (None, {"max_size": 4})])
def test_the_size_of_the_module_and_the_largest_one_are_never_exceeded(
    size: int | None, options: dict[str, int]
) -> None:
    notes = Notes("batch/")
    adaptive = AdaptiveBatchSize(initial_size=2, grow_after=2, **options)
    _fit(Pair(size=size), adaptive, logger=notes)
    assert [row["batch/size"] for row in notes.rows] == [2, 2, 4, 4, 4, 4, 4, 4]


class Seed(Callback):
    """Random generators, which are no part of a checkpoint, begin anew with each batch."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.fit_loop.total_batch_idx)
        np.random.seed(trainer.fit_loop.total_batch_idx)  # noqa: NPY002


def test_a_run_goes_on_with_its_size_to_the_bit(tmp_path: Path) -> None:
    path, adaptive = tmp_path / "x.ckpt", AdaptiveBatchSize(grow_after=None)
    whole, first, second = Pair("first"), Pair("first"), Pair("first")
    expected = _fit(whole, AdaptiveBatchSize(grow_after=None), Seed())
    _fit(first, AdaptiveBatchSize(grow_after=None), Seed(), max_epochs=1)
    first.trainer.save_checkpoint(path)
    resumed = _fit(second, adaptive, Seed(), ckpt_path=path)
    assert (first.refused(), second.refused()) == ([8], [])
    assert_same(resumed["weights"], expected["weights"])
    assert adaptive.summary() == {"batch/ooms": 1, "batch/size": 4}


def test_the_smallest_size_that_does_not_fit_ends_the_run() -> None:
    text = "batch 2: the smallest micro-batch of 2 samples of tensor 6 float32 does not fit"
    with pytest.raises(BatchMemoryError, match=text):
        _fit(Pair("second", fitting=1, begin=2), AdaptiveBatchSize(min_size=2))


class Uncut(LightningModule):
    """One without micro-batches; memory runs out in a batch, or in validation above 4 samples."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.net, self.bad = nn.Linear(6, 1), bad
        self.note_size, self.sizes = _record()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx in self.bad:
            raise out_of_memory()
        optimizer = self.optimizers()
        self.note_size(len(batch))
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).mean())
        optimizer.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note_size(-len(batch))
        if len(batch) > 4:
            raise out_of_memory()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_error_of_any_other_module_passes_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, adaptive = Uncut(2), AdaptiveBatchSize(initial_size=2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _fit(module, adaptive)
    assert str(caught.value) == str(out_of_memory())
    assert caught.value.__notes__ == [
        "AdaptiveBatchSize cannot repeat steps of Uncut, which uses manual optimization: lower "
        "data.loader.batch_size, or let the module accumulate its gradients in micro-batches, as "
        "GANModule does"
    ]
    assert module.sizes() == [8, 8], "whole batches, and no step is begun again"
    assert adaptive.summary() == {"batch/ooms": 0, "batch/size": 8}
    assert "manual optimization: out-of-memory errors are raised, initial_size=2" in caplog.text


def test_without_an_error_the_run_is_that_without_the_callback() -> None:
    assert_same(_fit(Pair(size=3), AdaptiveBatchSize()), _fit(Pair(size=3)))
