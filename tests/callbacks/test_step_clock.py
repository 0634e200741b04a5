import pytest
import torch

from lit_data.callbacks.timing import step_clock
from lit_data.callbacks.timing.step_clock import PARTS, CudaStepClock, StepClock
from tests.callbacks.clock import Clock
from tests.simulated.log import LOG


class Event:
    """An event of a device that is `lag_s` behind the host; those of before `reached_s` are over."""

    time: Clock
    lag_s = 100.0
    reached_s = float("inf")
    made = waited = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1

    def record(self) -> None:
        self.at_s = self.time.now_s + self.lag_s

    def query(self) -> bool:
        return self.at_s <= self.reached_s

    def synchronize(self) -> None:
        type(self).waited += not self.query()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at_s - self.at_s)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(step_clock, "time", fake)
    monkeypatch.setattr(Event, "time", fake, raising=False)
    for name in ("made", "waited"):
        monkeypatch.setattr(Event, name, 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return fake


def spend(clock: StepClock, time: Clock, **parts: float) -> None:
    for part, seconds_s in parts.items():
        clock.enter(part)
        time.now_s += seconds_s


def known(clock: StepClock) -> list[tuple[int, dict[str, float]]]:
    steps = []
    for step, seconds in clock.known:
        parts = zip(PARTS, seconds, strict=True)
        steps.append((step, {part: value for part, value in parts if value}))
    return steps


def clocks() -> list[StepClock]:
    return [StepClock(), CudaStepClock(1.0)]


@pytest.mark.parametrize("clock", clocks(), ids=["host", "cuda"])
def test_the_parts_of_a_step_add_up_to_its_time(clock: StepClock, time: Clock) -> None:
    assert clock.lap(0) is None
    spend(clock, time, wait=1, transfer=2, forward=4, backward=8, other=16)
    assert clock.lap(1) == 31
    spend(clock, time, wait=32)
    assert clock.lap(2) == 32
    clock.read()
    first = {"wait": 1.0, "transfer": 2.0, "forward": 4.0, "backward": 8.0, "other": 16.0}
    assert known(clock) == [(1, first), (2, {"wait": 32.0})]


@pytest.mark.parametrize("clock", clocks(), ids=["host", "cuda"])
def test_the_loaders_own_work_is_taken_out_of_the_wait(clock: StepClock, time: Clock) -> None:
    clock.lap(0)
    for step, assembled_s in ((1, 1.0), (2, 9.0)):
        spend(clock, time, wait=4)
        clock.count_assembly(assembled_s)
        spend(clock, time, forward=1)
        clock.lap(step)
    clock.read()
    first, second = known(clock)
    assert first == (1, {"wait": 3.0, "assemble": 1.0, "forward": 1.0})
    assert second == (2, {"assemble": 4.0, "forward": 1.0})  # never more than the wait


def test_steps_that_the_device_has_not_done_are_known_later_and_never_waited_for(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CudaStepClock(1.0)
    clock.lap(0)
    for step in (1, 2, 3):
        spend(clock, time, forward=1)
        clock.lap(step)
    monkeypatch.setattr(Event, "reached_s", 102.0)
    clock.read()
    assert [step for step, _ in clock.known] == [1, 2]
    assert Event.waited == 0
    clock.read(wait=True)
    assert [step for step, _ in clock.known] == [1, 2, 3]
    assert Event.waited == 1


@pytest.mark.gpu
def test_a_real_device_is_measured_without_waiting() -> None:
    clock = CudaStepClock(1.0)
    matrix = torch.ones(*((256, 256) if LOG.installed else (4096, 4096)), device="cuda")
    for step in range(4):
        clock.enter("forward")
        for _ in range(20):
            matrix = matrix @ matrix
        clock.enter("optimizer")
        matrix += 1
        clock.lap(step)
    clock.read(wait=True)
    assert [step for step, _ in clock.known] == [1, 2, 3]
    for _, seconds in clock.known:
        parts = dict(zip(PARTS, seconds, strict=True))
        assert parts["forward"] > parts["optimizer"] > 0


def test_events_are_used_again_and_stay_bounded(time: Clock) -> None:
    clock = CudaStepClock(1.0)
    for step in range(200):
        spend(clock, time, forward=1)
        clock.lap(step)
        clock.read()
    assert len(clock.known) == 199
    assert Event.made < 10
    for step in range(300):  # which nobody reads
        spend(clock, time, forward=1)
        clock.lap(step)
    assert Event.made < 300  # each step that is kept holds some
