"""Thresholds by few defective validation images, and what they are worth."""

import pytest
import torch
from torch import Tensor

from lit_data.models import AnomalyModule
from lit_data.models.anomaly.module import LEAST_IMAGES, balance, find_distance


def test_misses_are_as_frequent_as_false_alarms() -> None:
    generator = torch.Generator().manual_seed(0)
    for good_count, defective_count in ((40, 40), (200, 20), (12, 90)):
        good = torch.randn(good_count, generator=generator)
        defective = torch.randn(defective_count, generator=generator) + 1.5
        threshold = balance(good, defective)
        misses = (defective < threshold).float().mean()
        false_alarms = (good >= threshold).float().mean()
        assert abs(misses - false_alarms) <= 1 / min(good_count, defective_count)


def test_kinds_that_do_not_overlap_are_parted_halfway() -> None:
    assert balance(torch.tensor([1.0, 2.0]), torch.tensor([6.0, 9.0])) == 4


def _choose(
    good: list[float], defective: list[float], balanced: bool = True
) -> tuple[float, dict[str, Tensor]]:
    model = AnomalyModule(quantile=1.0, balanced=balanced)
    named = model.choose_threshold(torch.tensor(good), torch.tensor(defective))
    return float(model.threshold), named


def test_enough_defective_images_lower_the_threshold_and_never_raise_it() -> None:
    good = [0.1, 0.2, 0.3, 0.4, 0.5]
    overlapping = [0.35, 0.45, 0.6, 0.7, 0.8]
    highest = float(find_distance(torch.tensor(0.5), torch.tensor(1.0)))
    by_good, named = _choose(good, overlapping[:-1])
    assert by_good == pytest.approx(highest)
    assert "defective_images" not in named  # a count of those that chose it, not of all there are
    assert len(overlapping) == LEAST_IMAGES
    balanced, named = _choose(good, overlapping)
    assert balanced < highest
    assert (named["good_images"], named["defective_images"]) == (5, 5)
    assert _choose(good, overlapping, balanced=False)[0] == pytest.approx(highest)
    assert _choose(good, [0.9] * 5)[0] == pytest.approx(highest)


def test_the_same_threshold_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = AnomalyModule(quantile=1.0)
    caplog.set_level("INFO")
    for highest in (0.5, 0.5, 0.6):
        model.threshold.fill_(1.0)
        model.choose_threshold(torch.tensor([0.1, highest]), torch.tensor([]))
    assert caplog.text.count("quantile 1 of 2 good validation images") == 2
