"""Map-style datasets as datasets that write rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words, seed_generators, unchanged_generators
from lit_data.core.types import COUNT_SUFFIX, Array, Batch, FieldSpec, Ints, RowWriter, read_samples
from lit_data.loading.structure import Leaf, Value, build_batch, describe, fill

Collate = Callable[[list[Value]], Any]
"""``collate_fn`` of torch's DataLoader: makes a batch from a list of samples."""

_PROBED = 8
_READ_BYTES = 2**18
"""Bytes to read at a time: so little that an allocator keeps the memory for the next samples."""


class MapStyle(Protocol):
    """A dataset with ``__getitem__`` and ``__len__``.

    ``__getitems__(indices)`` and ``set_epoch`` are called if the dataset has them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Value: ...


class Facts(NamedTuple):
    """Facts of a map-style dataset that are known before its first batch.

    Attributes:
        structure: Structure of a sample, with leaves for its arrays and its text.
        fields: Shape and dtype of each value that is an array, by the name of its rows.
        draws: Reading a sample drew from global generators.
        keeps_files: Reading samples left files open.
        sample_s: Seconds per sample; None if not measured.
        trouble: Reason why it cannot be read in a separate process; empty if it can.
    """

    structure: Value
    fields: Mapping[str, FieldSpec]
    draws: bool = False
    keeps_files: bool = False
    sample_s: float | None = None
    trouble: str = ""


UNREAD = Facts(Leaf("", "", None), {})
"""Facts of a dataset that was not read; sufficient if a `collate_fn` makes the batches."""


class SampleWriter:
    """Writer of the samples of a map-style dataset into rows, and builder of their batches.

    Batches have the structure that torch's `default_collate` gives them. Tensors, arrays and
    numbers are stacked; dicts, named tuples, tuples and lists are kept (a tuple becomes a list, as
    in torch); text and bytes become lists. All samples must have the structure and the shapes of
    sample 0.

    Random numbers that a dataset draws from the global generators of torch, NumPy and `random` are
    a pure function of (seed, epoch, index). If reading a sample changes the state of the generators,
    they are seeded before each sample and restored afterwards, and ``__getitems__`` is called for
    one sample at a time. Threads share those generators with each other and with training, so
    `lit_data.loading.choice` uses no threads for a dataset that draws from them.

    Nothing is read before `describe`. It may run in another process, and its result is set as
    `facts` in this one.

    Args:
        dataset: The dataset, with at least one sample.
        seed: 0 <= seed < 2**64.
        collate_fn: Makes a batch from a list of samples, which may differ in size; by default
            samples are stacked.

    Attributes:
        worker_init_fn: Called in each process with its number, before the first sample.
        facts: Known facts of the dataset.
        draws: Reading a sample has drawn from global generators so far.
        isolated: This process reads one sample at a time, so that generators can be compared and
            seeded.
    """

    def __init__(self, dataset: MapStyle, *, seed: int, collate_fn: Collate | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.isolated = True
        self.draws = False
        self.worker_init_fn: Callable[[int], None] | None = None
        self._facts = UNREAD

    @property
    def facts(self) -> Facts:
        """Return the known facts of the dataset."""
        return self._facts

    @facts.setter
    def facts(self, facts: Facts) -> None:
        self._facts = facts
        self.draws = self.draws or facts.draws

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Return shape and dtype of each value that is an array; empty if there is a `collate_fn`."""
        return self.facts.fields

    def describe(self) -> Facts:
        """Read sample 0; return its structure, and whether reading drew from global generators.

        Raises:
            ConfigError: It has a value that cannot be put into a batch.
        """
        with unchanged_generators() as have_moved:
            first = self.dataset[0]
            draws = have_moved()
        if self.collate_fn is not None:
            return UNREAD._replace(draws=draws)
        fields: dict[str, FieldSpec] = {}
        return Facts(describe(first, "", fields, count()), fields, draws)

    def __len__(self) -> int:
        return len(self.dataset)

    def describe_sample(self, index: int) -> str:
        """Return the dataset's description of a sample, if it has ``describe_sample``."""
        describe: Callable[[int], str] | None = getattr(self.dataset, "describe_sample", None)
        return describe(index) if describe else ""

    def check_sources(self) -> None:
        """Call ``check_sources`` of the dataset if it has one."""
        check: Callable[[], None] | None = getattr(self.dataset, "check_sources", None)
        if check:
            check()

    def probe(self) -> bool:
        """Read a few samples from the whole dataset; return True if it draws from global generators."""
        indices = np.linspace(0, len(self) - 1, min(len(self), _PROBED)).astype(np.int64)
        for index in indices.tolist():
            if self.draws:
                break
            with unchanged_generators() as have_moved:
                self.dataset[index]
                self.draws = have_moved()
        return self.draws

    def write_into(
        self, rows: Mapping[str, Array], indices: Ints, epoch: int
    ) -> dict[str, list[Any]]:
        """Write samples into the rows of a batch.

        Returns:
            Text and bytes of the samples by name, which have no rows; a collated batch has the name
                ``""``.

        Raises:
            DataError: A sample differs from sample 0 in structure, shape or dtype.
        """
        set_epoch: Callable[[int], None] | None = getattr(self.dataset, "set_epoch", None)
        if set_epoch:
            set_epoch(epoch)
        if not self.isolated:
            return self._write(rows, indices, None)
        with unchanged_generators() as have_moved:
            if not self.draws:
                texts = self._write(rows, indices, None)
                if not have_moved():
                    return texts
            # The first samples that drew used unseeded generators: read them again.
            self.draws = True
            seeds = random_words(self.seed, Stream.USER, indices, epoch, 2)
            return self._write(rows, indices, seeds)

    def build(self, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
        """Return a batch in the structure of a sample, or the batch of `collate_fn`."""
        if self.collate_fn is not None:
            return texts[""][0]
        return build_batch(self.facts.structure, arrays, texts)

    def _write(
        self,
        rows: Mapping[str, Array],
        indices: Ints,
        seeds: NDArray[np.uint32] | None,
    ) -> dict[str, list[Any]]:
        """Write samples a few at a time.

        They are still in the caches, and their memory is reused for the next ones.
        """
        if self.collate_fn is not None:
            return {"": [self.collate_fn(self._read(indices, seeds))]}
        texts: dict[str, list[Any]] = {}
        reads_many = seeds is None and hasattr(self.dataset, "__getitems__")
        step = len(indices) if reads_many else self._samples_at_a_time
        for first in range(0, len(indices), step):
            part = slice(first, first + step)
            samples = self._read(indices[part], None if seeds is None else seeds[part])
            part_rows = {name: array[part] for name, array in rows.items()}
            fill(self.facts.structure, samples, part_rows, texts)
        return texts

    @cached_property
    def _samples_at_a_time(self) -> int:
        sample_bytes = 0
        for field in self.fields.values():
            sample_bytes += math.prod(field.shape) * np.dtype(field.dtype).itemsize
        return max(1, _READ_BYTES // max(1, sample_bytes))

    def _read(self, indices: Ints, seeds: NDArray[np.uint32] | None) -> list[Value]:
        if seeds is None:
            return self._ask(indices.tolist())
        samples = []
        for index, sample_seeds in zip(indices.tolist(), seeds, strict=True):
            seed_generators(sample_seeds)
            samples += self._ask([index])
        return samples

    def _ask(self, indices: list[int]) -> list[Value]:
        read_many: Callable[[list[int]], Sequence[Any]] | None
        read_many = getattr(self.dataset, "__getitems__", None)
        if read_many:
            return list(read_many(indices))
        return [self.dataset[index] for index in indices]


def count_samples(dataset: RowWriter | MapStyle) -> int:
    """Return the length of a dataset.

    Raises:
        ConfigError: The dataset cannot be read by index.
    """
    has_index = hasattr(dataset, "__getitem__") or isinstance(dataset, RowWriter)
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_index):
        raise ConfigError(
            f"{type(dataset).__name__} is an iterable dataset, which is not supported: use "
            "torch's DataLoader for it, or give a dataset with __getitem__ and __len__"
        )
    if not has_index or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} cannot be read by index: give a map-style dataset with "
            "__getitem__ and __len__, or one with `fields` and `write_into` "
            "(lit_data.core.types.RowWriter)"
        )
    return len(dataset)


class SingleSamples:
    """A dataset that writes rows as a map-style dataset for torch's DataLoader.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: RowWriter) -> None:
        self._dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return read_samples(self._dataset, [index], self.epoch)[0]

    @property
    def collate_fn(self) -> Collate | None:
        """Function for torch's DataLoader; None, its default, if all samples have the same shapes."""
        fields = self._dataset.fields.values()
        return self._collate if any(field.max_items is not None for field in fields) else None

    def _collate(self, samples: list[Batch]) -> Batch:
        """Stack samples; concatenate items of ragged fields, and add their counts."""
        batch = {}
        for name, field in self._dataset.fields.items():
            values = [sample[name] for sample in samples]
            if field.max_items is None:
                batch[name] = default_collate(values)
                continue
            counts = torch.tensor([len(items) for items in values])
            batch[name] = torch.cat(values)
            batch[name + COUNT_SUFFIX] = counts
            if field.row_column:
                rows = torch.arange(len(samples))
                batch[name][:, 0] = rows.repeat_interleave(counts)
        return batch
