import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.callbacks import data_wait_monitor
from lit_data.callbacks.data_wait_monitor import DataWaitMonitor
from lit_data.callbacks.timing import step_clock
from lit_data.callbacks.timing.step_clock import PARTS
from lit_data.callbacks.timing.totals import EndedBatch, Hardware, Tally, describe_limit
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.testing import QUIET
from tests.callbacks.clock import Clock
from tests.helpers.notes import Notes

BATCHES = 8


class Slow:
    """Batches of 4 samples that take 3 s each, 1 s of which is the loader's own work."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.assemble_s = 0.0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(BATCHES):
            self.clock.now_s += 3
            self.assemble_s += 1
            yield torch.ones(4, 32)


class SlowSGD(torch.optim.SGD):
    """A step takes 32 s."""

    def __init__(self, parameters: Any, clock: Clock) -> None:
        super().__init__(parameters, lr=0.01)
        self.clock = clock

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.clock.now_s += 32
        return loss


class Model(BoringModel):
    """Transfer takes 4 s, augmentation 1 s, forward 8 s, backward 16 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.notes = Notes("data/", "time/")

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.clock.now_s += 4
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.clock.now_s += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now_s += 8
        return self.layer(batch).sum()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.clock.now_s += 16

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), self.clock)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now_s += 1000


