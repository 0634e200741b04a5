"""Order of the samples: a pure function of (seed, epoch), split over ranks step by step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words, shuffled
from lit_data.core.types import Array, FieldSpec, Ints, RowWriter, SampleRuns
from lit_data.loading.drawn import SamplerOrder
from lit_data.loading.options import LoaderOptions
from lit_inspect.counts import counted

_BLOCK = 4096


class Windows:
    """Random order that mixes a few runs of samples at a time.

    The runs come in random order, and their samples are shuffled within windows. A window has as
    many runs as fit into `window_bytes`, at least one. The position of a sample depends only on the
    seed and the epoch. Two samples of one run are never farther apart than a window.

    Args:
        runs: Samples that are stored together, no run being empty; or a function of the epoch that
            returns them, if they change with it.
        window_bytes: Bytes that fit into memory.
    """

    def __init__(self, runs: SampleRuns | Callable[[int], SampleRuns], window_bytes: int) -> None:
        self._runs = runs
        most_bytes = self._runs_at(0).most_bytes
        self.window_bytes = window_bytes if most_bytes is None else min(window_bytes, most_bytes)
        self._plans: dict[tuple[int, int], _Plan] = {}

    def at(self, positions: Ints, seed: int, epoch: int) -> Ints:
        """Return the sample indices at positions of an epoch."""
        plan = self._plans.get((seed, epoch))
        if plan is None:
            plan = _Plan.make(self._runs_at(epoch), self.window_bytes, seed, epoch)
            self._plans = {(seed, epoch): plan}
        window_of = np.searchsorted(plan.first, positions, side="right") - 1
        edges = [*plan.first.tolist(), int(plan.ends[-1])]
        mixed = np.empty_like(positions)
        for window in np.unique(window_of).tolist():
            inside = window_of == window
            begin, end = edges[window], edges[window + 1]
            # Each window has its own seed; otherwise windows of one length would have the same order.
            low, high = random_words(seed, Stream.WINDOWS, window, epoch, 2)[0].tolist()
            order = shuffled(positions[inside] - begin, end - begin, low | high << 32, epoch)
            mixed[inside] = begin + order
        # From positions in the random order of the runs to the dataset's sample numbers.
        run = np.searchsorted(plan.ends, mixed, side="right")
        samples: Ints = plan.offsets[run] + mixed
        return samples if plan.samples is None else plan.samples[samples]

    def _runs_at(self, epoch: int) -> SampleRuns:
        return self._runs(epoch) if callable(self._runs) else self._runs


class _Plan(NamedTuple):
    """The windows of an epoch.

    Attributes:
        ends: [R] position at which each run ends, in the order of the epoch.
        offsets: [R] number to add to a position in a run, to get the number of its sample among
            those of all runs.
        first: [windows] first position of each window.
        samples: As in `SampleRuns`.
    """

    ends: Ints
    offsets: Ints
    first: Ints
    samples: Ints | None

    @classmethod
    def make(cls, runs: SampleRuns, window_bytes: int, seed: int, epoch: int) -> Self:
        starts = np.concatenate(([0], runs.ends[:-1])).astype(np.int64)
        order = shuffled(np.arange(len(starts)), len(starts), seed, epoch)
        counts = (runs.ends - starts)[order]
        ends = np.cumsum(counts)
        begins = ends - counts
        nbytes = runs.nbytes[order]
        window = _number_windows(np.cumsum(nbytes) - nbytes, window_bytes, runs)
        _, first_runs = np.unique(window, return_index=True)
        return cls(ends, starts[order] - begins, begins[first_runs], runs.samples)


def _number_windows(before: Ints, window_bytes: int, runs: SampleRuns) -> Ints:
    """Return the window of each run, [R], given the bytes before it.

    If shards are fetched, the windows grow: the first has one run, each next one twice as many bytes.
    """
    if runs.most_bytes is None:
        return before // window_bytes
    # Windows of 1, 2, 4, ... mean runs end at 1, 3, 7, ... runs; later ones have window_bytes.
    least = max(1, min(int(runs.nbytes.mean()), window_bytes))
    small = least * (2 ** np.arange(int(np.log2(window_bytes / least)) + 1) - 1)
    edges = np.arange(int(small[-1]), int(before[-1]) + 2 * window_bytes, window_bytes)
    return np.searchsorted(np.concatenate((small[1:-1], edges)), before, side="right")


def find_windows(dataset: object, options: LoaderOptions) -> Windows | None:
    """Return the windows of a random order; None if all samples are shuffled together.

    Args:
        dataset: The dataset; its ``runs`` name the samples that are stored together.
        options: Options of its loader.

    Raises:
        ConfigError: Windows are needed and the dataset has no runs, or are needed and turned off.
    """
    needs_windows: bool = getattr(dataset, "needs_windows", False)
    if needs_windows and options.locality == "none":
        raise ConfigError(
            "loader.locality=none, but the set of shards does not fit data.cache_bytes, so "
            "every batch would fetch shards: raise it, or leave loader.locality at auto"
        )
    if options.locality == "none" or (options.locality == "auto" and not needs_windows):
        return None
    runs: SampleRuns | Callable[[int], SampleRuns] | None = getattr(dataset, "runs", None)
    if runs is not None:
        return Windows(runs, options.window_bytes)
    reason = (
        f"{type(dataset).__name__} does not state which of its samples are stored together "
        "(`runs`), or uses parts of other samples (mosaics, pasted defects)"
    )
    if needs_windows:
        raise ConfigError(
            f"the set of shards does not fit data.cache_bytes, and {reason}: raise it, or set "
            "data.mosaic_on=device or data.sampling.paste=null"
        )
    raise ConfigError(f"loader.locality={options.locality}, but {reason}: set loader.locality=none")


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Order of an epoch's samples, computed block by block, and the part of a rank in each step.

    A step takes the next positions of the epoch's order for all ranks together. Rank r gets every
    world_size-th of them, starting with the r-th. The samples that were used are therefore always
    the first ones of the order, and an epoch can resume at any position with another number of
    ranks and another batch size.

    In training all ranks take the same number of steps. If fewer samples than ranks would be left
    for a last step, the step before it is made smaller. With a batch size of 1 that is impossible,
    and the samples that are left are dropped: others in each epoch of a random order. In evaluation
    each sample occurs exactly once over all ranks.

    Args:
        length: Samples in the dataset.
        shuffle: Shuffle the samples in each epoch; otherwise the order is ascending.
        seed: 0 <= seed < 2**64.
        rank: Number of this process, 0 <= rank < world_size.
        world_size: Number of processes.
        evaluation: Only some ranks may have a last step; otherwise all take the same number of
            steps. The default is True for an ascending order.
        drop_last: Drop the last step of an epoch if it is short.
        windows: Windows in which samples that are stored together stay close, if any.
        sampled: Order that a sampler draws, instead of a random or ascending one.

    Raises:
        ConfigError: There are no samples, or fewer than ranks, or the rank is out of range.
    """

    length: int
    shuffle: bool
    seed: int
    rank: int = 0
    world_size: int = 1
    evaluation: bool | None = None
    drop_last: bool = False
    windows: Windows | None = None
    sampled: SamplerOrder | None = None

    def __post_init__(self) -> None:
        """Check that every rank has work."""
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is out of range for world_size={self.world_size}")
        if not self.length:
            raise ConfigError("the dataset is empty: there is nothing to batch")
        if self.length < self.world_size:
            raise ConfigError(
                f"{counted(self.length, 'sample')} cannot be split over {self.world_size} ranks: use fewer "
                "devices or more data"
            )

    @property
    def equal_steps(self) -> bool:
        """Return True if all ranks take the same number of steps."""
        return self.shuffle if self.evaluation is None else not self.evaluation

    @property
    def window_bytes(self) -> int:
        """Size of the windows; 0 without them."""
        return self.windows.window_bytes if self.windows else 0

    def take(self, position: int, batch_size: int) -> int:
        """Return how many positions the step takes for all ranks together; 0 at the end."""
        left = self.length - position
        full = self.world_size * batch_size
        if left < full:
            is_dropped = self.drop_last or (self.equal_steps and left < self.world_size)
            return 0 if is_dropped else left
        if not self.equal_steps or self.drop_last:
            return full
        if 0 < left - full < self.world_size and batch_size > 1:
            # A smaller step leaves a sample for each rank in the last step.
            return left - self.world_size
        return full

    def count(self, taken: int) -> int:
        """Return the number of this rank's samples in a step that takes `taken` positions."""
        return len(range(self.rank, taken, self.world_size))

    def steps(self, position: int, batch_size: int) -> int:
        """Return the number of this rank's batches from `position` to the end of the epoch."""
        full, rest = divmod(self.length - position, self.world_size * batch_size)
        if self.drop_last or not rest:
            return full
        if self.equal_steps:
            can_give_away = full > 0 and batch_size > 1
            has_short_step = rest >= self.world_size or can_give_away
        else:
            has_short_step = rest > self.rank
        return full + has_short_step

    def draw(self, epoch: int) -> None:
        """Let the sampler draw the order of an epoch, if there is one."""
        if self.sampled is not None:
            self.sampled.draw(self.seed, epoch)

    def digest(self, epoch: int) -> int:
        """Return a checksum of the order that a sampler drew for an epoch; 0 without a sampler."""
        return 0 if self.sampled is None else self.sampled.digest(self.seed, epoch)

    def describe(self) -> str:
        """Return a description, which Lightning quotes if it cannot turn off shuffling."""
        words = f"{self.length} samples, shuffle={self.shuffle}"
        if self.shuffle:
            words += ", which overfit_batches cannot turn off: give shuffle=False"
        return words

    def list_sizes(self, batch_size: int) -> set[int]:
        """Return the possible sizes of this rank's batches in an epoch."""
        sizes = {batch_size, self.count(self.length % (self.world_size * batch_size))}
        if self.equal_steps and self.world_size > 1:
            # The last full step may be smaller, so that every rank has one more step.
            sizes |= {batch_size - 1, 1}
        return sizes - {0}

    def check_shares(self, batch_size: int) -> None:
        """Refuse to drop samples if the order is not known to be one of training.

        Raises:
            ConfigError: Batches of one sample cannot be shared evenly by the ranks.
        """
        rest = self.length % self.world_size
        if rest and batch_size == 1 and self.equal_steps and not self.drop_last:
            raise ConfigError(
                f"{self.length} samples in batches of 1 cannot be split evenly over "
                f"{self.world_size} ranks: give MicroBatchLoader(stage='val') if each sample is "
                f"to be read once, stage='train' if {rest} may be dropped"
            )

    def indices(self, position: int, taken: int, epoch: int) -> Ints:
        """Return the sample indices of this rank in the step at `position`."""
        first, end = position + self.rank, position + taken
        return self.at(np.arange(first, end, self.world_size, dtype=np.int64), epoch)

    def at(self, positions: Ints, epoch: int) -> Ints:
        """Return the sample indices at positions of the epoch's order, for any rank."""
        if self.sampled is not None:
            return self.sampled.at(positions, self.seed, epoch)
        if not self.shuffle:
            return positions
        if self.windows is not None:
            return self.windows.at(positions, self.seed, epoch)
        return shuffled(positions, self.length, self.seed, epoch)


