"""`GeneratorModule`: a generator, the running mean of its weights, and pictures made by it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.rng import check_seed
from lit_data.wings.gan.model.conditions import Conditions, Use, draw_choices, draw_latents


class GeneratorModule(LightningModule):
    """Base of modules that learn to generate pictures.

    Args:
        generator: From latents [B, latent_size] and `Conditions` to images [B, C, H, W] in about
            -1..1.
        latent_size: Length of the latents.
        num_labels: Number of labels of the data; 0 if the generator uses none.
        seed: Seed of the random numbers of training.
        ema_decay: Fraction of the running mean that is kept in each step; less in the first steps.

    Attributes:
        ema_generator: The generator with the running mean of its weights.
        poses: [V, 2] float32 (azimuth, elevation) rad of the datamodule's views; None without
            views.

    Raises:
        ConfigError: A number is out of range, or differs from that of the generator.
    """

    def __init__(
        self,
        generator: nn.Module,
        *,
        latent_size: int,
        num_labels: int,
        seed: int,
        ema_decay: float,
    ) -> None:
        super().__init__()
        if not 0 <= ema_decay < 1:
            raise ConfigError(f"ema_decay={ema_decay}: need 0 or more, below 1")
        sizes = {"latent_size": latent_size, "num_labels": num_labels}
        check_net(generator, sizes, "the module has")
        self.generator = generator
        # A copy without an optimizer, which `follow_generator` updates.
        self.ema_generator = copy.deepcopy(generator).requires_grad_(False)
        self.latent_size = latent_size
        self.num_labels = num_labels
        self.seed = check_seed(seed)
        self.ema_decay = ema_decay
        self.poses: Tensor | None = None

    @override
    def setup(self, stage: str) -> None:
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        self.poses = getattr(datamodule, "poses", self.poses)
        # A user's datamodule may not describe its images: then the nets are not checked.
        for name in ("image_px", "channels"):
            value = getattr(datamodule, name, None)
            if value is not None:
                check_net(self.generator, {name: value}, "the data have")
        if stage == "fit":
            check_repeatable(self.generator, self.trainer.strategy.root_device)
        labels = getattr(datamodule, "num_labels", 0)
        # A net without labels may learn from data with labels, as if they had none.
        if 0 < self.num_labels < labels:
            raise ConfigError(
                f"num_labels={self.num_labels}: the data have {labels} - set model.num_labels to "
                "that, or to 0"
            )

    @override
    def forward(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """Generate images [B, C, H, W] in about -1..1 with the running mean of the weights.

        Args:
            latents: [B, latent_size] float32.
            conditions: Conditions of the images.
        """
        images: Tensor = self.ema_generator(latents, conditions)
        return images

    def sample_images(
        self,
        count: int,
        *,
        seed: int = 0,
        labels: Sequence[int] | Tensor | None = None,
        poses: Tensor | None = None,
        batch_size: int = 64,
    ) -> Tensor:
        """Generate pictures with the running mean of the weights, moved to the CPU batch by batch.

        Args:
            count: Number of pictures.
            seed: Seed of latents, and of conditions that are not given.
            labels: [count] labels of the pictures; by default random with equal probability.
            poses: [count, 2] float32 (azimuth, elevation) rad; by default random ones of the
                datamodule.
            batch_size: Pictures at once.

        Returns:
            [count, C, H, W] float32 in 0..1 on the CPU; the same for any batch size.

        Raises:
            ConfigError: The number of labels or poses is not `count`, a label is out of range, or
                there are no poses.
        """
        if poses is None and self.poses is None and getattr(self.generator, "posed", False):
            raise ConfigError(
                "pictures depend on the pose, but no datamodule gives any: give poses, [count, 2]"
            )
        conditions = self._draw_conditions(count, seed, labels, poses)
        return self._render(self._draw_latents(count, seed), conditions, batch_size)

    def sweep_views(
        self,
        count: int,
        poses: Tensor,
        seed: int = 0,
        *,
        labels: Sequence[int] | Tensor | None = None,
        batch_size: int = 64,
    ) -> Tensor:
        """Generate the same objects from all sides.

        A generator without poses gives the same picture each time.

        Args:
            count: Number of objects.
            poses: [V, 2] float32 (azimuth, elevation) rad.
            seed: Seed of latents, and of labels that are not given.
            labels: [count] labels of the objects.
            batch_size: Pictures at once.

        Returns:
            [count, V, C, H, W] float32 in 0..1 on the CPU.
        """
        views = len(poses)
        objects = self._draw_conditions(count, seed, labels, torch.zeros(count, 2))
        # Each object with all its views in turn.
        labels = objects.labels.repeat_interleave(views)
        conditions = Conditions(labels, poses.cpu().float().repeat(count, 1))
        latents = self._draw_latents(count, seed)
        images = self._render(latents.repeat_interleave(views, dim=0), conditions, batch_size)
        return images.view(count, views, *images.shape[1:])

    def follow_generator(self, steps: int) -> None:
        """Update the running mean after `steps` earlier updates; buffers are copied."""
        # As in tf.train.ExponentialMovingAverage: the first steps, far from any mean, are forgotten
        # quickly.
        decay = min(self.ema_decay, (1 + steps) / (10 + steps))
        weights = zip(self.ema_generator.parameters(), self.generator.parameters(), strict=True)
        buffers = zip(self.ema_generator.buffers(), self.generator.buffers(), strict=True)
        with torch.no_grad():
            for ema_weight, weight in weights:
                ema_weight.lerp_(weight, 1 - decay)
            for ema_buffer, buffer in buffers:
                ema_buffer.copy_(buffer)

    def _draw_conditions(
        self,
        count: int,
        seed: int,
        labels: Sequence[int] | Tensor | None,
        poses: Tensor | None,
    ) -> Conditions:
        """Return labels and poses of samples as given, or random ones with equal probability.

        Raises:
            ConfigError: The number of labels or poses is not `count`, or a label is out of range.
        """
        known_poses = torch.zeros(1, 2) if self.poses is None else self.poses.cpu()
        counts = self.num_labels, len(known_poses)
        drawn_labels, pose_numbers = draw_choices(torch.arange(count), counts, seed=seed)
        if poses is None:
            poses = known_poses[pose_numbers]
        labels = drawn_labels if labels is None else torch.as_tensor(labels, dtype=torch.int64)
        if labels.shape != (count,) or poses.shape != (count, 2):
            raise ConfigError(
                f"labels {list(labels.shape)} and poses {list(poses.shape)}: need [{count}] and "
                f"[{count}, 2] for {count} samples"
            )
        if self.num_labels and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_labels:
            raise ConfigError(
                f"labels={sorted(set(labels.tolist()))}: need 0 to {self.num_labels - 1}"
            )
        return Conditions(labels.cpu(), poses.cpu().float())

    def _draw_latents(self, count: int, seed: int) -> Tensor:
        """Draw [count, latent_size] on the CPU, different from those of training with the same seed."""
        index = torch.arange(count)
        return draw_latents(index, self.latent_size, seed=seed, epoch=0, use=Use.SAMPLES)

    def _render(self, latents: Tensor, conditions: Conditions, batch_size: int) -> Tensor:
        """Generate images from latents, in inference mode and with the generator in evaluation mode.

        Returns:
            [N, C, H, W] float32 in 0..1 on the CPU.
        """
        sizes = [len(part) for part in torch.split(latents, batch_size)]
        parts = zip(torch.split(latents, sizes), conditions.split(sizes), strict=True)
        generator = self.ema_generator
        dtype = next(generator.parameters()).dtype
        images: Tensor | None = None
        start = 0
        was_training = generator.training
        generator.eval()
        try:
            with torch.inference_mode():
                for part_latents, part_conditions in parts:
                    output = generator(
                        part_latents.to(self.device, dtype), part_conditions.to(self.device)
                    )
                    part_images = output.float().add(1).div(2).clamp(0, 1)
                    if images is None:
                        # Outside of inference mode, so that the result is an ordinary tensor.
                        with torch.inference_mode(False):
                            images = torch.empty(len(latents), *part_images.shape[1:])
                    images[start : start + len(part_images)] = part_images
                    start += len(part_images)
        finally:
            generator.train(was_training)
        assert images is not None
        return images


def check_net(net: nn.Module, expected: Mapping[str, Any], who: str) -> None:
    """Compare attributes of a net with expected values; a missing attribute is not checked.

    Args:
        net: The net.
        expected: Expected values by names of attributes.
        who: Subject and verb of the message, such as ``the data have``.

    Raises:
        ConfigError: A value differs.
    """
    for name, value in expected.items():
        net_value = getattr(net, name, value)
        if name == "image_px":
            net_value = pair_px(name, net_value)
            value = pair_px(name, value)
        if net_value != value:
            raise ConfigError(
                f"{name}={net_value} of {type(net).__name__}: {who} {value} - set it to that"
            )


def check_repeatable(net: nn.Module, device: torch.device) -> None:
    """Refuse, before training, a net whose first backward pass would raise an error.

    Raises:
        ConfigError: Deterministic algorithms are requested, and a gradient of the net has none.
    """
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_strict = torch.are_deterministic_algorithms_enabled() and not warns_only
    if is_strict and device.type == "cuda" and not getattr(net, "repeatable", True):
        raise ConfigError(
            f"trainer.deterministic=true: {type(net).__name__} trains through grid_sample, whose "
            "gradient has no deterministic kernel on CUDA. Set trainer.deterministic=warn, or "
            "train another net"
        )
