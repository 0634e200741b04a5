"""Pictures out of a generator, a batch at a time, on the CPU at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_data.errors import ConfigError
from lit_data.modules.gan.conditions import Conditions, Use, draw_choices, draw_latents


def draw_conditions(
    count: int,
    *,
    seed: int,
    num_labels: int,
    labels: Sequence[int] | Tensor | None,
    poses: Tensor | None,
    known_poses: Tensor | None,
) -> Conditions:
    """What samples show: as given, else drawn evenly.

    Args:
        count: Number of samples.
        seed: Draws what is not given.
        num_labels: Labels to choose from.
        labels: [count] of the samples; none: drawn.
        poses: [count, 2] of the samples, rad; none: drawn.
        known_poses: [V, 2] to choose from; none leaves 0.

    Raises:
        ConfigError: There are not `count` of what is given, or a label is out of range.
    """
    choices = 0 if known_poses is None else len(known_poses)
    drawn_labels, drawn_poses = draw_choices(torch.arange(count), (num_labels, choices), seed=seed)
    if poses is None:
        poses = torch.zeros(count, 2) if known_poses is None else known_poses.cpu()[drawn_poses]
    labels = drawn_labels if labels is None else torch.as_tensor(labels, dtype=torch.int64)
    if labels.shape != (count,) or poses.shape != (count, 2):
        raise ConfigError(
            f"labels {list(labels.shape)} and poses {list(poses.shape)}: need [{count}] and [{count}, 2] for {count} "
            "samples"
        )
    if num_labels and not 0 <= int(labels.min()) <= int(labels.max()) < num_labels:
        raise ConfigError(f"labels={sorted(set(labels.tolist()))}: need 0 to {num_labels - 1}")
    return Conditions(labels.cpu(), poses.cpu().float())


def render_samples(
    generator: nn.Module, conditions: Conditions, *, latents: Tensor, batch_size: int, device: torch.device
) -> Tensor:
    """Images of latents, in inference mode and with the generator in evaluation.

    Args:
        generator: From latents and conditions to images in -1..1.
        conditions: Of N images, on the CPU.
        latents: [N, latent_size] on the CPU.
        batch_size: Images at once.
        device: Of the generator.

    Returns:
        [N, C, H, W] float32 in 0..1 on the CPU.
    """
    count, training = len(latents), generator.training
    sizes = [min(batch_size, count - start) for start in range(0, count, batch_size)]
    dtype = next(generator.parameters()).dtype
    images: Tensor | None = None
    start = 0
    generator.eval()
    try:
        with torch.inference_mode():
            for some, wanted in zip(torch.split(latents, sizes), conditions.split(sizes), strict=True):
                found = generator(some.to(device, dtype), wanted.to(device)).float().add(1).div(2).clamp(0, 1)
                with torch.inference_mode(False):  # what is given out is a tensor as any other
                    images = torch.empty(count, *found.shape[1:]) if images is None else images
                images[start : start + len(some)] = found
                start += len(some)
    finally:
        generator.train(training)
    assert images is not None
    return images


def draw_sample_latents(count: int, latent_size: int, seed: int) -> Tensor:
    """[count, latent_size] on the CPU, apart from those of training with the same seed."""
    return draw_latents(torch.arange(count), latent_size, seed=seed, epoch=0, use=Use.SAMPLES)
