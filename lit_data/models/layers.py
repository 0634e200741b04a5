"""Functions that our nets share: counting outputs, padding, and layers that run in float32."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEEPEST = 12
"""How often our nets may halve a resolution: 4096 px become one."""


def count_outputs(classes: int | Sequence[str] | None) -> int:
    """Return the number of classes: the given number, the number of names, or 1 without names."""
    return classes if isinstance(classes, int) else len(classes or "1")


def pad_sides(images: Tensor, multiple_px: int, *, least_px: int = 1) -> Tensor:
    """Repeat the far edges until each side is a multiple.

    Args:
        images: [B, C, H, W], or [B, C, D, H, W].
        multiple_px: Sides become multiples of this.
        least_px: Shorter sides are padded as if they had this length.
    """
    padding: list[int] = []
    for side_px in reversed(images.shape[2:]):  # the last axis comes first
        longer_px = max(side_px, least_px)
        # Not by a division, which in an ONNX file rounds towards zero.
        padding += (0, longer_px + -longer_px % multiple_px - side_px)
    return F.pad(images, padding, mode="replicate")


def keep_statistics(net: nn.Module) -> None:
    """Put the batch normalization of a net into evaluation mode, whose statistics then stay.

    For a net that trains: call it in `forward`, because a Trainer leaves the mode that a net was
    made in, and warns of layers that evaluate before.
    """
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()


def run_in_float32(layer: nn.Conv2d | nn.Conv3d | nn.Linear, features: Tensor) -> Tensor:
    """Run the layer that gives a net's logits in float32 under autocast, too.

    bfloat16 has 8 significant bits: near 1 in 50 its logits are 1/64 apart, so that scores of
    pixels tie and those of images are coarse. The layer has few outputs, which costs next to
    nothing.

    Args:
        layer: The last layer.
        features: Its input, of any floating dtype.
    """
    device_type = features.device.type
    # Torch knows no autocast of shapes alone.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _call(layer, features)
    with torch.autocast(device_type, enabled=False):
        # That of the weights: some strategies cast them.
        return _call(layer, features.to(layer.weight.dtype))


def _call(layer: nn.Module, features: Tensor) -> Tensor:
    outputs: Tensor = layer(features)
    return outputs
