"""The ways to make a step of a GAN that the suite ``gan`` compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.callbacks import GradientCheckpointing
from lit_data.modules import GANModule
from lit_data.modules.gan.conditions import Use
from lit_data.types import Batch

NAMES = {
    "original": "original: fakes made twice, with a graph, zeroed gradients, all in one backward",
    "careful": "careful: fakes without a graph, gradients set to none, all in one backward",
    "whole": "lit_data: the whole batch at once",
    "checkpointed": "lit_data: the same, activations of blocks computed twice",
    "parts": "lit_data: in parts",
}
BLOCKS = ("generator.blocks.*", "generator.planes.blocks.*", "discriminator.blocks.*")
"""What is checkpointed, of those that there are."""

Step = Callable[[GANModule, Batch], None]


@dataclass(frozen=True, slots=True)
class GANVariant:
    """One line of the table.

    Attributes:
        name: One of `NAMES`.
        step: Takes the place of the module's training step; none leaves it.
        part: Samples that go through the nets at once; none: all.
        checkpointed: Compute activations of blocks twice.
    """

    name: str
    step: Step | None = None
    part: int | None = None
    checkpointed: bool = False

    def make_callbacks(self, module: GANModule) -> list[L.Callback]:
        """Make the callbacks that the Trainer needs for it."""
        if not self.checkpointed:
            return []
        names = [name for name, _ in module.named_modules()]
        present = []
        for pattern in BLOCKS:
            if any(name.startswith(pattern.removesuffix("*")) for name in names):
                present.append(pattern)
        return [GradientCheckpointing(present)]


def list_ways(part: int) -> list[GANVariant]:
    """List the ways, the original one first.

    Args:
        part: Samples of a part.
    """
    return [
        GANVariant("original", step_originally),
        GANVariant("careful", step_carefully),
        GANVariant("whole"),
        GANVariant("checkpointed", checkpointed=True),
        GANVariant("parts", part=part),
    ]


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
    penalty = _find_penalty(module, real, real_scores)
    module.manual_backward(real_loss + fake_loss + penalty)
    discriminator_optimizer.step()
    generator_optimizer.zero_grad(set_to_none=False)
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.GENERATOR)
    fakes = module.generator(part.latents, part.conditions)
    loss = _MeanLoss(module.losses.generator)(module.discriminator(fakes, part.conditions))
    module.manual_backward(loss)
    generator_optimizer.step()
    module.follow_generator(module.batches_done)


def step_carefully(module: GANModule, batch: Batch) -> None:
    """Make a step as tutorials of today have it."""
    optimizers: Any = module.optimizers()
    generator_optimizer, discriminator_optimizer = optimizers
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.DISCRIMINATOR)
    with torch.no_grad():
        fakes = module.generator(part.latents, part.conditions)
    real = part.read_real().requires_grad_()
    real_scores = module.discriminator(real, part.conditions)
    loss = module.losses.real(real_scores).mean()
    loss = loss + module.losses.fake(module.discriminator(fakes, part.conditions)).mean()
    discriminator_optimizer.zero_grad()
    module.manual_backward(loss + _find_penalty(module, real, real_scores))
    discriminator_optimizer.step()
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.GENERATOR)
    fakes = module.generator(part.latents, part.conditions)
    loss = module.losses.generator(module.discriminator(fakes, part.conditions)).mean()
    generator_optimizer.zero_grad()
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


def _find_penalty(module: GANModule, real: Tensor, scores: Tensor) -> Tensor:
    if module.batches_done % module.r1_every:
        return torch.zeros(())
    (gradients,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    return 0.5 * module.r1_weight * module.r1_every * gradients.square().sum((1, 2, 3)).mean()
