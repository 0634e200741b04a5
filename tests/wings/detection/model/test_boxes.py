import pytest
import torch
from torch import Tensor

from lit_data.wings.detection.model.boxes import (
    box_iou,
    generalised_iou,
    non_maximum_suppression,
    soft_suppression,
    to_corners,
)


def _boxes(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).view(-1, 4)


def _random_boxes(count: int, generator: torch.Generator) -> Tensor:
    low = torch.randint(0, 20, (count, 2), generator=generator)
    return torch.cat(
        (low, low + torch.randint(1, 12, (count, 2), generator=generator)), dim=1
    ).float()


@pytest.mark.parametrize(
    ("other", "iou", "generalised"),
    [
        ([0.0, 0.0, 2.0, 2.0], 1.0, 1.0),
        ([1.0, 0.0, 3.0, 2.0], 2 / 6, 2 / 6),
        ([1.0, 1.0, 3.0, 3.0], 1 / 7, 1 / 7 - 2 / 9),
        ([2.0, 0.0, 4.0, 2.0], 0.0, 0.0),
        ([4.0, 0.0, 6.0, 2.0], 0.0, -4 / 12),
        ([1.0, 1.0, 1.0, 1.0], 0.0, 0.0),
    ],
)
def test_overlap(other: list[float], iou: float, generalised: float) -> None:
    one = to_corners(_boxes([1.0, 1.0, 2.0, 2.0]))  # centre and sides
    assert float(box_iou(one, _boxes(other))) == pytest.approx(iou, abs=1e-6)
    assert float(generalised_iou(one, _boxes(other))) == pytest.approx(generalised, abs=1e-6)


def test_overlap_of_boxes_without_area_is_a_number() -> None:
    point = _boxes([1.0, 1.0, 1.0, 1.0]).requires_grad_()
    generalised_iou(point, point.detach()).sum().backward()
    assert point.grad is not None
    assert torch.isfinite(point.grad).all()
    assert box_iou(point, point).tolist() == [0]


def _suppress_slowly(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, most: int
) -> list[int]:
    kept = []
    for number in sorted(range(len(boxes)), key=lambda place: (-float(scores[place]), place)):
        rivals = [place for place in kept if classes[place] == classes[number]]
        if not any(box_iou(boxes[number], boxes[place]) > iou_threshold for place in rivals):
            kept.append(number)
    return kept[:most]


@pytest.mark.parametrize(
    ("count", "iou_threshold", "most"),
    [(0, 0.5, 3), (1, 0.1, 100), (2, 1.0, 3), (60, 0.1, 100), (60, 0.5, 3), (60, 1.0, 100)],
)
def test_suppression_is_the_greedy_one(count: int, iou_threshold: float, most: int) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        boxes = _random_boxes(count, generator)
        scores = torch.randint(0, 8, (count,), generator=generator) / 8  # many are equal
        classes = torch.randint(0, 3, (count,), generator=generator)
        kept = non_maximum_suppression(
            boxes, scores, classes, iou_threshold=iou_threshold, most=most
        )
        assert kept.tolist() == _suppress_slowly(boxes, scores, classes, iou_threshold, most)


def test_soft_suppression_of_a_case_computed_by_hand() -> None:
    # IoU of the first with the second: 8 x 10 of 120 px, 2 / 3; with the third 6 x 10 of 140, 3 / 7;
    # of the second with the third 8 x 10 of 120, 2 / 3. The fourth is of another class.
    boxes = _boxes([0.0, 0, 10, 10], [2.0, 0, 12, 10], [4.0, 0, 14, 10], [0.0, 0, 10, 10])
    scores, classes = torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([0, 0, 0, 1])
    options = {"iou_threshold": 0.4}
    order, left = soft_suppression(boxes, scores, classes, most=9, least_score=0.1, **options)
    # 0.6 * (1 - 3 / 7) = 0.343; 0.8 * (1 - 2 / 3) = 0.267, and then times 1 - 2 / 3.
    assert order.tolist() == [0, 3, 2]
    assert left.tolist() == pytest.approx([0.9, 0.5, 0.6 * 4 / 7])
    order, left = soft_suppression(boxes, scores, classes, most=9, least_score=0.08, **options)
    assert order.tolist() == [0, 3, 2, 1]
    assert left.tolist() == pytest.approx([0.9, 0.5, 0.6 * 4 / 7, 0.8 / 9])
    options = {"iou_threshold": 0.5, "least_score": 0.1, "most": 2}  # the third meets the second
    assert soft_suppression(boxes, scores, classes, **options)[0].tolist() == [0, 2]
    nothing = soft_suppression(boxes[:0], scores[:0], classes[:0], **options)
    assert [len(part) for part in nothing] == [0, 0]


SQUARE, FAR = [0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 60.0, 60.0]
