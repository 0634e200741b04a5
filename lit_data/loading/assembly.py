"""From an order to batches, which are planned into the staging ring ahead of the workers."""

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
        slot: Memory that it is written into.
        samples: Number of its samples.
        end: Position in the epoch's order behind it.
        left: Micro-batches that are not written yet.
        texts: Text of its samples, which has no rows.
    """

    slot: Slot
    samples: int
    end: int
    left: int
    texts: dict[str, list[Any]] = field(default_factory=dict)


class Assembly(Iterator[RowTask]):
    """The tasks of the rest of an epoch, and their answers turned into batches.

    Batches are planned one at a time, when workers ask for tasks. As the batch size changes, the
    batches that are planned and not handed out are given up and planned again: at most the few
    batches ahead are read twice, and no sample is lost.

    Args:
        order: Order of the samples.
        staging: Memory of the batches.
        progress: Progress to begin from; kept up to date.
        batch_size: Samples per batch on this rank.
        micro_batch_size: Returns the samples of a task for a batch size.
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
        self.order = order
        self.staging = staging
        self.progress = progress
        self.plan = plan
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._reader = OrderReader(order, progress.epoch)
        self._position = progress.position
        self._planned: dict[int, Planned] = {}  # by serial of the slot
        self._tasks: Iterator[RowTask] = iter(())

    def resize(self, batch_size: int) -> None:
        """Give up the planned batches, and plan them anew."""
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
            Exception: The one that the dataset raised.
        """
        if task.plan != self.plan:
            return None  # of a plan that was given up
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
        # A short batch too gets a slot of full size, which serves again.
        slot = self.staging.take(self._batch_size)
        slot.arrays[INDICES][:samples] = self._reader.indices(self._position, taken)
        self._position += taken
        step = self._micro_batch_size(self._batch_size)
        tasks = []
        for first in range(0, samples, step):
            stop = min(first + step, samples)
            tasks.append(RowTask(slot, first, stop, self.progress.epoch, self.plan))
        self._planned[slot.serial] = Planned(slot, samples, self._position, len(tasks))
        return iter(tasks)
