"""`ConvGenerator` and `ConvDiscriminator`, small nets for images of 16 to 256 px, and their blocks."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.types import Size
from lit_data.wings.gan.model.conditions import Conditions, make_grid, read_at

SLOPE = 0.2
"""Slope of leaky ReLUs below 0."""

_COARSEST_PX = 4  # of the shorter side; below it a layer sees the whole image anyway


class StyleNet(nn.Module):
    """A perceptron of two layers from latent, label and pose to a style.

    Args:
        latent_size: Length of the latents.
        num_labels: Number of labels; 0 for none.
        posed: True if the style depends on the pose.
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
        """Return styles [B, style_size] of latents [B, latent_size]."""
        embeddings = embed(self.label, self.pose, conditions, latents.dtype)
        styles: Tensor = self.layers(torch.cat((latents, *embeddings), dim=1))
        return styles


class StyledBlock(nn.Module):
    """Two convolutions, each normalized within its image and then scaled and shifted by a style.

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.
        style_size: Length of the style.
    """

    def __init__(self, inputs: int, outputs: int, style_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(size, outputs, 3, padding=1) for size in (inputs, outputs)
        )
        self.styles = nn.ModuleList(nn.Linear(style_size, 2 * outputs) for _ in range(2))
        self.groups = max(1, outputs // 8)  # of eight channels each

    @override
    def forward(self, features: Tensor, styles: Tensor) -> Tensor:
        """Return [B, outputs, H, W] from features [B, inputs, H, W] and styles [B, style_size]."""
        for layer, style in zip(self.layers, self.styles, strict=True):
            scales, shifts = style(styles)[:, :, None, None].chunk(2, dim=1)
            normal = F.group_norm(layer(features), self.groups)
            features = F.leaky_relu_(torch.addcmul(shifts, normal, 1 + scales), SLOPE)
        return features


class ResidualBlock(nn.Module):
    """Two convolutions that halve the size, with a skip connection.

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.second = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Return [B, outputs, H / 2, W / 2] from features [B, inputs, H, W]."""
        # In place, so that each layer keeps one tensor for backward.
        residual = F.leaky_relu_(self.first(features), SLOPE)
        residual = F.leaky_relu_(self.second(residual), SLOPE)
        skipped = self.skip(F.avg_pool2d(features, 2))
        # The sum of two equal variances is scaled back to one of them.
        halved: Tensor = (F.avg_pool2d(residual, 2) + skipped) * math.sqrt(0.5)
        return halved


def make_growth(
    coarsest: Sequence[int], widths: Sequence[int], style_size: int
) -> tuple[nn.Parameter, nn.ModuleList]:
    """Make the learned start of images, [1, C, h, w], and a block for it and for each doubling of its size.

    Args:
        coarsest: (h, w) of the start.
        widths: Channels at each size, the finest first.
        style_size: Length of the style.
        style_size: Length of the style.
    """
    start = nn.Parameter(torch.randn(1, widths[-1], *coarsest))
    steps = [(widths[-1], widths[-1]), *pairwise(reversed(widths))]
    return start, nn.ModuleList(StyledBlock(coarse, fine, style_size) for coarse, fine in steps)


def plan_sizes(
    image_px: int | Size, width: int, max_width: int
) -> tuple[tuple[int, int], list[int], list[int]]:
    """Plan the sizes of images that are halved while the shorter side has 8 px or more.

    Returns:
        Height and width at full size, the same at the coarsest size, and the channels at each size,
        the finest first.

    Raises:
        ConfigError: A side is too short, or odd before the last halving.
    """
    sides = pair_px("image_px", image_px)
    if min(sides) < _COARSEST_PX:
        raise ConfigError(
            f"image_px={image_px}: need a height and a width of at least {_COARSEST_PX} px"
        )
    coarsest = list(sides)
    # Each size has twice the channels of the finer one, so that every layer costs about as much.
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


def start_weights(net: nn.Module) -> None:
    """Draw weights that keep the variance of features from layer to layer, and set biases to 0.

    See He et al., "Delving deep into rectifiers", ICCV 2015. Weights are stored channels last, with
    which a step takes two thirds of the time on a CPU.
    """
    for part in net.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, SLOPE)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def double(images: Tensor, *, smooth: bool = False) -> Tensor:
    """Double height and width: by repeating values, or by interpolation, which costs more."""
    if smooth:
        return F.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
    return F.interpolate(images, scale_factor=2.0, mode="nearest")


