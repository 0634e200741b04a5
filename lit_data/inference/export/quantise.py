"""`quantise`: nets that predict on the CPU with fewer bits.

torch's maintained way is torchao; ``torch.ao.quantization`` is deprecated in its favour. Its modes:

- convolutions: `static`, int8 through ``prepare_pt2e`` and ``convert_pt2e``, compiled by Inductor
  into oneDNN's int8 kernels. That needs an x86 processor with VNNI and a C++ compiler, and some 20
  to 60 s for the first batch. Without compiling, the same net is slower than float32.
- linear layers: `dynamic`, int8 weights, and activations by the range of each batch. Convolutions
  stay float32.
- any net: `bf16`, by autocast.

In a UNet much of the time goes into other operations than convolutions: `static` inside of autocast
(``precision=bf16`` of `TiledPredictor`) is faster than each of both.
"""

import copy
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.errors import ConfigError, first_line
from lit_data.inference.export.onnx_file import without_noise
from lit_data.inference.forward import check_compiler

if TYPE_CHECKING:
    from torch.fx import GraphModule

Mode = Literal["dynamic", "static", "bf16"]

_LEAST_BATCH: Final = 2
"""A batch of one is compiled for itself; a copy of the tile takes less time than that."""


def quantise(net: nn.Module, *, mode: Mode, calibration: Iterable[Tensor] = ()) -> nn.Module:
    """Return a net that gives about the same values with fewer bits, on the CPU.

    The net itself stays as it is.

    Args:
        net: From [B, C, h, w] float32 in 0..1 to [B, K, h, w], on the CPU.
        mode: `dynamic` and `static` int8 or `bf16`, see above.
        calibration: For `static` [b, C, h, w] float32 in 0..1, batches of tiles of one size, like
            those that will be predicted: their activations set the ranges. The result takes any
            number of tiles of that size or smaller.

    Returns:
        As a model of `TiledPredictor`; that of `static` compiles itself, so ``compile`` stays off.

    Raises:
        ConfigError: The mode does not fit the net or the machine, or torchao is missing.
    """
    check_choice("quantise", mode, get_args(Mode))
    if any(weight.device.type != "cpu" for weight in net.parameters()):
        raise ConfigError(
            f"quantise={mode} is for the CPU: on a GPU use precision=bf16 or precision=fp16"
        )
    if mode == "bf16":
        return AutocastNet(net)
    if find_spec("torchao") is None:
        raise ConfigError(
            f"quantise={mode} needs torchao: pip install torchao, or use quantise=bf16"
        )
    if mode == "dynamic":
        return _quantise_linear(net)
    return _quantise_convolutions(net, list(calibration))


class AutocastNet(nn.Module):
    """Computes in bfloat16 the operations that torch's autocast deems safe.

    Args:
        net: Any net.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return values [B, K, h, w] float32."""
        with torch.autocast("cpu", torch.bfloat16):
            values: Tensor = self.net(images)
        return values.float()


