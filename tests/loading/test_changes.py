"""Datasets that somebody changes between passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.changes import look_at

KINDS: list[dict[str, Any]] = [
    {"worker_kind": "inline"},
    {"worker_kind": "process", "num_workers": 2},
]


class Transform:
    """Has a level."""

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0


class Curriculum:
    """Samples that depend on attributes of many kinds."""

    shared = 0

    def __init__(self) -> None:
        self.level = 0
        self.items = list(range(64))
        self.transform = Transform()
        self.table = {"levels": [{"level": 0}]}
        self.weights = np.zeros(4)
        self.tensor = torch.zeros(100_000)
        self.images = np.zeros((100, 100))
        self.size = 2
        self.add = partial(max, 0)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        levels = [self.level, self.transform.level, self.table["levels"][0]["level"], self.shared]
        levels += [int(self.weights[0]), int(self.tensor[0]), int(self.images[0, 0])]
        return {"level": sum(levels), "image": np.zeros(self.size)}


def _replace_images(dataset: Curriculum) -> None:
    dataset.images = None
    dataset.images = np.ones((100, 100))


CHANGES: dict[str, Callable[[Curriculum], object]] = {
    "attribute": lambda dataset: setattr(dataset, "level", 1),
    "class": lambda dataset: setattr(Curriculum, "shared", 1),
    "slot": lambda dataset: setattr(dataset.transform, "level", 1),
    "nested": lambda dataset: dataset.table["levels"][0].update(level=1),
    "small array": lambda dataset: dataset.weights.fill(1),
    "tensor": lambda dataset: dataset.tensor.fill_(1),
    "new array": _replace_images,
}


@pytest.mark.parametrize("name", CHANGES)
def test_worker_processes_see_what_was_changed_since_the_last_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Curriculum, "shared", 0)
    dataset = Curriculum()
    options = LoaderOptions(batch_size=32, worker_kind="process", num_workers=2)
    loader = MicroBatchLoader(Subset(dataset, range(64)), options, shuffle=True)
    assert {level for batch in loader for level in batch["level"].tolist()} == {0}
    CHANGES[name](dataset)
    assert {level for batch in loader for level in batch["level"].tolist()} == {1}
    loader.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_dataset_may_grow_shrink_and_change_the_size_of_its_samples(kind: Any) -> None:
    dataset = Curriculum()
    loader = MicroBatchLoader(dataset, LoaderOptions(batch_size=16, **kind), shuffle=True)
    found = []
    for length, size in ((64, 2), (96, 2), (20, 3)):
        dataset.items, dataset.size = list(range(length)), size
        assert len(loader) == -(-length // 16)
        shapes = [tuple(batch["image"].shape) for batch in loader]
        found.append((sum(samples for samples, _ in shapes), {width for _, width in shapes}))
    loader.close()
    assert found == [(64, {2}), (96, {2}), (20, {3})]


def test_worker_processes_stay_while_nothing_changes() -> None:
    options = LoaderOptions(batch_size=32, worker_kind="process", num_workers=2)
    loader = MicroBatchLoader(Pids(), options, shuffle=True)
    passes = [{pid for batch in loader for pid in batch.tolist()} for _ in range(3)]
    loader.close()
    assert passes[0] == passes[1] == passes[2]


class Pids(Curriculum):
    """Each sample is the process that read it."""

    def __getitem__(self, index: int) -> Any:
        import os

        return os.getpid()


def test_objects_that_hold_themselves_or_much_are_looked_at_in_a_bounded_time() -> None:
    dataset: Any = Curriculum()
    dataset.itself = dataset
    dataset.names = {str(number): [number] for number in range(100_000)}
    assert len(look_at(dataset)) <= 2000
    before = look_at(dataset)
    dataset.level = 5
    assert look_at(dataset) != before
