"""Drift of inputs: noticed where there is one, and not where there is none."""

import numpy as np
import pytest

from lit_inspect.drift import (
    BLOCK,
    Floats,
    describe_pixels,
    find_drift,
    p_value_of_same,
)


def _photograph(random: np.random.Generator, count: int, gain: float = 1.0) -> Floats:
    """Features of images of parts, whose exposure differs by a tenth from one to the next."""
    rows = []
    for _ in range(count):
        exposure = gain * random.normal(1, 0.1)
        image = exposure * (90 + 15 * random.normal(size=(1, 24, 24)))
        rows.append(describe_pixels(image.clip(0, 255).astype(np.uint8)))
    return np.array(rows)


def test_features_are_in_parts_of_the_range() -> None:
    image = np.zeros((1, 4, 8), np.uint16)
    image[..., ::2] = 65535
    grey, contrast, sharpness = describe_pixels(image)
    assert (grey, contrast, sharpness) == (0.5, 1, 1)
    assert describe_pixels(image.astype(np.float32) / 65535) == pytest.approx([0.5, 1, 1])
    assert describe_pixels(np.ones((3, 5, 1), np.uint8))[2] == 0


def test_a_higher_gain_is_noticed_within_200_images() -> None:
    random = np.random.default_rng(0)
    reference = _photograph(random, 300)
    for _ in range(5):
        assert find_drift(reference, _photograph(random, BLOCK, 1.3)) is not None
    # Also where it begins in the middle of many.
    later = np.concatenate((_photograph(random, 5 * BLOCK), _photograph(random, BLOCK, 1.3)))
    assert find_drift(reference, later) is not None


def test_images_like_those_of_the_calibration_keep_the_guarantee() -> None:
    random = np.random.default_rng(1)
    pool = random.normal(size=(200, 700, 3))
    alarms = sum(find_drift(rows[:300], rows[300:]) is not None for rows in pool)
    assert alarms <= 6  # of 200, where 2 are to be expected
    assert find_drift(pool[0, :300], pool[0, 300:303]) is None
    assert find_drift(pool[0, :300], pool[0, :0]) is None
    # The last few are the highest, as images of one kind at the end of a folder.
    assert find_drift(pool[0, :300], np.sort(pool[1, : BLOCK + 7], 0)) is None


def test_images_of_few_gray_levels_are_equal_to_themselves_in_a_file() -> None:
    random = np.random.default_rng(2)
    images = random.integers(0, [[[11]], [[13]]], (40, 2, 9, 9)).reshape(80, 1, 9, 9)
    rows = np.array([describe_pixels(image.astype(np.uint8)) for image in images])
    written = np.array([[float(f"{feature:.6f}") for feature in row] for row in rows])
    assert find_drift(written, rows) is None


def test_p_values_are_those_of_tables() -> None:
    # The critical distance at 5 % is 1.358 over the root of n m / (n + m).
    first = np.arange(1000.0)
    root = 500**0.5
    distance = 1.358 / (root + 0.12 + 0.11 / root)
    second = first + round(distance * 1000)
    assert p_value_of_same(first, second) == pytest.approx(0.05, abs=0.003)
    assert p_value_of_same(first, first) == 1
