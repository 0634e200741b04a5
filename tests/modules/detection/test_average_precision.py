import pytest
import torch
from torch import Tensor

from lit_data.modules.detection.boxes import BoxScores, Objects


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
        ([(0.9, 0, SQUARE)], [], 0.0, 0.0),
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
    assert float(scores["map50"]) == pytest.approx(map50, abs=1e-6)
    assert float(scores["map"]) == pytest.approx(mean, abs=1e-6)


def test_boxes_are_ranked_over_all_images_and_matched_in_their_own() -> None:
    images = [
        (_found((0.6, 0, SQUARE)), _true((0, SQUARE))),
        (_found((0.9, 0, SQUARE), (0.3, 0, FAR)), _true((0, FAR))),  # false at 0.9, right at 0.3
        (_found(), _true()),
    ]
    expected = (
        2 / 3
    )  # precision 1/2 at the first, 2/3 at the second right box, and the highest from there on counts
    assert float(_compute(*images)["map50"]) == pytest.approx(expected)
    split = BoxScores()
    for found, true in images:
        split.update([found], [true])
    assert float(split.compute()["map50"]) == pytest.approx(expected)


def test_each_box_takes_the_free_object_it_overlaps_most() -> None:
    near = [0.0, 0.0, 10.0, 9.0]
    both = _true((0, SQUARE), (0, near))
    assert float(_compute((_found((0.9, 0, near), (0.8, 0, near)), both))["map50"]) == 1.0
    # at IoU 0.95 the second box finds only the object that is taken: 9 thresholds at 1, one at
    # recall 1/2
    assert float(_compute((_found((0.9, 0, near), (0.8, 0, near)), both))["map"]) == pytest.approx(
        (9 + 51 / 101) / 10
    )
