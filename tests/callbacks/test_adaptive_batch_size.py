import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.callbacks.events import Event
from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.testing import QUIET
from tests.helpers.limited_memory import FaultPlan, Point, install, out_of_memory
from tests.helpers.notes import Notes

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

FAST = {**QUIET, "max_epochs": 1, "limit_val_batches": 0, "log_every_n_steps": 1}


class Regression(LightningModule):
    """A linear model without randomness; keeps the gradients of each optimizer step."""

    def __init__(self, step: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.gradients = []
        if step is not None:
            self.training_step = step.__get__(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(_find(batch)).squeeze(1) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(_find(batch)))
        return loss

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [parameter.grad for parameter in self.layer.parameters()]
        self.gradients.append([grad.clone() for grad in grads if grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _find(batch: Any) -> Tensor:
    """The [B, 3] float64 tensor of a batch."""
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, dict) else batch
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return next(part for part in tensors if part.ndim == 2 and part.shape[1] == 3)


def data(samples: int) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def fit(
    module: LightningModule, loader: Any, *callbacks: Callback, seed: int = 0, **options: Any
) -> tuple[LightningModule, Trainer]:
    torch.manual_seed(seed)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    trainer = Trainer(**(FAST | options), callbacks=list(callbacks))
    trainer.fit(module, loader)
    return module, trainer


def adaptive(size: int | None = None, **options: Any) -> AdaptiveBatchSize:
    return AdaptiveBatchSize(initial_size=size, grow_after=None, **options)


# --- memory that is too little


@pytest.mark.parametrize(("point", "index"), [("transfer", 2), ("backward", 2)])
def test_one_sample_that_does_not_fit(point: Point, index: int, tmp_path: Path) -> None:
    module, asked = Regression(), out_of_memory(asked_bytes=3 * 2**30)
    install(module, FaultPlan(point, lambda n, step, micro: step == index, error=lambda n: asked))
    loader = DataLoader(
        [{"image": image, "index": 10 * number} for number, image in enumerate(data(16))], 4
    )
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0)
    text = (
        rf"batch {index} \(sample {40 * index}\): one sample of image 3 float64, index 1 int64 does not fit into "
        r"memory: asked for 3\.00 GiB, .* GiB free \(CUDA out of memory.*\)\. Use a smaller patch"
    )
    callback = adaptive()
    with pytest.raises(BatchMemoryError, match=text) as caught:
        fit(module, loader, callback, saves, enable_checkpointing=True)
    assert caught.value.exit_code == 5
    assert callback.state_dict()["ooms"] == 3
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert last["global_step"] == index
    assert last["state_dict"].keys() == module.state_dict().keys()


def test_no_piece_is_smaller_than_min_size() -> None:
    module = Regression()
    faults = install(module, FaultPlan("forward_start", lambda n, step, micro: True))
    text = "the smallest micro-batch of 3 samples of tensor 3 float64 does not fit"
    with pytest.raises(BatchMemoryError, match=text):
        fit(module, DataLoader(data(9), 9), adaptive(min_size=3))
    assert faults.refused == [9, 5, 3]


# --- other errors


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("transfer", Odd("odd")),
        ("augment", KeyError("x")),
        ("forward_start", RuntimeError("CUDA error: device-side assert triggered")),
        ("forward_middle", Odd("odd")),
        ("backward", RuntimeError("CUDA error: device-side assert triggered")),
        ("optimizer", KeyError("x")),
    ],
)
def test_other_errors_pass_unchanged(point: Point, error: Exception) -> None:
    module, callback = Regression(), adaptive(2)
    faults = install(
        module, FaultPlan(point, lambda n, step, micro: step == 1, error=lambda n: error)
    )
    with pytest.raises(type(error)) as caught:
        fit(module, DataLoader(data(8), 4), callback)
    assert caught.value is error
    assert len(faults.refused) == 1
    assert callback.state_dict()["ooms"] == 0


# --- memory


