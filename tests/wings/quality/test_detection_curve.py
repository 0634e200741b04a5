"""Curves of detection against a detector whose answer is known."""

from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.wings.quality.detection_curve import Floats, fit_curve

_NORMAL = NormalDist()
_PIXELS, _NOISE, _THRESHOLD = 9, 0.1, 0.2
_SPREAD = _NOISE / _PIXELS**0.5
_A50 = _THRESHOLD
_A90 = _THRESHOLD + _NORMAL.inv_cdf(0.9) * _SPREAD


def _detect(random: np.random.Generator, targets: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Hits of a detector that compares the mean of pixels of white noise with a threshold."""
    sizes = np.repeat(np.linspace(0.1, 0.35, 10), targets // 10)
    means = sizes + random.normal(0, _NOISE, (_PIXELS, len(sizes))).mean(0)
    return sizes, means > _THRESHOLD


def test_the_size_of_a_known_detector_is_found() -> None:
    curve = fit_curve(*_detect(np.random.default_rng(0), 4000))
    assert curve is not None
    assert curve.size_at(0.5) == pytest.approx(_A50, rel=0.05)
    assert curve.size_at(0.9) == pytest.approx(_A90, rel=0.05)
    assert curve.at(np.array([_A90]))[0] == pytest.approx(0.9, abs=0.02)


def test_the_bound_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        curve = fit_curve(*_detect(random, 200))
        assert curve is not None
        bound = curve.bound_at(0.9)
        covered += bound is None or bound >= _A90
    assert 0.92 * 400 <= covered <= 0.98 * 400


def test_the_bound_lies_beyond_the_estimate_and_nears_it() -> None:
    random = np.random.default_rng(2)
    excess = []
    for targets in (200, 2000, 20000):
        curve = fit_curve(*_detect(random, targets))
        assert curve is not None
        estimate, bound = curve.size_at(0.9), curve.bound_at(0.9)
        assert estimate is not None
        assert bound is not None
        excess.append(bound - estimate)
    assert excess[0] > excess[1] > excess[2] > 0


def test_sizes_without_a_curve_have_none() -> None:
    sizes = np.repeat([2.0, 4.0, 8.0], 30)
    assert fit_curve(sizes, np.zeros(90, np.bool_)) is None
    assert fit_curve(sizes, np.ones(90, np.bool_)) is None
    assert fit_curve(np.full(90, 3.0), np.arange(90) % 2 == 0) is None


def test_what_is_found_less_often_with_size_has_no_a90() -> None:
    sizes = np.repeat([2.0, 4.0, 8.0], 30)
    curve = fit_curve(sizes, np.repeat([True, False, False], 30))
    assert curve is not None
    assert (curve.size_at(0.9), curve.bound_at(0.9)) == (None, None)


def test_hits_and_misses_that_do_not_overlap_lie_between_them() -> None:
    sizes = np.repeat([2.0, 4.0, 8.0, 16.0], 40)
    curve = fit_curve(sizes, sizes > 5)
    assert curve is not None
    a90, bound = curve.size_at(0.9), curve.bound_at(0.9)
    assert a90 is not None
    assert bound is not None
    assert 4 < a90 < 8
    assert a90 < bound < 8.5


def test_few_targets_give_no_bound() -> None:
    sizes = np.array([2.0, 4.0, 8.0, 16.0])
    curve = fit_curve(sizes, np.array([False, True, False, True]))
    assert curve is not None
    assert curve.bound_at(0.9) is None
