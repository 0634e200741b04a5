import pytest
import torch
from torch import Tensor
from torchmetrics.classification import BinaryAveragePrecision

from lit_data.models.scored import DefectRecall, PixelScores, append_rows


def _rare(samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(samples, 1, 64, 64, generator=generator) > 0.998).float()
    logits = torch.randn(masks.shape, generator=generator) * 2 - 6 + 5 * masks
    return logits.sigmoid(), masks


def test_average_precision_agrees_with_the_exact_one() -> None:
    scores, masks = _rare()
    metric = PixelScores()
    for part in range(0, 6, 4):
        metric.update(scores[part : part + 4], masks[part : part + 4])
    exact = BinaryAveragePrecision()(scores.flatten(), masks.flatten().long())
    assert 0.2 < exact < 0.9
    assert float(metric.compute()["average_precision"]) == pytest.approx(float(exact), abs=1e-3)


def test_perfect_and_empty() -> None:
    _, masks = _rare()
    perfect, empty = PixelScores(), PixelScores()
    perfect.update(masks, masks)
    assert perfect.compute() == {"average_precision": 1.0, "dice": 1.0}
    before = empty.histogram.shape
    for _ in range(3):
        empty.update(torch.rand(2, 1, 8, 8), torch.zeros(2, 1, 8, 8))
    assert (empty.histogram.shape, int(empty.histogram.sum())) == (before, 3 * 2 * 8 * 8)
    assert all(value.isnan() for value in empty.compute().values())


def _maps(*peaks: dict[tuple[int, int], float]) -> Tensor:
    maps = torch.zeros(len(peaks), 1, 32, 32)
    for number, places in enumerate(peaks):
        for (y, x), score in places.items():
            maps[number, 0, y, x] = score
    return maps


def test_recall_at_the_allowed_rate_of_false_alarms() -> None:
    # Ten patches allow one false alarm at a rate of 0.1: the threshold is the second highest, 0.5.
    masks = _maps({(5, 5): 1, (5, 6): 1, (20, 20): 1}, *[{}] * 9)
    scores = _maps({(5, 6): 0.6, (20, 20): 0.4}, {(9, 9): 0.8}, {(9, 9): 0.5}, *[{}] * 7)
    metric = DefectRecall(false_alarms_per_patch=0.1)
    for part in (slice(0, 3), slice(3, 10)):
        metric.update(scores[part], masks[part])
    assert float(metric.compute()) == 0.5
    metric.reset()
    metric.update(scores[[0]], masks[[0]])
    assert float(metric.compute()) == 1.0  # the flat background, at 0, is the strongest alarm


def test_diagonal_neighbours_are_one_defect_and_near_peaks_no_alarm() -> None:
    masks = _maps({(5, 5): 1, (6, 6): 1})
    scores = _maps({(5, 5): 0.3, (8, 8): 0.9, (11, 5): 0.8, (20, 20): 0.1})
    metric = DefectRecall(false_alarms_per_patch=0.0)
    metric.update(scores, masks)
    assert metric.defects[0].tolist() == [pytest.approx(0.3)]
    # (8, 8) is 2 px from the mask.
    assert metric.alarms[0][:2].tolist() == [pytest.approx(0.8), pytest.approx(0.1)]
    metric.reset()
    metric.update(_maps({(5, 5): 0.3, (8, 8): 0.9, (20, 20): 0.1}), masks)
    assert float(metric.compute()) == 1.0


def test_ranks_add_up_to_the_whole() -> None:
    scores, masks = _rare()
    whole, parts = (PixelScores(), DefectRecall()), (PixelScores(), DefectRecall())
    for metric, part in zip(whole, parts, strict=True):
        metric.update(scores, masks)
        other = type(part)()
        part.update(scores[:2], masks[:2])
        other.update(scores[2:], masks[2:])
        part.merge_state(other)
    assert parts[0].compute() == whole[0].compute()
    assert 0 < float(whole[1].compute()) < 1
    assert parts[1].compute() == whole[1].compute()


def test_rows_of_a_state_stay_in_a_few_tensors_that_nothing_writes_into() -> None:
    parts = []
    for number in range(100):
        before = list(parts)  # as AdaptiveBatchSize keeps it, to undo a step
        append_rows(parts, torch.arange(3) + 3 * number)
        assert sum(map(len, before)) == 3 * number
    assert torch.cat(parts).tolist() == list(range(300))
    assert [len(part) for part in parts] == [3 * 64, 3 * 32, 3 * 4]
