import math

import pytest
import torch
from torch import Tensor

from lit_data.modules import DetectorNet
from lit_data.modules.detection.net import Predictions
from lit_data.modules.detection.targets import Truths, assign, detection_loss, read_truths

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

SIDE_PX = 64


def _truths(*rows: list[float]) -> Truths:
    image = torch.empty(0, 3, SIDE_PX, SIDE_PX)
    return read_truths({"image": image, "boxes": torch.tensor(rows).view(-1, 6)})


def _net() -> DetectorNet:
    torch.manual_seed(0)
    return DetectorNet(2, width=4)


@pytest.fixture
def predictions() -> Predictions:
    with torch.no_grad():
        found: Predictions = _net().eval()(torch.rand(2, 3, SIDE_PX, SIDE_PX))
    return found


def _perfect(predictions: Predictions, truths: Truths) -> Predictions:
    targets = assign(predictions, truths)
    logits, boxes = torch.full_like(predictions.logits, -40), predictions.boxes.clone()
    logits.flatten(0, 1)[targets.places, truths.classes[targets.truths]] = 40
    boxes.flatten(0, 1)[targets.places] = truths.boxes[targets.truths]
    return Predictions(logits, boxes, predictions.levels)


def test_perfect_predictions_cost_nothing_and_others_do(predictions: Predictions) -> None:
    truths = _truths(
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
    truths = _truths([0, 1, 0.3, 0.3, 0.3, 0.4])
    none, one, two = (
        detection_loss(predictions, truths, box_weight=weight) for weight in (0.0, 1.0, 2.0)
    )
    assert one > none
    assert float(two - none) == pytest.approx(2 * float(one - none), rel=1e-5)


def test_images_without_objects_learn_that_there_is_nothing(predictions: Predictions) -> None:
    expected = predictions.logits.exp().log1p().sum() / 2
    assert float(detection_loss(predictions, _truths())) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[0.0, 0.0, 0.5, 0.5, 1 / SIDE_PX, 1 / SIDE_PX]],
        [[1.0, 0.0, 0.5, 0.5, 0.0, 0.0]],
        [[1.0, 1.0, 0.5, 0.5, 1.0, 1.0], [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]],
    ],
    ids=["no objects", "one pixel", "no area", "twice the whole image"],
)
def test_gradients_are_finite_and_reach_every_weight(rows: list[list[float]]) -> None:
    net = _net()
    loss = detection_loss(net(torch.rand(2, 3, SIDE_PX, SIDE_PX)), _truths(*rows))
    loss.backward()
    for weight in net.parameters():
        assert weight.grad is not None
        assert torch.isfinite(weight.grad).all()
    assert math.isfinite(float(loss.detach()))


def _gradient(net: DetectorNet, images: Tensor, boxes: Tensor) -> Tensor:
    net.zero_grad()
    detection_loss(net(images), _truths(*boxes.tolist())).backward()
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
