"""Epochs of a loader in plain loops and under Lightning, and who tells them."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import SequentialSampler

from lit_data.loading import LoaderOptions, MicroBatchLoader

OPTIONS = LoaderOptions(batch_size=4, num_workers=0)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "barebones": True,
}


class Noisy:
    """Sample i is (i, a random number)."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


def _walk(loader: MicroBatchLoader) -> tuple[list[int], list[float]]:
    order: list[int] = []
    noise: list[float] = []
    for index, value in loader:
        order += index.tolist()
        noise += value.tolist()
    return order, noise


def _epoch(epoch: int, **options: Any) -> tuple[list[int], list[float]]:
    loader = MicroBatchLoader(Noisy(), OPTIONS, **options)
    loader.set_epoch(epoch)
    return _walk(loader)


def test_each_pass_of_a_plain_loop_is_the_next_epoch() -> None:
    loader = MicroBatchLoader(Noisy(), OPTIONS, shuffle=True)
    passes = [_walk(loader) for _ in range(3)]
    assert passes == [_epoch(number, shuffle=True) for number in range(3)]
    assert passes[0][0] != passes[1][0] != passes[2][0]


def test_a_pass_that_is_broken_off_counts_and_an_iterator_that_is_not_read_does_not() -> None:
    loader = MicroBatchLoader(Noisy(), OPTIONS, shuffle=True)
    iter(loader)
    next(iter(loader))
    assert _walk(loader) == _epoch(1, shuffle=True)


def test_set_epoch_is_exact_and_later_passes_count_on_from_it() -> None:
    loader = MicroBatchLoader(Noisy(), OPTIONS, shuffle=True)
    loader.set_epoch(7)
    assert _walk(loader) == _epoch(7, shuffle=True)
    assert _walk(loader) == _epoch(8, shuffle=True)


def test_without_shuffling_the_order_stays_and_random_numbers_are_new() -> None:
    loader = MicroBatchLoader(Noisy(), OPTIONS)
    (first, noise), (second, other_noise) = _walk(loader), _walk(loader)
    assert first == second == list(range(12))
    assert not set(noise) & set(other_noise)


@pytest.mark.parametrize("options", [{"stage": "val"}, {"stage": "train", "repeats": True}])
def test_evaluation_and_what_shall_repeat_is_the_same_in_each_pass(options: Any) -> None:
    loader = MicroBatchLoader(Noisy(), OPTIONS, **options)
    first = _walk(loader)
    loader.sampler.set_epoch(3)  # as Lightning does
    assert _walk(loader) == first


class Module(L.LightningModule):
    """Keeps the samples and numbers that it trains on, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[tuple[int, float]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, value = batch[0] if isinstance(batch[0], list) else batch
        self.seen[-1] += zip(index.tolist(), value.tolist(), strict=True)
        return self.weight * value.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_lightning_gives_an_unshuffled_training_loader_new_numbers_in_each_epoch() -> None:
    module = Module()
    loader = MicroBatchLoader(Noisy(), OPTIONS)
    L.Trainer(max_epochs=2, **QUIET).fit(module, loader)
    first, second = ([number for _, number in epoch] for epoch in module.seen)
    assert [index for index, _ in module.seen[1]] == list(range(12))
    assert not set(first) & set(second)


def test_overfit_batches_knows_an_ascending_order() -> None:
    module = Module()
    L.Trainer(max_epochs=2, overfit_batches=1, **QUIET).fit(
        module, MicroBatchLoader(Noisy(), OPTIONS)
    )
    assert [[index for index, _ in epoch] for epoch in module.seen] == [[0, 1, 2, 3]] * 2
    assert isinstance(MicroBatchLoader(Noisy(), OPTIONS).sampler, SequentialSampler)


def test_each_cycle_and_each_epoch_of_a_combined_loader_differ() -> None:
    module = Module()
    short = MicroBatchLoader(Noisy(), OPTIONS, shuffle=True)
    long = MicroBatchLoader(Noisy(24), OPTIONS)
    L.Trainer(max_epochs=2, **QUIET).fit(module, CombinedLoader([short, long], "max_size_cycle"))
    passes = [tuple(epoch[start : start + 12]) for epoch in module.seen for start in (0, 12)]
    assert len(passes) == len(set(passes)) == 4
    assert len({number for each in passes for _, number in each}) == 48
    assert [index for index, _ in passes[0]] == _epoch(0, shuffle=True)[0]
    assert [index for index, _ in passes[2]] == _epoch(1, shuffle=True)[0]
