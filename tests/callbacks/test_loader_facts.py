"""How many samples a batch has, as far as its loader tells."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lit_data.callbacks.loader_facts import read_loader
from lit_data.loading import LoaderOptions, MicroBatchLoader

NUMBERS = list(range(10))
IN_FOURS = BatchSampler(RandomSampler(NUMBERS), 4, drop_last=False)
IN_TWOS = LoaderOptions(batch_size=2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def _trainer(loader: Any, stage: RunningStage = RunningStage.TRAINING, **more: Any) -> Any:
    loaders = dict.fromkeys(
        ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders"), loader
    )
    return SimpleNamespace(state=SimpleNamespace(stage=stage), **loaders, **more)


@pytest.mark.parametrize(
    ("loader", "sizes", "stacked"),
    [
        (DataLoader(NUMBERS, 4), {4, 2}, True),
        (DataLoader(NUMBERS, 4, drop_last=True), {4}, True),
        (DataLoader(NUMBERS, 5, collate_fn=list), {5}, False),
        (DataLoader(NUMBERS, batch_sampler=IN_FOURS), {4, 2}, True),
        (DataLoader(Stream(), 4), {1, 2, 3, 4}, True),
        (DataLoader(NUMBERS, batch_size=None), set(), False),
        (MicroBatchLoader(NUMBERS, LoaderOptions(batch_size=4)), {4, 2}, True),
        (MicroBatchLoader(NUMBERS, LoaderOptions(batch_size=4), collate_fn=list), {4, 2}, False),
        (MicroBatchLoader(NUMBERS, LoaderOptions(batch_size=4, resizable=True)), set(), True),
        (MicroBatchLoader(NUMBERS, IN_TWOS, shuffle=True, world_size=3), {2, 1}, True),
        ([[torch.zeros(3)]], set(), False),
        (SimpleNamespace(batch_size="many"), set(), False),
    ],
)
def test_what_a_loader_tells(loader: Any, sizes: set[int], stacked: bool) -> None:
    facts = read_loader(_trainer(loader))
    assert (set(facts.sizes), facts.stacked) == (sizes, stacked)
