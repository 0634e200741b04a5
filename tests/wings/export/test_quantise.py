"""Graphs in int8: near those in float32, and refused where onnxruntime cannot make them."""

import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.core.types import Floats
from lit_data.wings.export.onnx_file import quantise

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")


def _make_graph() -> bytes:
    """Three convolutions with ReLUs between them, a sum, and a sigmoid behind."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name)
        for name, shape in (
            ("first", (8, 3, 3, 3)),
            ("second", (8, 8, 3, 3)),
            ("third", (1, 8, 1, 1)),
        )
    ]
    nodes = [
        helper.make_node("Conv", ["images", "first"], ["a"], "thin", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], "wide", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Add", ["b", "d"], ["e"]),
        helper.make_node("Conv", ["e", "third"], ["f"], "head"),
        helper.make_node("Concat", ["f", "f"], ["g"], "answers", axis=1),
        helper.make_node("Clip", ["g"], ["h"], "limits"),
        helper.make_node("Sigmoid", ["h"], ["probability"]),
    ]
    kind = onnx.TensorProto.FLOAT
    ends = [
        helper.make_tensor_value_info("images", kind, ["b", 3, "h", "w"]),
        helper.make_tensor_value_info("probability", kind, ["b", 2, "h", "w"]),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset).SerializeToString()


def _run(graph: bytes, images: Floats) -> Floats:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images})[0]


def test_a_graph_in_int8_is_near_that_in_float32() -> None:
    graph, rng = _make_graph(), np.random.default_rng(1)
    batches = [rng.random((2, 3, 16, 24), np.float32) for _ in range(3)]
    quantised = quantise(graph, batches)
    assert quantised == quantise(graph, batches)
    net = onnx.load_from_string(quantised).graph
    kinds = {tensor.data_type for tensor in net.initializer}
    assert {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} <= kinds
    images = rng.random((1, 3, 40, 33), np.float32)
    difference = np.abs(_run(quantised, images) - _run(graph, images))
    assert 0 < difference.max() < 0.05


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^onnxruntime cannot quantize this net .*remove int8"):
        quantise(b"no graph", [])


def test_sums_answers_and_convolutions_of_few_channels_stay_in_float() -> None:
    quantised = quantise(
        _make_graph(), [np.random.default_rng(1).random((2, 3, 16, 24), np.float32)]
    )
    nodes = onnx.load_from_string(quantised).graph.node
    from_int8 = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    in_int8 = {node.name for node in nodes if node.op_type == "Conv" and node.input[1] in from_int8}
    assert in_int8 == {"wide", "head"}
    (total,) = (node for node in nodes if node.op_type == "Add")
    rounded_again = {node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    assert not {"images", "a", "g", "h", "probability"} & rounded_again
    assert total.output[0] in rounded_again  # on its way into the next convolution
