"""`MicroBatchLoader`: workers write micro-batches straight into the rows of a batch."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from lit_data.errors import ConfigError, WorkerDiedError
from lit_data.loading.options import LoaderOptions
from lit_data.loading.order import EpochOrder
from lit_data.types import Batch, FieldSpec, RowWriter

Pending = tuple[Batch, list["Future[None]"]]
Submit = Callable[..., "Future[None]"]


class MicroBatchLoader:
    """Batches of a dataset, written in place by several workers, in an order that no worker can change.

    A plain iterable, not a `torch.utils.data.DataLoader`: Lightning re-creates those.

    Args:
        dataset: A dataset that writes rows, see `lit_data.types.RowWriter`.
        options: Batch size, workers and the rest.
        shuffle: Random order, new in each epoch; otherwise ascending, and `set_epoch` by Lightning has no effect.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ConfigError: The dataset does not write rows, or is smaller than the number of ranks.
    """

    def __init__(
        self,
        dataset: RowWriter,
        options: LoaderOptions | None = None,
        *,
        shuffle: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not isinstance(dataset, RowWriter):
            raise ConfigError(
                f"{type(dataset).__name__} has no `fields` and `write_into`: see lit_data.types.RowWriter"
            )
        self.dataset = dataset
        self.options = options or LoaderOptions()
        self.order = EpochOrder(len(dataset), shuffle, self.options.seed, rank, world_size)
        self.batch_size = self.options.batch_size
        self.epoch = 0
        # Lightning calls `loader.sampler.set_epoch`; evaluation must not change with the epoch.
        self.sampler = self if shuffle else None
        self.batch_sampler = None  # Lightning reads it wherever there is a sampler

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order and random numbers from the next iteration on."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + (rest > 0 and not self.options.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        batch_size, epoch = self.batch_size, self.epoch
        workers = self.options.count_workers(len(self.order))
        depth = self.options.prefetch_batches if workers else 0
        with _open_workers(workers) as submit:
            ahead: deque[Pending] = deque()
            for number in range(len(self)):
                start = number * batch_size
                ahead.append(self._start_batch(submit, start, min(start + batch_size, len(self.order)), epoch))
                if len(ahead) > depth:
                    yield self._finish_batch(ahead.popleft())
            while ahead:
                yield self._finish_batch(ahead.popleft())

    def _start_batch(self, submit: Submit, start: int, stop: int, epoch: int) -> Pending:
        indices = self.order.indices(start, stop, epoch)
        batch = allocate_batch(self.dataset.fields, stop - start, pinned=self.options.pins_memory)
        rows = {name: tensor.numpy() for name, tensor in batch.items()}
        step = self.options.micro_batch_size
        return batch, [
            submit(
                self.dataset.write_into,
                {name: array[first : first + step] for name, array in rows.items()},
                indices[first : first + step],
                epoch,
            )
            for first in range(0, stop - start, step)
        ]

    def _finish_batch(self, pending: Pending) -> Batch:
        batch, writes = pending
        late = wait(writes, timeout=self.options.timeout_s).not_done
        if late:
            raise WorkerDiedError(
                f"{len(late)} micro-batches were not ready after timeout_s={self.options.timeout_s:g} s: "
                "is the disk or the network folder reachable? Otherwise raise data.loader.timeout_s"
            )
        for write in writes:
            write.result()
        return batch


def allocate_batch(fields: Mapping[str, FieldSpec], samples: int, *, pinned: bool = False) -> Batch:
    """Uninitialised tensors for a number of samples.

    Args:
        fields: Shape and dtype of each key, see `RowWriter`.
        samples: B.
        pinned: Page-locked, for copies to a GPU that do not block.
    """
    return {
        name: torch.empty((samples, *field.shape), dtype=getattr(torch, field.dtype), pin_memory=pinned)
        for name, field in fields.items()
    }


@contextmanager
def _open_workers(workers: int) -> Iterator[Submit]:
    """A submit function; with no workers it does the work at once."""
    if workers == 0:
        yield _run_inline
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lit_data")
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _run_inline(write: Callable[..., None], *args: object) -> "Future[None]":
    future: Future[None] = Future()
    try:
        write(*args)
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future
