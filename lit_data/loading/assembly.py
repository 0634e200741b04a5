"""From an order to batches: plans them into the staging ring ahead of the workers, and hands out what is written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lit_data.loading.order import EpochOrder, OrderReader
from lit_data.loading.staging import INDICES, Slot, Staging
from lit_data.loading.state import EpochProgress
from lit_data.loading.tasks import Failure, RowTask, Texts


@dataclass(slots=True)
class Planned:
    """A batch under way.

    Attributes:
        slot: Where it is written.
        samples: Its size.
        end: Position in the epoch's order behind it.
        left: Micro-batches that are not written yet.
        texts: What its samples hold beside arrays.
    """

    slot: Slot
    samples: int
    end: int
    left: int
    texts: dict[str, list[Any]] = field(default_factory=dict)


class Assembly(Iterator[RowTask]):
    """The tasks of the rest of an epoch, and their answers turned into batches.

    Batches are planned one at a time, when workers ask for tasks. As the batch size changes, what
    is planned and not handed out is given up and planned again: at most the few batches ahead are
    read twice, and no sample is lost.

    Args:
        order: Who gets which sample when.
        staging: Memory.
        progress: Where to begin; kept up to date.
        batch_size: Samples per batch on this rank.
        micro_batch_size: Samples of a task, for a batch of a size.
        plan: Number of the first plan, above those of earlier runs.
    """

    def __init__(
        self,
        order: EpochOrder,
        staging: Staging,
        progress: EpochProgress,
        *,
        batch_size: int,
        micro_batch_size: Callable[[int], int],
        plan: int,
    ) -> None:
        self.order, self.staging, self.progress, self.plan = order, staging, progress, plan
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._reader = OrderReader(order, progress.epoch)
        self._position = progress.position
        self._planned: dict[int, Planned] = {}  # by serial of the slot
        self._tasks: Iterator[RowTask] = iter(())

    def resize(self, batch_size: int) -> None:
        """Give up what is planned, and plan it anew."""
        self._batch_size = batch_size
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
        """Take in an answer.

        Returns:
            The batch that is complete with it, if one is.

        Raises:
            Exception: What the dataset raised.
        """
        if task.plan != self.plan:
            return None
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
        batch_size, position = self._batch_size, self._position
        taken = self.order.take(position, batch_size)
        samples = self.order.count(taken)
        if not samples:
            return iter(())
        slot = self.staging.take(batch_size)
        epoch, size = self.progress.epoch, self._micro_batch_size(batch_size)
        slot.arrays[INDICES][:samples] = self._reader.indices(position, taken)
        firsts = range(0, samples, size)
        self._position = position + taken
        self._planned[slot.serial] = Planned(slot, samples, self._position, len(firsts))
        return (
            RowTask(slot, first, min(first + size, samples), epoch, self.plan) for first in firsts
        )
