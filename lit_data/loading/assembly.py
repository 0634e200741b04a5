"""Assembly of batches: the tasks of an epoch, its progress, and its state in a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Self

from lit_data.core.errors import ConfigError, StoreError
from lit_data.core.types import LookAhead, RowWriter
from lit_data.loading.order import EpochOrder, OrderReader
from lit_data.loading.staging import INDICES, Slot, Staging
from lit_data.loading.workers import Failure, RowTask, Texts

_REMEMBERED = 64


@dataclass(slots=True)
class EpochProgress:
    """Progress within an epoch.

    Attributes:
        epoch: The epoch.
        batches: Batches returned in it, by this run and before an interruption.
        position: Samples of the order that these batches used, over all ranks.
        ends: End position of each recent batch, by the number of batches up to it.
    """

    epoch: int
    batches: int = 0
    position: int = 0
    ends: dict[int, int] = field(default_factory=dict)

    def advance(self, position: int) -> None:
        """Count a batch that is returned."""
        self.batches += 1
        self.position = position
        self.ends[self.batches] = position
        self.ends.pop(self.batches - _REMEMBERED, None)

    def locate(self, batch: int) -> tuple[int, int, int] | None:
        """Return epoch, first position and number of samples of a batch; None for an old batch."""
        if batch + 1 not in self.ends:
            return None
        position = self.ends.get(batch, 0)
        return self.epoch, position, self.ends[batch + 1] - position


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The samples trained so far in an epoch, and the properties of their order.

    Attributes:
        epoch: The epoch.
        position: Samples of its order that were used, over all ranks.
        batches: Batches of this rank in the epoch.
        batch_size: Batch size of the run that saved it.
        world_size: Ranks of the run that saved it.
        length: Samples of the dataset.
        seed: Seed of the order.
        shuffle: The order is random.
        window_bytes: Size of the windows of the order; 0 without windows.
        drawn: Digest of the order that a sampler drew; 0 without a sampler, and at position 0.
    """

    epoch: int
    position: int
    batches: int
    batch_size: int
    world_size: int
    length: int
    seed: int
    shuffle: bool
    window_bytes: int = 0
    drawn: int = 0

    @classmethod
    def within(
        cls, order: EpochOrder, epoch: int, position: int, batches: int, batch_size: int
    ) -> Self:
        """Return the state at a position of an order."""
        return cls(
            epoch=epoch,
            position=position,
            batches=batches,
            batch_size=batch_size,
            world_size=order.world_size,
            length=order.length,
            seed=order.seed,
            shuffle=order.shuffle,
            window_bytes=order.window_bytes,
            drawn=order.digest(epoch) if position else 0,
        )

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> Self:
        """Check and load the state in a checkpoint.

        Raises:
            StoreError: The state is not one that `to_plain` returns.
        """
        if not cls._is_valid(state):
            raise StoreError(
                "the loader's state in the checkpoint is not one that lit_data wrote "
                f"({state!r:.200}): resume from another checkpoint"
            )
        return cls(**state)

    @classmethod
    def _is_valid(cls, state: object) -> bool:
        names = {field.name for field in fields(cls)}
        if not isinstance(state, Mapping) or state.keys() != names:
            return False
        for name, value in state.items():
            kind = bool if name == "shuffle" else int
            limit = 2**64 if name == "seed" else 2**63
            if type(value) is not kind or not 0 <= value < limit:
                return False
        return bool(state["position"] <= state["length"])

    def to_plain(self) -> dict[str, Any]:
        """Return a dict of int and bool."""
        return asdict(self)

    def check_fits(self, order: EpochOrder) -> None:
        """Refuse to continue inside an epoch of another order, which would lose or repeat samples.

        Raises:
            ConfigError: The dataset, the seed or the order differs.
        """
        if not self.position:
            return  # at the beginning of an epoch every order fits
        for name in ("length", "seed", "shuffle", "window_bytes"):
            saved, current = getattr(self, name), getattr(order, name)
            if saved != current:
                raise ConfigError(
                    f"the checkpoint stopped inside epoch {self.epoch}, after {self.position} "
                    f"samples of an order with {name}={saved}, but it is {current} now: resume "
                    "with the same data and seed, or from a checkpoint at the end of an epoch"
                )

    def check_drawn(self, drawn: int) -> None:
        """Refuse to continue inside an epoch whose order a sampler drew differently.

        Raises:
            ConfigError: The digest differs.
        """
        if drawn != self.drawn:
            raise ConfigError(
                f"the checkpoint stopped inside epoch {self.epoch}, and the sampler has another "
                "order now: remove its generator, or resume from a checkpoint at the end of an epoch"
            )

    def check_length(self, batch_size: int, world_size: int) -> None:
        """Refuse to continue with other sizes if a Trainer relies on a known length.

        The Trainer would end the epoch too early.

        Raises:
            ConfigError: The rest of the epoch has another number of batches.
        """
        if self.is_elastic(batch_size, world_size) and self.position < self.length:
            raise ConfigError(
                f"the checkpoint stopped inside epoch {self.epoch}, with batches of "
                f"{self.batch_size} on {self.world_size} ranks, and this loader has {batch_size} on "
                f"{world_size}: its length, which is already in use, is wrong in this "
                "epoch. Resume with these sizes, with LoaderOptions(resizable=True), or with a "
                "BaseDataModule"
            )

    def start(self) -> EpochProgress:
        """Return the progress from which the epoch continues."""
        return EpochProgress(self.epoch, self.batches, self.position, {self.batches: self.position})

    def is_elastic(self, batch_size: int, world_size: int) -> bool:
        """Return True if the epoch continues with other sizes than it began with."""
        is_other = (self.batch_size, self.world_size) != (batch_size, world_size)
        return self.position > 0 and is_other


