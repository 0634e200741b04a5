"""`CompareNet`: a small fully convolutional net that sees how the target differs from both references."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_data.errors import ConfigError
from lit_data.modules.registration import align, normalise_contrast, smooth

_FEATURES = 5
_SCALE = 30.0  # brings differences of a few hundredths to the order of 1


class CompareNet(nn.Module):
    """Differences first, then a few convolutions at full resolution.

    A net that is fed raw images spends its training on finding out that it should subtract. Here the references are
    registered to the target (up to 1.5 px) and the differences to each, and what both agree on, are all that the
    convolutions see; so they learn what a difference looks like, not what the stripes look like.

    There is no normalisation layer: the input is normalised already, and the result for a sample then does not depend
    on its batch, whether in training or in micro-batches.

    Args:
        width: Channels of each layer.
        depth: 3 x 3 convolutions before the last one.
        prior: Expected share of defect pixels, the output of the untrained net.

    Raises:
        ConfigError: A size is not positive, or the prior is no share.
    """

    def __init__(self, *, width: int = 16, depth: int = 3, prior: float = 1e-3) -> None:
        super().__init__()
        if width < 1 or depth < 1 or not 0 < prior < 1:
            raise ConfigError(f"width={width}, depth={depth}, prior={prior}: need width, depth >= 1 and 0 < prior < 1")
        inputs = [_FEATURES] + [width] * (depth - 1)
        self.layers = nn.Sequential(
            *(layer for count in inputs for layer in (nn.Conv2d(count, width, 3, padding=1), nn.ReLU(inplace=True)))
        )
        self.head = nn.Conv2d(width, 1, 1)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # a Conv2d without bias has None
        nn.init.constant_(self.head.bias, math.log(prior / (1 - prior)))  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Logits of defect pixels.

        Args:
            images: [B, 3, H, W] float32 in 0..1: target, ref1, ref2; any H and W.

        Returns:
            [B, 1, H, W] logits.
        """
        # Few channels at full resolution: channels last saves a quarter of a training step on the CPU.
        features = compare(images).contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.layers(features))
        return logits


@torch.no_grad()
def compare(images: Tensor) -> Tensor:
    """How the target differs from its references, in float32 whatever the precision of the run.

    Args:
        images: [B, 3, H, W] float32 in 0..1: target, ref1, ref2.

    Returns:
        [B, 5, H, W] float32: plain difference to each reference, difference to each registered reference, and the
        smallest of the four where all have the same sign.
    """
    with torch.autocast(images.device.type, enabled=False):
        normal = normalise_contrast(images.float())
        target, references = normal[:, :1], normal[:, 1:]
        plain = target - references
        registered = target - align(target, references)
        registered = registered - smooth(registered.clamp(-0.05, 0.05))
        both = torch.cat((plain, registered), dim=1)
        agreed = F.relu(both.amin(1, keepdim=True)) - F.relu((-both).amin(1, keepdim=True))
        return _SCALE * torch.cat((both, agreed), dim=1)
