"""Export of trained models as one file that runs without torch, in float32 or int8."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.export.onnx_file import OnnxFile, export_onnx

__all__ = [
    "OnnxFile",
    "export_onnx",
]

TOOLS = {
    "export": "write a trained model as one file that runs without torch: export RUN [FILE]",
}
MODULES = {"export": f"{__name__}.command"}

__getattr__, __dir__ = offer(
    __name__,
    {
        "OnnxFile": "onnx_file",
        "export_onnx": "onnx_file",
    },
)
