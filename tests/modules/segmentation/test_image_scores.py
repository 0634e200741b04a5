"""Score of an image: which pixels of its patches count, and from which score on it is defective."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.modules.segmentation import anomaly_metrics
from lit_data.modules.segmentation.anomaly_metrics import (
    AnomalyMetrics,
    choose_threshold,
    count_top_px,
    mean_highest,
)

SIZES_PX = torch.tensor([[4, 10], [6, 4]])


@pytest.mark.parametrize(
    ("pixels", "fraction", "expected"),
    [
        (1, 0.0005, 1),
        (999, 0.0005, 1),
        (5000, 0.0005, 3),
        (10**8, 0.0005, 1024),
        (100, 1.0, 100),
        (10**8, 0, 1),
        (0, 0.5, 1),
    ],
)
def test_the_count_of_pixels_goes_by_the_size_of_the_image(
    pixels: int, fraction: float, expected: int
) -> None:
    assert count_top_px(pixels, fraction) == expected


def _maps() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(*size, generator=generator) for size in SIZES_PX.tolist()]


def _cut(maps: list[Tensor], image: int, y: int, x: int) -> Tensor:
    """A patch of 4 x 6 px, mirrored where it reaches past an edge."""
    height, width = maps[image].shape
    rows, columns = (
        np.pad(np.arange(height), 6, "reflect")[6:],
        np.pad(np.arange(width), 6, "symmetric")[6:],
    )
    return maps[image][rows[y : y + 4]][:, columns[x : x + 6]][None, None]


# They overlap; those of image 1 are wider than it is.
PLACES = [(0, 0, 0), (1, 2, 0), (0, 0, 4), (1, 0, 0)]


def _update(metric: AnomalyMetrics, maps: list[Tensor], masks: list[Tensor] | None = None) -> None:
    """See each patch in a batch of its own."""
    masks = masks or [torch.zeros_like(pixels) for pixels in maps]
    for image, y, x in PLACES:
        patches = (_cut(part, image, y, x) for part in (maps, masks))
        metric.update(*patches, torch.tensor([image]), torch.tensor([[y, x]]))


@pytest.mark.parametrize(
    ("fraction", "counts", "merge_after"),
    [(0, (1, 1), 3), (0.1, (4, 2), 2**20), (0.5, (20, 12), 3), (1, (40, 24), 2**20)],
)
def test_each_pixel_of_an_image_counts_once(
    fraction: float, counts: tuple[int, int], merge_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anomaly_metrics, "MERGE_AFTER", merge_after)
    maps, metric = _maps(), AnomalyMetrics(score_fraction=fraction)
    metric.sizes_px = SIZES_PX
    _update(metric, maps)
    numbers, scores, _ = metric.score_images()
    expected = [
        np.sort(pixels.numpy().ravel())[-count:].mean()
        for pixels, count in zip(maps, counts, strict=True)
    ]
    assert numbers.tolist() == [0, 1]
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    in_slabs = [
        mean_highest(pixels.numpy(), count_top_px(pixels.numel(), fraction)) for pixels in maps
    ]
    assert in_slabs == pytest.approx(expected, abs=1e-6)


def test_without_sizes_all_pixels_of_all_patches_count() -> None:
    patches = torch.tensor([[0.1, 0.5, 0.9, 0.3], [0.2, 0.8, 0.4, 0.7]]).view(2, 1, 2, 2)
    metric = AnomalyMetrics(score_fraction=0.375)  # 3 of 8
    for patch in patches:
        metric.update(patch[None], torch.zeros(1, 1, 2, 2), torch.tensor([5]))
    assert metric.score_images()[1].tolist() == pytest.approx([0.8])


def test_pixels_that_are_ignored_do_not_count() -> None:
    maps, metric = _maps(), AnomalyMetrics(score_fraction=0.1)
    metric.sizes_px = SIZES_PX
    masks = [torch.zeros_like(pixels) for pixels in maps]
    masks[1][maps[1] == maps[1].max()] = 255
    _update(metric, maps, masks)
    second_and_third = maps[1].flatten().sort(descending=True).values[1:3]
    assert float(metric.score_images()[1][1]) == pytest.approx(float(second_and_third.mean()))


def test_an_image_of_ignored_pixels_alone_scores_0() -> None:
    metric, masks = AnomalyMetrics(), torch.zeros(2, 1, 3, 3)
    masks[0] = 255
    metric.update(torch.ones(2, 1, 3, 3), masks, torch.arange(2))
    assert metric.score_images()[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("scores", "defective", "best", "expected"),
    [
        ([0.9, 0.8, 0.2, 0.1], [1, 1, 0, 0], 1.0, 0.5),
        ([0.01, 0.3, 0.7, 0.9, 0.95], [0, 0, 1, 0, 1], 0.8, 0.5),
        ([0.9, 0.5, 0.5, 0.5], [1, 1, 0, 0], 2 / 3, 0.75),  # equal scores are judged alike
        ([0.2, 0.9], [1, 0], 2 / 3, 0.2),
        ([0.5, 0.5, 0.5], [1, 1, 0], 0.8, 0.5),
        ([1.0, 1 - 1e-6, 0.0], [1, 0, 0], 1.0, 1 - 3.162e-8),
    ],
)
def test_the_threshold_of_images_is_where_their_f1_is_largest(
    scores: list[float], defective: list[int], best: float, expected: float
) -> None:
    found, threshold = choose_threshold(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(defective)
    )
    assert found == pytest.approx(best)
    assert threshold == pytest.approx(expected, abs=1e-8)
