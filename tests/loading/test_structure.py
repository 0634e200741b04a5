"""Values of samples in their rows: each has its own, and none changes on its way."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lit_data.core.errors import DataError
from lit_data.loading import LoaderOptions, MicroBatchLoader

pytestmark = pytest.mark.timeout(60)


def _load(samples: list[Any], batch_size: int = 8, **kind: Any) -> Any:
    options = LoaderOptions(batch_size=batch_size, **({"worker_kind": "inline"} | kind))
    loader = MicroBatchLoader(samples, options)
    batches = list(loader)
    loader.close()
    return batches[0] if len(batches) == 1 else batches


def _tensors(*parts: tuple[Any, torch.dtype]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=dtype) for value, dtype in parts]


def _arrays(*parts: tuple[Any, str]) -> list[np.ndarray[Any, Any]]:
    return [np.array(value, dtype) for value, dtype in parts]


LARGER = {
    "8 and 16 bit images": _arrays(([[200]], "uint8"), ([[1000]], "uint16")),
    "a sign": _tensors(([200], torch.uint8), ([-5], torch.int16)),
    "a negative number after a tensor": [torch.tensor(1, dtype=torch.uint8), -1],
    "a large number after short floats": [np.float16(1), 1e6],
    "integers after floats": _tensors(([1.0], torch.float32), ([2**24 + 1], torch.int64)),
    "truth and numbers": _tensors((True, torch.bool), (2, torch.int64)),
    "half a number": [1, 0.5],
    "bits of bfloat16": _tensors(([1.0], torch.bfloat16), ([16256], torch.int16)),
    "an array after bfloat16": [torch.tensor([1.0], dtype=torch.bfloat16), np.array([7], "int16")],
    "a list of large numbers": [np.zeros(1, np.float32), [0.1]],
}


@pytest.mark.parametrize("form", LARGER)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_no_value_is_cast_into_another(form: str, batch_size: int) -> None:
    with pytest.raises(DataError, match="give all samples one dtype in __getitem__"):
        _load(LARGER[form], batch_size)


HELD: dict[str, tuple[list[Any], torch.dtype, list[Any]]] = {
    "numbers": ([3, 300, 2**40], torch.int64, [3, 300, 2**40]),
    "floats and numbers": ([0.1, 1, True], torch.float64, [0.1, 1.0, 1.0]),
    "narrow integers": (
        [torch.tensor(2**40), np.int8(-3), np.uint32(7), 5], torch.int64, [2**40, -3, 7, 5],
    ),
    "numbers after bfloat16": (
        [torch.tensor(0.5, dtype=torch.bfloat16), 3, 0.25], torch.bfloat16, [0.5, 3.0, 0.25],
    ),
    "small integers in floats": (
        _arrays(([0.5], "float32"), ([200], "uint8"), ([-9], "int16")), torch.float32,
        [[0.5], [200.0], [-9.0]],
    ),
    "large unsigned numbers": ([torch.tensor(1, dtype=torch.uint64), 2**64 - 1], torch.uint64, [1, 2**64 - 1]),
    "another byte order": (
        _arrays(([1], "int32"), ([2], ">i4"), ([3], ">i2")), torch.int32, [[1], [2], [3]],
    ),
    "a view from the end": (
        [np.arange(3), np.arange(3)[::-1]], torch.int64, [[0, 1, 2], [2, 1, 0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", HELD)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_values_that_the_dtype_of_sample_0_holds_are_kept(form: str, batch_size: int) -> None:
    samples, dtype, values = HELD[form]
    batches = _load(samples, batch_size)
    batch = torch.cat(batches) if batch_size == 1 else batches
    assert batch.dtype == dtype
    assert batch.tolist() == values


CLASHES = [
    {"a.b": 1, "a": {"b": 101}},
    {"a": {"b": 101}, "a.b": 1},
    {"a": [1, 2], "a.0": 3, "a.1": "text"},
    {1: 5, "1": 6},
    {"": 1, "x": {"": 2}, ".": 3},
    {"a": {"": 1}, "a.": 2, (0, 1): 3, "(0, 1)": 4},
    {"boxes": 1, "boxes_count": 2, "\0indices": 3},
    (1, {"1": 2, 1: 3}),
    {"a.b": "one", "a": {"b": "other"}},
]


@pytest.mark.parametrize("sample", CLASHES, ids=str)
def test_each_value_has_rows_of_its_own(sample: Any) -> None:
    samples = [sample] * 3
    assert _as_lists(_load(samples)) == _as_lists(default_collate(samples))


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_as_lists(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": ["a", "b"]}, {"x": "ab"}], "a sample is a str, and sample 0 is a list of 2"),
        ([{"x": [1, 2]}, {"x": 12}], "a sample is a int, and sample 0 is a list of 2"),
        (
            [{"x": 1}, {"x": "a"}],
            "x is a str without numbers, and that of sample 0 has dtype int64",
        ),
        (
            [{"x": 1}, {"x": None}],
            "x is a NoneType without numbers, and that of sample 0 has dtype int64",
        ),
        ([{"x": np.zeros(1)}, {"x": np.array(["a"])}], "x is a ndarray without numbers, and that"),
    ],
)
def test_values_of_another_kind_are_refused(samples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _load(samples)
