"""A run that ran out of memory ends, to the bit, as one that used the same pieces from the start."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.wrappers import Running

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import BatchMemoryError
from lit_data.testing import QUIET
from tests.helpers.limited_memory import FaultPlan, Faults, Point, install

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings(
        "ignore:Detected call of `lr_scheduler"
    ),  # a gradient scaler skips first steps
]

BATCH = 16
PIECEWISE = ("transfer", "augment", "forward_start", "forward_middle", "backward")
IN_TRANSFER = ("transfer", "augment")  # then it draws for each piece, else for the whole batch


class Busy(LightningModule):
    """Draws from all generators, counts, keeps lists, logs in every way, has batch norm, dropout and metrics."""

    def __init__(self, optimizer: str = "adam", *, draws_in_transfer: bool = True) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.draws_in_transfer = draws_in_transfer
        self.layers = nn.Sequential(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(12, 12),
            nn.ReLU(),
        )
        self.head = nn.Linear(12, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.scores = MetricCollection(
            {"recall": MulticlassRecall(3), "accuracy": MulticlassAccuracy(3)}
        )
        self.running = Running(MeanMetric(), window=3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("last", None)
        self.calls = self.zeroed = 0
        self.losses = []
        self.notes = []

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        images, labels = batch
        if not self.draws_in_transfer:
            return [1.1 * images + 0.1, labels]
        shift = 0.01 * np.random.rand() + 0.01 * random.random()  # noqa: NPY002
        return [images + 0.1 * torch.randn_like(images) + shift, labels]

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.zeroed += 1

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.notes.append("step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.notes.append("start")
        self.log(
            "start", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="sum", batch_size=1
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        images, labels = batch
        self.calls += 1
        self.first_batch = getattr(self, "first_batch", batch_idx)
        self.numbered = getattr(self, "numbered", 0) + 1
        logits = self.head(self.layers(images)).float()
        loss = nn.functional.cross_entropy(logits, labels) * (
            1 + 0.1 * np.random.rand() + 0.1 * random.random()  # noqa: NPY002
        )
        self.seen += torch.bincount(labels, minlength=3)
        self.last = logits.detach()
        self.losses.append(loss.item())
        self.accuracy(logits, labels)
        self.scores.update(logits, labels)
        self.running.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", loss.detach(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("samples", float(len(images)), on_step=True, on_epoch=True, reduce_fx="sum")
        if batch_idx % 2 == 0:
            self.log("sometimes", loss.detach(), on_step=True, reduce_fx="sum")
        return {"loss": loss, "logits": logits, "mean": logits.mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss, logits = outputs["loss"], outputs["logits"]
        self.notes.append(f"end {batch_idx} {loss.item()} {logits.sum().item()}")

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Diary(Logger):
    """Keeps what is logged."""

    name, version = "diary", "0"

    def __init__(self) -> None:
        super().__init__()
        self.pages = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not all(key.startswith("batch/") for key in metrics):
            self.pages.append((step, dict(metrics)))


class Sizes(Callback):
    """Notes the size of each batch, or makes `adaptive` use sizes that were noted."""

    def __init__(self, adaptive: AdaptiveBatchSize, wanted: Sequence[int] = ()) -> None:
        self.adaptive, self.wanted = adaptive, wanted
        self.found = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.found.append(self.adaptive._size_of_last_batch)
        if len(self.found) < len(self.wanted):
            for search in self.adaptive._replay.searches.values():
                search.change(self.wanted[len(self.found)])


def make_loader(samples: int = 72) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(samples) % 3), BATCH)


def run(
    callbacks: list[Callback],
    *,
    plans: Sequence[FaultPlan] = (),
    precision: str = "fp32",
    optimizer: str = "adam",
    clip: float | None = None,
    accumulate: int = 1,
    epochs: int = 1,
    scale: float = 2.0**16,
    draws_in_transfer: bool = True,
) -> tuple[dict[str, Any], list[Faults]]:
    """Train; everything that a step may change, and what the faults saw."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    module, diary = Busy(optimizer, draws_in_transfer=draws_in_transfer), Diary()
    faults = [install(module, plan) for plan in plans]
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    trainer = Trainer(
        **(QUIET | {"logger": diary}),
        max_epochs=epochs,
        log_every_n_steps=1,
        limit_val_batches=0,
        callbacks=callbacks,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        plugins=[scaled] if precision == "fp16" else None,
        precision="bf16-mixed" if precision == "bf16" else None,
    )
    trainer.fit(module, make_loader())
    return read_state(trainer, module, diary), faults


