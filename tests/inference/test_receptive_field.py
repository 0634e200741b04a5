import pytest
import torch
from torch import Tensor, nn

from lit_data.inference import measure_reach_px
from tests.inference.nets import REACH_PX, HalvingNet, make_net

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


class Mean(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images - images.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("net", "channels", "multiple", "reach"),
    [
        (make_net(), 1, 1, REACH_PX),
        (make_net(3), 3, 1, REACH_PX),
        (nn.Identity(), 2, 1, 0),
        (nn.Conv2d(1, 1, (1, 7), padding=(0, 3)), 1, 1, 3),
        (nn.Conv2d(1, 1, (7, 1), padding=(3, 0)), 1, 1, 3),
        (nn.MaxPool2d(5, 1, 2), 1, 1, 2),
        (HalvingNet(), 1, 2, 4),  # to the end of the next pair, and one
        (nn.Conv2d(1, 1, 17, padding=8), 1, 1, None),
        (Mean(), 1, 1, None),
    ],
)
def test_how_far_nets_see(net: nn.Module, channels: int, multiple: int, reach: int | None) -> None:
    with torch.inference_mode():
        assert measure_reach_px(net, channels, (16, 20), multiple_px=multiple) == reach
