"""Losses of generators and discriminators, and the penalty on the discriminator's gradient."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_data.modules.gan_conditions import Conditions

GANLoss = Literal["non_saturating", "hinge"]


class ScoreLosses(NamedTuple):
    """Losses of scores [B], each [B].

    Attributes:
        real: Of the discriminator, for scores of real images.
        fake: Of the discriminator, for scores of fakes.
        generator: Of the generator, for scores of fakes.
    """

    real: Callable[[Tensor], Tensor]
    fake: Callable[[Tensor], Tensor]
    generator: Callable[[Tensor], Tensor]


LOSSES: Final[dict[GANLoss, ScoreLosses]] = {
    # Goodfellow et al., "Generative adversarial nets", NeurIPS 2014, section 3.
    "non_saturating": ScoreLosses(lambda score: F.softplus(-score), F.softplus, lambda score: F.softplus(-score)),
    # Lim and Ye, "Geometric GAN", 2017.
    "hinge": ScoreLosses(lambda score: F.relu(1 - score), lambda score: F.relu(1 + score), torch.neg),
}


def find_r1(discriminator: nn.Module, images: Tensor, conditions: Conditions) -> Tensor:
    """Squared norm of the gradient of each real image's score (Mescheder et al., ICML 2018), without autocast.

    In float32 where autocast would take fewer bits: squares of small gradients underflow, and torch computes the inner
    gradient under autocast, too.

    Args:
        discriminator: From images and conditions to scores.
        images: [B, C, H, W] in -1..1.
        conditions: What they show.

    Returns:
        [B], with a graph down to the discriminator's weights.
    """
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        images = images.detach().requires_grad_()
        scores = discriminator(images, conditions)
        (gradients,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    found: Tensor = gradients.square().sum((1, 2, 3))
    return found
