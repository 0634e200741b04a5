"""Which loaders are measured, and with which sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

OURS: Final = ("inline", "thread", "process", "device")
METHODS: Final = ("copy", "original", "improved", "dataloader", "textbook", *OURS)
NAMES: Final = {
    "copy": "bare copy of ready patches",
    "original": "original loader: whole files, whole-image defects",
    "improved": "improved: crop first, decoded images in memory",
    "dataloader": "torch DataLoader over the decoded samples",
    "textbook": "micro-batches joined by torch.cat",
    "inline": "lit_data, inline",
    "thread": "lit_data, threads",
    "process": "lit_data, processes",
    "device": "lit_data, cache=device",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        method: One of `METHODS`.
        batch_size: Samples per batch.
        num_workers: Threads or processes; 0 is the main thread.
        micro_batch_size: Samples that a worker makes at a time; the batch size for methods without micro-batches.
    """

    method: str
    batch_size: int
    num_workers: int
    micro_batch_size: int


def list_rows(
    methods: Sequence[str], *, workers: Sequence[int], micro_batch_sizes: Sequence[int], batch_sizes: Sequence[int]
) -> list[Row]:
    """Every different combination that means something, in the order of `METHODS`.

    Args:
        methods: Which methods.
        workers: Numbers of workers.
        micro_batch_sizes: Sizes of micro-batches; one larger than the batch counts as the batch.
        batch_sizes: Sizes of batches.
    """
    rows = (
        Row(method, batch_size, count, min(size, batch_size))
        for method in sorted(set(methods), key=METHODS.index)
        for batch_size in batch_sizes
        for count in _choose_workers(method, workers)
        for size in (micro_batch_sizes if method in ("textbook", "inline", "thread", "process") else [batch_size])
    )
    return list(dict.fromkeys(rows))


def _choose_workers(method: str, workers: Sequence[int]) -> Iterator[int]:
    if method in ("inline", "device"):
        yield 0
    else:
        yield from (count for count in workers if count or method not in ("copy", "thread", "process"))
