"""Bars on long work, and threads that keep the order."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lit_data.io import progress
from lit_data.io.progress import AHEAD, ordered_map, track


@pytest.mark.parametrize(
    ("seconds_each", "enabled", "shown"),
    [(0.6, True, True), (0.5, True, False), (0.6, False, False)],
)
def test_bar_appears_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seconds_each: float,
    enabled: bool,
    shown: bool,
) -> None:
    now_s = 0.0

    def work() -> Iterator[int]:
        nonlocal now_s
        for number in range(5):
            yield number
            now_s += seconds_each

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert list(track(work(), "decoding", 5, enabled=enabled)) == [0, 1, 2, 3, 4]
    out, err = capfd.readouterr()
    assert out == ""
    assert ("decoding" in err and "5/5" in err) is shown


def test_results_come_in_order() -> None:
    second_done = threading.Event()

    def slow_first(number: int) -> int:
        if number == 0:
            assert second_done.wait(30)
        else:
            second_done.set()
        return number * 10

    assert list(ordered_map(slow_first, range(5), 2)) == [0, 10, 20, 30, 40]


def test_pool_runs_a_bounded_way_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = ordered_map(lambda number: number, items(), 3)
    assert next(results) == 0
    assert len(taken) == AHEAD * 3 + 1
    results.close()
    assert len(taken) == AHEAD * 3 + 1


def test_error_of_a_call_is_raised_in_its_place() -> None:
    def divide(number: int) -> float:
        return 6 / number

    results = ordered_map(divide, [1, 2, 0, 3], 2)
    assert [next(results), next(results)] == [6, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_dropping_it_waits_for_no_thread() -> None:
    """The garbage collector may drop it while the lock is held that a thread needs to end: waiting would never end."""
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number > 0:
            started.set()
            go_on.wait(30)
            ended.set()

    results = ordered_map(work, [0, 1, 2], 1)
    next(results)
    assert started.wait(30)
    results.close()
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(30)
