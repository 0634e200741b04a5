"""The search alone, against a simulated memory: a micro-batch of n samples fits where n is at most a capacity."""

import itertools
import math
from typing import Any

import pytest

from lit_data.core.batch_form import cut_evenly
from lit_data.core.size_search import SizeSearch

LIMIT_BYTES = 1000


def _run_batch(search: SizeSearch, batch: int, capacity: int) -> int:
    """One batch until it fits, as `Replay` does it; how often it failed."""
    for retries in itertools.count():
        largest = cut_evenly(batch, search.size)[0][1]
        if largest <= capacity:
            search.succeed(largest, batch)
            return retries
        assert search.fails is None or largest < search.fails
        search.fail(largest, LIMIT_BYTES)
    raise AssertionError


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
    search.fail(failed, LIMIT_BYTES)
    assert (search.size, search.clean) == (expected, 0)
    assert (search.fails, search.fails_limit_bytes) == (failed, LIMIT_BYTES)


def test_at_most_as_many_retries_as_halvings_for_every_capacity() -> None:
    for batch in range(1, 301):
        for capacity in range(1, batch + 1):
            retries = _run_batch(SizeSearch(batch), batch, capacity)
            assert retries <= math.ceil(math.log2(batch)) - math.floor(math.log2(capacity)) + 1
            assert retries <= math.ceil(math.log2(batch))


@pytest.mark.parametrize(
    ("search", "sizes"),
    [
        (SizeSearch(8), [16, 32, 64]),
        (SizeSearch(8, max_size=20), [16, 20, 20]),
        (SizeSearch(19, max_size=20), [20, 20]),
        # half way to what failed, until a larger size would bring less than a twentieth
        (SizeSearch(64, fails=128), [96, 112, 120, 120]),
        (SizeSearch(3, fails=7), [5, 6, 6]),
        (SizeSearch(3, fails=100), [6, 12, 24, 48, 74]),
    ],
)
def test_growth(search: SizeSearch, sizes: list[int]) -> None:
    for size in sizes:
        search.clean = 7
        search.grow()
        assert (search.size, search.clean) == (size, 0)


@pytest.mark.parametrize(
    ("limit_bytes", "is_forgotten"), [(1000, False), (1050, False), (1051, True), (500, False)]
)
def test_more_memory_makes_failures_forgotten(limit_bytes: int, is_forgotten: bool) -> None:
    search = SizeSearch(32, fails=64, fails_limit_bytes=1000)
    search.forget_failure(limit_bytes)
    assert search.fails == (None if is_forgotten else 64)


def test_a_search_survives_as_plain_values() -> None:
    search = SizeSearch(64, min_size=2, max_size=500)
    search.succeed(64, 256)
    search.fail(100, LIMIT_BYTES)
    plain = search.to_plain()
    assert all(value is None or type(value) is int for value in plain.values())
    assert SizeSearch.from_plain(plain) == search


@pytest.mark.parametrize("change", [{"size": "8"}, {"fails": -1}, {"size": None}, {"odd": 1}])
def test_values_of_something_else_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of batch sizes"):
        SizeSearch.from_plain(SizeSearch(8).to_plain() | change)