@pytest.mark.parametrize("point", ["forward_middle", "backward"])
def test_memory_of_a_failed_attempt_is_free_when_the_next_begins(point: Point) -> None:
    module, alive = Regression(), []
    activations = []
    loss = Regression.training_step

    def step(batch: Tensor, batch_idx: int) -> Tensor:
        alive.append(sum(found() is not None for found in activations))
        output = module.layer[1](module.layer[0](batch))
        activations.append(weakref.ref(output))
        return loss(module, batch, batch_idx) + output.sum() * 0

    module.training_step = step
    install(module, FaultPlan(point, lambda n, step, micro: n > 2))
    fit(module, DataLoader(data(8), 8), adaptive())
    assert alive == [0] * len(alive)
    assert len(alive) == 6


# --- gradients


def _gradient(batch: Any, size: int | None) -> list[Tensor]:
    module, _ = fit(Regression(), DataLoader([batch], batch_size=None), adaptive(size))
    assert isinstance(module, Regression)
    return module.gradients[0]


@pytest.mark.parametrize(("batch", "size"), [(2, 1), (5, 2), (7, 3), (8, 3), (9, 5)])
def test_the_gradient_is_that_of_the_whole_batch(batch: int, size: int) -> None:
    for whole, pieces in zip(
        _gradient(data(batch), None), _gradient(data(batch), size), strict=True
    ):
        assert_close(pieces, whole, rtol=1e-6, atol=0)


def test_ragged_fields_go_with_their_samples() -> None:
    seen = []

    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seen.append((batch["boxes_count"].tolist(), len(batch["boxes"])))
        return self.layer(batch["image"]).mean()

    counts = torch.arange(7) % 3
    batch = {"image": data(7), "boxes": torch.randn(int(counts.sum()), 4), "boxes_count": counts}
    fit(Regression(step), DataLoader([batch], batch_size=None), adaptive(3))
    assert seen == [([0, 1, 2], 3), ([0, 1], 1), ([2, 0], 2)]


