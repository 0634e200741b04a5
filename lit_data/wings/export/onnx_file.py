"""Nets as ONNX files, which run without torch, in float32 or in int8."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError, DataError, first_line
from lit_data.core.temp import scratch_folder
from lit_data.core.types import Floats, PathText
from lit_inspect.replacement import replacing_by_path

TOLERANCE = 1e-4
_NEEDED = ("onnx", "onnxruntime", "onnxscript")
AXES = ("batch", "channels", "height", "width")
_LARGEST_BYTES = 2**31 - 2**20
"""Maximum size of weights, because a protobuf message holds 2 GiB."""

_BATCH = 2
"""Images of the traced batch; an axis of length 1 would be taken as a constant."""

_IN_INT8 = ("Conv", "Relu", "Clip", "Concat")
"""Node types in int8; sums of residuals lose too much in 8 bits, and so does everything after the last convolution."""

_FEW_CHANNELS = 4
"""Maximum input channels of convolutions that are slower in int8, such as the first one and blurs."""


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A net written as a file.

    Attributes:
        path: The file; its input is ``images`` [B, C, h, w] float32 in 0..1, its output
            ``probability`` [B, K, h, w].
        free_axes: Axes of the input that may have any length.
        max_difference: Largest difference between onnxruntime and torch.
    """

    path: Path
    free_axes: tuple[str, ...]
    max_difference: float


def export_onnx(net: nn.Module, path: PathText, images: Sequence[Tensor]) -> OnnxFile:
    """Write a net as a file, and compare onnxruntime's values with torch's.

    Batch, height and width of the file are free if the net allows it. The file is checked with the
    given images, and with parts of them of other sizes along the free axes. It appears under its
    name once it has passed.

    Args:
        net: From [B, C, h, w] float32 in 0..1 to [B, K, h, w], on the CPU, in evaluation mode.
        path: An ``.onnx`` file, which is replaced if it exists.
        images: [C, h, w] each, float32 in 0..1; the first one sets the size of axes that are not
            free.

    Raises:
        ConfigError: onnx, onnxruntime or onnxscript is missing, the net cannot be traced, or a size
            is wrong.
        DataError: The file gives other values than the net.
    """
    path = Path(path)
    _check(path, images)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_by_path(path) as part:
        _write(net, part, images[0])
        free_axes, max_difference = _check_file(net, part, images)
    return OnnxFile(path, free_axes, max_difference)


def _check(path: Path, images: Sequence[Tensor]) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX files need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    if path.suffix != ".onnx":
        raise ConfigError(f"{path.name}: a net is written as an .onnx file")
    if not images:
        raise ConfigError("an ONNX file is checked with images: give at least one")


def _write(net: nn.Module, path: Path, image: Tensor) -> None:
    weight_bytes = sum(
        tensor.nbytes for tensor in net.state_dict().values() if isinstance(tensor, Tensor)
    )
    if weight_bytes > _LARGEST_BYTES:
        raise ConfigError(
            f"the net takes {weight_bytes} bytes, but one ONNX file holds at most {_LARGEST_BYTES}"
        )
    free_axes: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    for axis in _find_free_sides(net, image):
        free_axes[axis] = torch.export.Dim.AUTO
    batch = image.expand(_BATCH, -1, -1, -1).contiguous()
    try:
        with without_noise(), torch.no_grad():
            program = torch.onnx.export(
                net,
                (batch,),
                dynamo=True,
                dynamic_shapes=(free_axes,),
                input_names=["images"],
                output_names=["probability"],
                verbose=False,
            )
            assert program is not None
            program.save(path)
    except Exception as error:
        raise ConfigError(
            f"{type(net).__name__} cannot be written as ONNX ({first_line(error)}): it must be one that "
            "torch.export can trace, with a batch of any size (images.shape[0], not len(images))"
        ) from error