def widen(values: Tensor) -> Tensor:
    """Convert values to float32 if autocast reduced their precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def locate_pixels(images: Tensor, grids: Tensor | None) -> Tensor:
    """Return places [B, 2, K, L] of the pixels of images [B, C, K, L] in the whole image, see `Conditions`."""
    if grids is None:  # the pixels of whole images
        height, width = images.shape[-2:]
        grids = make_grid(height, width, images.device).expand(len(images), -1, -1, -1)
    return grids.movedim(-1, 1).to(images.dtype)


def embed(
    label: nn.Module | None, pose: nn.Module | None, conditions: Conditions, dtype: torch.dtype
) -> list[Tensor]:
    """Return the embeddings [B, E] of labels and of poses, if the net has them."""
    embeddings = []
    if label is not None:
        embeddings.append(label(conditions.labels))
    if pose is not None:
        poses = conditions.poses.to(dtype)
        # Sines and cosines, so that 0 and 360 degrees are the same.
        embeddings.append(pose(torch.cat((poses.sin(), poses.cos()), dim=1)))
    return embeddings


class ConvGenerator(nn.Module):
    """Maps latents to images by convolutions between steps that double the size.

    A perceptron maps latent, label and pose to a style, which scales and shifts the features of
    each layer after they are normalized within their image (Karras et al., "A style-based generator
    architecture", CVPR 2019). Images are summed over the sizes (Karras et al., "Analyzing and
    improving the image quality of StyleGAN", CVPR 2020). No image affects another.

    Args:
        image_px: Height and width, or both in one number; halving them must lead to 4 to 7 px in
            whole numbers.
        channels: Number of channels of the images.
        latent_size: Length of the latents.
        num_labels: Number of labels; 0 for none.
        posed: True if images depend on the camera's pose.
        width: Channels at full size, doubled at each halving.
        max_width: Maximum number of channels.
        style_size: Length of the style.

    Raises:
        ConfigError: A number is out of range, or the size cannot be halved.
    """

    def __init__(
        self,
        *,
        image_px: int | Size = 64,
        channels: int = 3,
        latent_size: int = 64,
        num_labels: int = 0,
        posed: bool = False,
        width: int = 16,
        max_width: int = 128,
        style_size: int = 128,
    ) -> None:
        super().__init__()
        check_counts(
            channels=channels,
            latent_size=latent_size,
            width=width,
            max_width=max_width,
            style_size=style_size,
        )
        self.image_px, coarsest, widths = plan_sizes(image_px, width, max_width)
        self.channels = channels
        self.latent_size = latent_size
        self.num_labels = num_labels
        self.posed = posed
        self.style = StyleNet(latent_size, num_labels, posed=posed, style_size=style_size)
        self.start, self.blocks = make_growth(coarsest, widths, style_size)
        self.pictures = nn.ModuleList(nn.Conv2d(each, channels, 1) for each in reversed(widths))
        start_weights(self)

    @override
    def forward(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """Return images of latents.

        Args:
            latents: [B, latent_size] float32.
            conditions: Conditions of the images.

        Returns:
            [B, C, H, W] in about -1..1; [B, C, K, L] at the grids, if there are any.
        """
        styles = self.style(latents, conditions)
        features = self.start.expand(len(latents), -1, -1, -1)
        images: Tensor | None = None
        for block, picture in zip(self.blocks, self.pictures, strict=True):
            if images is None:
                features = block(features, styles)
                images = picture(features)
            else:
                features = block(double(features), styles)
                images = double(images, smooth=True) + picture(features)
        assert images is not None
        return read_at(images, conditions.grids)


class ConvDiscriminator(nn.Module):
    """Maps images to scores by residual blocks that halve the size; above 0 for real-looking images.

    Label and pose are added at the end, as a product with the features (Miyato and Koyama, "cGANs
    with projection discriminator", ICLR 2018). No image affects another, and nothing is normalized.

    Args:
        image_px: Height and width, or both in one number; halving them must lead to 4 to 7 px in
            whole numbers.
        channels: Number of channels of the images.
        num_labels: Number of labels; 0 for none.
        posed: True if the score depends on the camera's pose.
        placed: True to add two channels with the place of each pixel in the image: for patches.
        width: Channels at full size, doubled at each halving.
        max_width: Maximum number of channels.

    Raises:
        ConfigError: A number is out of range, or the size cannot be halved.
    """

    def __init__(
        self,
        *,
        image_px: int | Size = 64,
        channels: int = 3,
        num_labels: int = 0,
        posed: bool = False,
        placed: bool = False,
        width: int = 16,
        max_width: int = 128,
    ) -> None:
        super().__init__()
        check_counts(channels=channels, width=width, max_width=max_width)
        self.image_px, coarsest, widths = plan_sizes(image_px, width, max_width)
        self.channels = channels
        self.num_labels = num_labels
        self.posed = posed
        self.placed = placed
        size = widths[-1]
        self.stem = nn.Conv2d(channels + 2 * placed, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            ResidualBlock(fine, coarse) for fine, coarse in pairwise(widths)
        )
        self.last = nn.Conv2d(size, size, 3, padding=1)
        self.features = nn.Linear(size * math.prod(coarsest), size)
        self.score = nn.Linear(size, 1)
        self.label = nn.Embedding(num_labels, size) if num_labels else None
        self.pose = nn.Linear(4, size) if posed else None
        start_weights(self)

    @override
    def forward(self, images: Tensor, conditions: Conditions) -> Tensor:
        """Return the scores of images.

        Args:
            images: [B, C, H, W] in -1..1.
            conditions: Conditions that the images should meet.

        Returns:
            [B] scores.
        """
        if self.placed:
            images = torch.cat((images, locate_pixels(images, conditions.grids)), dim=1)
        images = images.contiguous(memory_format=torch.channels_last)  # as the weights are
        features = F.leaky_relu_(self.stem(images), SLOPE)
        for block in self.blocks:
            features = block(features)
        features = F.leaky_relu_(self.last(features), SLOPE)
        features = F.leaky_relu_(self.features(features.flatten(1)), SLOPE)
        scores: Tensor = self.score(features)[:, 0]
        for embedding in embed(self.label, self.pose, conditions, features.dtype):
            projection = (features * embedding).sum(1)
            # Divided so that its variance matches that of the score at any width.
            scores = scores + projection / math.sqrt(features.shape[1])
        return scores
