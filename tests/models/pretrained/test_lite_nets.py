"""Nets for labels and boxes on the encoder that has seen ImageNet."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.models import LiteClassifier
from lit_data.wings.detection import DetectorNet, LiteDetector
from lit_data.wings.detection.model.targets import Truths, detection_loss

NETS = [LiteClassifier, LiteDetector]


def _image(*, channels: int = 3, sides_px: tuple[int, int] = (64, 96)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(1, channels, *sides_px, generator=generator)


def _ask(net: nn.Module, images: Tensor) -> Tensor:
    """Return logits in evaluation, [B, classes] or [B, P, classes]."""
    with torch.no_grad():
        answer = net.eval()(images)
    logits: Tensor = answer if isinstance(answer, Tensor) else answer.logits
    return logits


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("sides_px", [(64, 96), (100, 36), (1, 1)])
def test_images_of_any_size_and_channels(channels: int, sides_px: tuple[int, int]) -> None:
    images = _image(channels=channels, sides_px=sides_px)
    assert _ask(LiteClassifier(["a", "b"], channels=channels), images).shape == (1, 2)
    # Places are those of the small detector.
    places = _ask(DetectorNet(5, width=4, channels=channels), images).shape
    assert _ask(LiteDetector(5, channels=channels), images).shape == places


@pytest.mark.parametrize("kind", NETS)
def test_grey_images_of_one_channel_get_the_answers_of_three_equal_ones(
    kind: type[LiteClassifier] | type[LiteDetector],
) -> None:
    torch.manual_seed(0)
    net = kind(2)
    single = kind(2, channels=1, weights=None)
    state = net.state_dict()
    state["encoder.conv_stem.weight"] = state["encoder.conv_stem.weight"].sum(1, keepdim=True)
    single.load_state_dict(state)
    grey = _image(channels=1)
    assert_close(_ask(single, grey), _ask(net, grey.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4)


def test_a_finer_level_is_that_of_stride_4() -> None:
    with torch.no_grad():
        levels = LiteDetector(2, finest_stride_px=4, weights=None).eval()(_image()).levels
    assert [level.stride_px for level in levels] == [4, 8, 16, 32]
    with pytest.raises(ConfigError, match="finest_stride_px=2 is unknown: choose one of"):
        LiteDetector(2, finest_stride_px=2)  # type: ignore[arg-type]  # the case in question


def test_the_untrained_detector_finds_little_and_every_weight_learns() -> None:
    torch.manual_seed(0)
    net = LiteDetector(2, weights=None)
    predictions = net(_image().expand(2, -1, -1, -1))
    assert predictions.logits.sigmoid().max() < 0.05
    truths = Truths(torch.tensor([0]), torch.tensor([1]), torch.tensor([[8.0, 8, 40, 40]]))
    detection_loss(predictions, truths).backward()
    assert all(weight.grad is not None for weight in net.parameters())


@pytest.mark.parametrize("kind", NETS)
def test_without_classes_is_refused(kind: type[LiteClassifier] | type[LiteDetector]) -> None:
    with pytest.raises(ConfigError, match="classes=0"):
        kind(0)
