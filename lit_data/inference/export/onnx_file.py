"""A net as an ONNX file, which runs without torch."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.errors import ConfigError, DataError
from lit_data.files import replacing_by_path

TOLERANCE: Final = 1e-4
_NEEDED: Final = ("onnx", "onnxruntime", "onnxscript")
_AXES: Final = ("batch", "channels", "height", "width")
_LARGEST_BYTES: Final = 2**31 - 2**20  # a protobuf message holds 2 GiB
_BATCH: Final = 2  # an axis of length 1 would be taken for a constant


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """What was written.

    Attributes:
        path: The file; its input is ``images`` [B, C, h, w] float32 in 0..1, its output
            ``probability`` [B, K, h, w].
        free_axes: Which axes of the input may have any length.
        max_difference: Largest difference between onnxruntime and torch.
    """

    path: Path
    free_axes: tuple[str, ...]
    max_difference: float


def export_onnx(net: nn.Module, path: str | os.PathLike[str], images: Sequence[Tensor]) -> OnnxFile:
    """Write a net as a file, and hold what onnxruntime makes of it against torch.

    Batch, height and width of the file are free where the net allows it. It is checked with the
    given images, and with random ones of other sizes along the free axes. The file appears when it
    has passed.

    Args:
        net: From [B, C, h, w] float32 in 0..1 to [B, K, h, w], on the CPU, in evaluation mode.
        path: An ``.onnx`` file, which is replaced if it exists.
        images: [C, h, w] each, float32 in 0..1; the first one tells the size of axes that are not
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
        free, worst = _check_file(net, part, images)
    return OnnxFile(path, free, worst)


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
            f"the net takes {weight_bytes} bytes, and one ONNX file holds {_LARGEST_BYTES}"
        )
    free: Any = {0: torch.export.Dim.DYNAMIC} | dict.fromkeys(
        _find_free_sides(net, image), torch.export.Dim.AUTO
    )
    try:
        with without_noise(), torch.no_grad():
            program = torch.onnx.export(
                net,
                (image.expand(_BATCH, -1, -1, -1).contiguous(),),
                dynamo=True,
                dynamic_shapes=(free,),
                input_names=["images"],
                output_names=["probability"],
                verbose=False,
            )
            assert program is not None
            program.save(path)
    except Exception as error:
        raise ConfigError(
            f"{type(net).__name__} cannot be written as ONNX ({str(error).strip().partition(chr(10))[0]}): it must be "
            "one that torch.export can trace, with a batch of any size (images.shape[0], not len(images))"
        ) from error


def _check_file(
    net: nn.Module, path: Path, images: Sequence[Tensor]
) -> tuple[tuple[str, ...], float]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    lengths = session.get_inputs()[0].shape
    free = tuple(
        name for name, length in zip(_AXES, lengths, strict=True) if not isinstance(length, int)
    )
    worst = 0.0
    for tiles in _list_probes(images, free):
        with torch.inference_mode():
            wanted = net(tiles).float().numpy()
        given = session.run(None, {"images": np.ascontiguousarray(tiles.numpy())})[0]
        worst = max(
            worst, float(np.abs(given - wanted).max()) if given.shape == wanted.shape else np.inf
        )
    if not worst <= TOLERANCE:
        raise DataError(
            f"the ONNX file gives values that differ by {worst:.3g} from those of the net, and {TOLERANCE:g} is "
            "allowed: it was not written"
        )
    return free, worst


def _find_free_sides(net: nn.Module, image: Tensor) -> Iterator[int]:
    """Axes of [B, C, h, w] of which the net takes other lengths; the exporter would miss some that it does not take."""
    for axis in (2, 3):
        shorter = image[None].narrow(axis, 0, _shorten(image.shape[axis - 1]))
        with suppress(Exception), torch.inference_mode():
            if net(shorter).shape[2:] == shorter.shape[2:]:
                yield axis


def _shorten(side_px: int) -> int:
    return side_px * 3 // 4 + 1


def _list_probes(images: Sequence[Tensor], free: Sequence[str]) -> Iterator[Tensor]:
    """Batches for the file: the images, and random ones of other sizes."""
    shape = images[0].shape
    fitting = [
        image for image in images if image.shape == shape or {"height", "width"} <= set(free)
    ]
    yield from (
        image[None].expand(1 if "batch" in free else _BATCH, -1, -1, -1) for image in fitting
    )
    height, width = (
        _shorten(side) if name in free else side
        for name, side in zip(_AXES[2:], shape[1:], strict=True)
    )
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3) if "batch" in free else (_BATCH,):
        yield torch.rand(count, shape[0], height, width, generator=generator)


@contextmanager
def without_noise() -> Iterator[None]:
    """Hold back warnings, of the log too: of CUDA libraries that are not there, of what torch deprecates in torch."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
