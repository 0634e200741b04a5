import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lit_data.callbacks.device_memory import read_rss_bytes
from lit_data.callbacks.memory import record
from lit_data.callbacks.memory.record import Growth, TreeMemory, TreeReader
from tests.callbacks.clock import Clock

MIB = 2**20
ROLLUP = "55c6-7fff ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss: {pss} kB\nPss_Shmem: {shared} kB\nLocked: 0 kB\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process with two children, of which one has ended meanwhile."""
    for pid, pss, shared in ((1, 100, 10), (2, 30, 5)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps_rollup").write_text(ROLLUP.format(pss=pss, shared=shared))
    children = [SimpleNamespace(pid=2), SimpleNamespace(pid=3)]
    me = SimpleNamespace(pid=1, children=lambda recursive: children)
    monkeypatch.setattr(record, "PROC", tmp_path)
    monkeypatch.setattr(psutil, "Process", lambda: me)
    return tmp_path


def test_the_tree_is_the_sum_of_the_processes_that_can_be_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record.read_tree() == TreeMemory(130 * 1024, 15 * 1024, processes=2)

    def refuse(recursive: bool) -> Any:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(pid=1, children=refuse))
    assert record.read_tree() == TreeMemory(100 * 1024, 10 * 1024, processes=1)


@pytest.mark.parametrize(
    "content", [None, "", "range\nRss: 900 kB\n"]
)  # no such file, nothing, an older kernel
def test_a_system_that_does_not_tell_gives_nothing(tree: Path, content: str | None) -> None:
    rollup = tree / "1" / "smaps_rollup"
    rollup.unlink()
    if content is not None:
        rollup.write_text(content)
    assert record.read_tree() is None


def test_shared_memory_counts_once_and_growth_is_seen() -> None:
    before = record.read_tree()
    if before is None:
        pytest.skip("this system has no smaps_rollup")
    gc.collect()
    shared = torch.zeros(32 * MIB, dtype=torch.uint8).share_memory_()
    shared.fill_(1)
    after = record.read_tree()
    assert after.shared_bytes - before.shared_bytes == 32 * MIB
    children = psutil.Process(os.getpid()).children(recursive=True)
    rss_bytes = sum(child.memory_info().rss for child in children) + read_rss_bytes()
    assert after.pss_bytes <= rss_bytes + 32 * MIB
    assert after.processes == 1 + len(children)


def test_pinned_bytes_are_those_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record.read_pinned_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 4096})
    assert record.read_pinned_bytes() == 4096
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)  # CUDA was not used yet
    assert record.read_pinned_bytes() == 0


def test_growth_is_the_median_slope_after_the_first_epoch() -> None:
    growth = Growth()
    for epoch, value in enumerate([0, 1000, 1010, 1020]):
        growth.add(epoch, value)
        assert growth.bytes_per_epoch is None
        assert not growth.exceeds(1)
    growth.add(4, 1030)
    assert growth.bytes_per_epoch == 10
    assert growth.describe() == "1000 B after epoch 1, 1.0 KiB after epoch 4"


ALARMS = [
    # steady growth
    ([10, 20, 80, 140, 200], True),
    ([10, 20, 70, 120, 170], False),  # exactly the limit
    ([10, 20, 81, 122, 210, 240, 300], True),  # with noise
    # a warm-up: one large step in the first epoch, or growth that levels off
    ([0, 900, 900, 900, 900, 900], False),
    ([0, 100, 200, 250, 275, 287, 293], False),
    ([0, 0, 100, 150, 175], False),
    # noise
    ([100, 100, 500, 100, 500, 100, 500], False),
    ([100, 500, 100, 500, 100, 500], False),
    ([100, 300, 100, 400, 200, 300, 150], False),
    ([100, 100, 100, 0, 400, 500, 200], False),  # more than a fourth of the pairs of ends fell
    # memory that is given back, one outlier
    ([500, 400, 300, 200, 100, 0], False),
    ([100, 100, 100, 900, 100, 100], False),
    # a leak under a saw-tooth
    ([0, 100, 240, 180, 320, 260, 400, 340, 480, 420, 560], False),  # 40 MiB per epoch
    ([0, 100, 260, 220, 380, 340, 500, 460, 620, 580, 740], True),  # 60 MiB per epoch
]


@pytest.mark.parametrize(("ends_mib", "alarm"), ALARMS)
def test_the_alarm_is_for_steady_growth_alone(ends_mib: list[int], alarm: bool) -> None:
    growth = Growth()
    for epoch, mib in enumerate(ends_mib):
        growth.add(epoch, mib * MIB)
    assert growth.exceeds(50 * MIB) is alarm


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.01, 4.0), (0.05, 20.0)])
def test_reading_takes_a_quarter_of_a_percent_of_the_time(
    cost_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, memory = Clock(100.0), TreeMemory(5, 1, 3)

    def read() -> TreeMemory:
        clock.now_s += cost_s
        return memory

    monkeypatch.setattr(record, "time", clock)
    monkeypatch.setattr(record, "read_tree", read)
    reader, began_s = TreeReader(), clock.now_s
    assert reader.read() == memory
    clock.now_s = began_s + pause_s - 0.001
    assert reader.read() is None
    clock.now_s = began_s + pause_s + 0.001
    assert reader.read() == memory
