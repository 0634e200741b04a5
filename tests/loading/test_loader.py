import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lit_data.core.errors import ConfigError, WorkerDiedError
from lit_data.core.types import FieldSpec, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.samples import SingleSamples
from tests.helpers.options import assert_refused
from tests.loading.rows import KINDS as FEW_KINDS
from tests.loading.rows import Indices, Rows


class Numbers(Indices):
    """Sample i is filled with i, and with the epoch."""

    def __init__(self, length: int) -> None:
        super().__init__(length, image=FieldSpec((2, 3), "uint16"))
        self.threads = set()

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        self.threads.add(threading.current_thread().name)
        rows["image"][:] = indices[:, None, None] + 1000 * epoch


class Stuck(Numbers):
    release = threading.Event()

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        self.release.wait(60)


class Boxes(Indices):
    """Sample i has i % 4 boxes and as many points; its boxes tell where they come from."""

    def __init__(self) -> None:
        boxes = FieldSpec((3,), "float32", max_items=3, row_column=True)
        super().__init__(30, boxes=boxes, points=FieldSpec((), "int32", max_items=3))

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        for row, index in enumerate(indices.tolist()):
            count = index % 4
            for number in range(count):
                rows["boxes"][row, number] = -1, index, number
            rows["points"][row, :count] = index
            rows["boxes_count"][row] = rows["points_count"][row] = count


KINDS = [*FEW_KINDS, {"worker_kind": "thread", "num_workers": 1}]


def _stream(loader: MicroBatchLoader) -> list[dict[str, torch.Tensor]]:
    return [{key: value.clone() for key, value in batch.items()} for batch in loader]


def test_a_torch_loader_of_single_samples_joins_ragged_fields_as_ours_does() -> None:
    samples = SingleSamples(Boxes())
    torch_loader = DataLoader(samples, batch_size=8, collate_fn=samples.collate_fn)
    options = LoaderOptions(batch_size=8, worker_kind="inline")
    loader = MicroBatchLoader(Boxes(), options, shuffle=False)
    for batch, expected in zip(torch_loader, loader, strict=True):
        assert batch.keys() == expected.keys()
        assert all(batch[key].equal(expected[key]) for key in batch)
    assert SingleSamples(Numbers(3)).collate_fn is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("micro", "shuffle"), [(1, True), (3, False), (32, True)])
def test_batches_do_not_depend_on_workers_or_micro_batches(
    kind: dict[str, Any], micro: int, shuffle: bool
) -> None:
    def stream(micro_batch_size: int, **kind: Any) -> list[dict[str, torch.Tensor]]:
        options = LoaderOptions(batch_size=10, micro_batch_size=micro_batch_size, seed=4, **kind)
        loader = MicroBatchLoader(Numbers(57), options, shuffle=shuffle)
        loader.set_epoch(2)
        batches = _stream(loader)
        loader.close()
        return batches

    batches, expected = stream(micro, **kind), stream(10, worker_kind="inline")
    assert [len(batch["index"]) for batch in batches] == [10] * 5 + [7]
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch["index"], other["index"])
        assert torch.equal(batch["image"], other["image"])
        assert torch.equal(batch["image"][:, 0, 0].long(), batch["index"] + 2000)
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(57))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_batch_that_is_kept_is_never_written_again(kind: dict[str, Any]) -> None:
    options = LoaderOptions(batch_size=4, micro_batch_size=2, **kind)
    loader = MicroBatchLoader(Numbers(200), options, shuffle=True)
    kept = list(loader)
    loader.set_epoch(0)
    kept += list(loader)
    loader.close()
    assert len(kept) == 100
    for batch in kept:
        assert torch.equal(batch["image"][:, 1, 2].long(), batch["index"])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ragged_fields_travel_flat_with_their_rows(kind: dict[str, Any]) -> None:
    loader = MicroBatchLoader(Boxes(), LoaderOptions(batch_size=8, micro_batch_size=3, **kind))
    batches = list(loader)
    loader.close()
    assert [len(batch["boxes"]) for batch in batches] == [12, 12, 12, 7]
    for batch in batches:
        rows = batch["boxes"][:, 0].long()
        assert torch.equal(batch["index"][rows].float(), batch["boxes"][:, 1])
        assert torch.equal(batch["points"].long(), batch["index"][rows])
        assert rows.tolist() == sorted(rows.tolist())
        counts = torch.bincount(rows, minlength=len(batch["index"]))
        assert batch["boxes_count"].tolist() == counts.tolist()


