"""Map-style datasets, written row by row like those that write rows themselves."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lit_data.errors import ConfigError, DataError
from lit_data.loading.options import LoaderOptions
from lit_data.rng import Stream, random_words, seed_generators, unchanged_generators
from lit_data.types import COUNT_SUFFIX, Array, Batch, FieldSpec, Ints, RowWriter, read_samples

_VIEWED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
"""Dtypes that NumPy lacks travel as integers of their size."""


Value = Any
"""A sample or a part of one: any nesting of tensors, arrays, numbers and text."""

Collate = Callable[[list[Value]], Any]
"""``collate_fn`` of torch's DataLoader: a list of samples becomes a batch."""

_PROBED = 8
_READ_BYTES = 2**18
"""Bytes read at a time: less than an allocator gives back to the system, to ask for it anew."""


class MapStyle(Protocol):
    """A dataset with ``__getitem__`` and ``__len__``.

    ``__getitems__(indices)`` and ``set_epoch`` are used if there.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Value: ...


class Leaf(NamedTuple):
    """A value of a sample: its name in the batch, and the dtype it gets back; None for text."""

    name: str
    dtype: torch.dtype | None


class SampleWriter:
    """Writer of the samples of a map-style dataset into rows, and builder of their batches.

    Batches have the structure that torch's `default_collate` gives them. Tensors, arrays and
    numbers are stacked; dicts, named tuples, tuples and lists stay (a tuple becomes a list, as in
    torch); text and bytes become lists. All samples must have the structure and the shapes of
    sample 0.

    Random numbers that a dataset draws from the global generators of torch, NumPy and `random` are
    made a pure function of (seed, epoch, index): once the generators are seen to move, they are
    seeded before each sample and put back afterwards, and ``__getitems__`` is asked for one sample
    at a time. Threads share those generators with each other and with training, so
    `lit_data.loading.choice` gives no threads to a dataset that draws.

    Args:
        dataset: At least one sample.
        seed: 0 <= seed < 2**64.
        collate_fn: Makes a batch of a list of samples, which then may differ in size; by default
            they are stacked.

    Attributes:
        fields: Shape and dtype of each value that is an array; none where `collate_fn` makes the
            batches.
        draws: The dataset was seen to draw from global generators.
        isolated: This process makes one sample at a time, so that generators can be watched and
            seeded.

    Raises:
        ConfigError: Sample 0 holds something that cannot be put into a batch.
    """

    def __init__(self, dataset: MapStyle, *, seed: int, collate_fn: Collate | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.isolated = True
        self.fields: dict[str, FieldSpec] = {}
        with unchanged_generators() as have_moved:
            first = dataset[0]
            self.draws = have_moved()
        self.structure = self._describe(first, "") if collate_fn is None else Leaf("", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def describe_sample(self, index: int) -> str:
        """Return the dataset's description of a sample, if it has ``describe_sample``."""
        describe: Callable[[int], str] | None = getattr(self.dataset, "describe_sample", None)
        return describe(index) if describe else ""

    def check_sources(self) -> None:
        """Let the dataset check its files, if it has ``check_sources``."""
        check: Callable[[], None] | None = getattr(self.dataset, "check_sources", None)
        if check:
            check()

    def probe(self) -> bool:
        """Read a few samples all over the dataset; return True if it draws from generators."""
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
            Text and bytes of the samples by name, which have no rows; a collated batch under the
            name ``""``.

        Raises:
            DataError: A sample is not like sample 0.
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
            # The first samples that drew did so from generators in any state: they are read again.
            self.draws = True
            seeds = random_words(self.seed, Stream.USER, indices, epoch, 2)
            return self._write(rows, indices, seeds)

    def build(self, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
        """Return a batch in the structure of a sample, or as `collate_fn` made it."""
        if self.collate_fn is not None:
            return texts[""][0]
        return _build(self.structure, arrays, texts)

    def _write(
        self,
        rows: Mapping[str, Array],
        indices: Ints,
        seeds: NDArray[np.uint32] | None,
    ) -> dict[str, list[Any]]:
        """Write samples a few at a time.

        Those are still in the caches, and their memory serves the next ones.
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
            self._fill(self.structure, samples, part_rows, texts)
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

    def _describe(self, value: Value, name: str) -> Value:
        """Return the structure of a value, with leaves for its arrays, and note their fields."""
        if isinstance(value, Mapping):
            return {key: self._describe(part, f"{name}.{key}") for key, part in value.items()}
        if isinstance(value, tuple | list):
            parts = [self._describe(part, f"{name}.{n}") for n, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else parts
        if isinstance(value, str | bytes):
            return Leaf(name, None)
        tensor = _as_tensor(value, name)
        array = tensor.view(_VIEWED_AS.get(tensor.dtype, tensor.dtype)).numpy()
        self.fields[name] = FieldSpec(tuple(tensor.shape), array.dtype.name)
        return Leaf(name, tensor.dtype)

    def _fill(
        self,
        structure: Value,
        parts: list[Value],
        rows: Mapping[str, Array],
        texts: dict[str, list[Any]],
    ) -> None:
        """Write the same part of several samples."""
        if isinstance(structure, Leaf):
            if structure.dtype is None:
                texts.setdefault(structure.name, []).extend(parts)
            else:
                _fill_leaf(structure, parts, rows[structure.name])
            return
        _check_form(structure, parts)
        for key in structure if isinstance(structure, dict) else range(len(structure)):
            self._fill(structure[key], [part[key] for part in parts], rows, texts)


def _check_form(structure: Value, parts: list[Value]) -> None:
    """Refuse parts of several samples that have another form than that of sample 0."""
    for part in parts:
        if isinstance(structure, dict):
            is_alike = isinstance(part, Mapping) and part.keys() == structure.keys()
        else:
            is_alike = not isinstance(part, Mapping) and len(part) == len(structure)
        if not is_alike:
            raise DataError(
                f"a sample is a {_sketch(part)} and sample 0 a {_sketch(structure)}: give them one "
                "form"
            )


def _fill_leaf(leaf: Leaf, parts: list[Value], target: Array) -> None:
    """Write a value of several samples: all at once if they are tensors or numbers."""
    shape = target.shape[1:]
    try:
        if all(isinstance(part, torch.Tensor) and part.shape == shape for part in parts):
            rows = torch.from_numpy(target)  # of their shape: `stack` would resize another one
            rows = rows if leaf.dtype is None else rows.view(leaf.dtype)
            if len(parts) == 1 and parts[0].dtype == rows.dtype:
                rows[0].copy_(parts[0].detach())  # sooner than `stack`, which would check the dtype
                return
            with torch.no_grad():
                torch.stack(parts, out=rows)
            return
        if not shape:
            values = _check_dtype(np.asarray(parts), leaf, target)
            if values.shape == target.shape:  # else one of them is no number
                target[:] = values
                return
    except (RuntimeError, TypeError, ValueError):
        pass  # they differ: the loop finds out in what
    for row, part in enumerate(parts):
        target[row] = _check_value(part, leaf, target)


def _check_value(value: Value, leaf: Leaf, target: Array) -> Array:
    """Return a value of a sample as an array of the shape of sample 0's."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        value = tensor.view(_VIEWED_AS.get(tensor.dtype, tensor.dtype)).numpy()
    array = np.asarray(value)
    if array.shape != target.shape[1:]:
        raise DataError(
            f"{_name(leaf)} has shape {list(array.shape)} and that of sample 0 has "
            f"{list(target.shape[1:])}: crop or pad the samples to one shape, or give "
            "MicroBatchLoader(collate_fn=list) and take lists of samples"
        )
    return _check_dtype(array, leaf, target)


def _check_dtype(array: Array, leaf: Leaf, target: Array) -> Array:
    if not np.can_cast(array.dtype, target.dtype, "same_kind"):
        raise DataError(
            f"{_name(leaf)} has dtype {array.dtype} and that of sample 0 has {target.dtype}: give "
            "all samples one dtype"
        )
    return array


def _name(leaf: Leaf) -> str:
    name = leaf.name.lstrip(".")
    if name[:1].isdigit():
        return f"part {name} of a sample"
    return name or "a sample"


def _as_tensor(value: Value, name: str) -> torch.Tensor:
    where = name.lstrip(".") or "a sample"
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns of read-only arrays
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, which cannot be put into a batch: return "
            "tensors, arrays, numbers, text, or dicts, tuples and lists of them"
        ) from error
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{where} is a tensor on {tensor.device} with layout {tensor.layout}: datasets give "
            "dense tensors on the CPU, and the batch is moved to the device as a whole"
        )
    return tensor


