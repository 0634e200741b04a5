"""Arguments of torch's DataLoader, and samplers."""

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader

SAMPLES = [{"index": number} for number in range(40)]
INLINE: dict[str, Any] = {"batch_size": 8, "num_workers": 0}


def _read(loader: MicroBatchLoader) -> list[int]:
    return [index for batch in loader for index in batch["index"].tolist()]


def _options(**given: Any) -> LoaderOptions:
    return MicroBatchLoader(SAMPLES, **given).options


def test_arguments_of_torch_set_the_options_that_mean_the_same() -> None:
    options = _options(
        batch_size=8,
        num_workers=2,
        pin_memory=False,
        drop_last=True,
        timeout=5,
        prefetch_factor=3,
        multiprocessing_context="spawn",
    )
    assert options == LoaderOptions(
        batch_size=8,
        num_workers=2,
        pin_memory=False,
        drop_last=True,
        timeout_s=5,
        prefetch_batches=6,
        start_method="spawn",
    )
    context = torch.multiprocessing.get_context("fork")
    assert _options(multiprocessing_context=context).start_method == "fork"
    assert _options(timeout=0).timeout_s > 1e5
    allowed = {"batch_sampler": None, "pin_memory_device": "", "in_order": True}
    assert _options(**allowed, prefetch_factor=None, generator=None) == LoaderOptions()


def test_a_generator_gives_the_seed() -> None:
    first, twin, other = (
        _options(generator=torch.Generator().manual_seed(seed)).seed for seed in (1, 1, 2)
    )
    assert first == twin != other


