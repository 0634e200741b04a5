"""A step of a GAN in micro-batches: draws for the samples, losses, and the penalty."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_data.batch_form import cut_evenly
from lit_data.errors import ConfigError
from lit_data.modules.gan.conditions import Conditions, RayPatches, Use, draw_latents, read_at
from lit_data.modules.gan.nets import widen
from lit_data.types import Batch

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
    "non_saturating": ScoreLosses(
        lambda score: F.softplus(-score), F.softplus, lambda score: F.softplus(-score)
    ),
    # Lim and Ye, "Geometric GAN", 2017.
    "hinge": ScoreLosses(
        lambda score: F.relu(1 - score), lambda score: F.relu(1 + score), torch.neg
    ),
}


def find_r1(discriminator: nn.Module, images: Tensor, conditions: Conditions) -> Tensor:
    """Squared norm of the gradient of each real image's score (Mescheder et al., ICML 2018).

    In float32 where autocast would take fewer bits: squares of small gradients underflow, and torch
    computes the inner gradient under autocast, too.

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
    penalties: Tensor = gradients.square().sum((1, 2, 3))
    return penalties


Backward = Callable[[Tensor], Any]


class Part(NamedTuple):
    """Micro-batch: samples that go through the nets at once.

    Attributes:
        images: [B, C, H, W] real ones in 0..1.
        latents: [B, latent_size] of the fakes.
        conditions: Of real images and fakes.
        fraction: B by the samples of the whole batch.
    """

    images: Tensor
    latents: Tensor
    conditions: Conditions
    fraction: float

    def read_real(self) -> Tensor:
        """Return the real images in -1..1, at the places of the conditions."""
        return read_at(self.images, self.conditions.grids).mul(2).sub(1)


@dataclass(frozen=True, slots=True)
class PartDraws:
    """Cuts batches into micro-batches, and draws for each sample what is its own wherever it is.

    Attributes:
        latent_size: Length of the latents.
        seed: Of everything that is drawn.
        patches: Places of the pixels; none: whole images.
        posed: Refuse batches without poses.
    """

    latent_size: int
    seed: int
    patches: RayPatches | None
    posed: bool

    def cut(self, batch: Batch, size: int | None, *, epoch: int, use: Use) -> Iterator[Part]:
        """Yield micro-batches of at most `size` samples, as equal as can be; none: one.

        Raises:
            ConfigError: The batch lacks images, indices or poses.
        """
        _check_batch(batch, self.posed)
        index, images = batch["index"], batch["image"]
        samples = len(index)
        sizes = [stop - start for start, stop in cut_evenly(samples, size or samples)]
        latents = draw_latents(index, self.latent_size, seed=self.seed, epoch=epoch, use=use)
        conditions = self._read_conditions(batch, epoch, use)
        parts = zip(
            torch.split(images, sizes),
            torch.split(latents.to(images.dtype), sizes),
            conditions.split(sizes),
            strict=True,
        )
        for part_images, part_latents, part_conditions in parts:
            fraction = len(part_images) / samples
            yield Part(part_images, part_latents, part_conditions, fraction)

    def _read_conditions(self, batch: Batch, epoch: int, use: Use) -> Conditions:
        index = batch["index"]
        labels = batch.get("label")
        if labels is None:
            labels = torch.zeros_like(index)
        poses = batch.get("pose")
        if poses is None:
            poses = torch.zeros(len(index), 2, device=index.device)
        if self.patches is None:
            return Conditions(labels, poses)
        grids, offsets = self.patches.draw(index, seed=self.seed, epoch=epoch, use=use)
        return Conditions(labels, poses, grids, offsets)


def make_fakes(generator: nn.Module, part: Part) -> Tensor:
    """Generate fakes without a graph."""
    with torch.no_grad():
        fakes: Tensor = generator(part.latents, part.conditions)
    return fakes


def learn(
    discriminator: nn.Module,
    images: Tensor,
    part: Part,
    find_loss: Callable[[Tensor], Tensor],
    backward: Backward,
) -> Tensor:
    """Go through the discriminator and back; no graph is left.

    Args:
        discriminator: From images and conditions to scores.
        images: [B, C, H, W] in -1..1.
        part: Where they belong.
        find_loss: From scores [B] to losses [B].
        backward: Called with the part's fraction of the mean loss.

    Returns:
        [2]: the part's fraction of the mean loss and of the mean score.
    """
    scores = widen(discriminator(images, part.conditions))
    loss = part.fraction * find_loss(scores).mean()
    backward(loss)
    return torch.stack((loss.detach(), part.fraction * scores.detach().mean()))


def penalise(discriminator: nn.Module, part: Part, weight: float, backward: Backward) -> Tensor:
    """Go through the discriminator, to the gradient of the score, and back through both.

    Args:
        discriminator: From images and conditions to scores.
        part: With real images.
        weight: Of the penalty.
        backward: Called with the weighted penalty.

    Returns:
        []: the part's fraction of the mean penalty, without the weight.
    """
    penalty = part.fraction * find_r1(discriminator, part.read_real(), part.conditions).mean()
    backward(weight * penalty)
    return penalty.detach()


def _check_batch(batch: Batch, posed: bool) -> None:
    keys = ("image", "index", "pose") if posed else ("image", "index")
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ConfigError(
            f"the batch has no {' and no '.join(map(repr, missing))} but {', '.join(sorted(batch))}: set data.views "
            "for nets that depend on poses, and batch_format=dict"
        )
