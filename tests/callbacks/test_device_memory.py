from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_data.callbacks import device_memory
from lit_data.callbacks.device_memory import CudaGauge, HostGauge, MemoryReading, open_gauge

MIB = 2**20


class FakeCuda:
    """One device's counters, as the allocator keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = self.reserved = 0
        self.free = 1000
        self.used = True
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 5000))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits"))

    def hold(self, size: int) -> None:
        self.current = size
        self.peak, self.reserved = max(self.peak, size), max(self.reserved, size)

    def _stats(self, device: torch.device) -> dict[str, Any]:
        if not self.used:
            return {}
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved}},
        }

    def _reset(self, device: torch.device) -> None:
        self.peak = self.current


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_reading_of_cuda(cuda: FakeCuda) -> None:
    gauge = CudaGauge(torch.device("cuda", 0))
    cuda.hold(600)
    cuda.hold(200)
    # Of the device's memory, this process could have what it reserved and what is free.
    assert gauge.read() == MemoryReading(200, 600, 600, 1600)
    cuda.used = False
    assert gauge.read() == MemoryReading(0, 0, 0, 1000)


def test_two_gauges_of_one_device_have_their_own_peaks(cuda: FakeCuda) -> None:
    one, two = (CudaGauge(torch.device("cuda", 0)) for _ in range(2))
    cuda.hold(600)
    cuda.hold(200)
    one.reset_peak()
    cuda.hold(300)
    cuda.hold(100)
    assert (one.read().peak_bytes, two.read().peak_bytes) == (300, 600)
    two.reset_peak()
    cuda.hold(150)
    assert (one.read().peak_bytes, two.read().peak_bytes) == (300, 150)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process with a resident set of `rss` bytes on a machine that has `available` more."""
    memory = SimpleNamespace(rss=100, available=900)
    monkeypatch.setattr(device_memory, "read_rss_bytes", lambda: memory.rss)
    monkeypatch.setattr(device_memory, "available_memory_bytes", lambda: memory.available)
    return memory


def test_a_reading_of_the_host(host: SimpleNamespace) -> None:
    gauge = HostGauge()
    assert gauge.read() == MemoryReading(100, 100, 100, 1000)
    host.rss, host.available = 400, 600
    assert gauge.read() == MemoryReading(400, 400, 400, 1000)
    host.rss, host.available = 300, 200
    assert gauge.read() == MemoryReading(300, 300, 400, 500)
    gauge.reset_peak()
    assert gauge.read().peak_bytes == 300


@pytest.mark.gpu
def test_cuda_for_real() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    gauge = open_gauge(device)
    gauge.reset_peak()
    before = gauge.read()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    during = gauge.read()
    del held
    after = gauge.read()
    assert during.allocated_bytes - before.allocated_bytes == 64 * MIB
    assert after.allocated_bytes == before.allocated_bytes
    assert after.peak_bytes == during.allocated_bytes
    assert during.reserved_bytes >= during.allocated_bytes
    assert 0 < during.limit_bytes <= torch.cuda.get_device_properties(device).total_memory
    gauge.reset_peak()
    assert gauge.read().peak_bytes == before.allocated_bytes
