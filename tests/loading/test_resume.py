"""Interrupted at any step, continued with other workers, ranks or batch sizes: the rest of the order is the same."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lit_data.core.errors import ConfigError, StoreError
from lit_data.core.rng import uniform
from lit_data.core.types import FieldSpec, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.testing import QUIET
from tests.loading.rows import FORK, Indices, Rows

STEPS = 40
BATCH = 4
LENGTH = STEPS * BATCH - 2


class Drawn(Indices):
    """Each sample holds random numbers of its own stream."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length, image=FieldSpec((8,), "float32"))

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        rows["image"][:] = uniform(5, 2, indices, epoch, 8)


Samples = list[tuple[int, bytes]]


def _loader(
    batch_size: int = BATCH, rank: int = 0, world: int = 1, **options: Any
) -> MicroBatchLoader:
    defaults = {"worker_kind": "inline", "micro_batch_size": 3, "seed": 9}
    chosen = LoaderOptions(**(defaults | {"batch_size": batch_size} | options))
    return MicroBatchLoader(Drawn(), chosen, shuffle=True, rank=rank, world_size=world)


def _samples(batches: Iterator[Mapping[str, torch.Tensor]]) -> Samples:
    samples = []
    for batch in batches:
        for index, image in zip(batch["index"].tolist(), batch["image"], strict=True):
            samples.append((index, image.numpy().tobytes()))
    return samples


@cache
def _whole_epoch() -> Samples:
    loader = _loader()
    loader.set_epoch(2)
    return _samples(iter(loader))


def _interrupt(steps: int, **options: Any) -> tuple[Samples, dict[str, Any]]:
    loader = _loader(**options)
    loader.set_epoch(2)
    done = _samples(islice(iter(loader), steps))
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1024
    loader.close()
    return done, state


@pytest.mark.parametrize("steps", range(STEPS + 1))
def test_interrupted_at_every_step_and_continued_alike(steps: int) -> None:
    done, state = _interrupt(steps)
    loader = _loader()
    loader.load_state_dict(state)
    assert len(loader) == STEPS
    if steps < STEPS:
        assert done + _samples(iter(loader)) == _whole_epoch()
    loader.set_epoch(3)
    assert len(_samples(iter(loader))) == LENGTH


@pytest.mark.parametrize("steps", [1, STEPS - 1])
@pytest.mark.parametrize(
    "options",
    [
        {"worker_kind": "thread", "num_workers": 1},
        {"worker_kind": "thread", "num_workers": 4, "micro_batch_size": 1},
        FORK,
        {"batch_size": 1},
        {"batch_size": 7},
        {"batch_size": LENGTH},
        {"resizable": True},
    ],
    ids=str,
)
def test_continued_with_other_workers_or_batch_sizes(steps: int, options: dict[str, Any]) -> None:
    done, state = _interrupt(steps)
    loader = _loader(**options)
    loader.load_state_dict(state)
    assert done + _samples(iter(loader)) == _whole_epoch()
    loader.close()


@pytest.mark.parametrize("steps", [1, 13])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (3, 2), (4, 3)])
def test_continued_on_another_number_of_ranks(steps: int, before: int, after: int) -> None:
    runs = [_interrupt(steps, rank=rank, world=before, batch_size=3) for rank in range(before)]
    states = [state for _, state in runs]
    assert all(state == states[0] for state in states)
    done = [sample for samples, _ in runs for sample in samples]
    rest = []
    counts = set()
    for rank in range(after):
        loader = _loader(rank=rank, world=after, batch_size=2)
        loader.load_state_dict(states[0])
        batches = list(loader)
        counts.add(len(batches))
        rest += _samples(iter(batches))
    assert len(counts) == 1
    assert sorted(done + rest) == sorted(_whole_epoch())


def test_continuing_reads_nothing_that_was_trained_before() -> None:
    read = []

    class Noting(Drawn):
        def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
            read.extend(indices.tolist())
            super().write_into(rows, indices, epoch)

    done, state = _interrupt(30)
    options = LoaderOptions(batch_size=BATCH, worker_kind="inline", seed=9)
    loader = MicroBatchLoader(Noting(), options, shuffle=True)
    loader.load_state_dict(state)
    next(iter(loader))
    assert not set(read) & {index for index, _ in done}
    assert len(read) == BATCH


def test_a_loader_that_goes_on_with_other_sizes_has_no_length() -> None:
    _, state = _interrupt(5)
    loader = _loader(batch_size=7)
    loader.load_state_dict(state)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    loader.set_epoch(3)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    assert loader


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "after 20 samples of an order with seed=9, but it is 8 now"),
        ({"length": 100}, "with length=158, but it is 100 now"),
        ({"shuffle": False}, "with shuffle=True, but it is False now"),
    ],
)
def test_another_order_is_refused_inside_an_epoch(change: dict[str, Any], message: str) -> None:
    _, state = _interrupt(5)
    order = {"seed": 9, "length": LENGTH, "shuffle": True} | change
    options = LoaderOptions(seed=order["seed"], worker_kind="inline")
    loader = MicroBatchLoader(Drawn(order["length"]), options, shuffle=order["shuffle"])
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict(state)
    loader.load_state_dict(state | {"position": 0, "batches": 0})
    assert loader.epoch == 2


