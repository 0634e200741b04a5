"""The detector: its net, which place learns which object, and the loss."""

import pytest
import torch
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.wings.detection import DetectorNet
from lit_data.wings.detection.model.boxes import box_iou
from lit_data.wings.detection.model.net import Level, Predictions, decode, place_centres
from lit_data.wings.detection.model.targets import (
    Truths,
    assign,
    detection_loss,
    find_candidates,
    read_truths,
)

LEVELS = (Level(8, 8, 6), Level(16, 4, 3), Level(32, 2, 2))  # of an image of 64 x 48 px
PLACES = 48 + 12 + 4
SIDE_PX = 64


@pytest.mark.parametrize(
    ("height", "width", "levels"),
    [
        (320, 256, ((40, 32), (20, 16), (10, 8))),
        (100, 36, ((13, 5), (7, 3), (4, 2))),  # no multiple of a stride
        (1, 1, ((1, 1), (1, 1), (1, 1))),
    ],
)
def test_shapes(height: int, width: int, levels: tuple[tuple[int, int], ...]) -> None:
    net = DetectorNet(5, width=4).eval()
    with torch.no_grad():
        logits, boxes, found = net(torch.rand(2, 3, height, width))
    assert found == tuple(
        Level(stride, *size) for stride, size in zip((8, 16, 32), levels, strict=True)
    )
    places = sum(rows * columns for rows, columns in levels)
    assert logits.shape == (2, places, 5)
    assert boxes.shape == (2, places, 4)
    assert (boxes[..., 2:] > boxes[..., :2]).all()


def test_a_finer_level_has_places_for_objects_of_a_few_pixels() -> None:
    net = DetectorNet(2, width=4, finest_stride_px=4).eval()
    with torch.no_grad():
        found = net(torch.rand(1, 3, 100, 36))
    sizes = (4, 25, 9), (8, 13, 5), (16, 7, 3), (32, 4, 2)
    assert found.levels == tuple(Level(*size) for size in sizes)
    assert found.logits.shape == (1, 25 * 9 + 13 * 5 + 7 * 3 + 4 * 2, 2)
    # Two objects side by side, which lie in one cell of 8 px.
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 8.0, 4.0]])
    truths = Truths(torch.tensor([0, 0]), torch.tensor([0, 1]), boxes)
    learned = assign(found, truths)
    assert {0, 1} <= set(learned.places.tolist())
    with pytest.raises(ConfigError, match="finest_stride_px=2 is unknown: choose one of"):
        DetectorNet(2, finest_stride_px=2)