class StaticNet(nn.Module):
    """Int8 convolutions for tiles of one size, compiled at the first batch.

    Smaller tiles are filled up by repeating their edge. Int8 knows no NaN: tiles with one go
    through the float32 net, so that it shows in the result.

    Args:
        quantised: From [B, C, h, w] to [B, K, h, w].
        net: The float32 net.
        size_px: (h, w).
    """

    def __init__(self, quantised: "GraphModule", net: nn.Module, size_px: tuple[int, int]) -> None:
        super().__init__()
        for part in quantised.modules():
            part.training = False  # an exported module refuses a call of eval()
        self.quantised = quantised
        self.net = net
        self._size_px = size_px
        self._call = torch.compile(quantised)

    @override
    def train(self, mode: bool = True) -> "StaticNet":
        self.training = mode
        self.net.train(mode)
        return self

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return values of every pixel.

        Args:
            images: [B, C, h, w] float32 in 0..1.

        Returns:
            [B, K, h, w].

        Raises:
            ConfigError: Tiles are larger than those of the calibration.
        """
        if images.isnan().any():
            values: Tensor = self.net(images)
            return values
        count, _, height, width = images.shape
        missing_rows = self._size_px[0] - height
        missing_columns = self._size_px[1] - width
        if missing_rows < 0 or missing_columns < 0:
            raise ConfigError(
                f"tiles of {height} x {width} px are larger than those of the calibration, "
                f"{self._size_px[0]} x {self._size_px[1]} px: "
                f"predict with tile_px={list(self._size_px)}, "
                "and without augment=d4 if that is no square"
            )
        if missing_rows or missing_columns:
            padding = (0, missing_columns, 0, missing_rows)
            images = nn.functional.pad(images, padding, mode="replicate")
        if count < _LEAST_BATCH:
            images = images.expand(_LEAST_BATCH, -1, -1, -1)
        # The order in memory that the kernels want; another one would be compiled again.
        images = images.contiguous(memory_format=torch.channels_last)
        return self._run(images)[:count, :, :height, :width]

    def _run(self, images: Tensor) -> Tensor:
        from torch._inductor import config

        torch._dynamo.mark_dynamic(images, 0)
        # Only frozen weights are packed for int8 kernels.
        with config.patch(freezing=True), without_noise():
            values: Tensor = self._call(images)
        return values


def _quantise_linear(net: nn.Module) -> nn.Module:
    if not any(isinstance(part, nn.Linear) for part in net.modules()):
        raise ConfigError(
            f"quantise=dynamic is for linear layers, and {type(net).__name__} has none: "
            "use quantise=static for convolutions, or quantise=bf16"
        )
    with without_noise():
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantised = copy.deepcopy(net)
        quantize_(quantised, Int8DynamicActivationInt8WeightConfig())
    return quantised


def _quantise_convolutions(net: nn.Module, calibration: list[Tensor]) -> nn.Module:
    check_static(calibration)
    sizes = {tuple(tiles.shape[1:]) for tiles in calibration}
    if len(sizes) != 1:
        raise ConfigError(
            f"quantise=static needs calibration tiles of one size: these are {sorted(sizes)}"
        )
    tiles = torch.cat([tiles.float() for tiles in calibration])
    if len(tiles) % _LEAST_BATCH:
        tiles = torch.cat((tiles, tiles[-1:]))  # so that no batch is of one
    tiles = tiles.contiguous(memory_format=torch.channels_last)
    with without_noise(), _evaluated(net), torch.no_grad():
        quantised = _convert(net, torch.split(tiles, _LEAST_BATCH))
    return StaticNet(quantised, net, (tiles.shape[2], tiles.shape[3]))


def _convert(net: nn.Module, batches: tuple[Tensor, ...]) -> "GraphModule":
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    shapes: Any = ({0: torch.export.Dim.DYNAMIC},)
    try:
        traced = torch.export.export(
            net, (batches[0],), dynamic_shapes=shapes, strict=False
        ).module()
    except Exception as error:
        raise ConfigError(
            f"quantise=static traces a net by torch.export, which {type(net).__name__} does not "
            f"allow ({first_line(error)}): quantise=bf16 takes any net"
        ) from error
    _forget_dtypes(traced)
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(traced, quantizer)
    for batch in batches:
        prepared(batch)
    converted: GraphModule = convert_pt2e(prepared)
    return converted


def _forget_dtypes(traced: "GraphModule") -> None:
    """Drop checks of dtypes: where the net asks for float32, the trace would refuse autocast."""
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            traced.graph.erase_node(node)
    traced.recompile()


def check_static(calibration: list[Tensor]) -> None:
    """Refuse static quantisation where it cannot work, and name a mode that does.

    Raises:
        ConfigError: The images, the processor or the compiler are missing.
    """
    if not calibration:
        raise ConfigError(
            "quantise=static needs calibration images: some that are like those to predict"
        )
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.cpu._is_vnni_supported():
        raise ConfigError(
            "quantise=static needs an x86 processor with VNNI, without which int8 is neither exact "
            "nor fast: use quantise=bf16"
        )
    try:
        check_compiler(torch.device("cpu"))
    except ConfigError as error:
        names = os.environ.get("CXX", "g++")
        raise ConfigError(
            f"quantise=static compiles the net, and there is no C++ compiler ({names}): "
            "install one, or use quantise=bf16"
        ) from error


@contextmanager
def _evaluated(net: nn.Module) -> Iterator[None]:
    training = [part for part in net.modules() if part.training]
    net.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two nets on the same images.

    Attributes:
        mean_difference: Mean absolute difference of the probabilities, 0 to 1.
        max_difference: The largest.
        dice: Of both masks together: 2 * shared pixels / (pixels of one + pixels of the other); NaN
            if neither marks a pixel.
        marked_share: Fraction of the pixels that the first net marks, without which Dice says
            little.
    """

    mean_difference: float
    max_difference: float
    dice: float
    marked_share: float


def measure_agreement(
    net: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    *,
    threshold: float,
) -> Agreement:
    """Compare the probabilities of a net with those of another.

    Args:
        net: From [B, C, h, w] to probability [B, K, h, w]: the reference.
        other: The same with fewer bits.
        batches: [B, C, h, w] each, float32 in 0..1.
        threshold: Least probability of a marked pixel.
    """
    pairs = ((net(images), other(images)) for images in batches)
    with torch.inference_mode():
        return compare_values(pairs, threshold=threshold)


def compare_values(pairs: Iterable[tuple[Tensor, Tensor]], *, threshold: float) -> Agreement:
    """Compare probabilities with others.

    Args:
        pairs: Two tensors of one shape each; the reference comes first.
        threshold: Least probability of a marked pixel.
    """
    sum_of_differences = 0.0
    max_difference = 0.0
    pixels = shared_pixels = marked_pixels = other_marked_pixels = 0
    for values, other_values in pairs:
        difference = (values.float() - other_values.float()).abs()
        sum_of_differences += float(difference.sum(dtype=torch.float64))
        max_difference = max(max_difference, float(difference.max()))
        mask = values >= threshold
        other_mask = other_values >= threshold
        pixels += values.numel()
        shared_pixels += int((mask & other_mask).sum())
        marked_pixels += int(mask.sum())
        other_marked_pixels += int(other_mask.sum())
    all_marked = marked_pixels + other_marked_pixels
    return Agreement(
        mean_difference=sum_of_differences / pixels,
        max_difference=max_difference,
        dice=2 * shared_pixels / all_marked if all_marked else math.nan,
        marked_share=marked_pixels / pixels,
    )
