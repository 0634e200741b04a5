"""`UNet`: segments images at full resolution with what it sees at all scales."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.errors import ConfigError


class UNet(nn.Module):
    """Two convolutions at each scale on the way down and up, joined across (Ronneberger et al., MICCAI 2015).

    Unlike the original, convolutions keep the size, scales are halved by the stride of a convolution, and the way up is
    bilinear, which leaves no chequerboard. Sides that 2^depth does not divide are padded by repeating the edge, and the
    padding is cut off again.

    Args:
        channels: Of the images.
        classes: Logits of each pixel: how many; or names of classes, of which each has one and the background one more,
            for a softmax; None stands for 1.
        width: Channels at full resolution; each scale has twice those of the finer one.
        depth: How often the resolution is halved.
        prior: Expected share of each class, the output of the untrained net; of all names together.

    Raises:
        ConfigError: A size is not positive, or the prior is no share.
    """

    def __init__(
        self,
        *,
        channels: int = 3,
        classes: int | Sequence[str] | None = 1,
        width: int = 16,
        depth: int = 3,
        prior: float = 0.1,
    ) -> None:
        super().__init__()
        named = 0 if classes is None or isinstance(classes, int) else len(classes)
        classes = named + 1 if named else classes if isinstance(classes, int) else 1
        if min(channels, classes, width, depth) < 1 or not 0 < prior < 1:
            raise ConfigError(
                f"channels={channels}, classes={classes}, width={width}, depth={depth}, prior={prior}: need at least 1 "
                "of each, and 0 < prior < 1"
            )
        self.depth = depth
        widths = [width * 2**scale for scale in range(depth + 1)]
        self.stem = _convolve_twice(channels, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_convolve_twice(fine, coarse, stride=2) for fine, coarse in pairs)
        self.up = nn.ModuleList(_convolve_twice(fine + coarse, fine) for fine, coarse in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)
        bias = torch.full((classes,), math.log(prior / (1 - prior) / max(1, named)))
        if named:
            bias[0] = 0
        with torch.no_grad():
            self.head.bias.copy_(bias)  # type: ignore[union-attr]  # it has one

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits of each pixel.

        Args:
            images: [B, C, H, W] float32 in 0..1; any H and W.

        Returns:
            [B, classes, H, W] logits.
        """
        height, width = images.shape[-2:]
        step = 2**self.depth
        padded = F.pad(images, (0, -width % step, 0, -height % step), mode="replicate")
        features: Tensor = self.stem(padded.contiguous(memory_format=torch.channels_last))
        sides = []
        for layer in self.down:
            sides.append(features)
            features = layer(features)
        for layer in self.up:
            finer = F.interpolate(features, scale_factor=2.0, mode="bilinear", align_corners=False)
            features = layer(torch.cat((sides.pop(), finer), dim=1))
        logits: Tensor = self.head(features)
        return logits[..., :height, :width]


def _convolve_twice(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*_convolve(inputs, outputs, stride), *_convolve(outputs, outputs, 1))


def _convolve(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    # Batch normalisation, because in evaluation it is local: a tile of an image gets what the whole image would.
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