def test_each_epoch_has_its_own_order_and_evaluation_has_one() -> None:
    training = MicroBatchLoader(Numbers(50), LoaderOptions(num_workers=0), shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        training.set_epoch(epoch)
        orders.append(torch.cat([batch["index"] for batch in training]).tolist())
    assert orders[0] == orders[2] != orders[1]
    evaluation = MicroBatchLoader(Numbers(50), LoaderOptions(num_workers=0))
    assert torch.cat([batch["index"] for batch in evaluation]).tolist() == list(range(50))
    assert isinstance(evaluation.sampler, SequentialSampler)


def test_threads_do_the_work_and_are_gone_afterwards() -> None:
    dataset = Numbers(100)
    options = LoaderOptions(worker_kind="thread", num_workers=2, batch_size=2)
    loader = MicroBatchLoader(dataset, options, shuffle=True)
    before = set(threading.enumerate())
    assert len(_stream(loader)) == 50
    assert all(name.startswith("lit_data") for name in dataset.threads)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    assert len(_stream(loader)) == 50
    assert set(threading.enumerate()) - before == workers
    loader.close()
    for thread in workers:
        thread.join(5)
        assert not thread.is_alive()


def test_a_stuck_thread_is_reported() -> None:
    dataset = Stuck(40)
    options = LoaderOptions(worker_kind="thread", num_workers=1, timeout_s=0.05, micro_batch_size=8)
    text = r"not ready with sample 0, 1, 2, 3, 4 and 3 more after timeout_s=0.05"
    try:
        with pytest.raises(WorkerDiedError, match=text):
            _stream(MicroBatchLoader(dataset, options))
    finally:
        dataset.release.set()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_another_iteration_is_whole_and_ends_the_first_with_a_message(kind: dict[str, Any]) -> None:
    options = LoaderOptions(batch_size=5, micro_batch_size=2, **kind)
    loader = MicroBatchLoader(Numbers(60), options, shuffle=True)
    for batch in loader:
        assert len(batch["index"]) == 5
        break
    indices = torch.cat([batch["index"] for batch in _stream(loader)])
    assert sorted(indices.tolist()) == list(range(60))
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ConfigError, match="another iteration over this loader has begun"):
        next(first)
    loader.close()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Stream(), "Stream is an iterable dataset, which is not supported: use torch's DataLoader"),
        ((number for number in range(3)), "generator is an iterable dataset, which is not suppor"),
        (object(), "object cannot be read by index: give a map-style dataset"),
    ],
)
def test_a_dataset_that_cannot_be_read_by_index_is_refused(dataset: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MicroBatchLoader(dataset)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"micro_batch_size": 0},
        {"num_workers": "many"},
        {"prefetch_batches": 0},
        {"worker_kind": "fiber"},
        {"start_method": "clone"},
        {"resizable": "yes"},
        {"pin_memory": "yes"},
        {"timeout_s": 0},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    assert_refused(LoaderOptions, options)


def test_a_few_samples_can_be_read_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_data.loading.loader.maps_files", bool)
    options = LoaderOptions(worker_kind="process", num_workers=2)
    loader = MicroBatchLoader(Numbers(60), options, shuffle=True)
    batch = loader.read(np.array([0, 59, 7]), 3)
    assert batch["index"].tolist() == loader.order.at(np.array([0, 59, 7]), 3).tolist()
    assert torch.equal(batch["image"][:, 0, 0].long(), batch["index"] + 3000)
    assert not loader.has_chosen
