"""The share of a rank, as torch.distributed or the user says it."""

import logging
import multiprocessing
from typing import Any

import pytest
import torch.distributed as dist

from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader, current_order

SAMPLES = [{"index": number} for number in range(17)]


def _read(loader: MicroBatchLoader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def _make(batch_size: int = 4, **options: Any) -> MicroBatchLoader:
    loader_options = LoaderOptions(batch_size=batch_size, num_workers=0)
    return MicroBatchLoader(SAMPLES, loader_options, **options)


def _be_rank(rank: int, store: str, answers: Any) -> None:
    loaders = [_make(shuffle=True), _make(), _make(1, stage="val"), _make(rank=0, world_size=1)]
    before = [len(loader) for loader in loaders]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    after = [len(loader) for loader in loaders]
    answers.put((rank, before, after, [_read(loader) for loader in loaders]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, Any, Any, Any]]:
    """What two processes say about their loaders: rank, lengths before and after the group, batches."""
    context = multiprocessing.get_context("fork")
    store = tmp_path_factory.mktemp("ranks") / "store"
    answers = context.Queue()
    processes = [
        context.Process(target=_be_rank, args=(rank, str(store), answers)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    said = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    return said


def test_a_loader_shares_its_samples_over_the_process_group(two_ranks: Any) -> None:
    for number in range(3):
        batches = [batches[number] for *_, batches in two_ranks]
        together = [index for of_rank in batches for batch in of_rank for index in batch]
        assert sorted(together) == list(range(17))
    for _, _, lengths, batches in two_ranks:
        assert lengths == [len(of_loader) for of_loader in batches]


def test_training_ranks_take_equally_many_steps_shuffled_or_not(two_ranks: Any) -> None:
    for number in range(2):
        assert len({len(batches[number]) for *_, batches in two_ranks}) == 1


def test_explicit_ranks_hold_and_without_a_group_everything_is_read(two_ranks: Any) -> None:
    for _, before, after, batches in two_ranks:
        assert before == [5, 5, 17, 5]
        assert after[3] == 5
        everything = [index for batch in batches[3] for index in batch]
        assert sorted(everything) == list(range(17))


def test_batches_of_one_that_ranks_cannot_share_are_refused_where_the_stage_is_unknown() -> None:
    loader = _make(1, rank=0, world_size=2)
    with pytest.raises(ConfigError, match=r"17 samples in batches of 1.*stage='val'"):
        len(loader)
    assert len(_make(1, rank=0, world_size=2, stage="val")) == 9
    assert len(_make(1, rank=1, world_size=2, stage="val")) == 8
    assert len(_make(1, rank=0, world_size=2, stage="train")) == 8


def test_a_world_size_without_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size=2 without rank"):
        next(iter(_make(world_size=2)))


def test_processes_of_a_launcher_that_have_no_group_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current_order.warn_without_group.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        assert len(_read(_make())) == len(_read(_make())) == 5
    assert caplog.text.count("WORLD_SIZE=2") == 1
