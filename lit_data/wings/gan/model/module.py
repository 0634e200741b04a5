"""`GANModule`: a generator and a discriminator that learn from each other within a memory limit."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.core.batch_form import count_samples
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Size
from lit_data.models.schedule import OptimizerFactory, Schedule, schedule_optimizer
from lit_data.wings.gan.model.conditions import Conditions, Part, PartDraws, RayPatches, Use
from lit_data.wings.gan.model.generator import GeneratorModule, check_net
from lit_data.wings.gan.model.nets import ConvDiscriminator, ConvGenerator, widen

GANLoss = Literal["non_saturating", "hinge"]
_PLAIN = (
    "image_px",
    "channels",
    "latent_size",
    "num_labels",
    "seed",
    "loss",
    "r1_weight",
    "r1_every",
    "micro_batch_size",
    "r1_micro_batch_size",
    "ema_decay",
    "schedule",
    "gradient_clip_norm",
)
"""Options stored in checkpoints: plain values only, so that they load with weights_only=True."""


class ScoreLosses(NamedTuple):
    """Losses of scores [B], each [B].

    Attributes:
        real: Loss of the discriminator for scores of real images.
        fake: Loss of the discriminator for scores of fakes.
        generator: Loss of the generator for scores of fakes.
    """

    real: Callable[[Tensor], Tensor]
    fake: Callable[[Tensor], Tensor]
    generator: Callable[[Tensor], Tensor]


def _softplus_below(score: Tensor) -> Tensor:
    return F.softplus(-score)


LOSSES: dict[GANLoss, ScoreLosses] = {
    # Goodfellow et al., "Generative adversarial nets", NeurIPS 2014, section 3.
    "non_saturating": ScoreLosses(_softplus_below, F.softplus, _softplus_below),
    # Lim and Ye, "Geometric GAN", 2017.
    "hinge": ScoreLosses(
        lambda score: F.relu(1 - score), lambda score: F.relu(1 + score), torch.neg
    ),
}


class GANModule(GeneratorModule):
    """A GAN: two nets, two optimizers, manual optimization.

    It takes batches with ``image`` [B, C, H, W] float32 in 0..1 and ``index`` [B] int64; ``label``
    [B] int64 and ``pose`` [B, 2] float32 (azimuth, elevation; rad) if the nets depend on them.
    Fakes get the labels and poses of the real images of the batch. Their latents are a pure
    function of (seed, epoch, index), and so are the places of patches. So micro-batches, a resume,
    or a repeated step do not change the random numbers.

    Memory stays low for several reasons. The discriminator learns from fakes that were made once,
    without a graph. It learns from fakes, real images and penalty one after the other, and each
    graph is freed before the next. Gradients are freed once an optimizer has stepped. While the
    generator learns, the discriminator's weights have no gradients. Micro-batches of
    `micro_batch_size` samples, weighted by their number, give the step of the whole batch.
    `AdaptiveBatchSize` halves that size when memory runs out, and `add_gradients` starts over.

    It logs in each step:

    - ``train/generator_loss``, ``train/discriminator_loss``: the latter without the penalty;
    - ``train/r1``: mean squared norm of the score's gradient, from its last computation;
    - ``train/real_score``, ``train/fake_score``: mean scores as the discriminator learned from
      them;

    and ``val/real_score`` or ``test/real_score`` of held-out images: far below that of training if
    the discriminator has memorized its images.

    Each net may be replaced by another module: the generator maps latents [B, latent_size] and
    `Conditions` to images in -1..1, the discriminator maps images and `Conditions` to scores [B].

    Args:
        generator: `ConvGenerator` by default.
        discriminator: `ConvDiscriminator` by default.
        image_px: Height and width of the images, or both in one number, for the default nets.
        channels: Number of channels of the images, for the default nets.
        latent_size: Length of the latents.
        num_labels: Number of labels of the data; 0 if the nets use none.
        seed: Seed of latents and patches.
        loss: ``non_saturating`` or ``hinge``.
        r1_weight: Weight of the penalty, half of which is counted (gamma in the paper); 0 for no
            penalty.
        r1_every: Number of steps between computations of the penalty, whose weight is multiplied by
            this number.
        micro_batch_size: Samples that go through the nets at once; None for the whole batch.
        r1_micro_batch_size: The same for the penalty, whose graph is about three times as large;
            None for `micro_batch_size`, which is also its maximum.
        ema_decay: Samples come from a running mean of the generator's weights, which keeps this
            fraction in each step; less in the first steps.
        patches: Train on random patches of the images; None for whole images.
        generator_optimizer: Makes the optimizer from the parameters; Adam by default.
        discriminator_optimizer: The same for the discriminator.
        schedule: Both learning rates over the run, see `learning_rate_factor`; `none` leaves them.
        gradient_clip_norm: Gradients of each net are clipped to this L2 norm before its step; None
            does not clip.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    nets_learn_in_turn: ClassVar[bool] = True
    """DDP must not wait for the gradients of the net that is not learning, see `docs/ranks.md`."""

    last_r1: Tensor

    def __init__(
        self,
        generator: nn.Module | None = None,
        discriminator: nn.Module | None = None,
        *,
        image_px: int | Size = 64,
        channels: int = 3,
        latent_size: int = 64,
        num_labels: int = 0,
        seed: int = 0,
        loss: GANLoss = "non_saturating",
        r1_weight: float = 1.0,
        r1_every: int = 16,
        micro_batch_size: int | None = None,
        r1_micro_batch_size: int | None = None,
        ema_decay: float = 0.995,
        patches: RayPatches | None = None,
        generator_optimizer: OptimizerFactory | None = None,
        discriminator_optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "none",
        gradient_clip_norm: float | None = None,
    ) -> None:
        sizes: dict[str, Any] = {
            "image_px": image_px,
            "channels": channels,
            "num_labels": num_labels,
        }
        super().__init__(
            generator or ConvGenerator(latent_size=latent_size, **sizes),
            latent_size=latent_size,
            num_labels=num_labels,
            seed=seed,
            ema_decay=ema_decay,
        )
        _check_choices(loss, schedule)
        _check_ranges(r1_weight, r1_every, gradient_clip_norm)
        _check_sizes(micro_batch_size, r1_micro_batch_size)
        self.automatic_optimization = False
        self.discriminator = discriminator or ConvDiscriminator(**sizes)
        check_net(self.discriminator, {"num_labels": num_labels}, "the module has")
        posed = any(getattr(net, "posed", False) for net in (self.generator, self.discriminator))
        self.draws = PartDraws(latent_size, self.seed, patches, posed)
        self.losses = LOSSES[loss]
        self.schedule = schedule
        self.r1_weight = r1_weight
        self.r1_every = r1_every
        self.gradient_clip_norm = gradient_clip_norm
        self.micro_batch_size = micro_batch_size
        self.r1_micro_batch_size = r1_micro_batch_size
        adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.0, 0.99))
        self.make_generator_optimizer = generator_optimizer or adam
        self.make_discriminator_optimizer = discriminator_optimizer or adam
        self.register_buffer("last_r1", torch.zeros(()))
        self.save_hyperparameters(*_PLAIN)

    @override
    def setup(self, stage: str) -> None:
        """Refuse data without views if a net depends on the pose.

        Raises:
            ConfigError: The data have no views.
        """
        super().setup(stage)
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        # A user's datamodule may give poses in its batches alone, which are checked too.
        if stage == "fit" and self.draws.posed and getattr(datamodule, "poses", ()) is None:
            raise ConfigError(
                "the nets depend on the pose, but the data have no views: set data.views=folders "
                "or sheet, or experiment=gan model.generator.posed=false"
            )

    @property
    def batches_done(self) -> int:
        """Number of batches of the run before the current one."""
        return self.trainer.fit_loop.total_batch_idx

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        generator_optimizer, discriminator_optimizer = optimizers
        logged = self.add_gradients(discriminator_optimizer, self._teach_discriminator, batch)
        _step(discriminator_optimizer)
        # The generator learns from a discriminator that has just stepped.
        logged |= self.add_gradients(generator_optimizer, self._teach_generator, batch)
        _step(generator_optimizer)
        self.follow_generator(self.batches_done)
        samples = count_samples(batch)
        for name, value in logged.items():
            # Not in the progress bar, which would wait for the device after each step.
            self.log(f"train/{name}", value, batch_size=samples)

    def add_gradients(
        self,
        optimizer: LightningOptimizer,
        learn: Callable[[Batch], dict[str, Tensor]],
        batch: Batch,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of a batch in micro-batches, for an optimizer without gradients.

        Only gradients and buffers change, so it may be called again after memory ran out.

        Args:
            optimizer: Optimizer of the net that learns; the other net has no gradients meanwhile.
            learn: Called with the batch.
            batch: Batch of ``training_step``.

        Returns:
            The result of `learn`.
        """
        with self.toggled_optimizer(optimizer):
            return learn(batch)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._score_real(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._score_real(batch, "test")

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Update the learning rates for this batch, as manual optimization requires."""
        for config in self.trainer.lr_scheduler_configs:
            now = self.batches_done if config.interval == "step" else self.current_epoch
            scheduler: Any = config.scheduler
            while scheduler.last_epoch < now:
                scheduler.step()

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip gradients here, where they are not scaled."""
        if self.gradient_clip_norm is not None:
            self.clip_gradients(optimizer, self.gradient_clip_norm, "norm")

    @override
    def configure_optimizers(self) -> Any:
        optimizers = (
            self.make_generator_optimizer(self.generator.parameters()),
            self.make_discriminator_optimizer(self.discriminator.parameters()),
        )
        return [
            schedule_optimizer(optimizer, self.schedule, self.trainer, optimizers=2)
            for optimizer in optimizers
        ]

    def _teach_discriminator(self, batch: Batch) -> dict[str, Tensor]:
        fake = torch.zeros(2, device=self.device)  # loss, score
        real = torch.zeros(2, device=self.device)
        for part in self._cut(batch, self.micro_batch_size, Use.DISCRIMINATOR):
            with torch.no_grad():
                fakes = self.generator(part.latents, part.conditions)
            fake += self._learn(fakes, part, self.losses.fake)
            real += self._learn(part.read_real(), part, self.losses.real)
        if self.r1_weight and self.batches_done % self.r1_every == 0:
            self._penalise(batch)
        return {
            "discriminator_loss": fake[0] + real[0],
            "real_score": real[1],
            "fake_score": fake[1],
            "r1": self.last_r1.clone(),
        }

    def _teach_generator(self, batch: Batch) -> dict[str, Tensor]:
        loss = torch.zeros((), device=self.device)
        for part in self._cut(batch, self.micro_batch_size, Use.GENERATOR):
            fakes = self.generator(part.latents, part.conditions)
            part_loss, _ = self._learn(fakes, part, self.losses.generator)
            loss += part_loss
        return {"generator_loss": loss}

    def _cut(self, batch: Batch, size: int | None, use: Use) -> Iterator[Part]:
        return self.draws.cut(batch, size, epoch=self.current_epoch, use=use)

    def _learn(self, images: Tensor, part: Part, find_loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the discriminator forward and backward; no graph is left.

        Args:
            images: [B, C, H, W] in -1..1.
            part: Micro-batch of the images.
            find_loss: From scores [B] to losses [B].

        Returns:
            [2]: contribution of the micro-batch to the mean loss and to the mean score.
        """
        scores = widen(self.discriminator(images, part.conditions))
        loss = part.fraction * find_loss(scores).mean()
        self._backward(loss)
        return torch.stack((loss.detach(), part.fraction * scores.detach().mean()))

    def _penalise(self, batch: Batch) -> None:
        """Compute the gradient of the discriminator's score, and backpropagate through it."""
        # Half of gamma, as in the paper, for all the steps up to the next penalty.
        weight = 0.5 * self.r1_weight * self.r1_every
        sizes = [size for size in (self.micro_batch_size, self.r1_micro_batch_size) if size]
        self.last_r1.zero_()
        for part in self._cut(batch, min(sizes, default=None), Use.DISCRIMINATOR):
            penalties = find_r1(self.discriminator, part.read_real(), part.conditions)
            penalty = part.fraction * penalties.mean()
            self._backward(weight * penalty)
            self.last_r1 += penalty.detach()

    def _backward(self, loss: Tensor) -> None:
        # Under autocast, the second derivatives of the penalty would run with fewer bits, and torch
        # advises against backward there.
        with torch.autocast(loss.device.type, enabled=False):
            self.manual_backward(loss)

    def _score_real(self, batch: Batch, stage: str) -> None:
        (part,) = self.draws.cut(batch, None, epoch=0, use=Use.SAMPLES)
        scores = self.discriminator(part.read_real(), part.conditions)
        self.log(
            f"{stage}/real_score", scores.float().mean(), batch_size=len(scores), sync_dist=True
        )


def find_r1(discriminator: nn.Module, images: Tensor, conditions: Conditions) -> Tensor:
    """Return the squared norm of the gradient of each real image's score (Mescheder et al., ICML 2018).

    It is computed in float32 even under autocast, because squares of small gradients underflow, and
    torch would also compute the inner gradient under autocast.

    Args:
        discriminator: From images and conditions to scores.
        images: [B, C, H, W] in -1..1.
        conditions: Conditions of the images.

    Returns:
        [B], with a graph down to the discriminator's weights.
    """
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        images = images.detach().requires_grad_()
        scores = discriminator(images, conditions)
        (gradients,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    penalties: Tensor = gradients.square().sum((1, 2, 3))
    return penalties


def _step(optimizer: LightningOptimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _check_choices(loss: str, schedule: Schedule) -> None:
    check_choice("schedule", schedule, get_args(Schedule))
    if schedule == "plateau":
        raise ConfigError(
            "schedule='plateau' needs a metric, and two opposing losses have none: choose another"
        )
    check_choice("loss", loss, tuple(LOSSES))


def _check_ranges(r1_weight: float, r1_every: int, clip_norm: float | None) -> None:
    if r1_weight < 0 or r1_every < 1:
        raise ConfigError(
            f"r1_weight={r1_weight}, r1_every={r1_every}: need 0 or more, and 1 or more"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"gradient_clip_norm={clip_norm}: need a number above 0, or none")


def _check_sizes(micro_size: int | None, r1_size: int | None) -> None:
    if any(size is not None and size < 1 for size in (micro_size, r1_size)):
        raise ConfigError(
            f"micro_batch_size={micro_size}, r1_micro_batch_size={r1_size}: need 1 or more each, or none"
        )
