"""Watermarks as coverage: each text is one warp of its bitmap into its sample, on the host."""

import math
from typing import Final

import numpy as np

from lit_data.synthesis.watermarks.glyphs import GlyphBank, level_of, size_of
from lit_data.synthesis.watermarks.plan import WatermarkPlan
from lit_data.types import Array

_LEAST_SOFT_PX: Final = 0.2  # less cannot be seen


def draw_cover(rows: Array, plan: WatermarkPlan, bank: GlyphBank) -> None:
    """Draw how far each pixel is covered by the watermark of its sample.

    Args:
        rows: [M, H, W] uint8, written: 0 is not covered, 255 is covered.
        plan: The watermarks.
        bank: Their texts.
    """
    import cv2

    rows[...] = 0
    for number, row in enumerate(plan.row.tolist()):
        (_tile if plan.tiled[row] else _place)(rows[row], plan, bank, number)
    for row in np.flatnonzero(plan.present & (plan.soft_px > _LEAST_SOFT_PX)).tolist():
        sigma_px = float(plan.soft_px[row])
        rows[row] = cv2.GaussianBlur(rows[row], (0, 0), sigma_px)


def _place(rows: Array, plan: WatermarkPlan, bank: GlyphBank, number: int) -> None:
    """One text, in the window that holds it."""
    import cv2

    bitmap, scale = _get_bitmap(plan, bank, number)
    half_px = _half_extents(bitmap, scale, float(plan.angle_deg[number]))
    centre = plan.centre[number].tolist()
    top, left = (max(0, math.floor(c - half)) for c, half in zip(centre, half_px, strict=True))
    bottom, right = (
        min(size, math.ceil(c + half) + 1) for c, half, size in zip(centre, half_px, rows.shape, strict=True)
    )
    window = rows[top:bottom, left:right]
    matrix = _find_matrix(plan, number, bitmap, scale, (top, left))
    drawn = cv2.warpAffine(bitmap, matrix, (right - left, bottom - top), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    np.maximum(window, drawn, out=window)


def _tile(rows: Array, plan: WatermarkPlan, bank: GlyphBank, number: int) -> None:
    """One text over the whole sample, each line shifted by half a text: the warp reads a cell that has no end."""
    import cv2

    bitmap, scale = _get_bitmap(plan, bank, number)
    height, width = bitmap.shape
    gap_y, gap_x = (round(float(gap) * height) for gap in plan.gap[plan.row[number]])
    cell = np.zeros((2 * (height + gap_y), width + gap_x), np.uint8)
    cell[:height, :width] = bitmap
    cell[height + gap_y :] = np.roll(cell[: height + gap_y], cell.shape[1] // 2, axis=1)
    matrix = _find_matrix(plan, number, bitmap, scale, (0, 0))
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    rows[...] = cv2.warpAffine(cell, matrix, rows.shape[::-1], flags=flags, borderMode=cv2.BORDER_WRAP)


def _get_bitmap(plan: WatermarkPlan, bank: GlyphBank, number: int) -> tuple[Array, float]:
    """A text as it was drawn, and the factor from its pixels to those of the sample."""
    size_px, outline = float(plan.size_px[number]), float(plan.outline[plan.row[number]])
    level = level_of(size_px)
    outline_px = max(1, round(outline * size_of(level))) if outline else 0
    font = int(plan.font[number] * np.float32(len(bank.fonts)))
    return bank.get(int(plan.text[number]), font, level, outline_px), size_px / size_of(level)


def _half_extents(bitmap: Array, scale: float, angle_deg: float) -> tuple[float, float]:
    """(vertical, horizontal) px that a turned text reaches from its middle."""
    height, width = (scale * side / 2 for side in bitmap.shape)
    sine, cosine = abs(math.sin(math.radians(angle_deg))), abs(math.cos(math.radians(angle_deg)))
    return width * sine + height * cosine, width * cosine + height * sine


def _find_matrix(plan: WatermarkPlan, number: int, bitmap: Array, scale: float, origin_px: tuple[int, int]) -> Array:
    """[2, 3]: from (x, y) px of a window of the sample to those of the bitmap."""
    angle, (y, x) = math.radians(float(plan.angle_deg[number])), plan.centre[number].tolist()
    sine, cosine = math.sin(angle) / scale, math.cos(angle) / scale
    turn = np.array([[cosine, -sine], [sine, cosine]])
    middle = np.array([(bitmap.shape[1] - 1) / 2, (bitmap.shape[0] - 1) / 2])
    return np.column_stack((turn, middle - turn @ np.array([x - origin_px[1], y - origin_px[0]])))