def read_state(trainer: Trainer, module: Busy, diary: Diary) -> dict[str, Any]:
    metrics = trainer.callback_metrics.items()
    shown = {key: value for key, value in metrics if not key.startswith("batch/")}
    return {
        "weights": module.state_dict(),
        "gradients": [parameter.grad for parameter in module.parameters()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "scaler": trainer.precision_plugin.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),  # noqa: NPY002
        "metrics": {
            name: (part.metric_state, part._update_count)
            for name, part in module.named_modules()
            if hasattr(part, "metric_state") and hasattr(part, "_update_count")
        },
        "collection": {
            name: metric.compute() for name, metric in module.scores.items() if metric.update_called
        },
        "shown": shown,
        "diary": diary.pages,
        "notes": module.notes,
        "losses": module.losses,
        "counts": [module.calls, module.zeroed, module.first_batch, module.numbered],
        "step": trainer.global_step,
        "loops": trainer._checkpoint_connector._get_loops_state_dict(),
    }


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Equal to the bit, with the path of the first difference."""
    assert type(left) is type(right), path
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), path
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), f"{path}: {left} {right}"
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}/{number}")
    else:
        assert left == right or left != left, f"{path}: {left} {right}"


def adaptive(initial_size: int | None = None) -> AdaptiveBatchSize:
    return AdaptiveBatchSize(initial_size=initial_size, grow_after=None)


def check_twins(
    plans: Sequence[FaultPlan], refused: Sequence[Sequence[int]], sizes: list[int], **options: Any
) -> None:
    """A run with faults against one that uses the sizes it came to."""
    first = adaptive()
    noted = Sizes(first)
    failed, faults = run([first, noted], plans=plans, **options)
    assert [fault.refused for fault in faults] == list(refused)
    assert noted.found == sizes
    assert first.state_dict()["ooms"] == sum(map(len, refused))
    second = adaptive(sizes[0])
    told = Sizes(second, sizes)
    whole, _ = run([second, told], **options)
    assert told.found == sizes
    assert_same(failed, whole)


def fail_at(point: Point, *places: tuple[int, int, int]) -> FaultPlan:
    """Fail at (samples of the piece, batch, place of the piece in the batch), each once."""
    left = list(places)

    def when(n: int, step: int, micro: int) -> bool:
        found = (n, step, micro) in left
        if found:
            left.remove((n, step, micro))
        return found

    return FaultPlan(point, when)


# A whole batch, then the second of two pieces, then the third of four, of batches of 16, 16, 16, 16
# and 8.
THREE_PLACES = ((16, 1, 0), (8, 1, 1), (4, 3, 2))


@pytest.mark.parametrize(
    ("precision", "accumulate", "clip"), [("fp32", 2, 0.5), ("bf16", 1, None), ("fp16", 2, 0.5)]
)
@pytest.mark.parametrize("point", PIECEWISE)
def test_twins(point: Point, precision: str, accumulate: int, clip: float | None) -> None:
    options = {"precision": precision, "accumulate": accumulate, "clip": clip}
    options["draws_in_transfer"] = point not in IN_TRANSFER
    check_twins([fail_at(point, *THREE_PLACES)], [[16, 8, 4]], [16, 4, 4, 2, 2], **options)


def test_twins_over_epochs_and_at_all_points_in_one_run() -> None:
    plans = [
        fail_at("transfer", (16, 0, 0)),
        fail_at("augment", (8, 1, 1)),
        fail_at("backward", (4, 6, 3)),
    ]
    sizes = [8, 4, 4, 4, 4, 4, 2, 2, 2, 2]
    check_twins(plans, [[16], [8], [4]], sizes, epochs=2, accumulate=2, draws_in_transfer=False)


@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2), ("fp16", 2)])
def test_without_errors_a_run_is_that_without_the_callback(accumulate: int, precision: str) -> None:
    options = {"accumulate": accumulate, "precision": precision}
    with_it, _ = run([AdaptiveBatchSize(grow_after=2)], clip=0.5, epochs=2, **options)
    without, _ = run([], clip=0.5, epochs=2, **options)
    assert_same(with_it, without)


@pytest.mark.parametrize(
    ("precision", "batch", "point"),
    [("fp32", 0, "optimizer"), ("bf16", 3, "optimizer_middle"), ("fp16", 3, "optimizer")],
)
def test_an_optimizer_step_is_not_repeated(precision: str, batch: int, point: Point) -> None:
    text = rf"in the optimizer step of batch {batch}, which cannot be repeated \(CUDA out of memory.*fused"
    callback = adaptive()
    with pytest.raises(BatchMemoryError, match=text):
        run([callback], plans=[fail_at(point, (16, batch, 0))], precision=precision)
    assert callback.state_dict()["ooms"] == 1
