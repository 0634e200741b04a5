"""Which sample comes when: a pure function of (seed, epoch), shared out over ranks step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.rng import Stream, random_words, shuffled
from lit_data.types import SampleRuns

_BLOCK: Final = 1024


class Windows:
    """An order that is random among a few runs at a time: the runs in random order, their samples
    mixed by windows.

    A window is as many runs as take `window_bytes`, at least one. A sample's place depends on the
    seed and the epoch alone; two samples of one run are never further apart than a window.

    Args:
        runs: Which samples lie together; none is empty. Where that changes with the epoch, a
            function of it.
        window_bytes: What fits into memory.
    """

    def __init__(self, runs: SampleRuns | Callable[[int], SampleRuns], window_bytes: int) -> None:
        self._runs = runs
        first = self._runs_at(0)
        self.window_bytes = (
            window_bytes if first.most_bytes is None else min(window_bytes, first.most_bytes)
        )
        self._plans: dict[tuple[int, int], _Plan] = {}

    def at(self, positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        """Sample indices at positions of an epoch."""
        if (seed, epoch) not in self._plans:
            self._plans = {
                (seed, epoch): _Plan.make(self._runs_at(epoch), self.window_bytes, seed, epoch)
            }
        plan = self._plans[seed, epoch]
        window = np.searchsorted(plan.first, positions, side="right") - 1
        places = np.empty_like(positions)
        for number in np.unique(window).tolist():
            own, begin = window == number, int(plan.first[number])
            length = (
                int(plan.first[number + 1] if number + 1 < len(plan.first) else plan.ends[-1])
                - begin
            )
            low, high = random_words(seed, Stream.WINDOWS, number, epoch, 2)[0].tolist()
            places[own] = begin + shuffled(positions[own] - begin, length, low | high << 32, epoch)
        row = np.searchsorted(plan.ends, places, side="right")
        found: NDArray[np.int64] = plan.starts[row] + places
        return found if plan.samples is None else plan.samples[found]

    def _runs_at(self, epoch: int) -> SampleRuns:
        return self._runs(epoch) if callable(self._runs) else self._runs


class _Plan(NamedTuple):
    """The windows of an epoch.

    Attributes:
        ends: [R] position at which each run ends, in the order of the epoch.
        starts: [R] what is added to a position in a run for the place of its sample among those of
            all runs.
        first: [windows] first position of each.
        samples: As `SampleRuns` has them.
    """

    ends: NDArray[np.int64]
    starts: NDArray[np.int64]
    first: NDArray[np.int64]
    samples: NDArray[np.int64] | None

    @classmethod
    def make(cls, runs: SampleRuns, window_bytes: int, seed: int, epoch: int) -> Self:
        starts = np.concatenate(([0], runs.ends[:-1])).astype(np.int64)
        counts, order = (
            runs.ends - starts,
            shuffled(np.arange(len(starts)), len(starts), seed, epoch),
        )
        ends, nbytes = np.cumsum(counts[order]), runs.nbytes[order]
        window = _number_windows(np.cumsum(nbytes) - nbytes, window_bytes, runs)
        begins = ends - counts[order]
        first = begins[np.unique(window, return_index=True)[1]]
        return cls(ends, starts[order] - begins, first, runs.samples)


def _number_windows(
    before: NDArray[np.int64], window_bytes: int, runs: SampleRuns
) -> NDArray[np.int64]:
    """[R] window of each run, by the bytes before it; growing ones take one run at first, then twice as much."""
    if runs.most_bytes is None:
        return before // window_bytes
    least = max(1, min(int(runs.nbytes.mean()), window_bytes))
    small = least * (2 ** np.arange(int(np.log2(window_bytes / least)) + 1) - 1)
    edges = np.arange(int(small[-1]), int(before[-1]) + 2 * window_bytes, window_bytes)
    return np.searchsorted(np.concatenate((small[1:-1], edges)), before, side="right")


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of an epoch's samples, computed piece by piece, and the share of one rank in each
    step.

    A step takes the next positions of the epoch's order for all ranks together, and rank r gets
    every world_size-th of them, from the r-th on. So what is consumed is always a beginning of the
    order, whatever the number of ranks and the batch size, and an epoch can go on from any position
    with others.

    Training ranks take equally many steps: where fewer samples than ranks would be left over for
    one more step, the step before gives some away. With a batch size of 1 it has none to give, and
    those few (another choice in each epoch) are left out. In evaluation each sample occurs exactly
    once over all ranks.

    Args:
        length: Samples in the set.
        shuffle: Random order, new in each epoch, and equally many steps on each rank; otherwise
            ascending.
        seed: 0 <= seed < 2**64.
        rank: This process, 0 <= rank < world_size.
        world_size: Number of processes.
        drop_last: Leave out the last step of an epoch when it is short.
        windows: Which samples stay close to each other in a random order; by default none do.

    Raises:
        ConfigError: There are fewer samples than ranks, or the rank is out of range.
    """

    length: int
    shuffle: bool
    seed: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    windows: Windows | None = None

    def __post_init__(self) -> None:
        """Check that every rank has work."""
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is out of range for world_size={self.world_size}")
        if self.length < self.world_size:
            raise ConfigError(
                f"{self.length} samples cannot be shared by {self.world_size} ranks: use fewer devices or more data"
            )

    @property
    def window_bytes(self) -> int:
        """Size of the windows; 0 without them."""
        return self.windows.window_bytes if self.windows else 0

    def take(self, position: int, batch_size: int) -> int:
        """Positions that the step at `position` takes for all ranks together; 0 at the end of the epoch."""
        left, full = self.length - position, self.world_size * batch_size
        if left < full:
            return 0 if self.drop_last or (self.shuffle and left < self.world_size) else left
        if (
            self.shuffle
            and 0 < left - full < self.world_size
            and batch_size > 1
            and not self.drop_last
        ):
            return left - self.world_size
        return full

    def count(self, taken: int) -> int:
        """Samples of this rank in a step that takes so many positions."""
        return len(range(self.rank, taken, self.world_size))

    def steps(self, position: int, batch_size: int) -> int:
        """Batches of this rank from `position` to the end of the epoch."""
        full, rest = divmod(self.length - position, self.world_size * batch_size)
        if self.drop_last or not rest:
            return full
        if not self.shuffle:
            return full + (rest > self.rank)
        return full + (rest >= self.world_size or (full > 0 and batch_size > 1))

    def indices(self, position: int, taken: int, epoch: int) -> NDArray[np.int64]:
        """Sample indices of this rank in the step at `position`."""
        return self.at(
            np.arange(position + self.rank, position + taken, self.world_size, dtype=np.int64),
            epoch,
        )

    def at(self, positions: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Sample indices at positions of the epoch's order, whoever's they are."""
        if not self.shuffle:
            return positions
        if self.windows is not None:
            return self.windows.at(positions, self.seed, epoch)
        return shuffled(positions, self.length, self.seed, epoch)


class OrderReader:
    """Reads one epoch's order step by step; indices are computed for many steps at once, which
    costs little more.

    Args:
        order: The order.
        epoch: The epoch.
    """

    def __init__(self, order: EpochOrder, epoch: int) -> None:
        self.order, self.epoch = order, epoch
        self._start = 0
        self._block: NDArray[np.int64] = np.empty(0, np.int64)

    def indices(self, position: int, taken: int) -> NDArray[np.int64]:
        """Sample indices of this rank in the step at `position`, as `EpochOrder.indices` gives them."""
        world_size, count = self.order.world_size, self.order.count(taken)
        first, off_grid = divmod(position - self._start, world_size)
        if off_grid or not 0 <= first <= len(self._block) - count:
            self._start, first = position, 0
            ahead = min(max(taken, _BLOCK * world_size), self.order.length - position)
            self._block = self.order.indices(position, ahead, self.epoch)
        return self._block[first : first + count]