class Sliced(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.cuts = []

    def count_samples(self, batch: Any) -> int:
        return len(batch["n"])

    def slice_batch(self, batch: Any, start: int, stop: int) -> Any:
        self.cuts.append((start, stop))
        return {"packed": batch["packed"][:, start:stop], "n": torch.zeros(stop - start)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["packed"].T, batch_idx)


def test_a_module_may_cut_its_batches_itself() -> None:
    batch = {"n": torch.zeros(7), "packed": data(7).T}
    module = Sliced()
    fit(module, DataLoader([batch], batch_size=None), adaptive(3))
    assert module.cuts == [(0, 3), (3, 5), (5, 7)]
    for whole, pieces in zip(_gradient(data(7), None), module.gradients[0], strict=True):
        assert_close(pieces, whole, rtol=1e-6, atol=0)


def test_a_batch_that_cannot_be_cut_says_what_to_do() -> None:
    batch = {"image": data(4), "pairs": torch.zeros(6, 2)}
    message = r"cannot tell how many samples a dict holds, whose tensors have the lengths 4, 6: .*slice_batch"
    with pytest.raises(ConfigError, match=message):
        fit(Regression(), DataLoader([batch], batch_size=None), adaptive(2))


# --- kinds of training steps


def _only_batch(self: Any, batch: Any) -> Tensor:
    return self.layer(batch).mean()


def _none(self: Any, batch: Any, batch_idx: int) -> None:
    return None


def _sometimes(self: Any, batch: Any, batch_idx: int) -> Tensor | None:
    return self.layer(batch).mean() if batch_idx else None


def _by_hand(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.layer(batch).mean()
    self.log("weighted", loss, on_step=True, on_epoch=True, batch_size=len(batch))
    return loss


@pytest.mark.parametrize("step", [_only_batch, _none, _sometimes, _by_hand])
@pytest.mark.filterwarnings("ignore:.*returned `None`.*")
def test_steps_as_others_write_them(step: Callable[..., Any]) -> None:
    failing = Regression(step)
    faults = install(failing, FaultPlan("forward_start", lambda n, step, micro: n > 2))
    first, trainer = fit(failing, DataLoader(data(8), 4), adaptive())
    second, twin = fit(Regression(step), DataLoader(data(8), 4), adaptive(2))
    assert faults.entered == [4, 2, 2, 2, 2]
    assert trainer.global_step == twin.global_step == 2
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    shown, expected = dict(trainer.callback_metrics), dict(twin.callback_metrics)
    for metrics in (shown, expected):
        metrics.pop("batch/ooms", None)
    assert shown == expected


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_a_step_that_fetches_its_batches_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Fetching(Regression):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, number, _ = next(dataloader_iter)
            if number == 3:
                raise out_of_memory()
            return self.layer(batch).mean()

    _, trainer = fit(Fetching(), DataLoader(data(8), 4), adaptive(2))
    assert trainer.global_step == 2
    assert "batch/size" not in trainer.callback_metrics
    assert "dataloader_iter: out-of-memory errors are raised, initial_size=2 has" in caplog.text
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Fetching(), DataLoader(data(8), 2), adaptive(2))
    assert (
        "elsewhere: in a hook between them, or in a step that takes data"
        in caught.value.__notes__[0]
    )


# --- the Trainer's ways


# --- state


def test_the_state_is_plain_and_goes_on(tmp_path: Path) -> None:
    module, callback = Regression(), adaptive()
    install(module, FaultPlan("backward", lambda n, step, micro: n > 2))
    _, trainer = fit(module, DataLoader(data(16), 8), callback, limit_train_batches=2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    state = callback.state_dict()
    assert json.loads(json.dumps(state)) == state != AdaptiveBatchSize().state_dict() == {}
    assert state["ooms"] == 2
    search = state["searches"]["train: tensor 3 float64"]
    assert (search["size"], search["fails"], search["fits"], search["clean"]) == (2, 4, 2, 2)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"][callback.state_key]
    assert saved == state

    module, again = Regression(), adaptive()
    faults = install(module, FaultPlan("backward", lambda n, step, micro: n > 2))
    trainer = Trainer(**(FAST | {"max_epochs": 2}), callbacks=[again])
    trainer.fit(module, DataLoader(data(16), 8), ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    assert faults.refused == []
    assert faults.entered == [2] * 8
    assert again.state_dict()["ooms"] == 2
    assert again.summary() == {"batch/ooms": 2, "batch/size": 2}


# --- what is told


class Listener(Callback):
    def __init__(self) -> None:
        self.heard = []

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        self.heard.append((event, type(error) if error else None))


def test_listeners_hear_of_errors_and_sizes(caplog: pytest.LogCaptureFixture) -> None:
    listener, module = Listener(), Regression()
    install(module, FaultPlan("backward", lambda n, step, micro: n > 3 and step == 1))
    with caplog.at_level(logging.WARNING, "lit_data"):
        fit(module, DataLoader(data(20), 10), listener, adaptive())
    expected = []
    for size, smaller, pieces in ((10, 5, 2), (5, 3, 4)):
        text = f"{size} samples ran out of memory: {out_of_memory()}"
        expected.append((Event("oom", text, {"size": size, "index": 1}), torch.OutOfMemoryError))
        text = f"{smaller} samples go through the model at once"
        expected.append((Event("batch_size", text, {"size": smaller, "pieces": pieces}), None))
    assert listener.heard == expected
    told = [record.message for record in caplog.records if record.name.startswith("lit_data")]
    assert told == [
        "batch 1: 10 samples at once ran out of memory; continuing with 5",
        "batch 1: 5 samples at once ran out of memory; continuing with 3",
    ]


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [2, 5]), (2, [2])])
def test_metrics_are_logged_when_the_trainer_logs(accumulate: int, steps: list[int]) -> None:
    notes = Notes("batch/")
    options = {"log_every_n_steps": 3, "accumulate_grad_batches": accumulate, "logger": notes}
    fit(Regression(), DataLoader(data(28), 4), adaptive(3), **options)
    assert notes.rows == [{"batch/size": 2.0, "batch/pieces": 2.0, "batch/ooms": 0.0}] * len(steps)
    assert notes.steps == steps


@pytest.mark.parametrize(("samples", "fits", "pieces"), [(8, 1, "1, 1, 1"), (5, 2, "2, 2, 1")])
def test_batch_norm_on_a_single_sample_ends_with_a_remedy(
    samples: int, fits: int, pieces: str
) -> None:
    module = Regression()
    module.layer.insert(1, nn.BatchNorm1d(5).double())
    install(module, FaultPlan("forward_start", lambda n, step, micro: n > fits))
    text = rf"^batch 0: {samples} samples run in micro-batches of {pieces}.* and batch norm"
    with pytest.raises(BatchMemoryError, match=text):
        fit(module, DataLoader(data(samples), samples), adaptive())
