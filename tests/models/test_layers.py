"""Every net: logits in float32 under autocast, and weights that lie channels last whatever is loaded into them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.models import CompareNet, ConvClassifier, LiteUNet, UNet
from lit_data.wings.detection import DetectorNet

NETS = {
    "unet": (lambda: UNet(width=4, depth=2), 3),
    "unet of one channel": (lambda: UNet(channels=1, width=4, depth=2), 1),
    "unet that has seen ImageNet": (lambda: LiteUNet(width=4), 3),
    "compare": (lambda: CompareNet(width=4, depth=2), 3),
    "classifier": (lambda: ConvClassifier(3, width=4, depth=2), 3),
    "detector": (lambda: DetectorNet(2, width=4), 3),
}


@pytest.fixture(params=NETS)
def net_and_images(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, channels = NETS[request.param]
    return make().eval(), torch.rand(8, channels, 64, 64)


def give_logits(net: nn.Module, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Logits of a net, under autocast where a dtype is given."""
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        outputs = net(images)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def test_logits_under_autocast_have_the_steps_of_float32(
    net_and_images: tuple[nn.Module, Tensor],
) -> None:
    net, images = net_and_images
    exact, found = give_logits(net, images), give_logits(net, images, torch.bfloat16)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert len(found.unique()) > 0.5 * len(exact.unique())  # in bfloat16 there were a handful
    spread = (exact - exact.mean()).abs().mean()
    assert (found - exact).abs().mean() < 0.1 * spread


def test_weights_lie_channels_last_and_take_a_state_of_any_layout(
    net_and_images: tuple[nn.Module, Tensor],
) -> None:
    net, images = net_and_images
    before = give_logits(net, images)
    state = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in net.state_dict().items()
    }
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    net.load_state_dict(state)
    kernels = [weight for weight in net.parameters() if weight.ndim == 4]
    assert kernels
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    assert torch.equal(give_logits(net, images), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unet_has_the_gradient_of_its_definition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, images = UNet(width=4, depth=2), torch.rand(2, 3, 16, 16)
    (fine, middle), (join_middle, join_fine) = net.down, net.up

    def compute(images: Tensor) -> Tensor:
        scales = [net.stem(images.contiguous(memory_format=torch.channels_last))]
        scales += [fine(scales[0])]
        coarse = middle(scales[1])
        double = partial(
            torch.nn.functional.interpolate, scale_factor=2.0, mode="bilinear", align_corners=False
        )
        joined = join_middle(torch.cat((scales[1], double(coarse)), dim=1))
        features = join_fine(torch.cat((scales[0], double(joined)), dim=1))
        with torch.autocast("cpu", enabled=False):
            return net.head(features.float())

    gradients = []
    for forward in (net, compute):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = forward(images)
        gradients.append(torch.autograd.grad(logits.square().sum(), list(net.parameters())))
    for first, second in zip(*gradients, strict=True):
        assert_close(first, second, rtol=1e-3, atol=1e-3 * float(second.abs().max()))