def _build(structure: Value, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
    if isinstance(structure, Leaf):
        if structure.dtype is None:
            return texts[structure.name]
        tensor = arrays[structure.name]
        return tensor.view(structure.dtype) if structure.dtype in _VIEWED_AS else tensor
    if isinstance(structure, dict):
        return {key: _build(part, arrays, texts) for key, part in structure.items()}
    parts = [_build(part, arrays, texts) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else parts


def _sketch(value: Value) -> str:
    if isinstance(value, Mapping):
        return f"dict of {sorted(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def count_samples(dataset: RowWriter | MapStyle) -> int:
    """Return the length of a dataset.

    Raises:
        ConfigError: It cannot be read by index.
    """
    has_samples = hasattr(dataset, "__getitem__") or isinstance(dataset, RowWriter)
    if not has_samples or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} cannot be read by index: give a map-style dataset with "
            "__getitem__ and __len__, or one with `fields` and `write_into` "
            "(lit_data.types.RowWriter)"
        )
    return len(dataset)


def as_rows(
    dataset: RowWriter | MapStyle, options: LoaderOptions, collate_fn: Collate | None = None
) -> RowWriter:
    """Return the dataset, if it writes rows; else a writer of its samples.

    Raises:
        ConfigError: Its samples cannot be put into a batch, or there is nothing for `collate_fn` to
            do.
    """
    if not isinstance(dataset, RowWriter):
        return SampleWriter(dataset, seed=options.seed, collate_fn=collate_fn)
    if collate_fn is not None:
        raise ConfigError(
            f"{type(dataset).__name__} writes into the rows of a batch itself: leave out collate_fn"
        )
    return dataset


class SingleSamples:
    """A dataset that writes rows, read sample by sample, as torch's own loader does.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: RowWriter) -> None:
        self._dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the samples of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return read_samples(self._dataset, [index], self.epoch)[0]

    @property
    def collate_fn(self) -> Collate | None:
        """That of torch's loader: None, its own, where all samples have the same shapes."""
        fields = self._dataset.fields.values()
        return self._collate if any(field.max_items is not None for field in fields) else None

    def _collate(self, samples: list[Batch]) -> Batch:
        """Stack samples; items of ragged fields lie behind each other, with their counts."""
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