def test_codes_are_offsets_and_logarithms_of_sizes() -> None:
    codes = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.5, -1.0, -1.0, 99.0]]])
    low, high = decode(codes, (Level(8, 1, 2),))[0].split(2, dim=1)
    assert ((low + high) / 2).tolist() == [[4, 4], [16, -4]]
    assert (high - low)[0].tolist() == [32, 32]
    assert (high - low)[1].tolist() == pytest.approx([32 * 0.36788, 32 * 403.42], rel=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_outputs_are_float32_and_the_untrained_net_finds_little(precision: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        found = DetectorNet(2, width=4)(torch.rand(2, 3, 64, 64))
    assert found.logits.dtype == found.boxes.dtype == torch.float32
    assert found.logits.sigmoid().max() < 0.05


@pytest.mark.parametrize(("classes", "width"), [(0, 16), (3, 0), (3, 7)])
def test_impossible_sizes(classes: int, width: int) -> None:
    message = f"classes={classes}, width={width}, channels=3: need classes >= 1, an even"
    with pytest.raises(ConfigError, match=message):
        DetectorNet(classes, width=width)


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


def test_an_object_that_no_box_meets_is_learned_from_the_middle_outwards() -> None:
    predictions = _predict()
    far_off = torch.tensor([1000.0, 1000, 1001, 1001]).expand_as(predictions.boxes)
    truths = _truths((0, 0, [20.0, 20.0, 38.0, 36.0]))
    targets = assign(predictions._replace(boxes=far_off), truths)
    assert float(targets.quality.max()) == pytest.approx(0.5)
    assert targets.places[targets.quality.argmax()] == 3 * 6 + 3  # the place at (28, 28)


def test_unknown_classes() -> None:
    with pytest.raises(ConfigError, match=r"class 2, but the net has 2, .*model\.net\.classes"):
        assign(_predict(), _truths((0, 2, [0.0, 0.0, 9.0, 9.0])))


def _read(*rows: list[float]) -> Truths:
    image = torch.empty(0, 3, SIDE_PX, SIDE_PX)
    return read_truths({"image": image, "boxes": torch.tensor(rows).view(-1, 6)})


def _net() -> DetectorNet:
    torch.manual_seed(0)
    return DetectorNet(2, width=4)


@pytest.fixture
def predictions() -> Predictions:
    with torch.no_grad():
        return _net().eval()(torch.rand(2, 3, SIDE_PX, SIDE_PX))


def _perfect(predictions: Predictions, truths: Truths) -> Predictions:
    targets = assign(predictions, truths)
    logits, boxes = torch.full_like(predictions.logits, -40), predictions.boxes.clone()
    logits.flatten(0, 1)[targets.places, truths.classes[targets.truths]] = 40
    boxes.flatten(0, 1)[targets.places] = truths.boxes[targets.truths]
    return Predictions(logits, boxes, predictions.levels)


def test_perfect_predictions_cost_nothing_and_others_do(predictions: Predictions) -> None:
    truths = _read(
        [0, 1, 0.3, 0.3, 0.3, 0.4], [1, 0, 0.7, 0.6, 0.5, 0.5], [1, 1, 0.2, 0.2, 0.1, 0.1]
    )
    perfect = _perfect(predictions, truths)
    assert float(detection_loss(perfect, truths)) == pytest.approx(0, abs=1e-5)
    assert detection_loss(predictions, truths) > 0.5
    places = assign(perfect, truths).places
    moved = perfect.boxes.clone()
    moved.flatten(0, 1)[places] += 4.0
    assert detection_loss(perfect._replace(boxes=moved), truths) > 0.1
    wrong = perfect._replace(logits=perfect.logits.flip(2))
    assert detection_loss(wrong, truths) > 10


def test_the_weight_of_boxes_leaves_the_rest(predictions: Predictions) -> None:
    truths = _read([0, 1, 0.3, 0.3, 0.3, 0.4])
    none, one, two = (
        detection_loss(predictions, truths, box_weight=weight) for weight in (0.0, 1.0, 2.0)
    )
    assert one > none
    assert float(two - none) == pytest.approx(2 * float(one - none), rel=1e-5)


def test_an_ignored_region_teaches_nothing_about_its_class_but_what_its_objects_learn() -> None:
    predictions = _predict()
    logits = predictions.logits.detach().requires_grad_()
    truths = _truths((0, 1, [8.0, 8.0, 24.0, 24.0]))
    region = _truths((0, 0, [0.0, 0.0, 32.0, 32.0]), (0, 1, [0.0, 0.0, 32.0, 32.0]))
    given = predictions._replace(logits=logits, boxes=predictions.boxes.detach())
    detection_loss(given, truths, region).backward()
    assert logits.grad is not None
    learns = logits.grad[0] != 0
    centres = place_centres(predictions.levels, logits.device)[0]
    is_inside = (centres < 32).all(1)
    assert not learns[is_inside, 0].any()
    assert learns[~is_inside].all()
    assigned = assign(given, truths).places
    assert learns[assigned, 1].all()
    assert int(learns[is_inside, 1].sum()) == int(is_inside[assigned].sum())


def _gradient(net: DetectorNet, images: Tensor, boxes: Tensor) -> Tensor:
    net.zero_grad()
    detection_loss(net(images), _read(*boxes.tolist())).backward()
    return torch.cat(
        [weight.grad.flatten() for weight in net.parameters() if weight.grad is not None]
    )


def test_pieces_weighted_by_their_images_give_the_gradient_of_the_batch() -> None:
    net, images = _net().eval(), torch.rand(5, 3, SIDE_PX, SIDE_PX)
    generator = torch.Generator().manual_seed(0)
    # Images of four, two and one object, and two without.
    rows = torch.tensor([0, 0, 0, 0, 2, 2, 4])
    places = 0.2 + 0.5 * torch.rand(7, 4, generator=generator)
    boxes = torch.cat((rows[:, None], torch.randint(0, 2, (7, 1)), places), 1)
    whole, pieces = _gradient(net, images, boxes), torch.zeros(())
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        part = boxes[(rows >= start) & (rows < stop)] - torch.tensor([start, 0, 0, 0, 0, 0])
        pieces = pieces + _gradient(net, images[start:stop], part) * (stop - start) / 5
    assert (whole - pieces).abs().max() < 1e-5 * whole.abs().max()
