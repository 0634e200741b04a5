"""`LiteCompareNet`: what target and references share cancels, and what differs is learned."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.models import LiteCompareNet


def _small(**options: Any) -> LiteCompareNet:
    return LiteCompareNet(**{"strides_px": [2, 4], "width": 8, **options})


def _draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target and two equal references, and where a spot is in the target alone."""
    generator = torch.Generator().manual_seed(seed)
    part = F.interpolate(torch.rand(4, 1, 8, 8, generator=generator), scale_factor=8.0)
    mask = torch.zeros_like(part)
    for row in range(len(part)):
        y, x = torch.randint(8, 48, (2,), generator=generator).tolist()
        mask[row, :, y : y + 8, x : x + 8] = 1
    return torch.cat((part * 0.5 + mask * 0.4, part * 0.5, part * 0.5), dim=1), mask


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (7, 5)])
@pytest.mark.parametrize("references", [1, 2])
def test_any_size_goes_through(size: tuple[int, int], references: int) -> None:
    net = _small(references=references).eval()
    assert net(torch.rand(2, 3, *size)).shape == (2, 1, *size)


@torch.no_grad()
def test_the_difference_is_that_to_the_nearer_reference() -> None:
    images = torch.rand(2, 3, 32, 32)
    net = _small().eval()
    one, other = (net.find_maps(images[:, [0, number, number]]) for number in (1, 2))
    for both, first, second in zip(net.find_maps(images), one, other, strict=True):
        torch.testing.assert_close(both, torch.minimum(first, second), rtol=1e-4, atol=1e-5)
    alone = _small(references=1, weights=None).eval()
    alone.load_state_dict(net.state_dict())
    torch.testing.assert_close(alone(images), alone(images[:, :2]))


def test_it_learns_to_mark_what_the_target_alone_shows() -> None:
    torch.manual_seed(0)
    net = _small(prior=0.02, strides_px=[2, 4, 8])
    optimizer = torch.optim.AdamW((each for each in net.parameters() if each.requires_grad), 1e-2)
    for step in range(40):
        images, masks = _draw(step)
        loss = F.binary_cross_entropy_with_logits(net(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, masks = _draw(99)
    found = net.eval()(images) > 0
    assert (found & (masks > 0)).sum() > 0.7 * masks.sum()
    assert (found & (masks == 0)).sum() < 0.5 * masks.sum()


def test_other_numbers_of_references_are_refused() -> None:
    with pytest.raises(ConfigError, match="references=3 is not usable"):
        _small(references=3)
