import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lit_data.errors import ConfigError, WorkerDiedError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.order import EpochOrder
from lit_data.types import FieldSpec


class Numbers:
    """Sample i is filled with i, and with the epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fields = {"image": FieldSpec((2, 3), "uint16"), "index": FieldSpec((), "int64")}
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def write_into(self, rows: Mapping[str, NDArray[Any]], indices: NDArray[np.int64], epoch: int) -> None:
        self.threads.add(threading.current_thread().name)
        rows["image"][:] = indices[:, None, None] + 1000 * epoch
        rows["index"][:] = indices


class Failing(Numbers):
    def write_into(self, rows: Mapping[str, NDArray[Any]], indices: NDArray[np.int64], epoch: int) -> None:
        if 13 in indices:
            raise OSError("sample 13 is gone")
        super().write_into(rows, indices, epoch)


class Stuck(Numbers):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.release = threading.Event()

    def write_into(self, rows: Mapping[str, NDArray[Any]], indices: NDArray[np.int64], epoch: int) -> None:
        self.release.wait(60)


def _stream(loader: MicroBatchLoader) -> list[dict[str, torch.Tensor]]:
    return [{key: value.clone() for key, value in batch.items()} for batch in loader]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("micro", [1, 3, 8, 32])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_do_not_depend_on_workers_or_micro_batches(workers: int, micro: int, shuffle: bool) -> None:
    def stream(num_workers: int, micro_batch_size: int) -> list[dict[str, torch.Tensor]]:
        options = LoaderOptions(batch_size=10, micro_batch_size=micro_batch_size, num_workers=num_workers, seed=4)
        loader = MicroBatchLoader(Numbers(57), options, shuffle=shuffle)
        loader.set_epoch(2)
        return _stream(loader)

    batches, expected = stream(workers, micro), stream(0, 10)
    assert [len(batch["index"]) for batch in batches] == [10] * 5 + [7]
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch["index"], other["index"])
        assert torch.equal(batch["image"], other["image"])
        assert torch.equal(batch["image"][:, 0, 0].long(), batch["index"] + 2000)
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(57))


def test_each_epoch_has_its_own_order_and_evaluation_has_one() -> None:
    training = MicroBatchLoader(Numbers(50), LoaderOptions(num_workers=0), shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        training.set_epoch(epoch)
        orders.append(torch.cat([batch["index"] for batch in training]).tolist())
    assert orders[0] == orders[2] != orders[1]
    assert training.sampler is training
    evaluation = MicroBatchLoader(Numbers(50), LoaderOptions(num_workers=0))
    assert torch.cat([batch["index"] for batch in evaluation]).tolist() == list(range(50))
    assert evaluation.sampler is None


def test_drop_last_leaves_out_the_short_batch() -> None:
    loader = MicroBatchLoader(Numbers(57), LoaderOptions(batch_size=10, num_workers=0, drop_last=True))
    assert len(loader) == 5
    assert [len(batch["index"]) for batch in loader] == [10] * 5


def test_threads_do_the_work_and_are_gone_afterwards() -> None:
    dataset = Numbers(100)
    assert len(_stream(MicroBatchLoader(dataset, LoaderOptions(num_workers=2)))) == 4
    assert all(name.startswith("lit_data") for name in dataset.threads)
    iterator = iter(MicroBatchLoader(dataset, LoaderOptions(num_workers=2, batch_size=2)))
    next(iterator)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("lit_data")]
    assert workers
    del iterator
    for thread in workers:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["inline", "auto"])
def test_no_workers_means_the_main_thread(kind: str) -> None:
    dataset = Numbers(20)
    workers = 2 if kind == "inline" else 0
    _stream(MicroBatchLoader(dataset, LoaderOptions(worker_kind=kind, num_workers=workers)))  # type: ignore[arg-type]
    assert dataset.threads == {"MainThread"}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_arrives_as_itself(workers: int) -> None:
    with pytest.raises(OSError, match="sample 13 is gone"):
        _stream(MicroBatchLoader(Failing(40), LoaderOptions(batch_size=8, num_workers=workers)))


def test_a_stuck_worker_is_reported() -> None:
    dataset = Stuck(40)
    try:
        with pytest.raises(WorkerDiedError, match=r"not ready after timeout_s=0.05 s: is the disk"):
            _stream(MicroBatchLoader(dataset, LoaderOptions(num_workers=1, timeout_s=0.05)))
    finally:
        dataset.release.set()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_the_samples(world: int) -> None:
    evaluation = [EpochOrder(21, False, 0, rank, world) for rank in range(world)]
    seen = np.concatenate([order.indices(0, len(order), 0) for order in evaluation])
    assert sorted(seen.tolist()) == list(range(21))
    training = [EpochOrder(21, True, 0, rank, world) for rank in range(world)]
    assert {len(order) for order in training} == {21 // world}
    seen = np.concatenate([order.indices(0, len(order), 0) for order in training])
    assert len(set(seen.tolist())) == 21 // world * world


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(ConfigError, match="1 samples cannot be shared by 2 ranks"):
        EpochOrder(1, True, 0, 0, 2)
    with pytest.raises(ConfigError, match="rank=2 is out of range for world_size=2"):
        EpochOrder(9, True, 0, 2, 2)


def test_a_dataset_that_writes_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="list has no `fields` and `write_into`"):
        MicroBatchLoader([1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is not usable: choose a whole number of at least 1"),
        ({"batch_size": -1}, "batch_size=-1 is not usable"),
        ({"batch_size": "8"}, "batch_size='8' is not usable"),
        ({"batch_size": True}, "batch_size=True is not usable"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 is not usable"),
        ({"num_workers": -1}, "num_workers=-1 is not usable"),
        ({"num_workers": "many"}, "num_workers='many' is not usable"),
        ({"prefetch_batches": 0}, "prefetch_batches=0 is not usable"),
        ({"worker_kind": "fiber"}, "worker_kind='fiber' is unknown: choose one of"),
        ({"pin_memory": "yes"}, "pin_memory='yes' is unknown"),
        ({"timeout_s": 0}, "timeout_s=0 must be greater than 0"),
        ({"seed": -1}, "seed=-1 is not usable"),
        ({"seed": 2**64}, "seed=18446744073709551616 is not usable"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderOptions(**options)


def test_small_sets_get_no_workers() -> None:
    options = LoaderOptions(micro_batch_size=8)
    assert options.count_workers(31) == 0
    assert options.count_workers(32) >= 1
    assert LoaderOptions(num_workers=3).count_workers(5) == 3
