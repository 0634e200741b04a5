"""From a net to values of every pixel of whole images, and the defects in them."""

from lit_data.inference.export.onnx_file import OnnxFile, export_onnx
from lit_data.inference.predictor import TiledPredictor, find_defects
from lit_data.inference.tiling import measure_reach_px
from lit_inspect.regions import Defect

__all__ = [
    "Defect",
    "OnnxFile",
    "TiledPredictor",
    "export_onnx",
    "find_defects",
    "measure_reach_px",
]
