"""Text watermarks.

A plan holds all randomness and no pixels; glyphs are drawn once, marks warped, then blended.
"""

from lit_data.synthesis.watermarks.glyphs import GlyphBank
from lit_data.synthesis.watermarks.plan import WatermarkPlan, WatermarkSpec, sample_watermarks

__all__ = ["GlyphBank", "WatermarkPlan", "WatermarkSpec", "sample_watermarks"]
