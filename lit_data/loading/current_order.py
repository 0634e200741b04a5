"""Order of a loader for the current dataset and ranks."""

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple, get_args

import torch.distributed as dist

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.types import RowWriter, Stage
from lit_data.loading.drawn import SamplerOrder, check_sampler
from lit_data.loading.options import LoaderOptions
from lit_data.loading.order import EpochOrder, find_windows
from lit_data.loading.samples import MapStyle, count_samples

log = logging.getLogger(__name__)


class CurrentOrder:
    """Order of the samples of a dataset, whose length and ranks may change between passes.

    Args:
        dataset: The dataset.
        options: Options of its loader.
        shuffle: Shuffle the samples in each epoch.
        sampler: Yields the sample indices in order, instead of the order of lit_data.
        rank: Number of this process, if given.
        world_size: Number of processes, if given.
        stage: Purpose of the batches, if given.

    Attributes:
        is_evaluation: Each sample occurs exactly once over all ranks, see `EpochOrder`.

    Raises:
        ConfigError: The stage is unknown; see also `EpochOrder`, `SamplerOrder` and `check_sampler`.
    """

    def __init__(
        self,
        dataset: RowWriter | MapStyle,
        options: LoaderOptions,
        *,
        shuffle: bool,
        sampler: Iterable[int] | None,
        rank: int | None,
        world_size: int | None,
        stage: Stage | None,
    ) -> None:
        if stage is not None:
            check_choice("stage", stage, get_args(Stage))
        self._stage = stage
        self.is_evaluation = stage in ("val", "test", "predict")
        check_sampler(sampler, shuffle=shuffle, world_size=world_size)
        self._dataset, self._options = dataset, options
        self._given = rank, world_size
        samples = count_samples(dataset)
        sampled = None if sampler is None else SamplerOrder(sampler, dataset)
        ranks = find_ranks(rank, world_size)
        self._order = EpochOrder(
            samples if sampled is None else len(sampled),
            shuffle or sampled is not None,
            options.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            evaluation=self.is_evaluation,
            drop_last=options.drop_last,
            windows=find_windows(dataset, options) if shuffle else None,
            sampled=sampled,
        )

    def read(self) -> EpochOrder:
        """Return the order for the current dataset and ranks."""
        order = self._order
        ranks = find_ranks(*self._given)
        length = len(self._dataset) if order.sampled is None else len(order.sampled)
        windows = order.windows
        if windows is not None and length != order.length:
            windows = find_windows(self._dataset, self._options)
        self._order = replace(
            order, length=length, rank=ranks.rank, world_size=ranks.world_size, windows=windows
        )
        return self._order

    def plan(self, batch_size: int) -> EpochOrder:
        """Return the order for a pass with a batch size.

        Raises:
            ConfigError: The ranks cannot share it evenly, and no stage was given.
        """
        order = self.read()
        is_random = order.shuffle and order.sampled is None
        if self._stage is None and not is_random:
            order.check_shares(batch_size)
        return order

    def check_ranks(self) -> None:
        """See `check_ranks_known`."""
        check_ranks_known(*self._given)


class Ranks(NamedTuple):
    """Rank of this process, and the number of processes that share the samples.

    Attributes:
        rank: Rank of this process, 0 <= rank < world_size.
        world_size: Number of processes.
    """

    rank: int
    world_size: int


def find_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """Return the given ranks, else those of `torch.distributed` if its group is initialized.

    Args:
        rank: Number of this process, if given.
        world_size: Number of processes, if given.
    """
    group = Ranks(0, 1)
    if _has_group():
        group = Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks(
        group.rank if rank is None else rank,
        group.world_size if world_size is None else world_size,
    )


def check_ranks_known(rank: int | None, world_size: int | None) -> None:
    """Check that a process without a process group has a rank.

    If a launcher started several processes, only a warning is logged, because they may be unrelated.

    Raises:
        ConfigError: There are several processes, and this one has no rank.
    """
    if rank is not None or _has_group():
        return
    if world_size is not None and world_size > 1:
        raise ConfigError(
            f"world_size={world_size} without rank, and torch.distributed has no process group: "
            "give rank= too, or each process reads the same part"
        )
    started = os.environ.get("WORLD_SIZE", "")
    if world_size is None and started.isdigit() and int(started) > 1:
        warn_without_group(int(started))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@cache
def warn_without_group(processes: int) -> None:
    """Warn once that each of several processes reads all samples."""
    log.warning(
        "WORLD_SIZE=%d, but torch.distributed has no process group: this process reads all samples, "
        "as do the others. Call torch.distributed.init_process_group before, or give "
        "MicroBatchLoader rank= and world_size=",
        processes,
    )