def test_other_options_may_stand_beside_them() -> None:
    loader = MicroBatchLoader(SAMPLES, LoaderOptions(seed=3), batch_size=8)
    assert loader.options == LoaderOptions(seed=3, batch_size=8)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (LoaderOptions(batch_size=4), {"batch_size": 8}, "batch_size is given twice"),
        (LoaderOptions(timeout_s=4), {"timeout": 8}, r"timeout is given twice.*timeout_s=4"),
        (LoaderOptions(global_batch_size=4), {"batch_size": 8}, "exclude each other"),
        (8, {}, r"options=8 are not LoaderOptions.*batch_size=8"),
        (None, {"batch_size": None}, "batch_size=None is not usable"),
        (None, {"batch_sampler": [[1]]}, r"batch_sampler=.* is not possible: give sampler="),
        (None, {"in_order": False}, "always come in order"),
        (None, {"pin_memory_device": "cuda"}, "remove it"),
        (None, {"prefetch_factor": 2}, "set num_workers to at least 1"),
        (None, {"prefetch_factor": 2, "num_workers": 0}, "set num_workers to at least 1"),
        (None, {"persistent_workers": True, "num_workers": 0}, "remove one of them"),
        (None, {"seed": 1}, r"LoaderOptions\(seed=1\)"),
        (None, {"resizable": True}, r"LoaderOptions\(resizable=True\)"),
        (None, {"sampler": [1], "shuffle": True}, "both set the order"),
        (None, {"sampler": iter([1])}, "has no length"),
        (None, {"sampler": []}, "the sampler gives no samples"),
        (None, {"sampler": DistributedSampler([1], 2, 0)}, "remove it and set shuffle=True"),
        (None, {"stage": "validate"}, "stage='validate' is unknown"),
        (
            LoaderOptions(worker_kind="thread"),
            {"worker_init_fn": print},
            "set worker_kind=process",
        ),
    ],
)
def test_what_is_given_twice_or_has_no_counterpart_is_refused(
    options: Any, given: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MicroBatchLoader(SAMPLES, options, **given)


def test_a_name_that_nobody_has_is_no_argument() -> None:
    with pytest.raises(TypeError, match="'batchsize'"):
        MicroBatchLoader(SAMPLES, batchsize=8)


def test_an_empty_dataset_is_called_so() -> None:
    with pytest.raises(ConfigError, match="the dataset is empty"):
        MicroBatchLoader([], batch_size=8)


def test_pinning_without_a_device_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loader = MicroBatchLoader(SAMPLES, **INLINE, pin_memory=True)
    with caplog.at_level(logging.WARNING):
        assert len(_read(loader)) == len(_read(loader)) == 40
    assert caplog.text.count("pin_memory=True") == 1


def test_workers_persist_or_end_as_told() -> None:
    pids: list[set[int]] = []
    for shuffle, persistent in ((True, False), (False, True)):
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
        loader = MicroBatchLoader(Processes(), batch_size=20, shuffle=shuffle, **workers)
        pids += [set(_read(loader)) for _ in range(2)]
        loader.close()
    assert not pids[0] & pids[1]
    assert pids[2] == pids[3]


class Processes:
    """Each sample is the process that reads it, and what its `worker_init_fn` left there."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, int]:
        import os

        info: Any = get_worker_info()
        return {"index": os.getpid(), "worker": getattr(info and info.dataset, "worker", -1)}


def _set_worker(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.worker = worker + 10


def test_a_function_runs_first_in_each_worker_process() -> None:
    loader = MicroBatchLoader(Processes(), batch_size=20, num_workers=2, worker_init_fn=_set_worker)
    assert {worker for batch in loader for worker in batch["worker"].tolist()} == {10, 11}


def test_no_function_runs_in_the_main_process() -> None:
    loader = MicroBatchLoader(SAMPLES, **INLINE, worker_init_fn=_set_worker)
    assert len(_read(loader)) == 40


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 20 + [0.0] * 20, 30),
        SubsetRandomSampler(range(5, 25)),
        RandomSampler(SAMPLES),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_random_sampler_gives_each_epoch_an_order_that_ranks_share(sampler: Any) -> None:
    loader = MicroBatchLoader(SAMPLES, **INLINE, sampler=sampler)
    assert len(loader) == -(-len(sampler) // 8)
    torch.manual_seed(5)
    first, second = _read(loader), _read(loader)
    assert first != second
    assert len(first) == len(sampler)
    shares = []
    for rank in range(2):
        torch.manual_seed(rank)
        share = MicroBatchLoader(
            SAMPLES, **INLINE, sampler=sampler, stage="train", rank=rank, world_size=2
        )
        shares.append(_read(share))
    assert sorted(shares[0] + shares[1]) == sorted(first)


def test_a_list_of_indices_is_followed() -> None:
    loader = MicroBatchLoader(SAMPLES, **INLINE, sampler=[7, 3, 3, 39])
    assert _read(loader) == _read(loader) == [7, 3, 3, 39]


def test_a_distributed_sampler_is_followed_where_the_loader_does_not_share() -> None:
    sampler = DistributedSampler(SAMPLES, 2, 1, shuffle=True)
    loader = MicroBatchLoader(SAMPLES, **INLINE, sampler=sampler, rank=0, world_size=1)
    passes = [_read(loader), _read(loader)]
    assert [len(each) for each in passes] == [20, 20]
    assert passes[0] != passes[1]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([40], "the dataset has 40 samples"),
        ([-1], "from 0 to 39"),
        ([[1, 2]], "single indices"),
        ([[1, 2], [3]], "gives \\[1, 2\\]: give single indices"),
    ],
)
def test_indices_that_are_none_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(MicroBatchLoader(SAMPLES, **INLINE, sampler=sampler))


def test_an_epoch_of_a_sampler_goes_on_exactly_or_is_refused() -> None:
    def make(generator: torch.Generator | None) -> MicroBatchLoader:
        sampler = WeightedRandomSampler([1.0] * 40, 40, generator=generator)
        return MicroBatchLoader(SAMPLES, **INLINE, sampler=sampler)

    for generator in (None, torch.Generator()):
        loader, resumed = make(generator), make(generator)
        whole = _read(make(None))
        next(iter(loader))
        resumed.load_state_dict(loader.state_dict())
        if generator is None:
            assert _read(resumed) == whole[8:]
        else:
            with pytest.raises(ConfigError, match="remove its generator"):
                _read(resumed)