class OrderReader:
    """Reader of one epoch's order, step by step.

    Indices are computed for many steps at once, which costs little more than for one.

    Args:
        order: The order.
        epoch: The epoch.
    """

    def __init__(self, order: EpochOrder, epoch: int) -> None:
        self.order, self.epoch = order, epoch
        self._start = 0
        self._block: Ints = np.empty(0, np.int64)

    def indices(self, position: int, taken: int) -> Ints:
        """Return the same as `EpochOrder.indices` for the step at `position`."""
        world_size = self.order.world_size
        count = self.order.count(taken)
        # The block serves only steps at multiples of the ranks: its other indices are of other ranks.
        first, off_grid = divmod(position - self._start, world_size)
        if off_grid or not 0 <= first <= len(self._block) - count:
            ahead = min(max(taken, _BLOCK * world_size), self.order.length - position)
            self._block = self.order.indices(position, ahead, self.epoch)
            self._start = position
            first = 0
        return self._block[first : first + count]


class ChosenRows:
    """A subset of a dataset that writes rows.

    Args:
        dataset: All samples.
        numbers: Numbers of the samples of the subset, in order.
    """

    def __init__(self, dataset: RowWriter, numbers: Sequence[int]) -> None:
        self._dataset = dataset
        self._numbers = np.asarray(numbers, np.int64)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the dataset."""
        return self._dataset.fields

    def __len__(self) -> int:
        return len(self._numbers)

    def write_into(
        self, rows: Mapping[str, Array], indices: Ints, epoch: int
    ) -> Mapping[str, list[Any]] | None:
        """See `RowWriter`."""
        return self._dataset.write_into(rows, self._numbers[indices], epoch)

    def describe_sample(self, index: int) -> str:
        """Return the dataset's description of a sample, if it has ``describe_sample``."""
        describe: Callable[[int], str] | None = getattr(self._dataset, "describe_sample", None)
        return describe(int(self._numbers[index])) if describe else ""

    def check_sources(self) -> None:
        """Let the dataset check its files, if it has ``check_sources``."""
        check: Callable[[], None] | None = getattr(self._dataset, "check_sources", None)
        if check:
            check()
