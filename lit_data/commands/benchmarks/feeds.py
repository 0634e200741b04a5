"""From a row of the table to an iterable of batches."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.commands.benchmarks.rows import OURS, Row
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.samples import SingleSamples
from lit_data.types import Batch

Step = Callable[[Batch], Batch]


def keep(batch: Batch) -> Batch:
    """Do nothing to a batch."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Samples that the rows of one method read, and the steps behind its loader.

    Args:
        dataset: A map-style dataset; for `copy` a tensor of ready samples.
        plan: Work on the host before the transfer.
        finish: Work on the device after it.
        options: Of our loaders, beside those that a row sets.
        make_loader: Another way to load, from a row, this candidate and a seed; None takes the
            loader that the method of the row names.
        has_micro_batches: That way makes batches of several parts.
    """

    dataset: Any
    plan: Step = keep
    finish: Step = keep
    options: LoaderOptions = field(default_factory=LoaderOptions)
    make_loader: "Callable[[Row, Candidate, int], Iterable[Batch]] | None" = None
    has_micro_batches: bool = False


@contextmanager
def open_feed(row: Row, candidate: Candidate, *, seed: int) -> Iterator[Iterable[Batch]]:
    """Open an iterable of batches, shuffled, an epoch long; its workers end with the block.

    Args:
        row: Method and sizes.
        candidate: Where samples come from.
        seed: Of the order.

    Raises:
        ConfigError: The loader refuses the row.
    """
    if candidate.make_loader is not None:
        yield candidate.make_loader(row, candidate, seed)
    elif row.method == "copy":
        yield BareCopy(candidate.dataset, row, seed)
    elif row.method in OURS:
        options = _make_options(row, candidate, seed)
        with closing(MicroBatchLoader(candidate.dataset, options, shuffle=True)) as loader:
            yield loader
    else:
        yield make_torch_loader(row, candidate, seed)


def make_torch_loader(row: Row, candidate: Candidate, seed: int) -> DataLoader[Batch]:
    """Make a torch DataLoader as people set it up: workers that stay, pinned where there is CUDA.

    Args:
        row: Sizes.
        candidate: Where samples come from.
        seed: Of the order.
    """
    dataset = candidate.dataset
    if not hasattr(dataset, "__getitem__"):
        dataset = SingleSamples(dataset)
    return DataLoader(
        dataset,
        row.batch_size,
        shuffle=True,
        num_workers=row.num_workers,
        persistent_workers=row.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed % 2**63),
    )


class BareCopy:
    """Ready samples copied into batches by threads, each a whole batch: the most memory allows.

    Args:
        samples: [N, ...] ready samples.
        row: Sizes.
        seed: Of the order.
    """

    def __init__(self, samples: Tensor, row: Row, seed: int) -> None:
        self.samples = samples
        self.row = row
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.samples), generator=self.generator)
        depth = self.row.num_workers + 1
        shape = (self.row.batch_size, *self.samples.shape[1:])
        # one more than are under way: the caller still holds the last batch
        buffers = deque(torch.empty(shape, dtype=self.samples.dtype) for _ in range(depth + 1))
        with ThreadPoolExecutor(
            self.row.num_workers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            under_way: deque[Any] = deque()
            for indices in torch.split(order, self.row.batch_size):
                out = buffers[0][: len(indices)]
                buffers.rotate(-1)
                copying = pool.submit(torch.index_select, self.samples, 0, indices, out=out)
                under_way.append(copying)
                if len(under_way) == depth:
                    yield {"image": under_way.popleft().result()}
            while under_way:
                yield {"image": under_way.popleft().result()}


def _make_options(row: Row, candidate: Candidate, seed: int) -> LoaderOptions:
    return replace(
        candidate.options,
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        num_workers=row.num_workers,
        worker_kind="inline" if row.method in ("inline", "device") else row.method,  # type: ignore[arg-type]
        seed=seed,
    )
