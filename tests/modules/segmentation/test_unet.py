import pytest
import torch

from lit_data.errors import ConfigError
from lit_data.modules import UNet


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (7, 5), (1, 9)])
def test_any_size_goes_through(size: tuple[int, int]) -> None:
    assert UNet(width=4, channels=1, classes=2)(torch.rand(2, 1, *size)).shape == (2, 2, *size)


def test_it_learns_to_mark_what_is_bright() -> None:
    torch.manual_seed(0)
    net, images = UNet(width=8, depth=2), torch.rand(4, 3, 32, 32)
    masks = (images.mean(1, keepdim=True) > 0.6).float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(
        weight.grad is not None and weight.grad.abs().max() > 0 for weight in net.parameters()
    )
    assert ((net(images) > 0) == (masks > 0)).float().mean() > 0.95


def test_a_pixel_sees_far_at_coarse_scales() -> None:
    torch.manual_seed(0)
    net, images = UNet(width=4, depth=3).eval(), torch.rand(1, 3, 96, 96, requires_grad=True)
    net(images)[0, 0, 48, 48].backward()
    assert images.grad is not None
    seen = images.grad.abs().sum((0, 1)).nonzero()
    assert (seen.max() - 48).item() > 24


def test_the_untrained_net_expects_few_pixels() -> None:
    torch.manual_seed(0)
    assert UNet(prior=0.02)(torch.rand(2, 3, 32, 32)).sigmoid().mean().item() < 0.1


@pytest.mark.parametrize("options", [{"width": 0}, {"depth": 0}, {"channels": 0}, {"prior": 0.0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(
        ConfigError, match=r"(width|depth|channels)=0 is not usable|prior=0.0: need 0 < prior < 1"
    ):
        UNet(**options)  # type: ignore[arg-type]
