"""Bars on long work, threads that keep the order, and how many there are."""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_data.app.cli import main
from lit_data.core import progress
from lit_data.core.progress import AHEAD, count_threads, limit_threads, ordered_map, track
from lit_data.images.writing import write_png


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
    assert ("decoding" in err and "5/5" in err and "2.08/s" in err) is shown


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
    taken = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = ordered_map(lambda number: number, items(), 3)
    assert next(results) == 0
    assert len(taken) == AHEAD * 3 + 1
    results.close()
    assert len(taken) == AHEAD * 3 + 1


@pytest.mark.parametrize(
    ("item_bytes", "expected"), [(0, 16), (10**6, 16), (10**9, 4), (10**12, 1)]
)
def test_threads_are_cores_unless_their_images_fill_the_memory(
    item_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "count_cores", lambda: 16)
    monkeypatch.setattr(progress, "available_memory_bytes", lambda: 100 * 10**9)
    assert count_threads(item_bytes) == expected
    with limit_threads(3):
        assert count_threads(item_bytes) == 3
    assert count_threads(item_bytes) == expected


def test_prepare_decodes_with_as_many_threads_as_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(6):
        image = np.full((64, 64), number, np.uint8)
        write_png(folder / f"{number}.png", image)
    asked = []
    ordered_map = progress.ordered_map

    def note(function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
        asked.append(workers)
        return ordered_map(function, items, workers)

    for module in ("lit_data.images.header_scan", "lit_data.images.store.build"):
        monkeypatch.setattr(f"{module}.ordered_map", note)
    words = [
        "+experiment=anomaly",
        f"data.root={folder}",
        f"paths.cache={tmp_path / 'c'}",
    ]
    words += [f"paths.runs={tmp_path / 'runs'}", "prepare.workers=3", "data.size_px=32"]
    assert main(["prepare", *words]) == 0
    assert set(asked) == {3}
    assert main(["prepare", *words, "prepare.workers=0"]) == 2
    assert "prepare.workers=0" in capfd.readouterr().err
