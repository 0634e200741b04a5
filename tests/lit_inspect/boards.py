"""Exported files of small nets, made without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lit_inspect.board import NET, encode_board
from lit_inspect.images import ReadOptions

LABELS = {
    **{"task": "labels", "classes": ["a", "b"], "tiling": None},
    "scaling": {"size_px": [8, 8], "factor": None},
}
BOXES = {
    **{"task": "boxes", "classes": ["a"], "tiling": None},
    "boxes": {"sample_px": [64, 64], "stride_px": None, "fill": 0, "iou_threshold": 0.5},
}


def write_board(
    path: Path,
    *,
    side: int | str = "side",
    nodes: Sequence[Any] | None = None,
    weights: Sequence[Any] = (),
    parts: Mapping[str, bytes] | None = None,
    **changes: Any,
) -> Path:
    """Write a file whose net gives the probability of a defect; without `nodes` its one channel.

    Args:
        path: Of the file.
        side: Length of an image; a name where it is free.
        nodes: Of the net, from ``images`` to ``probability``.
        weights: Of the net.
        parts: Others of the file.
        changes: Parts of the manifest.
    """
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
    helper = onnx.helper
    ends = []
    channels = changes.get("channels", 1)
    for name, shape in (("images", ["batch", channels, side, side]), ("probability", None)):
        ends.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    nodes = nodes or [helper.make_node("Identity", ["images"], ["probability"])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], list(weights))
    net = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    tiling = {"tile_px": [64, 64], "overlap_px": 0, "margin_px": None, "blend": "constant"}
    manifest = {
        **{"task": "maps", "read": asdict(ReadOptions()), "channels": 1, "dtype": "uint8"},
        **{"value_range": None, "scaling": None, "classes": [], "golden": 0, "boxes": None},
        **{"tiling": {**tiling, "multiple_px": 1, "round_px": 1}, "threshold": 0.5},
        **{"image_threshold": None, "top_fraction": 0.0, "min_area_px": 1, "large_px": 10**6},
        **{"doubt": None, "review": None, "guarantee": None, "versions": {}},
    }
    contents = {NET: net.SerializeToString(), **(parts or {})}
    path.write_bytes(encode_board({**manifest, **changes}, contents))
    return path
