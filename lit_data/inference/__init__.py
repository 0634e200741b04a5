"""From a net to values of every pixel of whole images, and what is found in them."""

from lit_data.inference.defects import Defect, find_defects
from lit_data.inference.model_cache import ModelCache
from lit_data.inference.predictor import TiledPredictor
from lit_data.inference.progress import Progress
from lit_data.inference.ranks import gather_in_order, merge_shares, rank_share
from lit_data.inference.reach import measure_reach_px
from lit_data.inference.stitching import PatchStitcher

__all__ = [
    "Defect",
    "ModelCache",
    "PatchStitcher",
    "Progress",
    "TiledPredictor",
    "find_defects",
    "gather_in_order",
    "measure_reach_px",
    "merge_shares",
    "rank_share",
]
