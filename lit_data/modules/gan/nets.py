"""`ConvGenerator` and `ConvDiscriminator`: small nets for images of 16 to 256 px."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.modules.gan.blocks import (
    SLOPE,
    ResidualBlock,
    StyledBlock,
    StyleNet,
    check_counts,
    double,
    embed,
    locate_pixels,
    plan_sizes,
    start_weights,
)
from lit_data.modules.gan.conditions import Conditions, read_at


class ConvGenerator(nn.Module):
    """From latents to images, by convolutions between steps that double the size.

    A perceptron turns latent, label and pose into a style, which scales and shifts the features of
    each layer after they are normalised within their image (Karras et al., "A style-based generator
    architecture", CVPR 2019); images are summed up over the sizes (Karras et al., "Analyzing and
    improving the image quality of StyleGAN", CVPR 2020). No image sees another.

    Args:
        image_px: Height and width, or both in one number; halving them must lead to 4 to 7 px in
            whole numbers.
        channels: Of the images.
        latent_size: Length of the latents.
        num_labels: Labels to tell apart; 0 for none.
        posed: Images depend on the camera's pose.
        width: Channels at full size, doubled at each halving.
        max_width: At most so many.
        style_size: Length of the style.

    Raises:
        ConfigError: A number is out of range, or the size cannot be halved.
    """

    def __init__(
        self,
        *,
        image_px: int | tuple[int, int] = 64,
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
            {
                "channels": channels,
                "latent_size": latent_size,
                "width": width,
                "max_width": max_width,
                "style_size": style_size,
            }
        )
        self.image_px, coarsest, widths = plan_sizes(image_px, width, max_width)
        self.channels = channels
        self.latent_size = latent_size
        self.num_labels = num_labels
        self.posed = posed
        self.style = StyleNet(latent_size, num_labels, posed=posed, style_size=style_size)
        self.start = nn.Parameter(torch.randn(1, widths[-1], *coarsest))
        steps = [(widths[-1], widths[-1]), *pairwise(reversed(widths))]
        self.blocks = nn.ModuleList(StyledBlock(coarse, fine, style_size) for coarse, fine in steps)
        self.pictures = nn.ModuleList(nn.Conv2d(fine, channels, 1) for _, fine in steps)
        start_weights(self)

    @override
    def forward(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """Images of latents.

        Args:
            latents: [B, latent_size] float32.
            conditions: What is asked for.

        Returns:
            [B, C, H, W] in about -1..1; [B, C, K, L] of the grids, if there are any.
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
    """From images to scores, by residual blocks that halve the size; above 0 for what looks real.

    Label and pose come in at the end, as a product with the features (Miyato and Koyama, "cGANs
    with projection discriminator", ICLR 2018). No image sees another, and nothing is normalised.

    Args:
        image_px: Height and width, or both in one number; halving them must lead to 4 to 7 px in
            whole numbers.
        channels: Of the images.
        num_labels: Labels to tell apart; 0 for none.
        posed: The score depends on the camera's pose.
        placed: Two more channels say where in the image each pixel lies: for patches.
        width: Channels at full size, doubled at each halving.
        max_width: At most so many.

    Raises:
        ConfigError: A number is out of range, or the size cannot be halved.
    """

    def __init__(
        self,
        *,
        image_px: int | tuple[int, int] = 64,
        channels: int = 3,
        num_labels: int = 0,
        posed: bool = False,
        placed: bool = False,
        width: int = 16,
        max_width: int = 128,
    ) -> None:
        super().__init__()
        check_counts({"channels": channels, "width": width, "max_width": max_width})
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
        """Scores of images.

        Args:
            images: [B, C, H, W] in -1..1.
            conditions: What they should show.

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
            scores = scores + projection / math.sqrt(features.shape[1])
        return scores
