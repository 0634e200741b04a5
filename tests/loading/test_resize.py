import os
import random
from typing import Any

import pytest

from lit_data.core.errors import ConfigError
from lit_data.core.types import FieldSpec, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from tests.loading.rows import KINDS, Indices, Rows


class Pids(Indices):
    """The batch of sample i tells which process wrote it."""

    def __init__(self) -> None:
        super().__init__(1000, pid=FieldSpec((), "int64"))

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        rows["pid"][:] = os.getpid()


def _loader(batch_size: int = 8, **options: Any) -> MicroBatchLoader:
    chosen = {"micro_batch_size": 3, "seed": 2, "resizable": True} | options
    return MicroBatchLoader(Pids(), LoaderOptions(batch_size=batch_size, **chosen), shuffle=True)


def _fixed_order() -> list[int]:
    batches = list(_loader(worker_kind="inline"))
    return [index for batch in batches for index in batch["index"].tolist()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_new_size_holds_from_the_next_batch_and_nothing_is_lost(kind: dict[str, Any]) -> None:
    draw = random.Random(1)
    loader = _loader(**kind)
    sizes, seen, pids, expected = [], [], set(), [8]
    for batch in loader:
        assert batch["index"].is_contiguous()
        sizes.append(len(batch["index"]))
        seen += batch["index"].tolist()
        pids |= set(batch["pid"].tolist())
        loader.batch_size = draw.choice([1, 2, 8, 31, 100])
        expected.append(loader.batch_size)
    loader.close()
    assert sizes[:-1] == expected[: len(sizes) - 1]
    assert seen == _fixed_order()
    assert len(pids) <= int(kind.get("num_workers", 1))  # the same workers all the time


def test_without_resizable_the_next_epoch_has_the_new_size() -> None:
    loader = _loader(worker_kind="inline", resizable=False)
    stream = iter(loader)
    next(stream)
    loader.batch_size = 20
    assert {len(batch["index"]) for batch in stream} == {8}
    assert {len(batch["index"]) for batch in loader} == {20}
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
