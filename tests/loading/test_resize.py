import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.types import FieldSpec

KINDS = [
    {"worker_kind": "inline"},
    {"worker_kind": "thread", "num_workers": 2},
    {"worker_kind": "process", "num_workers": 2, "start_method": "fork"},
]


class Pids:
    """Sample i is filled with i; its batch tells which process wrote it."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.fields = {"image": FieldSpec((5,), "int32"), "pid": FieldSpec((), "int64")}

    def __len__(self) -> int:
        return self.length

    def write_into(
        self, rows: Mapping[str, NDArray[Any]], indices: NDArray[np.int64], epoch: int
    ) -> None:
        import os

        rows["image"][:] = indices[:, None]
        rows["pid"][:] = os.getpid()


def _loader(batch_size: int = 8, **options: Any) -> MicroBatchLoader:
    chosen: dict[str, Any] = {"micro_batch_size": 3, "seed": 2, "resizable": True} | options
    return MicroBatchLoader(Pids(), LoaderOptions(batch_size=batch_size, **chosen), shuffle=True)


def _fixed_order() -> list[int]:
    return [
        index for batch in _loader(worker_kind="inline") for index in batch["image"][:, 0].tolist()
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_new_size_holds_from_the_next_batch_and_nothing_is_lost(kind: dict[str, Any]) -> None:
    draw = random.Random(1)
    loader = _loader(**kind)
    sizes, seen, pids, expected = [], [], set(), [8]
    for batch in loader:
        assert batch["image"].is_contiguous()
        sizes.append(len(batch["image"]))
        seen += batch["image"][:, 0].tolist()
        pids |= set(batch["pid"].tolist())
        loader.batch_size = draw.choice([1, 2, 8, 31, 100])
        expected.append(loader.batch_size)
    loader.close()
    assert sizes[:-1] == expected[: len(sizes) - 1]
    assert seen == _fixed_order()
    assert len(pids) <= int(kind.get("num_workers", 1))  # the same workers all the time


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_change_among_the_last_batches(kind: dict[str, Any]) -> None:
    for last in range(1, 20):
        loader = _loader(100, **kind)
        seen = []
        for batch in loader:
            seen += batch["image"][:, 0].tolist()
            if len(seen) >= 900:
                loader.batch_size = last
        loader.close()
        assert seen == _fixed_order()


def test_without_resizable_the_next_epoch_has_the_new_size() -> None:
    loader = _loader(worker_kind="inline", resizable=False)
    stream = iter(loader)
    next(stream)
    loader.batch_size = 20
    assert {len(batch["image"]) for batch in stream} == {8}
    assert {len(batch["image"]) for batch in loader} == {20}
    assert len(loader) == 50


def test_a_resizable_loader_has_no_length_and_a_state_at_every_size() -> None:
    loader = _loader(worker_kind="inline")
    with pytest.raises(TypeError, match="its batch size can change"):
        len(loader)
    stream = iter(loader)
    for size in (8, 3, 50):
        loader.batch_size = size
        next(stream)
    assert loader.state_dict()["position"] == 61
    with pytest.raises(ConfigError, match="batch_size=0 is not usable"):
        loader.batch_size = 0
