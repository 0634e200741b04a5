from math import nan

import pytest
import torch
from torch import Tensor

from lit_data.modules.detection.boxes import (
    Objects,
    box_iou,
    generalised_iou,
    non_maximum_suppression,
    soft_suppression,
    to_corners,
)
from lit_data.modules.detection.scores import BoxScores


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


def test_a_dropped_box_drops_none() -> None:
    chain = _boxes(*([float(start), 0.0, start + 4.0, 4.0] for start in range(6)))
    scores, classes = torch.linspace(1, 0.5, 6), torch.zeros(6, dtype=torch.int64)
    kept = non_maximum_suppression(chain, scores, classes, iou_threshold=0.5, most=10)
    assert kept.tolist() == [0, 2, 4]


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


def _found(*rows: tuple[float, int, list[float]]) -> Objects:
    return _true(*(row[1:] for row in rows)) | {"scores": torch.tensor([row[0] for row in rows])}


def _true(*rows: tuple[int, list[float]]) -> Objects:
    boxes = torch.tensor([row[1] for row in rows]).view(-1, 4)
    return {"boxes": boxes, "classes": torch.tensor([row[0] for row in rows], dtype=torch.int64)}


def _compute(*images: tuple[Objects, Objects]) -> dict[str, Tensor]:
    metric = BoxScores()
    metric.update(*zip(*images, strict=True))
    return metric.compute()


SQUARE, FAR = [0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 60.0, 60.0]
SHIFTED = [0.0, 0.0, 10.0, 7.2]  # IoU 0.72 with the square


@pytest.mark.parametrize(
    ("found", "true", "map50", "mean"),
    [
        ([(0.9, 0, SQUARE)], [(0, SQUARE)], 1.0, 1.0),
        ([(0.9, 0, SHIFTED)], [(0, SQUARE)], 1.0, 0.5),  # right at 0.5, 0.55 .. 0.7
        ([(0.9, 1, SQUARE)], [(0, SQUARE)], 0.0, 0.0),
        ([], [(0, SQUARE)], 0.0, 0.0),
        ([(0.9, 0, SQUARE)], [], nan, nan),
        # recall 1/2 at most, which is 51 of 101 levels
        ([(0.9, 0, SQUARE)], [(0, SQUARE), (0, FAR)], 51 / 101, 51 / 101),
        # a false box above, and one below, the right one
        ([(0.9, 0, FAR), (0.5, 0, SQUARE)], [(0, SQUARE)], 0.5, 0.5),
        ([(0.9, 0, SQUARE), (0.5, 0, FAR)], [(0, SQUARE)], 1.0, 1.0),
        # the second box on the same object is false, so the last is the second of three
        (
            [(0.9, 0, SQUARE), (0.8, 0, SQUARE), (0.7, 0, FAR)],
            [(0, SQUARE), (0, FAR)],
            *[(51 + 50 * 2 / 3) / 101] * 2,
        ),
        # mean over the classes with objects: 1, 0; class 2 has none
        ([(0.9, 0, SQUARE), (0.8, 2, SQUARE)], [(0, SQUARE), (1, FAR)], 0.5, 0.5),
    ],
)
def test_known_values(
    found: list[tuple[float, int, list[float]]],
    true: list[tuple[int, list[float]]],
    map50: float,
    mean: float,
) -> None:
    scores = _compute((_found(*found), _true(*true)))
    assert float(scores["map50"]) == pytest.approx(map50, abs=1e-6, nan_ok=True)
    assert float(scores["map"]) == pytest.approx(mean, abs=1e-6, nan_ok=True)


def test_boxes_are_ranked_over_all_images_and_matched_in_their_own() -> None:
    images = [
        (_found((0.6, 0, SQUARE)), _true((0, SQUARE))),
        (_found((0.9, 0, SQUARE), (0.3, 0, FAR)), _true((0, FAR))),  # false at 0.9, right at 0.3
        (_found(), _true()),
    ]
    # Precision 1/2 at the first, 2/3 at the second right box, and the highest from there on counts.
    expected = 2 / 3
    assert float(_compute(*images)["map50"]) == pytest.approx(expected)
    split = BoxScores()
    for found, true in images:
        split.update([found], [true])
    assert float(split.compute()["map50"]) == pytest.approx(expected)


def test_each_box_takes_the_free_object_it_overlaps_most() -> None:
    near = [0.0, 0.0, 10.0, 9.0]
    both = _true((0, SQUARE), (0, near))
    scores = _compute((_found((0.9, 0, near), (0.8, 0, near)), both))
    assert float(scores["map50"]) == 1.0
    # At IoU 0.95 the second box finds only the object that is taken: 9 thresholds at 1, one at
    # recall 1/2.
    assert float(scores["map"]) == pytest.approx((9 + 51 / 101) / 10)