class Busy(Callback):
    """Takes 64 s after each batch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.clock.now_s += 64


PARTS_S = {
    "time/wait_s": 2.0,
    "time/assemble_s": 1.0,
    "time/transfer_s": 4.0,
    "time/augment_s": 1.0,
    "time/forward_s": 8.0,
    "time/backward_s": 16.0,
    "time/optimizer_s": 32.0,
    "time/other_s": 64.0,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(step_clock, "time", fake)
    return fake


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    steps = {"max_epochs": 1, "limit_val_batches": 0, "log_every_n_steps": 4}
    settings = QUIET | steps | {"default_root_dir": folder} | options
    return Trainer(**settings, callbacks=list(callbacks))


def fit(folder: Path, model: Model, *callbacks: Callback, **options: Any) -> list[Any]:
    """Train; what a monitor logged."""
    trainer = make_trainer(folder, *callbacks, logger=model.notes, **options)
    trainer.fit(model, Slow(model.clock))
    return model.notes.rows


def test_every_second_belongs_to_one_part(clock: Clock, tmp_path: Path) -> None:
    monitor = DataWaitMonitor(plot=False)
    assert monitor.summary() == {}
    rows = fit(tmp_path, Model(clock), monitor, Busy(clock), max_epochs=2)
    rates = {"data/wait_fraction": 3 / 128, "data/samples_per_s": 4 / 128, "data/success_rate": 1.0}
    assert rows == [rates | PARTS_S] * 4
    summary = monitor.summary()
    memory = [summary.pop(f"train/memory_{name}_bytes") for name in ("mean", "max")]
    assert 0 < int(memory[0]) <= int(memory[1])
    assert int(summary.pop("train/disk_read_bytes")) >= 0
    assert summary == {
        "data_wait_fraction": 3 / 128,
        "samples_per_s": 4 / 128,
        "train/mean_step_s": 128.0,
        **{f"train/mean_{part}_s": PARTS_S[f"time/{part}_s"] for part in PARTS},
        "train/best_batch_size": 4,
        "train/batch_success_rate": 1.0,
        "train/limited_by": "what is neither data nor model (callbacks, loggers, the Trainer) takes 50% of the time: "
        "try fewer callbacks, a larger log_every_n_steps or larger batches",
    }


@pytest.mark.parametrize("weights_only", [False, True])
def test_validation_checkpoints_and_first_steps_are_left_out(
    weights_only: bool, clock: Clock, tmp_path: Path
) -> None:
    class SlowlySaved(Model):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            clock.now_s += 500

    model, monitor = SlowlySaved(clock), DataWaitMonitor(plot=False)
    checkpoint = ModelCheckpoint(
        tmp_path, every_n_train_steps=3, save_weights_only=weights_only, save_top_k=-1
    )
    options = {"limit_val_batches": 1, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, monitor, checkpoint, **options)
    trainer.fit(model, Slow(clock), DataLoader(RandomDataset(32, 4), 4))
    assert monitor.summary()["train/mean_step_s"] == 64.0
    tally = monitor.state_dict()["tally"]
    # The first step is left out, and those after the two checkpoints.
    assert (tally["steps"], tally["batches"]) == (BATCHES - 3, BATCHES)


def test_a_checkpoint_keeps_the_sums(clock: Clock, tmp_path: Path) -> None:
    first, second = DataWaitMonitor(plot=False), DataWaitMonitor(plot=False)
    trainer = make_trainer(tmp_path, first, max_epochs=1)
    trainer.fit(Model(clock), Slow(clock))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = make_trainer(tmp_path, second, max_epochs=2)
    path = tmp_path / "a.ckpt"
    again.fit(Model(clock), Slow(clock), ckpt_path=path, weights_only=True)
    tally = second.state_dict()["tally"]
    assert (tally["steps"], tally["batches"]) == (2 * (BATCHES - 1), 2 * BATCHES)
    assert second.summary()["train/mean_step_s"] == 64.0


def test_a_plain_script_is_told_what_limits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(data_wait_monitor, "rank_zero_info", said.append)
    monitor, notes = DataWaitMonitor(path=tmp_path / "plots"), Notes("time/")
    trainer = make_trainer(tmp_path, monitor, logger=notes, limit_val_batches=1)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), 4))
    assert said == [f"DataWaitMonitor: {monitor.summary()['train/limited_by']}"]
    assert (tmp_path / "plots" / "throughput.png").is_file()
    assert all(row["time/forward_s"] > 0 for row in notes.rows)
    assert notes.steps == [3, 7, 11, 15]
    parts = [float(monitor.summary()[f"train/mean_{part}_s"]) for part in PARTS]
    assert sum(parts) == pytest.approx(float(monitor.summary()["train/mean_step_s"]))
    trainer.validate(BoringModel(), DataLoader(RandomDataset(32, 4)), verbose=False)


class Graphs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["nodes"], batch_idx)


class CountedGraphs(Graphs):
    def count_samples(self, batch: Any) -> int:
        return len(batch["graphs"])


@pytest.mark.parametrize(
    ("model", "sizes"), [(CountedGraphs(), {3}), (Graphs(), {3}), (Graphs(), set[int]())]
)
def test_samples_are_those_that_the_module_counts_or_that_are_clear(
    model: BoringModel, sizes: set[int], tmp_path: Path
) -> None:
    lengths = (9, 3, 9, 3, 9) if sizes else (9,) * 5
    batches = [{"nodes": torch.ones(rows, 32), "graphs": torch.ones(3)} for rows in lengths]
    monitor, notes = DataWaitMonitor(plot=False), Notes("data/")
    trainer = make_trainer(tmp_path, monitor, logger=notes, limit_val_batches=0)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    summary = monitor.summary()
    assert {summary[key] for key in summary if key == "train/best_batch_size"} == sizes
    assert ("samples_per_s" in summary) == ("data/samples_per_s" in notes.rows[-1]) == bool(sizes)


def test_the_rate_is_that_of_batches_that_could_be_counted() -> None:
    sums = Tally()
    ended = [EndedBatch(number, number % 2 * 8, 2.0, 8, False, False) for number in range(4)]
    sums.add(ended, [(1.0,) * len(PARTS)])
    assert sums.rate()["samples_per_s"] == 4


def test_what_was_read_from_disks_is_held_against_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slowly(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Tensor:
            time.sleep(0.01)
            return torch.ones(32)

    read = iter((1000, 1000 + 4 * 16 * 32 * 4))
    monkeypatch.setattr(data_wait_monitor, "count_disk_bytes", lambda: next(read))
    loader = MicroBatchLoader(Slowly(), LoaderOptions(batch_size=2, num_workers=0))
    monitor = DataWaitMonitor(plot=False)
    make_trainer(tmp_path, monitor).fit(BoringModel(), loader)
    summary = monitor.summary()
    assert summary["train/disk_read_bytes"] == 4 * 16 * 32 * 4
    text = r"waiting for data .* the disk was read for [34]\.\d times the bytes of the samples: try mem"
    assert re.match(text, str(summary["train/limited_by"]))


SLOW_CPU = {"on_cpu": True, "precision": "32-true", "has_bf16": True}


@pytest.mark.parametrize(
    ("parts", "options", "sentence"),
    [
        # what is neither model nor small
        ("wait=61 forward=39", {}, "waiting for data takes 61% of the time: try more workers"),
        ("wait=10 assemble=51 forward=39", {}, "waiting for data takes 61% of the time: try fewer"),
        ("wait=61 forward=39", {"disk_ratio": 12.6}, "waiting for data takes 61% of the time, and th"),
        ("transfer=30 forward=70", {}, "the copy to the device takes 30% of the time: try page-"),
        ("optimizer=25 forward=75", {}, "the optimizer takes 25% of the time: try fused=True"),
        ("other=40 wait=30 forward=30", {}, "what is neither data nor model (callbacks, loggers"),
        # the model
        ("wait=19 forward=40 backward=41", {"on_cpu": True}, "the model takes 81% of the time: try a GPU"),
        ("forward=1", SLOW_CPU, "the model takes 100% of the time: try bf16 (the callback AMP), for which"),
        ("forward=1", {"is_chosen": True}, "the model takes 100% of the time: the memory is in use; try torch"),
        ("forward=1", {"precision": "16-mixed", "has_bf16": True}, "the model in fp16 takes 100% of the time: the"),
        ("forward=1", {"free_memory": 0.6}, "the model takes 100% of the time: a larger batch may help, as 6"),
        ("forward=1", {"free_memory": 0.2}, "the model takes 100% of the time: the memory is in use; try lo"),
        ("forward=1", {"gain": 1.2}, "the model takes 100% of the time: a larger batch may help, as the l"),
    ],
)  # fmt: skip
def test_one_sentence_names_the_limit(parts: str, options: dict[str, Any], sentence: str) -> None:
    seconds_s = dict.fromkeys(PARTS, 0.0)
    for part in parts.split():
        name, _, value = part.partition("=")
        seconds_s[name] = float(value)
    names = options.keys() & {"on_cpu", "precision", "has_bf16", "is_chosen"}
    hardware = Hardware(**{"on_cpu": False} | {name: options[name] for name in names})
    rest = {name: value for name, value in options.items() if name not in names}
    assert describe_limit(seconds_s, hardware, **rest).startswith(sentence)


@pytest.mark.gpu
def test_a_device_is_measured_by_its_own_clock(tmp_path: Path) -> None:
    monitor = DataWaitMonitor(plot=False)
    trainer = make_trainer(tmp_path, monitor, accelerator="gpu", devices=1, log_every_n_steps=8)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 256), 4))
    summary = monitor.summary()
    parts = [float(summary[f"train/mean_{part}_s"]) for part in PARTS]
    assert all(seconds_s >= 0 for seconds_s in parts)
    assert float(summary["train/mean_forward_s"]) > 0
    assert sum(parts) < 2 * float(summary["train/mean_step_s"])
    assert int(summary["train/memory_max_bytes"]) > 0
