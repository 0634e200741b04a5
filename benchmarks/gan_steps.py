"""A step of a GAN as others write it, beside that of `GANModule`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.types import Batch
from lit_data.wings.gan import GANModule
from lit_data.wings.gan.model.conditions import Use


def step_originally(module: GANModule, batch: Batch) -> None:
    """Make a step as it is often written: correct, but with more in memory than is needed."""
    optimizers: Any = module.optimizers()
    generator_optimizer, discriminator_optimizer = optimizers
    discriminator_optimizer.zero_grad(set_to_none=False)
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.DISCRIMINATOR)
    # with its graph, through which backward goes in vain
    fakes = module.generator(part.latents, part.conditions)
    fake_scores = module.discriminator(fakes, part.conditions)
    real = part.read_real().requires_grad_()
    real_scores = module.discriminator(real, part.conditions)
    real_loss = _MeanLoss(module.losses.real)(real_scores)
    fake_loss = _MeanLoss(module.losses.fake)(fake_scores)
    penalty = find_penalty(module, real, real_scores)
    module.manual_backward(real_loss + fake_loss + penalty)
    discriminator_optimizer.step()
    generator_optimizer.zero_grad(set_to_none=False)
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.GENERATOR)
    fakes = module.generator(part.latents, part.conditions)
    loss = _MeanLoss(module.losses.generator)(module.discriminator(fakes, part.conditions))
    module.manual_backward(loss)
    generator_optimizer.step()
    module.follow_generator(module.batches_done)


class _MeanLoss(nn.Module):
    """Mean of a loss, a module that is built in each step."""

    def __init__(self, find_loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.find_loss = find_loss

    @override
    def forward(self, scores: Tensor) -> Tensor:
        return self.find_loss(scores).mean()


def find_penalty(module: GANModule, real: Tensor, scores: Tensor) -> Tensor:
    """Return the penalty of the gradient by real images, scaled for the steps that have none."""
    if module.batches_done % module.r1_every:
        return torch.zeros(())
    (gradients,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    return 0.5 * module.r1_weight * module.r1_every * gradients.square().sum((1, 2, 3)).mean()
