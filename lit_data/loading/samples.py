"""Any map-style dataset, written row by row like one that writes rows itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.errors import ConfigError, DataError
from lit_data.loading.generators import are_equal, put_states, seed_generators, take_states
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
    (seed, epoch, index): once the generators are seen to move, they are seeded before each ``__getitem__`` and put back
    afterwards. Not with several threads, which share those generators, and not inside ``__getitems__``, which makes
    many samples at once.

    Args:
        dataset: At least one sample.
        seed: 0 <= seed < 2**64.
        isolated: Whether this process makes one sample at a time, so that generators can be seeded.

    Attributes:
        fields: Shape and dtype of each value that is an array.
        draws: Whether the dataset draws from global generators.

    Raises:
        ConfigError: Sample 0 holds something that cannot be put into a batch.
    """

    def __init__(self, dataset: MapStyle, *, seed: int, isolated: bool) -> None:
        self.dataset, self.seed, self.isolated = dataset, seed, isolated
        self.fields: dict[str, FieldSpec] = {}
        before = take_states()
        self.structure = self._describe(dataset[0], "")
        self.draws = not are_equal(before, take_states())
        put_states(before)

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
        self._fill(self.structure, self._read(indices, epoch), rows, texts)
        return texts

    def build(self, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
        """A batch in the structure of a sample."""
        return _build(self.structure, arrays, texts)

    def _read(self, indices: NDArray[np.int64], epoch: int) -> list[Value]:
        read_many: Callable[[list[int]], Sequence[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if read_many:
            return list(read_many(indices.tolist()))
        if self.isolated and not self.draws:
            before = take_states()
            samples = [self.dataset[index] for index in indices.tolist()]
            if are_equal(before, take_states()):
                return samples
            self.draws = True  # these samples were drawn from whatever was there: read them again
            put_states(before)
        if not self.isolated:
            return [self.dataset[index] for index in indices.tolist()]
        return self._read_seeded(indices, epoch)

    def _read_seeded(self, indices: NDArray[np.int64], epoch: int) -> list[Value]:
        samples, before = [], take_states()
        for index, words in zip(indices.tolist(), random_words(self.seed, Stream.USER, indices, epoch, 2), strict=True):
            seed_generators(words)
            samples.append(self.dataset[index])
        put_states(before)
        return samples

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

    def _fill(
        self, structure: Value, parts: list[Value], rows: Mapping[str, Array], texts: dict[str, list[Any]]
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
    if isinstance(structure, dict):
        keys = structure.keys()
        wrong = next((part for part in parts if not isinstance(part, Mapping) or part.keys() != keys), None)
    else:
        wrong = next((part for part in parts if isinstance(part, Mapping) or len(part) != len(structure)), None)
    if wrong is not None:
        raise DataError(f"a sample is a {_sketch(wrong)} and sample 0 a {_sketch(structure)}: give them one form")


def _fill_leaf(leaf: Leaf, parts: list[Value], target: Array) -> None:
    """Write a value of several samples: at once where all are tensors or numbers, otherwise one by one."""
    try:
        if isinstance(parts[0], torch.Tensor):
            rows = torch.from_numpy(target)
            with torch.no_grad():
                torch.stack(parts, out=rows if leaf.dtype is None else rows.view(leaf.dtype))
            return
        if not target.shape[1:]:
            target[:] = _cast(np.asarray(parts), leaf, target)
            return
    except (RuntimeError, TypeError, ValueError):
        pass  # they differ: the loop finds out in what
    for row, part in enumerate(parts):
        _write_leaf(leaf, part, target, row)


def _write_leaf(leaf: Leaf, value: Value, target: Array, row: int) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = (value.view(_VIEWED_AS[value.dtype]) if value.dtype in _VIEWED_AS else value).numpy()
    array = np.asarray(value)
    if array.shape != target.shape[1:]:
        raise DataError(
            f"{_name(leaf)} has shape {list(array.shape)} and that of sample 0 has {list(target.shape[1:])}: crop or "
            "pad the samples to one shape"
        )
    target[row] = _cast(array, leaf, target)


def _cast(array: Array, leaf: Leaf, target: Array) -> Array:
    if not np.can_cast(array.dtype, target.dtype, "same_kind"):
        raise DataError(
            f"{_name(leaf)} has dtype {array.dtype} and that of sample 0 has {target.dtype}: give all samples one dtype"
        )
    return array


def _name(leaf: Leaf) -> str:
    return leaf.name.lstrip(".") or "a sample"


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
    if isinstance(value, Mapping):
        return f"dict of {sorted(map(str, value))}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
