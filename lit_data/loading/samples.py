"""Any map-style dataset, written row by row like one that writes rows itself."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.errors import ConfigError, DataError
from lit_data.rng import Stream, random_words
from lit_data.types import Array, Batch, FieldSpec

_VIEWED_AS: Final = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}
"""Dtypes that NumPy lacks travel as integers of their size."""


Value = Any
"""A sample or a part of one: any nesting of tensors, arrays, numbers and text."""


class MapStyle(Protocol):
    """A dataset with ``__getitem__`` and ``__len__``; ``__getitems__(indices)`` and ``set_epoch`` are used if there."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Value: ...


class Leaf(NamedTuple):
    """A value of a sample: under which name it travels, and the dtype it gets back; no dtype for text."""

    name: str
    dtype: torch.dtype | None


class SampleWriter:
    """Writes the samples of a map-style dataset into rows, and builds batches as torch's `default_collate` does.

    Tensors, arrays and numbers are stacked; dicts, named tuples, tuples and lists are kept (a tuple becomes a list, as
    in torch); text and bytes become lists. All samples must have the structure and the shapes of sample 0.

    What a dataset draws from the global generators of torch, NumPy and `random` is made a pure function of
    (seed, epoch, index): they are seeded before each ``__getitem__`` and put back afterwards. Not with several threads,
    which share those generators, and not inside ``__getitems__``, which makes many samples at once.

    Args:
        dataset: At least one sample.
        seed: 0 <= seed < 2**64.
        isolated: Whether this process makes one sample at a time, so that generators can be seeded.

    Attributes:
        fields: Shape and dtype of each value that is an array.

    Raises:
        ConfigError: Sample 0 holds something that cannot be put into a batch.
    """

    def __init__(self, dataset: MapStyle, *, seed: int, isolated: bool) -> None:
        self.dataset, self.seed, self.isolated = dataset, seed, isolated
        self.fields: dict[str, FieldSpec] = {}
        with _kept_generators():
            _seed_generators(random_words(seed, Stream.USER, 0, 0, 2)[0])
            self.structure = self._describe(dataset[0], "")

    def __len__(self) -> int:
        return len(self.dataset)

    def describe_sample(self, index: int) -> str:
        """What the dataset says of a sample, if it has ``describe_sample``."""
        describe: Callable[[int], str] | None = getattr(self.dataset, "describe_sample", None)
        return describe(index) if describe else ""

    def check_sources(self) -> None:
        """Let the dataset look after its files, if it has ``check_sources``."""
        check: Callable[[], None] | None = getattr(self.dataset, "check_sources", None)
        if check:
            check()

    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> dict[str, list[Any]]:
        """Write samples into the rows of a batch.

        Returns:
            Text and bytes of the samples by name, which have no rows.

        Raises:
            DataError: A sample is not like sample 0.
        """
        set_epoch: Callable[[int], None] | None = getattr(self.dataset, "set_epoch", None)
        if set_epoch:
            set_epoch(epoch)
        texts: dict[str, list[Any]] = {}
        for row, sample in enumerate(self._read(indices, epoch)):
            self._write(self.structure, sample, rows, row, texts)
        return texts

    def build(self, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
        """A batch in the structure of a sample."""
        return _build(self.structure, arrays, texts)

    def _read(self, indices: NDArray[np.int64], epoch: int) -> Iterator[Any]:
        read_many: Callable[[list[int]], Sequence[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if read_many:
            yield from read_many(indices.tolist())
        elif not self.isolated:
            yield from (self.dataset[index] for index in indices.tolist())
        else:
            words = random_words(self.seed, Stream.USER, indices, epoch, 2)
            with _kept_generators():
                for index, seed_words in zip(indices.tolist(), words, strict=True):
                    _seed_generators(seed_words)
                    yield self.dataset[index]

    def _describe(self, value: Value, name: str) -> Value:
        if isinstance(value, Mapping):
            return {key: self._describe(part, f"{name}.{key}") for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._describe(part, f"{name}.{n}") for n, part in enumerate(value)))
        if isinstance(value, tuple | list):
            return [self._describe(part, f"{name}.{n}") for n, part in enumerate(value)]
        if isinstance(value, str | bytes):
            return Leaf(name, None)
        tensor = _as_tensor(value, name)
        array = tensor.view(_VIEWED_AS.get(tensor.dtype, tensor.dtype)).numpy()
        self.fields[name] = FieldSpec(tuple(tensor.shape), array.dtype.name)
        return Leaf(name, tensor.dtype)

    def _write(
        self,
        structure: Value,
        value: Value,
        rows: Mapping[str, Array],
        row: int,
        texts: dict[str, list[Any]],
    ) -> None:
        if isinstance(structure, Leaf):
            if structure.dtype is None:
                texts.setdefault(structure.name, []).append(value)
            else:
                _write_leaf(structure, value, rows[structure.name], row)
            return
        keyed = isinstance(structure, dict)
        if keyed != isinstance(value, Mapping) or (keyed and structure.keys() != value.keys()):
            raise DataError(f"a sample is a {_sketch(value)} and sample 0 a {_sketch(structure)}: give them one form")
        if not keyed and len(structure) != len(value):
            raise DataError(f"a sample has {len(value)} parts and sample 0 has {len(structure)}: give them one form")
        for key in structure if keyed else range(len(structure)):
            self._write(structure[key], value[key], rows, row, texts)


def _write_leaf(leaf: Leaf, value: Value, target: Array, row: int) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = (value.view(_VIEWED_AS[value.dtype]) if value.dtype in _VIEWED_AS else value).numpy()
    if np.shape(value) != target.shape[1:]:
        raise DataError(
            f"{leaf.name.lstrip('.') or 'a sample'} has shape {list(np.shape(value))} and that of sample 0 has "
            f"{list(target.shape[1:])}: crop or pad the samples to one shape"
        )
    target[row] = value


def _as_tensor(value: Value, name: str) -> torch.Tensor:
    where = name.lstrip(".") or "a sample"
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns of read-only arrays, and only shape and dtype matter here
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, which cannot be put into a batch: return tensors, arrays, numbers, "
            "text, or dicts, tuples and lists of them"
        ) from error
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{where} is a tensor on {tensor.device} with layout {tensor.layout}: datasets give dense tensors on the "
            "CPU, and the batch is moved to the device as a whole"
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
    return f"dict of {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def _seed_generators(words: NDArray[np.uint32]) -> None:
    low, high = int(words[0]), int(words[1])
    torch.default_generator.manual_seed(low | high << 32)
    np.random.seed(low)  # noqa: NPY002 - the global generator is what users draw from
    random.seed(high)


@contextmanager
def _kept_generators() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