def _check_file(
    net: nn.Module, path: Path, images: Sequence[Tensor]
) -> tuple[tuple[str, ...], float]:
    """Return the free axes of a file, and its largest difference from torch.

    Raises:
        DataError: The difference is too large.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    free_axes = []
    for name, length in zip(AXES, session.get_inputs()[0].shape, strict=True):
        if not isinstance(length, int):  # the name of a variable
            free_axes.append(name)

    def run(tiles: Tensor) -> Floats:
        values: Floats = session.run(None, {"images": np.ascontiguousarray(tiles.numpy())})[0]
        return values

    max_difference = measure_difference(net, run, list_probes(images, free_axes))
    if not max_difference <= TOLERANCE:  # in this form it refuses NaN too
        raise DataError(
            f"the ONNX file gives values that differ by {max_difference:.3g} from those of the "
            f"net, but only {TOLERANCE:g} is allowed: it was not written"
        )
    return tuple(free_axes), max_difference


def measure_difference(
    net: nn.Module, run: Callable[[Tensor], Floats], batches: Iterable[Tensor]
) -> float:
    """Return the largest difference between a net and a graph of it; infinite if the shapes differ."""
    differences = [0.0]
    for images in batches:
        with torch.inference_mode():
            expected = net(images).float().numpy()
        values = np.asarray(run(images))
        is_alike = values.shape == expected.shape
        differences.append(float(np.abs(values - expected).max()) if is_alike else np.inf)
    return float(np.max(differences))  # NaN, if one is


def _find_free_sides(net: nn.Module, image: Tensor) -> Iterator[int]:
    """Yield axes of [B, C, h, w] along which the net takes other lengths.

    The exporter would not detect all axes that the net does not support.
    """
    for axis in (2, 3):
        shorter = image[None].narrow(axis, 0, _shorten(image.shape[axis - 1]))
        with suppress(Exception), torch.inference_mode():
            if net(shorter).shape[2:] == shorter.shape[2:]:
                yield axis


def _shorten(side_px: int) -> int:
    return side_px * 3 // 4 + 1


def list_probes(images: Sequence[Tensor], free_axes: Sequence[str]) -> Iterator[Tensor]:
    """Yield batches for the file: the images, and parts of them in other sizes.

    There are no random values: noise has steeper edges than any image, and for a net that registers
    images, results on noise depend on the rounding of each library.
    """
    height, width = images[0].shape[1:]
    has_free_batch = "batch" in free_axes
    has_free_sides = "height" in free_axes and "width" in free_axes
    for image in images:
        if image.shape == images[0].shape or has_free_sides:
            yield image[None].expand(1 if has_free_batch else _BATCH, -1, -1, -1)
    if "height" in free_axes:
        height = _shorten(height)
    if "width" in free_axes:
        width = _shorten(width)
    parts = []
    for image in images:
        if image.shape == images[0].shape:
            parts.append(image[:, :height, :width].flip(1))  # upside down, to see other values
    for count in (1, 3) if has_free_batch else (_BATCH,):
        yield torch.stack([parts[number % len(parts)] for number in range(count)])


def quantise(graph: bytes, batches: Sequence[Floats]) -> bytes:
    """Return a graph whose convolutions compute in int8.

    Weights are int8 for each output channel, and activations are uint8 in the ranges of the batches
    (static quantization; B. Jacob et al., "Quantization and training of neural networks for
    efficient integer-arithmetic-only inference", CVPR 2018). Convolutions with few channels, sums,
    and everything after the last convolution stay in float32.

    Args:
        graph: An ONNX file whose input is ``images`` [B, C, h, w] float32.
        batches: Representative inputs.

    Raises:
        ConfigError: onnxruntime cannot quantize the graph.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with scratch_folder() as folder, without_noise():
        source, merged, quantised = (Path(folder, f"{name}.onnx") for name in "abc")
        source.write_bytes(graph)
        try:
            # Normalization is merged into convolutions first, and not rounded by itself.
            quant_pre_process(source, merged, skip_symbolic_shape=True)
            quantize_static(
                merged,
                quantised,
                _Batches(batches),
                op_types_to_quantize=_IN_INT8,
                nodes_to_exclude=_list_floats(merged),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # onnxruntime has its own errors
            raise ConfigError(
                f"onnxruntime cannot quantize this net ({first_line(error)}): remove int8"
            ) from error
        return quantised.read_bytes()


def _list_floats(path: Path) -> list[str]:
    """Return the names of nodes in float32: convolutions of few channels, and nodes that lead to no others."""
    import onnx

    graph = onnx.load(path).graph
    shapes = {weights.name: list(weights.dims) for weights in graph.initializer}
    on_the_way: set[str] = set()
    names = []
    for node in reversed(graph.node):  # later nodes first
        is_wide = node.op_type == "Conv" and _count_channels(node, shapes) > _FEW_CHANNELS
        leads_on = not on_the_way.isdisjoint(node.output)
        if is_wide or leads_on:
            on_the_way.update(node.input)
        if not is_wide and (node.op_type == "Conv" or not leads_on):
            names.append(node.name)
    return names


def _count_channels(node: Any, shapes: Mapping[str, Sequence[int]]) -> int:  # noqa: ANN401 - onnx may be missing
    """Return the number of input channels of a convolution; 0 if its weights are computed."""
    groups = next((option.i for option in node.attribute if option.name == "group"), 1)
    shape = shapes.get(node.input[1], (0, 0))
    return int(groups * shape[1])


class _Batches:
    """Batches in the form that onnxruntime reads for a calibration.

    Args:
        batches: [B, C, h, w] each.
    """

    def __init__(self, batches: Sequence[Floats]) -> None:
        self._batches: Iterator[Floats] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch by the name of the input; None after the last one."""
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch}


@contextmanager
def without_noise() -> Iterator[None]:
    """Suppress warnings, also in the log, such as those of missing CUDA libraries and deprecations."""
    before = logging.root.manager.disable
    handlers = list(logging.root.handlers)  # onnxruntime adds one
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers
