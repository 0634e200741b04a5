"""Plain graphs of an exported net for other runtimes, with the metadata needed to use them."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_data.core.errors import ConfigError, DataError, first_line
from lit_data.core.lightning_internals import tracing
from lit_data.core.temp import scratch_folder
from lit_data.core.types import Floats
from lit_data.predict.net_facts import NetFacts
from lit_data.wings.export.onnx_file import (
    AXES,
    TOLERANCE,
    list_probes,
    measure_difference,
    without_noise,
)
from lit_inspect.replacement import replacing_by_path

if TYPE_CHECKING:
    from lit_inspect.board import Board

READING = "reading.json"
"""Extra file of a TorchScript archive with the metadata."""
_SECTION = "lit_data"  # of the rt_info of OpenVINO
_LEFT_OUT = ("format", "golden", "sha256", "trained")
_OUTPUTS = {
    "maps": (
        "probability [batch, 1 + classes, height, width] in 0..1: plane 0 is any defect, the others "
        "are the classes"
    ),
    "labels": "probability [batch, classes] in 0..1",
    "boxes": (
        "[batch, places, 4 + classes] in 0..1: left, top, right and bottom in fractions of the "
        "input, then the probability of each class; overlapping boxes are still to be joined"
    ),
}


def describe_reading(board: "Board") -> dict[str, str]:
    """Return the facts needed to use the graph alone, as texts by short names."""
    manifest = board.manifest
    settings = {name: value for name, value in manifest.items() if name not in _LEFT_OUT}
    reading = {
        "task": manifest["task"],
        "input": "images [batch, channels, height, width] float32",
        "input_range": _describe_range(manifest),
        "input_channels": _describe_channels(manifest),
        "input_size": _describe_size(manifest),
        "output": _OUTPUTS[manifest["task"]],
        "classes": json.dumps(manifest["classes"]),
        "threshold": str(manifest["threshold"]),
        "image_threshold": str(manifest["image_threshold"]),
        "settings": json.dumps(settings, sort_keys=True),
    }
    return {name: text for name, text in reading.items() if text != "None"}


def _describe_range(manifest: Mapping[str, Any]) -> str:
    limits, dtype = manifest["value_range"], np.dtype(manifest["dtype"])
    inside = "the graph standardizes its input if the net needs it"
    if limits is not None:
        low, high = limits
        above = f"(pixels - {low:g})" if low else "pixels"
        return f"0..1: {above} / {high - low:g}, clipped; {inside}"
    if dtype.kind == "f":
        return f"0..1: pixels as they are; {inside}"
    return f"0..1: pixels / {np.iinfo(dtype).max}; {inside}"


def _describe_channels(manifest: Mapping[str, Any]) -> str:
    count, layout = manifest["channels"], manifest.get("layout")
    if layout is not None:
        return ", ".join(("target", "ref1", "ref2")[:count])
    if count != 3:
        return f"{count}, as in the files"
    return "B, G, R" if manifest["read"]["cv2_order"] else "R, G, B"


def _describe_size(manifest: Mapping[str, Any]) -> str:
    scaling, tiling, boxes = manifest["scaling"], manifest["tiling"], manifest["boxes"]
    if boxes is not None:
        height, width = boxes["sample_px"]
        return f"{height} x {width} px, the image scaled to fit or a window of it"
    words = []
    if scaling is not None and scaling["size_px"] is not None:
        words.append("images scaled to {} x {} px".format(*scaling["size_px"]))
    elif scaling is not None and scaling["factor"] is not None:
        words.append(f"images scaled by {scaling['factor']:g}")
    if tiling is not None:
        words.append("tiles of {} x {} px".format(*tiling["tile_px"]))
        round_px = tiling["round_px"]
        words.append(f"sides that are multiples of {round_px} px" if round_px > 1 else "any sides")
    return "; ".join(words)


def check_form(form: str, *, int8: bool) -> None:
    """Refuse a form that cannot be written, before anything is computed.

    Raises:
        ConfigError: Its library is missing, or it does not support int8.
    """
    if int8 and form in ("openvino", "torchscript"):
        raise ConfigError(f"int8=true is for to=inspect and to=onnx, not for to={form}")
    if form == "openvino" and find_spec(form) is None:
        raise ConfigError(
            "to=openvino needs openvino: pip install openvino, or 'lit-data-inspect[openvino]'"
        )


def write_onnx(facts: NetFacts, board: "Board", path: Path) -> None:
    """Write the graph of an exported file as ONNX, with the facts of `describe_reading` in ``metadata_props``."""
    import onnx

    from lit_inspect.board import NET

    model = onnx.load_from_string(board.parts[NET])
    onnx.helper.set_model_props(model, describe_reading(board))
    _name_axes(model.graph)
    with replacing_by_path(path) as part:
        onnx.save(model, part)


def _name_axes(graph: Any) -> None:  # noqa: ANN401 - protobuf's messages have no types
    """Name the axes of any length, which the exporter numbers, in all values of a graph."""
    sides = graph.input[0].type.tensor_type.shape.dim
    names = {side.dim_param: name for side, name in zip(sides, AXES, strict=True) if side.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for side in value.type.tensor_type.shape.dim:
            if side.dim_param:  # or a formula of several
                side.dim_param = re.sub(
                    r"\w+", lambda match: names.get(match[0], match[0]), side.dim_param
                )


def write_openvino(facts: NetFacts, board: "Board", path: Path) -> None:
    """Write a graph as XML for OpenVINO, with a ``.bin`` beside it and the facts in ``rt_info``.

    Raises:
        ConfigError: OpenVINO cannot convert the graph.
        DataError: OpenVINO gives other values than the net.
    """
    import openvino

    from lit_inspect.board import NET

    with scratch_folder() as folder, without_noise():
        source, target = Path(folder, "net.onnx"), Path(folder, "net.xml")
        source.write_bytes(board.parts[NET])
        try:
            model = openvino.convert_model(source)
            for name, text in describe_reading(board).items():
                model.set_rt_info(text, [_SECTION, name])
            openvino.save_model(model, target, compress_to_fp16=False)
            # Processors with bfloat16 or half precision would round by default.
            exact = {"INFERENCE_PRECISION_HINT": "f32"}
            net = openvino.Core().compile_model(target, "CPU", exact)
        except Exception as error:  # OpenVINO has its own errors
            raise ConfigError(f"OpenVINO cannot convert this net: {first_line(error)}") from error
        _check(
            facts, board, lambda images: net(np.ascontiguousarray(images.numpy()))[0], "OpenVINO"
        )
        for suffix in (".bin", ".xml"):
            with replacing_by_path(path.with_suffix(suffix)) as part:
                shutil.copyfile(target.with_suffix(suffix), part)


def write_torchscript(facts: NetFacts, board: "Board", path: Path) -> None:
    """Write a net as TorchScript by ``torch.jit.trace``, with the facts in an extra file.

    Raises:
        ConfigError: The net cannot be traced.
        DataError: The trace gives other values than the net.
    """
    with without_noise(), torch.no_grad(), tracing():
        try:
            trace: Any = torch.jit.trace
            traced = trace(facts.net, facts.probes[0][None], check_trace=False)
        except Exception as error:
            raise ConfigError(f"the net cannot be traced: {first_line(error)}") from error
        _check(facts, board, lambda images: traced(images).numpy(), "TorchScript")
        reading = {READING: json.dumps(describe_reading(board), indent=1)}
        with replacing_by_path(path) as part:
            torch.jit.save(traced, part, _extra_files=reading)


def _check(facts: NetFacts, board: "Board", run: Callable[[Tensor], Floats], runtime: str) -> None:
    """Compare a graph with the net, on the images and sizes that the ONNX file takes.

    Raises:
        DataError: The graph cannot compute one, or the values differ.
    """
    try:
        difference = measure_difference(facts.net, run, _list_inputs(facts, board))
    except RuntimeError as error:
        raise DataError(f"{runtime} cannot compute this net: {first_line(error)}") from error
    if not difference <= TOLERANCE:  # in this form it refuses NaN too
        raise DataError(
            f"{runtime} gives values that differ by {difference:.3g} from those of the net, but "
            f"only {TOLERANCE:g} is allowed: it was not written"
        )


def _list_inputs(facts: NetFacts, board: "Board") -> Iterator[Tensor]:
    import onnx

    from lit_inspect.board import NET

    [images] = onnx.load_from_string(board.parts[NET]).graph.input
    sides = images.type.tensor_type.shape.dim
    free = [name for name, side in zip(AXES, sides, strict=True) if side.dim_param]
    return list_probes(facts.probes, free)


FORMS: Mapping[str, tuple[str, Callable[[NetFacts, "Board", Path], None]]] = {
    "onnx": (".onnx", write_onnx),
    "openvino": (".xml", write_openvino),
    "torchscript": (".pt", write_torchscript),
}
"""Suffix and writer of each plain form."""
