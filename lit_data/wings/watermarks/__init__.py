"""Text watermarks: drawing, finding, and painting over them."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.watermarks.datamodule import WatermarkDataModule
    from lit_data.wings.watermarks.glyphs import GlyphBank
    from lit_data.wings.watermarks.plan import WatermarkPlan, WatermarkSpec, sample_watermarks
    from lit_data.wings.watermarks.predictions import MarkTask

__all__ = [
    "GlyphBank",
    "MarkTask",
    "WatermarkDataModule",
    "WatermarkPlan",
    "WatermarkSpec",
    "sample_watermarks",
]

TARGETS = (
    "WatermarkDataModule",
    "WatermarkSpec",
)
"""Classes that a configuration may name."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "GlyphBank": "glyphs",
        "MarkTask": "predictions",
        "WatermarkDataModule": "datamodule",
        "WatermarkPlan": "plan",
        "WatermarkSpec": "plan",
        "sample_watermarks": "plan",
    },
)
