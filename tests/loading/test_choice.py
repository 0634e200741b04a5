import logging
from typing import Any

import numpy as np
import pytest

from lit_data.core import machine
from lit_data.core.types import Array, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader, choice, survey
from lit_data.loading.choice import Choice
from lit_data.loading.staging import INDICES
from tests.loading.rows import Indices, Rows


class Asked(Indices):
    """A dataset that counts how often it is asked."""

    asked = 0

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        self.asked += 1
        super().write_into(rows, indices, epoch)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of 8 cores and 16 GiB, and samples of a given cost."""

    def set_up(sample_s: float, gain: float = 1.0) -> None:
        monkeypatch.setattr(
            survey, "time_batches", lambda rows, parts: sample_s * sum(map(_count, parts))
        )
        monkeypatch.setattr(survey, "compare_threads", lambda rows, scratch, micro_batch_s: gain)
        monkeypatch.setattr(choice, "count_cores", lambda ranks=1: max(1, 8 // ranks))
        monkeypatch.setattr(choice, "available_memory_bytes", lambda: 16 * 2**30)

    return set_up


def _count(arrays: dict[str, Array]) -> int:
    return len(arrays[INDICES])


def _choose(length: int, *, world_size: int = 1, dataset: Any = None, **options: Any) -> Choice:
    chosen = dataset if dataset is not None else Asked(length)
    return MicroBatchLoader(chosen, LoaderOptions(**options), world_size=world_size).choice


def test_threads_where_they_gain_and_processes_where_they_do_not(fake: Any) -> None:
    fake(1e-3, gain=1.8)
    assert (_choose(10_000).kind, _choose(10_000).workers) == ("thread", 8)
    fake(1e-3, gain=1.2)
    found = _choose(10_000)
    assert (found.kind, found.workers) == ("process", 8)
    text = "1000 us per sample in the main thread, two threads are 1.2 times as fast"
    assert found.reason == text
    assert found.inline_us_per_sample == pytest.approx(1000)


def test_a_small_set_gets_no_workers_and_a_larger_one_no_more_than_it_can_feed(fake: Any) -> None:
    fake(0.01, gain=2)
    assert (_choose(20).kind, _choose(20).reason) == ("inline", "20 samples, fewer than 32")
    assert [_choose(length).workers for length in (32, 100, 255, 256, 10_000)] == [1, 3, 7, 8, 8]
    fake(1e-6, gain=2)
    assert _choose(10_000).reason == "a whole epoch takes 0.010 s"
    assert _choose(10_000).kind == "inline"


def test_ranks_share_the_cores_and_processes_the_memory(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(1e-2)
    assert _choose(10_000, world_size=4).workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _choose(10_000, world_size=4).workers == 4
    monkeypatch.setattr(choice, "available_memory_bytes", lambda: 2 * 2**30)
    assert _choose(10_000, world_size=4).workers == 1
    assert _choose(10_000).workers == 3


def test_what_is_configured_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    for options, expected in (
        ({"worker_kind": "thread", "num_workers": 3}, ("thread", 3)),
        ({"worker_kind": "process", "num_workers": 5}, ("process", 5)),
        ({"worker_kind": "inline", "num_workers": 5}, ("inline", 0)),
        ({"num_workers": 0}, ("inline", 0)),
    ):
        dataset = Asked(1000)
        found = _choose(0, dataset=dataset, **options)
        assert (found.kind, found.workers, found.reason) == (*expected, "as configured")
        assert not dataset.asked
    assert not caplog.records


def test_the_measurement_is_short_and_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Asked(1000)
    loader = MicroBatchLoader(dataset, LoaderOptions())
    with caplog.at_level(logging.INFO):
        list(loader)
        list(loader)
    messages = [message for message in caplog.messages if "loader:" in message]
    assert messages == [f"loader: inline, no workers: {loader.choice.reason}"]
    assert loader.choice.reason.startswith("a whole epoch takes 0.0")
    assert loader.choice.thread_gain is not None


def test_each_stage_names_its_loader_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    stages = ["train", "val", "test"]
    with caplog.at_level(logging.INFO):
        for stage in (*stages, "val", "test"):  # after training both are opened anew
            list(MicroBatchLoader(Asked(20), LoaderOptions(), stage=stage))
    assert caplog.messages == [
        f"{stage} loader: inline, no workers: 20 samples, fewer than 32" for stage in stages
    ]


def test_single_samples_are_never_given_to_threads(fake: Any) -> None:
    fake(1e-3, gain=5)
    found = _choose(0, dataset=[np.float32(number) for number in range(1000)])
    assert (found.kind, found.thread_gain) == ("process", None)
    assert "threads do not read single samples" in found.reason


def test_a_container_s_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cpu.max": "200000 100000",
        "memory.max": str(4 * 2**30),
        "memory.current": str(3 * 2**30),
        "memory.stat": f"anon 5\nactive_file {2**29}\ninactive_file {2**28}\nfile 1",
    }
    monkeypatch.setattr(machine, "read_limit", lambda path: files[path.name])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert machine.count_cores() == 2
    assert machine.count_cores(4) == 1
    assert machine.available_memory_bytes() == 2**30 + 2**29 + 2**28
    files["cpu.max"] = "max 100000"
    assert machine.count_cores() == 16
