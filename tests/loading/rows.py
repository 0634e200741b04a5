"""A dataset that the tests of loading build on, and the workers that they try."""

from collections.abc import Mapping

from lit_data.core.types import Array, FieldSpec, Ints

Rows = Mapping[str, Array]

FORK = {"worker_kind": "process", "num_workers": 2, "start_method": "fork"}
KINDS = [
    {"worker_kind": "inline"},
    {"worker_kind": "thread", "num_workers": 2},
    FORK,
]


class Indices:
    """Sample i is its index; others add fields to it, and change `write_into`."""

    def __init__(self, length: int = 64, **fields: FieldSpec) -> None:
        self.length = length
        self.fields = {"index": FieldSpec((), "int64"), **fields}

    def __len__(self) -> int:
        return self.length

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        rows["index"][:] = indices
