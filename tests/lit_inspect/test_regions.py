"""Scores and defects of maps: parts give what the whole map gives."""

import cv2
import numpy as np
import pytest

from lit_inspect.regions import count_top_px, find_defects, mean_highest, round_score


@pytest.mark.parametrize("step", [1, 7, 50])
def test_defects_and_scores_are_those_of_the_whole_map(step: int) -> None:
    rng = np.random.default_rng(step)
    probability = cv2.GaussianBlur(rng.random((120, 90), np.float32), (0, 0), 2)
    probability = (probability - probability.min()) / np.ptp(probability)
    kinds = rng.integers(1, 4, probability.shape).astype(np.uint8)
    kinds[probability < 0.55] = 0
    parts = [slice(top, top + step) for top in range(0, 120, step)]
    limits = {"threshold": 0.55, "min_area_px": 3, "classes": 3}
    found = find_defects(((probability[part], kinds[part]) for part in parts), **limits)
    assert len(found) > 20
    assert found == find_defects([(probability, kinds)], **limits)
    count = count_top_px(probability.size, 0.01)
    score = mean_highest((probability[part] for part in parts), count)
    assert score == pytest.approx(np.sort(probability, axis=None)[-count:].mean(), abs=1e-6)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (0.0, "0.0"),
        (1.0, "1.0"),
        (0.99, "0.99"),
        (float(np.nextafter(0.99, 0)), "0.99"),
        (0.989995, "0.99"),
        (0.999995, "0.99999"),
        (0.00012345, "0.0001234"),
        (5e-324, "5e-324"),
        (123.456789, "123.45679"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_scores_have_four_digits_and_more_close_to_one(score: float, text: str) -> None:
    assert str(round_score(score)) == text