@dataclass(slots=True)
class Planned:
    """A batch that is being written.

    Attributes:
        slot: Memory of the batch.
        samples: Number of its samples.
        end: End position of the batch in the order of the epoch.
        left: Number of micro-batches that are not written yet.
        texts: Text of its samples, by name; it has no rows.
    """

    slot: Slot
    samples: int
    end: int
    left: int
    texts: dict[str, list[Any]] = field(default_factory=dict)


class Assembly(Iterator[RowTask]):
    """Tasks of the rest of an epoch, whose answers are assembled into batches.

    Batches are planned one at a time, when workers ask for tasks. If the batch size changes, the
    batches that are planned but not returned are discarded and planned again: at most the few
    batches ahead are read twice, and no sample is lost.

    Args:
        order: Order of the samples.
        staging: Memory of the batches.
        progress: Progress to begin from; kept up to date.
        batch_size: Samples per batch on this rank.
        count_rows: Returns the samples of a task for a batch size.
        plan: Number of the first plan, above those of earlier runs.
    """

    def __init__(
        self,
        order: EpochOrder,
        staging: Staging,
        progress: EpochProgress,
        *,
        batch_size: int,
        count_rows: Callable[[int], int],
        plan: int,
    ) -> None:
        self.order = order
        self.staging = staging
        self.progress = progress
        self.plan = plan
        self._count_rows = count_rows
        self._batch_size, self._task_rows = batch_size, count_rows(batch_size)
        self._reader = OrderReader(order, progress.epoch)
        self._position = progress.position
        self._planned: dict[int, Planned] = {}  # by serial of the slot
        self._tasks: Iterator[RowTask] = iter(())

    def resize(self, batch_size: int) -> None:
        """Discard the planned batches, and plan them again."""
        self._batch_size, self._task_rows = batch_size, self._count_rows(batch_size)
        self.plan += 1
        self._planned.clear()
        self._tasks = iter(())
        self._position = self.progress.position

    def __next__(self) -> RowTask:
        task = next(self._tasks, None)
        if task is None:
            self._tasks = self._plan_batch()
            task = next(self._tasks)
        return task

    def receive(self, task: RowTask, answer: Texts | Failure) -> Planned | None:
        """Process an answer.

        Returns:
            The batch that it completes, if any.

        Raises:
            Exception: The one that the dataset raised.
        """
        if task.plan != self.plan:
            return None  # its plan was discarded
        if isinstance(answer, Failure):
            raise answer.rebuild()
        batch = self._planned[task.slot.serial]
        for name, values in (answer or {}).items():
            batch.texts.setdefault(name, []).extend(values)
        batch.left -= 1
        if batch.left:
            return None
        self.progress.advance(batch.end)
        return self._planned.pop(task.slot.serial)

    def _plan_batch(self) -> Iterator[RowTask]:
        taken = self.order.take(self._position, self._batch_size)
        samples = self.order.count(taken)
        if not samples:
            return iter(())
        # A short batch also gets a slot of full size, so that the slot can be reused.
        slot = self.staging.take(self._batch_size)
        slot.arrays[INDICES][:samples] = self._reader.indices(self._position, taken)
        self._position += taken
        tasks = []
        for first in range(0, samples, self._task_rows):
            stop = min(first + self._task_rows, samples)
            tasks.append(RowTask(slot, first, stop, self.progress.epoch, self.plan))
        self._planned[slot.serial] = Planned(slot, samples, self._position, len(tasks))
        return iter(tasks)


def check_sources(rows: RowWriter) -> None:
    """Check for truncated files, because a read past their end would kill this process."""
    check: Callable[[], None] | None = getattr(rows, "check_sources", None)
    if check is not None:
        check()


def look_ahead(rows: RowWriter, order: EpochOrder, progress: EpochProgress) -> LookAhead:
    """Tell a dataset that fetches its samples which ones are next.

    Args:
        rows: The dataset, with ``look_ahead`` if it fetches.
        order: Order of the epoch.
        progress: Start of the pass.
    """
    begin: Callable[..., LookAhead | None] | None = getattr(rows, "look_ahead", None)
    if begin is None:
        return _NothingAhead()
    # A function, because computing the order of a large set takes long and is rarely needed. It
    # holds the current numbers, because `progress` changes.
    position, epoch = progress.position, progress.epoch
    rest = partial(order.indices, position, order.length - position, epoch)
    return begin(rest, epoch) or _NothingAhead()


class _NothingAhead:
    """`LookAhead` of a dataset with local data."""

    def advance(self, samples: int) -> None: ...

    def close(self) -> None: ...
