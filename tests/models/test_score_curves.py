import math

import pytest
import torch
from torchmetrics.functional.classification import binary_average_precision

from lit_data.models.score_curves import count_images, rank_curve, trace_curve
from lit_data.models.scored import PixelScores


def test_the_area_below_the_steps_is_the_average_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(100, generator=generator).round(decimals=2)  # some are equal
    is_true = torch.rand(100, generator=generator) < 0.3 + 0.5 * scores
    recall, precision = map(torch.tensor, rank_curve(scores, is_true))
    area = (torch.diff(recall, prepend=torch.zeros(1)) * precision).sum()
    assert float(area) == pytest.approx(float(binary_average_precision(scores, is_true.long())))
    assert recall[-1] == 1


def test_a_curve_of_many_thresholds_has_few_points() -> None:
    hits = torch.arange(1, 50_001)
    recall, precision = trace_curve(hits, hits * 3, 100_000)
    assert len(recall) == 200
    assert recall[-1] == 0.5
    assert set(precision) == {0.25}


def test_pixels_keep_their_curve_until_there_is_no_defect() -> None:
    metric = PixelScores()
    metric.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1.0, 0.0, 1.0]))
    metric.compute()
    assert metric.curve is not None
    assert metric.curve.recall == [0.5, 1.0]
    assert metric.curve.precision == pytest.approx([1.0, 2 / 3])
    metric.reset()
    metric.update(torch.tensor([0.9]), torch.tensor([0.0]))
    metric.compute()
    assert metric.curve is None


@pytest.mark.parametrize(
    "scores", [[0.1, 0.2, 0.9], [0.0, 1.0, 1.0], [0.5, 0.5, 0.5], [math.nan, 0.5, 0.2]]
)
def test_every_image_lies_in_a_bin(scores: list[float]) -> None:
    images = count_images(torch.tensor(scores), torch.tensor([0, 1, 1]), 0.5)
    assert (sum(images.good), sum(images.defective)) == (1, 2)
    assert len(images.edges) == len(images.good) + 1
    assert images.edges == sorted(set(images.edges))
    assert images.edges[0] < images.threshold < images.edges[-1]
