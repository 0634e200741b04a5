"""`UNet` and `CompareNet`: sizes, what they learn, and what they start from."""

from typing import Any

import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.models import CompareNet, UNet
from lit_data.models.segmentation.nets import align, compare


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (7, 5), (1, 9)])
def test_any_size_goes_through(size: tuple[int, int]) -> None:
    assert UNet(width=4, channels=1, classes=2)(torch.rand(2, 1, *size)).shape == (2, 2, *size)
    assert CompareNet()(torch.rand(2, 3, *size)).shape == (2, 1, *size)


def test_the_untrained_nets_expect_few_defects() -> None:
    torch.manual_seed(0)
    assert UNet(prior=0.02)(torch.rand(2, 3, 32, 32)).sigmoid().mean().item() < 0.1
    net = CompareNet(prior=1e-3)
    share = net(torch.full((1, 3, 32, 32), 0.5)).sigmoid().mean().item()
    assert share == pytest.approx(1e-3, rel=0.1)
    assert sum(weight.numel() for weight in net.parameters()) < 1_000_000


@pytest.mark.parametrize(
    ("net", "options"),
    [
        *((UNet, {name: 0}) for name in ("width", "depth", "channels", "prior")),
        *((CompareNet, {name: 0}) for name in ("width", "depth", "prior")),
        (CompareNet, {"prior": 1.0}),
    ],
)
def test_bad_options(net: Any, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"=0 is not usable|need 0 < prior < 1"):
        net(**options)


def _texture(
    height: int = 96, width: int = 96, shift: tuple[float, float] = (0.0, 0.0)
) -> torch.Tensor:
    """Smooth stripes with a second direction, so that both components of a shift can be seen."""
    y = torch.arange(height, dtype=torch.float32)[:, None] + shift[0]
    x = torch.arange(width, dtype=torch.float32) + shift[1]
    return (0.5 + 0.2 * torch.sin(x / 2.0 + y / 9) + 0.15 * torch.sin(y / 2.5 - x / 11))[None, None]


@pytest.mark.parametrize("shift", [(0.0, 0.6), (0.7, 0.0), (-0.5, 0.8), (1.0, -1.0)])
def test_references_are_brought_into_register(shift: tuple[float, float]) -> None:
    target, moved = _texture(), _texture(shift=shift)
    aligned = align(target, moved)
    inner = (slice(None), slice(None), slice(8, -8), slice(8, -8))
    assert (target - aligned)[inner].abs().mean() < 0.25 * (target - moved)[inner].abs().mean()


def test_a_true_defect_stands_out_and_a_distractor_does_not() -> None:
    images = torch.cat((_texture(), _texture(shift=(0.4, 0.5)), _texture(shift=(0.5, 0.3))), dim=1)
    images[:, 0, 30:33, 30:33] += 0.2
    images[:, 0, 60:63, 60:63] += 0.2
    images[:, 1:, 60:63, 60:63] += 0.2
    images[:, 1, 30:33, 70:73] += 0.2
    agreed = compare(images)[0, -1]
    assert agreed[31, 31] > 3
    assert agreed[61, 61].abs() < 1
    assert agreed[31, 71].abs() < 1


def test_gradients_reach_all_weights_in_bfloat16() -> None:
    torch.manual_seed(0)
    net, images = CompareNet(), torch.rand(2, 3, 32, 32)
    features = compare(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compare(images), features)  # small differences would drown in bfloat16
        net(images).float().square().mean().backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters()
    )
    assert all(weight.grad.abs().max() > 0 for weight in net.parameters())  # type: ignore[union-attr]
