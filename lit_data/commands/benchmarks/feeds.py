"""From a row of the table to an iterable of batches."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lit_data.batch_form import count_samples
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
    """What the rows of one method read, and what happens to a batch after its loader.

    Args:
        dataset: A map-style dataset; for `copy` a tensor of ready samples.
        plan: Work on the host before the transfer.
        finish: Work on the device after it.
        options: Of our loaders, beside those that a row sets.
        forked: Workers must inherit what the dataset has in memory.
    """

    dataset: Any
    plan: Step = keep
    finish: Step = keep
    options: LoaderOptions = field(default_factory=LoaderOptions)
    forked: bool = False


@contextmanager
def open_feed(row: Row, candidate: Candidate, *, seed: int) -> Iterator[Iterable[Batch]]:
    """An iterable of batches, shuffled, an epoch long; its workers end with the block.

    Args:
        row: Method and sizes.
        candidate: Where samples come from.
        seed: Of the order.

    Raises:
        ConfigError: The loader refuses the row.
    """
    if row.method == "copy":
        yield BareCopy(candidate.dataset, row, seed)
    elif row.method in OURS:
        with closing(
            MicroBatchLoader(candidate.dataset, _make_options(row, candidate, seed), shuffle=True)
        ) as loader:
            yield loader
    else:
        yield make_torch_loader(row, candidate, seed=seed)


def make_torch_loader(row: Row, candidate: Candidate, *, seed: int) -> Iterable[Batch]:
    """A torch DataLoader as its users set it up: workers that stay, pinned memory where there is CUDA."""
    sampler = MicroBatchSampler(len(candidate.dataset), row, seed)
    in_batch = -(-row.batch_size // row.micro_batch_size)
    dataset: Any = (
        candidate.dataset
        if hasattr(candidate.dataset, "__getitem__")
        else SingleSamples(candidate.dataset)
    )
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=row.num_workers,
        persistent_workers=row.num_workers > 0,
        prefetch_factor=2 * in_batch if row.num_workers else None,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=_choose_context(candidate) if row.num_workers else None,
    )
    return JoinedBatches(loader, row.batch_size) if row.method == "textbook" else loader


class MicroBatchSampler(Sampler[list[int]]):
    """Sample numbers of micro-batches that together make whole batches, in a new order in each epoch."""

    def __init__(self, samples: int, row: Row, seed: int) -> None:
        self.samples, self.row = samples, row
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples, generator=self.generator).tolist()
        for start in range(0, self.samples, self.row.batch_size):
            batch = order[start : start + self.row.batch_size]
            for first in range(0, len(batch), self.row.micro_batch_size):
                yield batch[first : first + self.row.micro_batch_size]


class JoinedBatches:
    """The textbook micro-collate: the main process joins micro-batches with `torch.cat`."""

    def __init__(self, loader: Iterable[Batch], batch_size: int) -> None:
        self.loader, self.batch_size = loader, batch_size

    def __iter__(self) -> Iterator[Batch]:
        parts: list[Batch] = []
        for micro_batch in self.loader:
            parts.append(micro_batch)
            if sum(map(count_samples, parts)) == self.batch_size:
                yield _join(parts)
                parts = []
        if parts:
            yield _join(parts)


class BareCopy:
    """Ready samples copied into batches by threads, each a whole batch at a time: the most that memory allows."""

    def __init__(self, samples: Tensor, row: Row, seed: int) -> None:
        self.samples, self.row = samples, row
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.samples), generator=self.generator)
        depth = self.row.num_workers + 1
        shape = (self.row.batch_size, *self.samples.shape[1:])
        spare = deque(torch.empty(shape, dtype=self.samples.dtype) for _ in range(depth + 1))
        with ThreadPoolExecutor(
            self.row.num_workers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            ahead: deque[Any] = deque()
            for indices in torch.split(order, self.row.batch_size):
                out = spare[0][: len(indices)]
                spare.rotate(-1)
                ahead.append(pool.submit(torch.index_select, self.samples, 0, indices, out=out))
                if len(ahead) == depth:
                    yield {"image": ahead.popleft().result()}
            while ahead:
                yield {"image": ahead.popleft().result()}


def _make_options(row: Row, candidate: Candidate, seed: int) -> LoaderOptions:
    return replace(
        candidate.options,
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        num_workers=row.num_workers,
        worker_kind="inline" if row.method in ("inline", "device") else row.method,  # type: ignore[arg-type]
        seed=seed,
    )


def _choose_context(candidate: Candidate) -> str | None:
    return (
        "fork" if candidate.forked and "fork" in multiprocessing.get_all_start_methods() else None
    )


def _join(parts: list[Batch]) -> Batch:
    return (
        parts[0]
        if len(parts) == 1
        else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    )
