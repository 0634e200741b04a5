"""Samplers through which a Trainer tells a loader the epoch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Sampler, SequentialSampler

from lit_data.loading.order import EpochOrder

EPOCHS = 2**32
"""Numbers of epochs from which random numbers are made, see `lit_data.rng.random_words`."""
CYCLE = 2**20
"""Added to the epoch by each further pass in it: no order and no random number is used twice."""
PER_PASS = 2
"""Iterators that a Trainer makes for its first pass: one to see that it can, and one to read."""
_LEFT_OUT = ("count_trained", "_workers", "_assembly", "_progress")
OF_PROCESS: Mapping[str, Any] = {**dict.fromkeys(_LEFT_OUT), "_marks": []}
"""Attributes that no copy of a loader takes over, and what it has in their place."""


class EpochSampler(Sampler[int]):
    """What a Trainer finds as ``loader.sampler``; nothing is drawn from it.

    Args:
        length: Samples of the dataset.
        set_epoch: Called by the Trainer at the start of an epoch.
    """

    def __init__(self, length: int, set_epoch: Callable[[int], None]) -> None:
        self.length = length
        self.set_epoch = set_epoch

    def __len__(self) -> int:
        return self.length


class AscendingSampler(SequentialSampler):
    """The same for the order of the dataset, by whose class `overfit_batches` knows it.

    Args:
        length: Samples of the dataset.
        set_epoch: Called by the Trainer at the start of an epoch.
    """

    def __init__(self, length: int, set_epoch: Callable[[int], None]) -> None:
        super().__init__(range(length))
        self.set_epoch = set_epoch


def make_sampler(
    order: EpochOrder, set_epoch: Callable[[int], None]
) -> EpochSampler | AscendingSampler:
    """Return the sampler of an order for a Trainer."""
    kind = EpochSampler if order.shuffle else AscendingSampler
    return kind(order.length, set_epoch)


def describe(order: EpochOrder) -> str:
    """Return an order in words, which Lightning quotes where it cannot turn off the shuffling."""
    words = f"{order.length} samples, shuffle={order.shuffle}"
    if order.shuffle:
        words += ", which overfit_batches cannot turn off: give shuffle=False"
    return words
