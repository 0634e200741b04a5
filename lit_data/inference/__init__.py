"""From a net to values of every pixel of whole images, and what is found in them."""

from lit_data.inference.batches import Progress
from lit_data.inference.defects import Defect, find_defects
from lit_data.inference.export.onnx_file import OnnxFile, export_onnx
from lit_data.inference.export.quantise import quantise
from lit_data.inference.model_cache import ModelCache
from lit_data.inference.predictor import TiledPredictor
from lit_data.inference.ranks import gather_in_order, merge_shares, rank_share
from lit_data.inference.tiling import measure_reach_px

__all__ = [
    "Defect",
    "ModelCache",
    "OnnxFile",
    "Progress",
    "TiledPredictor",
    "export_onnx",
    "find_defects",
    "gather_in_order",
    "measure_reach_px",
    "merge_shares",
    "quantise",
    "rank_share",
]
