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

    Such are ``UNet``, ``BasicUNet``, ``SegResNet``, ``DynUNet``, ``AttentionUnet``, ``VNet`` and
    ``SwinUNETR``. Of nets that give several tensors the first one counts.

    Args:
        architecture: Name of its class.
        classes: Logits of each voxel: how many; or names of classes, of which each has one and the
            background one more.
        channels: Of the windows.
        weights: File that the net starts from, see `load_weights_file`.
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
        # With deep supervision coarser ones follow.
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
        return logits


class MonaiLoss(nn.Module):
    """Any loss of ``monai.losses`` from logits and numbers of classes.

    Args:
        name: Of its class, such as ``DiceCELoss``, ``DiceFocalLoss`` or ``TverskyLoss``.
        options: Its arguments, beside those that say that logits and numbers of classes come.

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
        """Return the loss, a scalar, in float32 whatever the precision of the run.

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
    """Build a public module of a package of MONAI by its name; `defaults` are true where it takes them."""
    library = open_library("monai")
    for part in package.split("."):
        library = getattr(library, part)
    # Only its public modules, as the name comes from a configuration.
    known = []
    for public_name, value in vars(library).items():
        if isinstance(value, type) and issubclass(value, nn.Module):
            known.append(public_name)
    check_choice("architecture" if "nets" in package else "loss", name, known)
    kind = getattr(library, name)
    taken = {}
    # Losses call the same option by several names, of which each takes some.
    for option in inspect.signature(kind).parameters:
        if option in defaults:
            taken[option] = True
    with building(name):
        built: nn.Module = kind(**taken | dict(arguments))
    return built
