"""The search alone, against a simulated memory: a piece of n samples fits where n is at most a capacity."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from lit_data.batch_form import cut_evenly
from lit_data.callbacks.adaptive.batch_size_search import SizeSearch
from lit_data.callbacks.device_memory import MemoryReading

UNLIMITED = 1e18
CAPACITIES = sorted({*range(1, 40), *range(40, 301, 7), 64, 128, 150, 256, 299, 300})


def _run_batch(search: SizeSearch, batch: int, capacity: int, seconds: float = 1.0) -> int:
    """One batch until it fits, as `Replay` does it; how often it failed."""
    for retries in itertools.count():
        largest = cut_evenly(batch, search.size)[0][1]
        if largest <= capacity:
            search.succeed(largest, batch, seconds)
            return retries
        assert search.fails is None or largest < search.fails
        search.fail(largest, 1000)
    raise AssertionError


def _settle(search: SizeSearch, batch: int, capacity: int, steps: int = 40) -> int:
    """Batches with a growth after each; steps until the size stayed."""
    last = 0
    for step in range(steps):
        size = search.size
        _run_batch(search, batch, capacity)
        search.grow(batch, UNLIMITED)
        last = step if search.size != size else last
    return last


def _settle_resizing(search: SizeSearch, capacity: int, steps: int = 60) -> None:
    for _ in range(steps):
        _run_batch(search, search.size, capacity)
        search.enlarge(UNLIMITED)


@pytest.mark.parametrize(
    ("size", "fits", "failed", "expected"),
    [
        # nothing fitted: half, rounded up
        (256, 0, 256, 128),
        (9, 0, 9, 5),
        # what fitted, where that is more than half
        (128, 100, 128, 100),
        (128, 20, 128, 64),
        # what fitted does not count when it fails itself
        (64, 64, 64, 32),
        # a batch that is smaller than the size in use
        (1000, 0, 30, 15),
    ],
)
def test_after_a_failure(size: int, fits: int, failed: int, expected: int) -> None:
    search = SizeSearch(size, fits=fits)
    search.fail(failed, 1000)
    assert (search.size, search.fails, search.fails_limit_bytes, search.clean) == (
        expected,
        failed,
        1000,
        0,
    )


def test_never_below_the_smallest_size() -> None:
    search = SizeSearch(10, min_size=8)
    search.fail(10, 1000)
    assert search.size == 8


def test_the_smallest_failure_counts() -> None:
    search = SizeSearch(64, fails=50)
    search.fail(64, 1000)
    assert search.fails == 50
    search.fail(20, 1000)
    assert search.fails == 20


def test_at_most_as_many_retries_as_halvings_whatever_was_known_before() -> None:
    for batch in range(1, 301):
        for fits in {0, 1, batch // 3, batch // 2, batch - 2, batch - 1} & set(range(batch)):
            search = SizeSearch(batch, fits=fits)
            retries = _run_batch(search, batch, 1)
            assert retries <= math.ceil(math.log2(batch)), (batch, fits)


def test_at_most_as_many_retries_as_halvings_for_every_capacity() -> None:
    for batch in range(1, 301):
        for capacity in range(1, batch + 1):
            retries = _run_batch(SizeSearch(batch), batch, capacity)
            assert retries <= math.ceil(math.log2(batch)) - math.floor(math.log2(capacity)) + 1
            assert retries <= math.ceil(math.log2(batch))


def test_splitting_finds_the_fewest_pieces() -> None:
    for batch in range(1, 301, 3):
        for capacity in (capacity for capacity in CAPACITIES if capacity <= batch):
            search = SizeSearch(batch)
            steps = _settle(search, batch, capacity)
            assert len(cut_evenly(batch, search.size)) == len(cut_evenly(batch, capacity)), (
                batch,
                capacity,
            )
            assert steps <= 8, (batch, capacity)


def test_splitting_begins_small_and_finds_the_fewest_pieces() -> None:
    for capacity in range(1, 257):
        search = SizeSearch(1)
        _settle(search, 256, capacity)
        assert len(cut_evenly(256, search.size)) == len(cut_evenly(256, capacity))


@pytest.mark.parametrize("first", [1, 32, 300])
def test_resizing_leaves_at_most_a_tenth_unused(first: int) -> None:
    for capacity in range(1, 1000):
        search = SizeSearch(first)
        _settle_resizing(search, capacity)
        assert 0.9 * capacity <= search.size <= capacity


def test_resizing_reaches_a_largest_size_that_is_near() -> None:
    search = SizeSearch(95, max_size=100)
    _settle_resizing(search, 1000, 1)
    assert search.size == 100
    _settle_resizing(search, 1000, 5)
    assert search.size == 100


def test_a_failed_size_is_never_tried_again_while_memory_stays() -> None:
    for batch, capacity in itertools.product((17, 64, 100, 255), (1, 3, 10, 40, 64)):
        search = SizeSearch(batch)
        tried = []
        for _ in range(30):
            _run_batch(search, batch, capacity)  # which checks it
            search.learn(search.fits, 0, MemoryReading(0, 0, 0, 1000))
            search.grow(batch, UNLIMITED)
            tried.append(search.size)
        assert tried[-10:] == tried[-1:] * 10


@pytest.mark.parametrize(
    ("limit_bytes", "forgotten"), [(1000, False), (1050, False), (1051, True), (500, False)]
)
def test_more_memory_makes_failures_forgotten(limit_bytes: int, forgotten: bool) -> None:
    search = SizeSearch(32, fails=64, fails_limit_bytes=1000, slow=48)
    search.learn(32, 0, MemoryReading(0, 0, 320, limit_bytes))
    assert (search.fails, search.slow) == ((None, None) if forgotten else (64, 48))
    assert search.grow(64, UNLIMITED) is forgotten
    assert search.size == (64 if forgotten else 32)


def _predict(search: SizeSearch, size: int) -> int:
    """The least memory that a size is believed to need: with one byte less it is not tried."""
    return next(memory for memory in range(1, 10**5) if search.largest_within(size, memory) == size)


def test_the_peak_is_a_fixed_part_and_one_that_grows() -> None:
    search = SizeSearch(16)
    search.learn(16, 100, MemoryReading(0, 0, 100 + 16 * 10, 1000))
    assert _predict(search, 64) == 100 + 64 * 10
    # two sizes tell what is fixed better than what was allocated before the step: here 200
    search.learn(32, 100, MemoryReading(0, 0, 200 + 32 * 10, 1000))
    search.peaks[16] = (100, 200 + 16 * 10)
    assert _predict(search, 64) == 200 + 64 * 10


def test_what_is_there_before_a_step_may_grow_meanwhile() -> None:
    """An optimizer has no state before its first step."""
    search = SizeSearch(16)
    search.learn(16, 100, MemoryReading(0, 0, 100 + 16 * 10, 10**6))
    search.learn(32, 500, MemoryReading(0, 0, 500 + 32 * 10, 10**6))
    assert _predict(search, 64) == 500 + 64 * 10


def test_a_peak_that_does_not_grow_predicts_nothing_larger() -> None:
    search = SizeSearch(16)
    search.learn(16, 300, MemoryReading(0, 0, 300, 1000))
    search.learn(8, 300, MemoryReading(0, 0, 310, 1000))
    assert search.grow(64, 1)
    assert search.size == 32


@pytest.mark.parametrize(
    ("memory_bytes", "size"),
    [
        # 100 + 10 n bytes; half the pieces of 8 are of 32
        (100 + 320, 32),
        (100 + 319, 26),  # 5 pieces
        (100 + 260, 26),
        (100 + 259, 22),  # 6 pieces
        (100 + 190, 19),  # 7 pieces
        (100 + 189, 16),
        (100, 16),
        (1, 16),
    ],
)
def test_growth_stays_under_the_predicted_peak(memory_bytes: int, size: int) -> None:
    search = SizeSearch(16)
    search.learn(16, 100, MemoryReading(0, 0, 100 + 16 * 10, 10**6))
    assert search.grow(128, memory_bytes) is (size > 16)
    assert search.size == size


@pytest.mark.parametrize(
    ("memory_bytes", "size"), [(10**6, 32), (420, 32), (410, 31), (280, 18), (270, 16), (1, 16)]
)
def test_enlarging_stays_under_the_predicted_peak(memory_bytes: int, size: int) -> None:
    search = SizeSearch(16)
    search.learn(16, 100, MemoryReading(0, 0, 100 + 16 * 10, 10**6))
    assert search.enlarge(memory_bytes) is (size > 16)
    assert search.size == size


@pytest.mark.parametrize(
    ("memory_bytes", "min_size", "size"),
    [
        (700, 1, 60),
        (420, 1, 32),
        (410, 1, 32),
        (100, 1, 32),
        (100, 40, 40),
        (740, 1, 32),
        (10**6, 1, 32),
    ],
)
def test_scarce_memory_is_left_to_others(memory_bytes: int, min_size: int, size: int) -> None:
    search = SizeSearch(64, min_size)
    search.learn(64, 100, MemoryReading(0, 0, 100 + 64 * 10, 10**6))
    search.recede(64, memory_bytes)
    assert (search.size, search.fails) == (size, None)


def test_no_growth_of_what_goes_through_whole_or_beyond_the_largest_size() -> None:
    assert not SizeSearch(64).grow(64, UNLIMITED)
    assert not SizeSearch(64).grow(10, UNLIMITED)
    assert not SizeSearch(16, max_size=16).grow(64, UNLIMITED)
    search = SizeSearch(16, max_size=22)
    assert search.grow(64, UNLIMITED)  # 3 pieces
    assert search.size == 22


def _settle_with_speed(
    search: SizeSearch,
    batch: Callable[[], int],
    seconds: Callable[[int], float],
    try_larger: Callable[[], bool],
) -> list[int]:
    sizes = [search.size]
    for _ in range(30):
        samples = batch()
        search.succeed(search.size, samples, seconds(search.size))
        if not search.take_back():
            try_larger()
        sizes.append(search.size)
    return sizes


def test_a_larger_size_that_is_slower_is_taken_back() -> None:
    search = SizeSearch(32)
    sizes = _settle_with_speed(
        search,
        lambda: 256,
        lambda size: 2.0 if size > 64 else 1.0,
        lambda: search.grow(256, UNLIMITED),
    )
    assert sizes[:5] == [32, 64, 128, 64, 86]  # 4 pieces, 2, again 4, 3
    assert sizes[5:] == [64] * 26
    assert search.slow == 86


def test_a_larger_batch_that_is_slower_is_taken_back() -> None:
    search = SizeSearch(32)
    sizes = _settle_with_speed(
        search,
        lambda: search.size,
        lambda size: size * (2.0 if size > 70 else 1.0),
        lambda: search.enlarge(UNLIMITED),
    )
    assert max(sizes) == 128
    assert 0.9 * 70 <= sizes[-1] <= 70
    assert sizes[-10:] == sizes[-1:] * 10


@pytest.mark.parametrize(
    ("seconds", "kept"), [(1.0, True), (1.05, True), (1.06, False), (0.5, True)]
)
def test_a_larger_size_must_be_about_as_fast(seconds: float, kept: bool) -> None:
    search = SizeSearch(32)
    search.succeed(32, 64, 1.0)
    assert not search.take_back()
    assert search.grow(64, UNLIMITED)
    search.succeed(64, 64, seconds)
    assert search.take_back() is not kept
    assert (search.size, search.slow) == ((64, None) if kept else (32, 64))


def test_nothing_is_taken_back_before_the_new_size_was_used() -> None:
    search = SizeSearch(32)
    search.succeed(32, 256, 1.0)
    search.take_back()
    search.grow(256, UNLIMITED)
    assert not search.take_back()
    search.succeed(20, 20, 100.0)  # the short last batch of an epoch
    assert not search.take_back()
    assert (search.size, search.clean, search.fits) == (64, 0, 32)


def test_a_rate_is_that_of_the_last_window() -> None:
    search = SizeSearch(32)
    search.succeed(32, 64, 100.0)  # warming up
    search.take_back()
    search.succeed(32, 64, 1.0)
    search.take_back()
    assert search.rates == {32: 64.0}


def test_clean_steps_are_counted_from_the_last_change() -> None:
    search = SizeSearch(256)
    for _ in range(3):
        search.succeed(256, 256, 1.0)
    assert search.clean == 3
    search.fail(256, 1000)
    assert search.clean == 0
    search.succeed(128, 256, 1.0)
    assert search.clean == 1
    search.change(200)
    assert (search.size, search.clean) == (200, 0)


def _plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain_types(found) for key, found in value.items())
    if isinstance(value, list | tuple):
        return all(map(_plain_types, value))
    return value is None or isinstance(value, bool | int | float | str)


def test_a_search_survives_as_plain_values() -> None:
    search = SizeSearch(64, min_size=2, max_size=500, slow=400)
    search.learn(64, 100, MemoryReading(0, 0, 740, 10000))
    search.succeed(64, 256, 2.0)
    search.take_back()
    search.fail(100, 1000)
    plain = search.to_plain()
    assert _plain_types(plain)
    assert not [key for key in plain if key.startswith("_")]
    assert SizeSearch.from_plain(plain).to_plain() == plain
    assert SizeSearch.from_plain(plain).peaks == search.peaks == {64: (100, 740)}
    assert SizeSearch.from_plain(plain).rates == search.rates == {64: 128.0}
    listed = {**plain, "peaks": {"64": [100, 740]}}  # as JSON has it
    assert SizeSearch.from_plain(listed).peaks == search.peaks