@pytest.mark.parametrize(
    "change",
    [{"epoch": -1}, {"position": "3"}, {"seed": 1.0}, {"shuffle": 1}, {"position": LENGTH + 1}],
    ids=str,
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any]) -> None:
    _, state = _interrupt(5)
    with pytest.raises(StoreError, match="state in the checkpoint is not one that lit_data wrote"):
        _loader().load_state_dict(state | change)
    for other in ({}, 3, [], None):
        with pytest.raises(StoreError, match="not one that lit_data wrote"):
            _loader().load_state_dict(other)


class Tally(LightningModule):
    """Notes the samples that it is trained on, and stops behind a batch."""

    def __init__(self, stop: int = 0, path: Path | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.stop, self.path = stop, path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = batch if isinstance(batch, list) else [batch]
        self.seen.append([index for part in parts for index in part["index"].tolist()])
        return self.layer(torch.ones(1)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.seen) == self.stop:
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(model: Tally, loaders: Any, start: Path | None = None, **options: Any) -> Tally:
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **options})
    trainer.fit(model, loaders, ckpt_path=start, weights_only=True)
    return model


def _direct(length: int = 24, **options: Any) -> MicroBatchLoader:
    chosen = LoaderOptions(**{"batch_size": 4, "num_workers": 0, **options})
    return MicroBatchLoader(Drawn(length), chosen, shuffle=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "sized": _direct,
    "resizable": lambda: _direct(resizable=True),
    "resizable threads": lambda: _direct(resizable=True, num_workers=2, worker_kind="thread"),
    "both": lambda: CombinedLoader([_direct(resizable=True), _direct()], "min_size"),
    "cycled": lambda: CombinedLoader([_direct(), _direct(8)], "max_size_cycle"),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [2, 5, 6, 8])
@pytest.mark.parametrize("limit", [1.0, 5])
def test_loaders_given_to_a_trainer_go_on_exactly(
    name: str, stop: int, limit: float, tmp_path: Path
) -> None:
    make, path = LOADERS[name], tmp_path / "stopped.ckpt"
    whole = _fit(Tally(), make(), limit_train_batches=limit)
    stopped = _fit(Tally(stop, path), make(), limit_train_batches=limit)
    resumed = _fit(Tally(), make(), path, limit_train_batches=limit)
    assert stopped.seen[:stop] + resumed.seen == whole.seen


class AsksForLength(Tally):
    """Has a schedule that asks a Trainer for the length of the run, before it reads a checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("name", ["sized", "cycled"])
@pytest.mark.parametrize("stop", [2, 6, 8])
def test_loaders_that_were_made_before_the_checkpoint_was_read_go_on_exactly(
    name: str, stop: int, tmp_path: Path
) -> None:
    make, path = LOADERS[name], tmp_path / "stopped.ckpt"
    whole = _fit(AsksForLength(), make())
    stopped = _fit(AsksForLength(stop, path), make())
    resumed = _fit(AsksForLength(), make(), path)
    assert stopped.seen[:stop] + resumed.seen == whole.seen


def test_a_batch_that_was_taken_before_the_checkpoint_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stopped.ckpt"
    _fit(AsksForLength(2, path), _direct(resizable=True), max_steps=12)
    with pytest.raises(ConfigError, match="took a batch before it read the checkpoint"):
        _fit(AsksForLength(), _direct(resizable=True), path, max_steps=12)


def test_other_sizes_go_on_only_where_no_length_was_told(tmp_path: Path) -> None:
    path = tmp_path / "stopped.ckpt"
    _fit(Tally(2, path), _direct())
    with pytest.raises(ConfigError, match=r"has 8 on 1: its length.*resizable=True"):
        _fit(Tally(), _direct(batch_size=8), path)
    resumed = _fit(Tally(), _direct(batch_size=8, resizable=True), path, max_epochs=1)
    assert [len(batch) for batch in resumed.seen] == [8, 8]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_a_loader_are_independent(duplicate: Callable[[Any], Any]) -> None:
    loader = _direct(num_workers=1, worker_kind="process")
    batches = iter(loader)
    next(batches)
    other = duplicate(loader)
    if isinstance(other, bytes):
        other = pickle.loads(other)
    other.set_epoch(0)
    whole = [batch["index"].tolist() for batch in _direct()]
    assert [batch["index"].tolist() for batch in other] == whole
    assert [batch["index"].tolist() for batch in batches] == whole[1:]
    loader.close()
    other.close()
