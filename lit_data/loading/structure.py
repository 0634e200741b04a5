"""Structure of a sample: its values, their rows, and the batch with the same structure."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array, Batch, FieldSpec

_VIEWED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
"""Dtypes that NumPy lacks are stored as integers of the same size."""
_SHORT_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = (
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


Value = Any
"""A sample or a part of one: any nesting of tensors, arrays, numbers and text."""


class Leaf(NamedTuple):
    """A value of a sample.

    Attributes:
        row: Unique name of its rows.
        path: Keys and positions that lead to it, for messages.
        dtype: Dtype in the batch; None for text.
    """

    row: str
    path: str
    dtype: torch.dtype | None


def describe(
    value: Value, path: str, fields: dict[str, FieldSpec], numbers: Iterator[int]
) -> Value:
    """Return the structure of a value, with leaves for its arrays and its text.

    Args:
        value: A sample, or a part of one.
        path: Keys and positions that lead to it.
        fields: Receives the shape and dtype of each array, by the name of its rows.
        numbers: Yields these names.

    Raises:
        ConfigError: A part of it cannot be put into a batch.
    """
    if isinstance(value, Mapping):
        return {
            key: describe(part, f"{path}.{key}", fields, numbers) for key, part in value.items()
        }
    if isinstance(value, tuple | list):
        parts = [describe(part, f"{path}.{n}", fields, numbers) for n, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    row = str(next(numbers))  # paths are not unique: {"a.b": 1} and {"a": {"b": 1}} have the same
    if isinstance(value, str | bytes):
        return Leaf(row, path, None)
    tensor = _as_tensor(value, path)
    fields[row] = FieldSpec(tuple(tensor.shape), _as_array(tensor).dtype.name)
    return Leaf(row, path, tensor.dtype)


def fill(
    structure: Value,
    parts: list[Value],
    rows: Mapping[str, Array],
    texts: dict[str, list[Any]],
) -> None:
    """Write one part of several samples.

    Args:
        structure: Structure of the part, from `describe`.
        parts: The part of each sample.
        rows: Rows of each array.
        texts: Receives values without rows.

    Raises:
        DataError: A part differs in structure, shape or dtype from that of sample 0.
    """
    if isinstance(structure, Leaf):
        if structure.dtype is None:
            texts.setdefault(structure.row, []).extend(parts)
        else:
            _fill_leaf(structure, structure.dtype, parts, rows[structure.row])
        return
    _check_form(structure, parts)
    for key in structure if isinstance(structure, dict) else range(len(structure)):
        fill(structure[key], [part[key] for part in parts], rows, texts)


def _check_form(structure: Value, parts: list[Value]) -> None:
    """Refuse parts of several samples whose structure differs from that of sample 0."""
    for part in parts:
        if isinstance(structure, dict):
            is_alike = isinstance(part, Mapping) and part.keys() == structure.keys()
        else:
            is_list = isinstance(part, tuple | list | np.ndarray | torch.Tensor)
            is_alike = is_list and len(part) == len(structure)
        if not is_alike:
            raise DataError(
                f"a sample is a {_sketch(part)}, and sample 0 is a {_sketch(structure)}: give all "
                "samples the same structure"
            )


def _fill_leaf(leaf: Leaf, dtype: torch.dtype, parts: list[Value], target: Array) -> None:
    """Write one value of several samples, all at once if they have the same type and shape."""
    if _stack_tensors(dtype, parts, target) or _stack_numbers(dtype, parts, target):
        return
    for row, part in enumerate(parts):
        array = _convert(part, leaf, dtype, target)
        if array.shape != target.shape[1:]:
            raise DataError(
                f"{_name(leaf.path)} has shape {list(array.shape)} and that of sample 0 has "
                f"{list(target.shape[1:])}: crop or pad the samples to one shape, or give "
                "MicroBatchLoader(collate_fn=list) to get lists of samples"
            )
        target[row] = array


def _stack_tensors(dtype: torch.dtype, parts: list[Value], target: Array) -> bool:
    """Write tensors with the shape and dtype of sample 0; return False if any value is different."""
    shape = target.shape[1:]
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dtype != dtype or part.shape != shape:
            return False
    rows = torch.from_numpy(target).view(dtype)
    try:
        if len(parts) == 1:
            rows[0].copy_(parts[0].detach())  # faster than `stack`
            return True
        with torch.no_grad():
            torch.stack(parts, out=rows)
    except (RuntimeError, TypeError):
        return False  # one is sparse or on a device, which has its own message
    return True


def _stack_numbers(dtype: torch.dtype, parts: list[Value], target: Array) -> bool:
    """Write numbers with the dtype of sample 0; return False if any value is different."""
    kinds = set(map(type, parts))
    if target.ndim > 1 or len(kinds) > 1 or dtype in _VIEWED_AS:
        return False
    if not issubclass(kinds.pop(), int | float | np.generic | np.ndarray):
        return False
    try:
        values = np.asarray(parts)
    except ValueError:
        return False  # the arrays differ in shape
    if values.dtype != target.dtype or values.shape != target.shape:
        return False
    target[:] = values
    return True


def _convert(value: Value, leaf: Leaf, dtype: torch.dtype, target: Array) -> Array:
    """Return a value of a sample in the dtype of sample 0.

    Raises:
        DataError: That dtype cannot hold the value.
    """
    if isinstance(value, np.ndarray) and value.dtype == target.dtype and dtype not in _VIEWED_AS:
        return value
    if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
        tensor = _convert_number(value, leaf, dtype)
    elif isinstance(value, torch.Tensor):
        tensor = _as_tensor(value, leaf.path)
        _check_dtype(_dtype_name(tensor.dtype), leaf, dtype)
    else:
        array = _as_numbers(value, leaf, dtype)
        _check_dtype(array.dtype.name, leaf, dtype)
        return array
    return _as_array(tensor.to(dtype))


def _as_numbers(value: Value, leaf: Leaf, dtype: torch.dtype) -> Array:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{_name(leaf.path)} is a {type(value).__name__} without numbers, and that of sample 0 "
            f"has dtype {_dtype_name(dtype)}: give all samples the same structure"
        )
    return array


def _convert_number(value: complex, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
    """Return a Python number, which has no dtype of its own, as a tensor."""
    is_held = isinstance(value, bool) or dtype.is_complex
    if dtype.is_floating_point and isinstance(value, int | float):
        is_held = abs(value) <= torch.finfo(dtype).max or abs(value) == math.inf or value != value
    elif dtype in _INTEGERS and isinstance(value, int):
        limits = torch.iinfo(dtype)
        is_held = limits.min <= value <= limits.max
    if not is_held:
        raise DataError(
            f"{_name(leaf.path)} is {value!r}, and that of sample 0 has dtype "
            f"{_dtype_name(dtype)}, which cannot hold it: give all samples one dtype in __getitem__"
        )
    return torch.tensor(value, dtype=dtype)


def _check_dtype(name: str, leaf: Leaf, dtype: torch.dtype) -> None:
    """Refuse values whose dtype can hold more than that of sample 0.

    Raises:
        DataError: The dtype of sample 0 cannot hold them.
    """
    held = _dtype_name(dtype)
    if not _can_hold(held, name):
        raise DataError(
            f"{_name(leaf.path)} has dtype {name} and that of sample 0 has {held}, which cannot "
            "hold it: give all samples one dtype in __getitem__"
        )


def _can_hold(wide: str, narrow: str) -> bool:
    """Return True if a dtype can hold every value of another one."""
    if narrow == wide:
        return True
    if narrow in _SHORT_FLOATS:
        return wide in ("float32", "float64")
    return wide not in _SHORT_FLOATS and np.can_cast(narrow, wide, "safe")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.view(_VIEWED_AS.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def _name(path: str) -> str:
    name = path.removeprefix(".")
    if name[:1].isdigit():
        return f"part {name} of a sample"
    return name or "a sample"


def _as_tensor(value: Value, path: str) -> torch.Tensor:
    where = _name(path)
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns of read-only arrays
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, which cannot be put into a batch: return "
            "tensors, arrays, numbers, text, or dicts, tuples and lists of them, or give "
            "MicroBatchLoader(collate_fn=list) to get lists of samples"
        ) from error
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{where} is a tensor on {tensor.device} with layout {tensor.layout}: datasets give "
            "dense tensors on the CPU, and the batch is moved to the device as a whole"
        )
    return tensor


def build_batch(structure: Value, arrays: Batch, texts: Mapping[str, list[Any]]) -> Value:
    """Return a batch in the structure of a sample."""
    if isinstance(structure, Leaf):
        if structure.dtype is None:
            return texts[structure.row]
        tensor = arrays[structure.row]
        return tensor.view(structure.dtype) if structure.dtype in _VIEWED_AS else tensor
    if isinstance(structure, dict):
        return {key: build_batch(part, arrays, texts) for key, part in structure.items()}
    parts = [build_batch(part, arrays, texts) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else parts


def _sketch(value: Value) -> str:
    if isinstance(value, Mapping):
        return f"dict of {sorted(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
