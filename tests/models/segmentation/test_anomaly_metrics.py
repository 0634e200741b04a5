import math

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_f1_score,
)

from lit_data.models.image_ranks import choose_threshold
from lit_data.models.segmentation import anomaly_metrics
from lit_data.models.segmentation.anomaly_metrics import ANOMALY_METRICS, AnomalyMetrics
from lit_inspect.regions import count_top_px, mean_highest

IMAGES = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def _make() -> tuple[Tensor, Tensor]:
    """Ten patches of five images, three of which show defects of several sizes; scores that are right at times."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(10, 1, 48, 48)
    defects = ((0, 4, 4, 3), (0, 20, 20, 12), (3, 1, 40, 6), (3, 30, 5, 5), (6, 10, 10, 20))
    for patch, y, x, size in defects:
        masks[patch, 0, y : y + size, x : x + size] = 1
    strengths = 1 + 2 * torch.rand(10, 1, 1, 1, generator=generator)
    logits = torch.randn(masks.shape, generator=generator) * 1.5 - 3 + masks * strengths
    return logits.sigmoid(), masks


def _score(
    scores: Tensor, masks: Tensor, images: Tensor | None = IMAGES, *, score_fraction: float = 0.0
) -> dict[str, float]:
    metric = AnomalyMetrics(score_fraction=score_fraction)
    for part in (slice(0, 3), slice(3, 10)):
        metric.update(scores[part], masks[part], None if images is None else images[part])
    return {name: float(value) for name, value in metric.compute().items()}


def _integrate(scores: Tensor, masks: Tensor, limit: float) -> float:
    """AUPRO by its definition: every score is a threshold, every region is looked at alone."""
    regions = []
    for patch, mask in enumerate(masks[:, 0].numpy().astype(np.uint8)):
        count, labels = cv2.connectedComponents(mask, connectivity=8)
        regions += [
            np.sort(scores[patch, 0].numpy()[labels == number]) for number in range(1, count)
        ]
    background = np.sort(scores[masks == 0].numpy())
    thresholds = np.unique(scores.numpy())[::-1]
    rates = 1 - np.searchsorted(background, thresholds) / len(background)
    overlap = np.mean(
        [1 - np.searchsorted(region, thresholds) / len(region) for region in regions], axis=0
    )
    rates, overlap = np.r_[0, rates], np.r_[0, overlap]
    grid = np.append(rates[rates < limit], limit)
    heights = np.append(overlap[rates < limit], np.interp(limit, rates, overlap))
    return float(np.trapezoid(heights, grid) / limit)


def test_pixels_agree_with_the_exact_scores() -> None:
    scores, masks = _make()
    found = _score(scores, masks)
    flat, truth = scores.flatten(), masks.flatten().long()
    assert found["pixel_auroc"] == pytest.approx(float(binary_auroc(flat, truth)), abs=1e-3)
    assert found["average_precision"] == pytest.approx(
        float(binary_average_precision(flat, truth)), abs=1e-3
    )
    assert 0.6 < found["pixel_auroc"] < 0.99


@pytest.mark.parametrize(("name", "limit"), [("aupro_30", 0.3), ("aupro_5", 0.05)])
def test_per_region_overlap_agrees_with_its_definition(name: str, limit: float) -> None:
    scores, masks = _make()
    expected = _integrate(scores, masks, limit)
    assert 0.05 < expected < 0.95
    assert _score(scores, masks)[name] == pytest.approx(expected, abs=2e-3)


def test_the_best_f1_is_nearly_reached_at_its_threshold() -> None:
    scores, masks = _make()
    found = _score(scores, masks)
    flat, truth = scores.flatten(), masks.flatten().long()
    others = [
        float(binary_f1_score(flat, truth, threshold)) for threshold in np.linspace(0.01, 0.99, 50)
    ]
    assert found["f1_max"] >= max(others) - 2e-3
    reached = float(binary_f1_score(flat, truth, found["f1_max_threshold"]))
    assert 0.95 * found["f1_max"] <= reached <= found["f1_max"] + 2e-3


@pytest.mark.parametrize("least", [None, 0.0, 1.0])
def test_images_are_counted_by_truth_and_threshold(least: float | None) -> None:
    scores, masks = _make()
    metric = AnomalyMetrics(score_fraction=0)
    metric.image_threshold = least
    metric.update(scores, masks, IMAGES)
    found = metric.compute()
    threshold = float(found["image_f1_max_threshold"]) if least is None else least
    highest = scores.flatten(1).amax(1).view(5, 2).amax(1)
    counts = [[0, 0], [0, 0]]
    for score, is_defective in zip(highest.tolist(), [1, 1, 0, 1, 0], strict=True):
        counts[is_defective][int(score >= threshold)] += 1
    assert metric.confusion is not None
    assert metric.confusion.counts == counts


def test_each_kind_of_defect_is_ranked_among_the_good_images() -> None:
    scores, masks = _make()
    highest = scores.flatten(1).amax(1).view(5, 2).amax(1)
    metric = AnomalyMetrics(kinds=["hole", "scratch", "good", "hole", "good"], score_fraction=0)
    metric.update(scores, masks, IMAGES)
    found = metric.compute()
    for kind, rows in {"hole": [0, 2, 3, 4], "scratch": [1, 2, 4]}.items():
        truth = torch.tensor([int(row not in (2, 4)) for row in rows])
        expected = float(binary_auroc(highest[rows], truth))
        assert float(found[f"image_auroc_{kind}"]) == pytest.approx(expected)
    alone = AnomalyMetrics(kinds=["bad", "bad", "good", "bad", "good"])
    alone.update(scores, masks, IMAGES)
    assert set(alone.compute()) == set(_score(scores, masks))  # one kind says nothing more


def test_one_image_whose_patches_come_apart_is_one_image() -> None:
    scores, masks = _make()
    order = torch.tensor([0, 2, 4, 6, 8, 1, 3, 5, 7, 9])
    for fraction in (0, 0.01):
        apart = _score(scores[order], masks[order], IMAGES[order], score_fraction=fraction)
        assert apart == pytest.approx(_score(scores, masks, score_fraction=fraction))


@pytest.mark.parametrize("chosen", [[1, 2], [0, 3]], ids=["no defects", "only defects"])
def test_images_of_one_class_have_no_ranking(chosen: list[int]) -> None:
    scores, masks = _make()
    metric = AnomalyMetrics()
    metric.update(scores[chosen], masks[chosen], IMAGES[chosen])
    found = metric.compute()
    assert metric.confusion is None
    of_images = {name for name in ANOMALY_METRICS if name.startswith("image_")}
    assert set(found) == {"average_precision", "dice", *ANOMALY_METRICS} - {"aupimo"}
    assert all(found[name].isnan() for name in of_images)


def test_perfect_scores_are_one_and_without_defects_they_are_undefined() -> None:
    scores, masks = _make()
    perfect = _score(masks, masks)
    values = {round(value, 4) for name, value in perfect.items() if "threshold" not in name}
    assert values == {1.0}
    without = _score(scores, torch.zeros_like(masks), IMAGES)
    assert without.keys() == perfect.keys()
    assert all(math.isnan(value) for value in without.values())


# scores of whole images

SIZES_PX = torch.tensor([[4, 10], [6, 4]])


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


def test_pixels_that_are_ignored_do_not_count() -> None:
    maps, metric = _maps(), AnomalyMetrics(score_fraction=0.1)
    metric.sizes_px = SIZES_PX
    masks = [torch.zeros_like(pixels) for pixels in maps]
    masks[1][maps[1] == maps[1].max()] = 255
    _update(metric, maps, masks)
    second_and_third = maps[1].flatten().sort(descending=True).values[1:3]
    assert float(metric.score_images()[1][1]) == pytest.approx(float(second_and_third.mean()))


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


def test_a_defect_that_no_mask_marks_counts_as_an_image_and_not_by_its_pixels() -> None:
    scores, masks = _make()
    unmarked = IMAGES == 2
    hidden = masks.masked_fill(unmarked[:, None, None, None], 255)
    metric = AnomalyMetrics(score_fraction=0.0)
    metric.update(scores, hidden, IMAGES, None, unmarked)
    values = {name: float(value) for name, value in metric.compute().items()}
    others = _score(scores[~unmarked], masks[~unmarked], IMAGES[~unmarked])
    for name in ("average_precision", "dice", "pixel_auroc", "aupro_30", "f1_max"):
        assert values[name] == others[name]
    whole = masks.clone()
    whole[unmarked] = 1
    assert values["image_auroc"] == _score(scores, whole)["image_auroc"]
    assert metric.confusion is not None
    assert sum(map(sum, metric.confusion.counts)) == 5
