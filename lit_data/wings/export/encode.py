"""Files for the runtime `lit_inspect`: a net, the conversion of images to its input, and golden answers."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import lit_data
from lit_data.core.errors import ConfigError
from lit_data.core.temp import scratch_folder
from lit_data.core.types import Array
from lit_data.predict.net_facts import NetFacts, list_settings, read_spread
from lit_data.predict.options import PredictOptions
from lit_data.wings.export.onnx_file import export_onnx

log = logging.getLogger(__name__)

_GOLDEN = 5
_GOLDEN_PX = 160  # longest side, so that the runtime starts quickly


def encode_file(facts: NetFacts) -> bytes:
    """Return the bytes of an ``.inspect`` file of a net.

    Args:
        facts: Facts of the net, which is on the host and in evaluation mode.

    Raises:
        ConfigError: The net cannot be written as ONNX, or the runtime lacks an option.
        DataError: The ONNX file gives other values than the net, or no image can be read.
    """
    from lit_inspect.board import NET, encode_array, encode_board

    graph, options = _write_graph(facts)
    parts = {NET: graph}
    for number, pixels in enumerate(_read_golden(facts)):
        parts[f"golden/{number}.npy"] = encode_array(pixels)
        parts[f"golden/{number}_answer.npy"] = encode_array(facts.answer(pixels, options))
    manifest = {
        **list_settings(facts, options),
        "golden": _GOLDEN,
        "versions": {"lit_data": lit_data.__version__, "torch": torch.__version__},
    }
    return encode_board(manifest, parts)


def _write_graph(facts: NetFacts) -> tuple[bytes, PredictOptions]:
    """Return the ONNX graph, and the options adapted to its free axes.

    Raises:
        ConfigError: See `export_onnx`; or the file does not accept single images.
    """
    options = facts.options
    with scratch_folder() as folder:
        exported = export_onnx(facts.net, Path(folder, "net.onnx"), facts.probes)
        graph = exported.path.read_bytes()
    if "batch" not in exported.free_axes:
        raise ConfigError(
            "the net cannot be written for single images: it must take a batch of any size "
            "(images.shape[0], not len(images))"
        )
    is_map = facts.settings["task"] == "maps"
    if is_map and not {"height", "width"} <= set(exported.free_axes):
        sides = options.tile_sides_px
        if not facts.has_one_size:
            log.warning(
                "the net can be exported only for tiles of %d x %d px: smaller images are "
                "padded to that by repeating their edge",
                *sides,
            )
        options = replace(options, round_px=max(sides))
    return graph, options


def _read_golden(facts: NetFacts) -> Iterator[Array]:
    """Yield parts of images as they are read, before any scaling: [C, h, w]."""
    pictures = list(read_spread(facts.bank, facts.source, _GOLDEN))
    for number in range(_GOLDEN):
        pixels = pictures[number % len(pictures)]
        # If there are few images, other parts of them are taken.
        top = max(pixels.shape[1] - _GOLDEN_PX, 0) * number // _GOLDEN
        left = max(pixels.shape[2] - _GOLDEN_PX, 0) * number // _GOLDEN
        part = pixels[:, top : top + _GOLDEN_PX, left : left + _GOLDEN_PX]
        yield np.ascontiguousarray(part)
