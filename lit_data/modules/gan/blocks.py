"""Blocks and sizes that the nets of a GAN are built from."""

import math
from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.errors import ConfigError
from lit_data.grid import pair_px
from lit_data.modules.gan.conditions import Conditions, make_grid

SLOPE: Final = 0.2
"""Of leaky ReLUs below 0."""

_COARSEST_PX: Final = 4  # of the shorter side; below it a layer sees the whole image anyway


class StyleNet(nn.Module):
    """A perceptron of two layers from latent, label and pose to a style.

    Args:
        latent_size: Length of the latents.
        num_labels: Labels to tell apart; 0 for none.
        posed: The style depends on the pose.
        style_size: Length of the style.
    """

    def __init__(self, latent_size: int, num_labels: int, *, posed: bool, style_size: int) -> None:
        super().__init__()
        self.label = nn.Embedding(num_labels, latent_size) if num_labels else None
        self.pose = nn.Linear(4, latent_size) if posed else None
        embeddings = [net for net in (self.label, self.pose) if net is not None]
        inputs = latent_size * (1 + len(embeddings))
        self.layers = nn.Sequential(
            nn.Linear(inputs, style_size),
            nn.LeakyReLU(SLOPE),
            nn.Linear(style_size, style_size),
            nn.LeakyReLU(SLOPE),
        )

    @override
    def forward(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """[B, style_size] of latents [B, latent_size]."""
        embeddings = embed(self.label, self.pose, conditions, latents.dtype)
        styles: Tensor = self.layers(torch.cat((latents, *embeddings), dim=1))
        return styles


class StyledBlock(nn.Module):
    """Two convolutions, each normalised within its image and then scaled and shifted by a style.

    Args:
        inputs: Channels.
        outputs: Channels.
        style_size: Length of the style.
    """

    def __init__(self, inputs: int, outputs: int, style_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(size, outputs, 3, padding=1) for size in (inputs, outputs)
        )
        self.styles = nn.ModuleList(nn.Linear(style_size, 2 * outputs) for _ in range(2))
        self.groups = max(1, outputs // 8)

    @override
    def forward(self, features: Tensor, styles: Tensor) -> Tensor:
        """[B, outputs, H, W] of features [B, inputs, H, W] and styles [B, style_size]."""
        for layer, style in zip(self.layers, self.styles, strict=True):
            scales, shifts = style(styles)[:, :, None, None].chunk(2, dim=1)
            normal = F.group_norm(layer(features), self.groups)
            features = F.leaky_relu_(torch.addcmul(shifts, normal, 1 + scales), SLOPE)
        return features


class ResidualBlock(nn.Module):
    """Two convolutions, half the size, and what came in is added.

    Args:
        inputs: Channels.
        outputs: Channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.second = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """[B, outputs, H / 2, W / 2] of features [B, inputs, H, W]."""
        # In place, so that each layer keeps one tensor for backward.
        residual = F.leaky_relu_(self.first(features), SLOPE)
        residual = F.leaky_relu_(self.second(residual), SLOPE)
        skipped = self.skip(F.avg_pool2d(features, 2))
        # The sum of two spreads as large is brought back to one of them.
        halved: Tensor = (F.avg_pool2d(residual, 2) + skipped) * math.sqrt(0.5)
        return halved


def plan_sizes(
    image_px: int | tuple[int, int], width: int, max_width: int
) -> tuple[tuple[int, int], list[int], list[int]]:
    """Sizes of images that are halved as long as the shorter side has 8 px or more.

    Returns:
        Height and width, those at the coarsest, and the channels at each size, the finest first.

    Raises:
        ConfigError: A side is too short, or odd before that.
    """
    sides = pair_px("image_px", image_px)
    if min(sides) < _COARSEST_PX:
        raise ConfigError(
            f"image_px={image_px}: need a height and a width of at least {_COARSEST_PX} px"
        )
    coarsest = list(sides)
    widths = [min(width, max_width)]
    while min(coarsest) >= 2 * _COARSEST_PX:
        if any(side % 2 for side in coarsest):
            raise ConfigError(
                f"image_px={image_px}: halving must lead to a shorter side of {_COARSEST_PX} to "
                f"{2 * _COARSEST_PX - 1} px in whole numbers - the nearest size is {_round_sides(sides)}"
            )
        coarsest = [side // 2 for side in coarsest]
        widths.append(min(width * 2 ** len(widths), max_width))
    return sides, coarsest, widths


def _round_sides(sides: tuple[int, int]) -> list[int]:
    """Return the nearest sides that can be halved down to the coarsest size."""
    halvings = (min(sides) // _COARSEST_PX).bit_length() - 1
    step = 2**halvings
    return [max(step, round(side / step) * step) for side in sides]


def check_counts(counts: Mapping[str, int]) -> None:
    """Refuse what is not positive.

    Raises:
        ConfigError: With its name.
    """
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name}={count}: need 1 or more")


def start_weights(net: nn.Module) -> None:
    """Draw weights that keep the spread of features from layer to layer, and set biases to 0.

    He et al., "Delving deep into rectifiers", ICCV 2015.

    Stored channels last, with which a step takes two thirds of the time on a CPU.
    """
    for part in net.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, SLOPE)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def double(images: Tensor, *, smooth: bool = False) -> Tensor:
    """Double height and width: by repeating values, or with new ones between them, which costs more."""
    if smooth:
        return F.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
    return F.interpolate(images, scale_factor=2.0, mode="nearest")


def widen(values: Tensor) -> Tensor:
    """Return values in float32 where autocast made less of them."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def locate_pixels(images: Tensor, grids: Tensor | None) -> Tensor:
    """Places [B, 2, K, L] of the pixels of images [B, C, K, L] in the whole image, see `Conditions`."""
    if grids is None:
        height, width = images.shape[-2:]
        grids = make_grid(height, width, images.device).expand(len(images), -1, -1, -1)
    return grids.movedim(-1, 1).to(images.dtype)


def embed(
    label: nn.Module | None, pose: nn.Module | None, conditions: Conditions, dtype: torch.dtype
) -> list[Tensor]:
    """Embeddings [B, E] of labels and of poses, of those that there are."""
    embeddings = []
    if label is not None:
        embeddings.append(label(conditions.labels))
    if pose is not None:
        poses = conditions.poses.to(dtype)
        # Sines and cosines, so that 0 and 360 degrees are the same.
        embeddings.append(pose(torch.cat((poses.sin(), poses.cos()), dim=1)))
    return embeddings
