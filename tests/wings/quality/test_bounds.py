"""Bounds against tables, and over thousands of calibrations whose truth is known."""

import math
import sys
from statistics import NormalDist

import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.wings.quality.bounds import (
    Floats,
    Ints,
    count_needed,
    find_limit,
    find_tail,
    lower_rate,
    p_value_of_mean,
    upper_mean,
    upper_rate,
)

_NORMAL = NormalDist()
_MISS, _CONFIDENCE = 0.02, 0.95
_LOTS, _OF_LOT = 300, 30
_ICC = 0.3


def test_a_tail_is_that_of_the_binomial_distribution() -> None:
    masses = [math.comb(20, k) * 0.1**k * 0.9 ** (20 - k) for k in range(21)]
    tails = [find_tail(errors, 20, 0.1) for errors in range(21)]
    assert tails == pytest.approx(np.cumsum(masses), rel=1e-12)
    assert find_tail(5000, 5000, 0.02) == 1


def test_bounds_without_scipy_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ConfigError, match="need SciPy: pip install scipy"):
        upper_rate(0, 149, 0.95)


def test_bounds_are_those_of_tables() -> None:
    # Two-sided 95 % of 5 in 100, as every table of Clopper-Pearson has it.
    assert lower_rate(5, 100, 0.975) == pytest.approx(0.01643, abs=1e-5)
    assert upper_rate(5, 100, 0.975) == pytest.approx(0.11283, abs=1e-5)
    assert (upper_rate(4, 4, 0.95), lower_rate(0, 4, 0.95)) == (1, 0)


def test_29_of_29_show_ninety_percent_and_28_do_not() -> None:
    assert lower_rate(29, 29, 0.95) == pytest.approx(0.05 ** (1 / 29))
    assert lower_rate(29, 29, 0.95) >= 0.9 > lower_rate(28, 29, 0.95)
    assert lower_rate(28, 28, 0.95) < 0.9


def test_149_images_are_needed() -> None:
    assert count_needed(0.02, 0.95) == 149
    assert upper_rate(0, 149, 0.95) <= 0.02 < upper_rate(0, 148, 0.95)
    scores = np.linspace(0.1, 0.9, 149)
    limit = find_limit(scores, 0.02, 0.95)
    assert limit is not None
    assert limit.threshold == pytest.approx(0.1)
    assert limit.errors == 0
    assert find_limit(scores[1:], 0.02, 0.95) is None
    # So many lots, of one image each, by the bound of means.
    assert find_limit(scores, 0.02, 0.95, np.arange(149)) is not None
    assert find_limit(scores, 0.02, 0.95, np.arange(149) // 2) is None


def test_the_bound_of_means_is_valid_and_no_sharper_than_the_exact_one() -> None:
    losses = np.array([1.0] * 3 + [0.0] * 197)
    assert p_value_of_mean(losses, 0.05) >= find_tail(3, 200, 0.05)
    assert upper_rate(3, 200, 0.95) < upper_mean(losses, 0.95) < 0.06
    assert p_value_of_mean(np.ones(10), 0.5) == 1


def test_equal_scores_fall_below_together() -> None:
    scores = np.repeat([0.2, 0.5, 0.9], 100)
    limit = find_limit(scores, 0.4, 0.95)
    assert limit is not None
    # A threshold of 0.5 misses a third, one of 0.9 two thirds.
    assert (limit.threshold, limit.errors) == (0.5, 100)
    assert limit.upper_rate <= 0.4


def test_the_true_miss_rate_is_kept_in_2000_calibrations() -> None:
    random = np.random.default_rng(0)
    broken = sum(_miss_rate(random.normal(size=300)) > _MISS for _ in range(2000))
    assert 0.005 * 2000 < broken <= 0.065 * 2000


def test_lots_need_groups() -> None:
    random = np.random.default_rng(1)
    lots = np.repeat(np.arange(_LOTS), _OF_LOT)
    repeats = 150
    by_image = by_lot = 0
    for _ in range(repeats):
        of_lot = np.sqrt(_ICC) * random.normal(size=_LOTS)
        scores = of_lot[lots] + np.sqrt(1 - _ICC) * random.normal(size=len(lots))
        by_image += _miss_rate(scores) > _MISS
        by_lot += _miss_rate(scores, lots) > _MISS
    assert by_lot <= 0.065 * repeats
    assert by_image > 0.1 * repeats


def _miss_rate(scores: Floats, lots: Ints | None = None) -> float:
    """True rate of scores, which are standard normal, below the threshold that was found."""
    limit = find_limit(scores, _MISS, _CONFIDENCE, lots)
    assert limit is not None
    assert limit.upper_rate <= _MISS + 1e-6
    return _NORMAL.cdf(limit.threshold)
