import pytest
import torch

from lit_data.errors import ConfigError
from lit_data.modules.detection.boxes import box_iou
from lit_data.modules.detection.net import Level, Predictions, decode, place_centres
from lit_data.modules.detection.targets import Truths, assign, find_candidates, read_truths

LEVELS = (Level(8, 8, 6), Level(16, 4, 3), Level(32, 2, 2))  # of an image of 64 x 48 px
PLACES = 48 + 12 + 4


def _predict(images: int = 1, classes: int = 2, seed: int = 0) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    codes = 0.2 * torch.randn(images, PLACES, 4, generator=generator)
    return Predictions(
        torch.randn(images, PLACES, classes, generator=generator), decode(codes, LEVELS), LEVELS
    )


def _truths(*rows: tuple[int, int, list[float]]) -> Truths:
    numbers = torch.tensor([row[:2] for row in rows], dtype=torch.int64).view(-1, 2)
    return Truths(numbers[:, 0], numbers[:, 1], torch.tensor([row[2] for row in rows]).view(-1, 4))


def _candidates(box: list[float]) -> list[int]:
    numbers, _, valid = find_candidates(torch.tensor([box]), LEVELS)
    return sorted(numbers[valid].tolist())


def test_boxes_become_pixels() -> None:
    boxes = torch.tensor([[1.0, 2.0, 0.5, 0.25, 0.5, 0.5]])
    truths = read_truths({"image": torch.empty(0, 3, 64, 48), "boxes": boxes})
    assert (truths.rows.tolist(), truths.classes.tolist()) == ([1], [2])
    assert truths.boxes.tolist() == [[12.0, 0.0, 36.0, 32.0]]


@pytest.mark.parametrize(
    "box",
    [
        [0.0, 0.0, 48.0, 64.0],
        [10.0, 3.0, 31.0, 20.0],
        [20.0, 40.0, 48.0, 64.0],
        [9.0, 9.0, 15.0, 15.0],
    ],
)
def test_candidates_lie_in_the_box_and_near_its_centre(box: list[float]) -> None:
    centres, strides = place_centres(LEVELS, torch.device("cpu"))
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    expected = []
    for number, ((place_x, place_y), stride) in enumerate(
        zip(centres.tolist(), strides.flatten().tolist(), strict=True)
    ):
        columns, rows = abs(place_x // stride - x // stride), abs(place_y // stride - y // stride)
        inside = box[0] < place_x < box[2] and box[1] < place_y < box[3]
        if max(columns, rows) == 0 or (inside and max(columns, rows) <= 2):
            expected.append(number)
    assert _candidates(box) == expected


@pytest.mark.parametrize(
    ("box", "places"),
    [
        ([0.0, 0.0, 1.0, 1.0], [0, 48, 60]),
        ([47.0, 63.0, 48.0, 64.0], [47, 59, 63]),
        ([24.0, 32.0, 24.0, 32.0], [4 * 6 + 3, 48 + 2 * 3 + 1, 62]),  # no area, between four places
        ([48.0, 64.0, 48.0, 64.0], [47, 59, 63]),  # the last corner of the image
    ],
)
def test_the_smallest_boxes_have_a_place_at_each_level(box: list[float], places: list[int]) -> None:
    assert _candidates(box) == places
    targets = assign(_predict(), _truths((0, 0, box)))
    assert sorted(targets.places.tolist()) == places
    assert 0 < float(targets.quality.max()) <= 1


def test_the_best_place_learns_the_best_overlap() -> None:
    predictions, truths = _predict(seed=3), _truths((0, 1, [6.0, 10.0, 40.0, 50.0]))
    targets = assign(predictions, truths)
    overlap = box_iou(predictions.boxes[0, targets.places], truths.boxes)
    score = predictions.logits[0, targets.places, 1].sigmoid()
    rank = score.sqrt() * overlap**2
    assert len(targets.places) == 10
    assert overlap.max() > 0.5
    assert float(targets.quality.max()) == pytest.approx(float(overlap.max()))
    assert targets.quality.tolist() == pytest.approx((rank / rank.max() * overlap.max()).tolist())
    assert int(targets.quality.argmax()) == int(rank.argmax())
    others = sorted(set(_candidates([6.0, 10.0, 40.0, 50.0])) - set(targets.places.tolist()))
    overlap = box_iou(predictions.boxes[0, others], truths.boxes)
    other = predictions.logits[0, others, 1].sigmoid().sqrt() * overlap**2
    assert other.max() <= rank.min()


def test_objects_find_places_in_their_own_image_only() -> None:
    box = [10.0, 10.0, 30.0, 30.0]
    targets = assign(_predict(3), _truths((2, 0, box), (0, 1, box)))
    pairs = zip((targets.places // PLACES).tolist(), targets.truths.tolist(), strict=True)
    assert set(pairs) == {(2, 0), (0, 1)}
    assert [len(part) for part in assign(_predict(2), _truths())] == [0, 0, 0]


def test_a_place_learns_the_object_it_overlaps_most() -> None:
    predictions = _predict()
    wide, narrow = [0.0, 8.0, 48.0, 48.0], [8.0, 16.0, 40.0, 40.0]
    targets = assign(predictions, _truths((0, 0, wide), (0, 0, narrow)))
    assert len(targets.places.unique()) == len(targets.places)
    alone = [
        set(assign(predictions, _truths((0, 0, box))).places.tolist()) for box in (wide, narrow)
    ]
    wanted = alone[0] & alone[1]
    assert wanted
    overlap = box_iou(predictions.boxes[0][:, None], torch.tensor([wide, narrow]))
    for place, truth in zip(targets.places.tolist(), targets.truths.tolist(), strict=True):
        assert place not in wanted or overlap[place, truth] == overlap[place].max()


def test_of_equal_objects_the_first_gets_the_place() -> None:
    box = [10.0, 10.0, 30.0, 30.0]
    both = assign(_predict(), _truths((0, 0, box), (0, 0, box)))
    assert set(both.truths.tolist()) == {0}
    one = assign(_predict(), _truths((0, 0, box)))
    assert torch.equal(both.places, one.places)
    assert torch.equal(both.quality, one.quality)


def test_an_object_that_no_box_meets_is_learned_from_the_middle_outwards() -> None:
    predictions = _predict()
    far_off = torch.tensor([1000.0, 1000, 1001, 1001]).expand_as(predictions.boxes)
    truths = _truths((0, 0, [20.0, 20.0, 38.0, 36.0]))
    targets = assign(predictions._replace(boxes=far_off), truths)
    assert float(targets.quality.max()) == pytest.approx(0.5)
    assert targets.places[targets.quality.argmax()] == 3 * 6 + 3  # the place at (28, 28)


def test_unknown_classes() -> None:
    with pytest.raises(ConfigError, match=r"class 2, but the net knows 2, .*model\.net\.classes"):
        assign(_predict(), _truths((0, 2, [0.0, 0.0, 9.0, 9.0])))
