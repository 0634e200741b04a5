"""The order of a loader, which follows its dataset and the ranks."""

from collections.abc import Iterable
from dataclasses import replace

from lit_data.loading.drawn import SamplerOrder, check_sampler
from lit_data.loading.options import LoaderOptions
from lit_data.loading.order import EpochOrder, find_windows
from lit_data.loading.ranks import check_ranks_known, find_ranks
from lit_data.loading.samples import MapStyle, count_samples
from lit_data.types import RowWriter


class CurrentOrder:
    """Order of the samples of a dataset, which may grow or be shared by more ranks between passes.

    Args:
        dataset: The dataset.
        options: Options of its loader.
        shuffle: Random order.
        sampler: Indices in their order, in place of ours.
        rank: This process, if somebody gave its number.
        world_size: Number of processes, if somebody gave it.
        evaluation: Each sample occurs exactly once over all ranks, see `EpochOrder`.

    Raises:
        ConfigError: See `EpochOrder`, `SamplerOrder` and `check_sampler`.
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
        evaluation: bool,
    ) -> None:
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
            evaluation=evaluation,
            drop_last=options.drop_last,
            windows=find_windows(dataset, options) if shuffle else None,
            sampled=sampled,
        )

    def read(self) -> EpochOrder:
        """Return the order as the dataset and the ranks are now."""
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

    def check_ranks(self) -> None:
        """See `check_ranks_known`."""
        check_ranks_known(*self._given)
