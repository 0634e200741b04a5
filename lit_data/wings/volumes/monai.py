"""Nets and losses of MONAI for volumes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice, check_counts
from lit_data.core.types import PathText
from lit_data.models.pretrained.libraries import building, check_options, open_library
from lit_data.models.segmentation.nets import prior_logits
from lit_data.models.weights import load_weights_file

_OF_CLASSES = ("to_onehot_y", "softmax", "use_softmax")  # of losses


class MonaiNet(nn.Module):
    """Any net of ``monai.networks.nets`` that takes ``spatial_dims``, ``in_channels`` and ``out_channels``.

    Examples are ``UNet``, ``BasicUNet``, ``SegResNet``, ``DynUNet``, ``AttentionUnet``, ``VNet``
    and ``SwinUNETR``. If a net returns several tensors, the first one is used.

    Args:
        architecture: Name of the class of the net.
        classes: Number of logits of each voxel; or names of classes, which have one logit each,
            with one more for the background.
        channels: Number of channels of the windows.
        weights: File with the initial weights, see `load_weights_file`.
        options: Further arguments of the class.

    Raises:
        ConfigError: MONAI is missing, the name is unknown, or an option is refused.
    """

    def __init__(
        self,
        architecture: str = "SegResNet",
        *,
        classes: int | Sequence[str] | None = 1,
        channels: int = 1,
        weights: PathText | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        count = len(prior_logits(classes, 0.5))
        check_counts(classes=count, channels=channels)
        arguments = check_options(options)
        arguments["spatial_dims"] = 3
        arguments["in_channels"] = channels
        arguments["out_channels"] = count
        self.net = _build("networks.nets", architecture, arguments)
        load_weights_file(self, weights)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, D, H, W] of windows [B, C, D, H, W]."""
        outputs: Any = self.net(images)
        # With deep supervision, coarser ones follow.
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
        return logits


class MonaiLoss(nn.Module):
    """Any loss of ``monai.losses`` from logits and numbers of classes.

    Args:
        name: Name of its class, such as ``DiceCELoss``, ``DiceFocalLoss`` or ``TverskyLoss``.
        options: Its arguments, except those that declare logits and numbers of classes as inputs.

    Raises:
        ConfigError: MONAI is missing, the name is unknown, or an option is refused.
    """

    def __init__(
        self, name: str = "DiceCELoss", *, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.loss = _build("losses", name, check_options(options), _OF_CLASSES)

    @override
    def forward(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return the loss, a scalar, in float32 at any precision of the run.

        Args:
            logits: [B, K, D, H, W].
            masks: [B, 1, D, H, W] int64.
        """
        with torch.autocast(logits.device.type, enabled=False):
            loss: Tensor = self.loss(logits.float(), masks)
        return loss


def _build(
    package: str, name: str, arguments: Mapping[str, Any], defaults: Sequence[str] = ()
) -> nn.Module:
    """Build a public module of a MONAI package by name; the `defaults` that it accepts are set to True."""
    library = open_library("monai")
    for part in package.split("."):
        library = getattr(library, part)
    # Only its public modules, because the name comes from a configuration.
    known = []
    for public_name, value in vars(library).items():
        if isinstance(value, type) and issubclass(value, nn.Module):
            known.append(public_name)
    check_choice("architecture" if "nets" in package else "loss", name, known)
    kind = getattr(library, name)
    taken = {}
    # Losses have several names for the same option, and each accepts some of them.
    for option in inspect.signature(kind).parameters:
        if option in defaults:
            taken[option] = True
    with building(name):
        built: nn.Module = kind(**taken | dict(arguments))
    return built
