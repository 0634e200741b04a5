"""From patch predictions back to whole images."""

from lit_data.inference.defects import Defect, find_defects
from lit_data.inference.stitching import PatchStitcher

__all__ = ["Defect", "PatchStitcher", "find_defects"]
