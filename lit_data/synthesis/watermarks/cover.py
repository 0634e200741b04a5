"""Watermarks as coverage, each text one warp of its bitmap, on the host; and colours by which all of them are seen."""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from lit_data.synthesis.families.base import Floats
from lit_data.synthesis.watermarks.glyphs import GlyphBank, level_of, size_of
from lit_data.synthesis.watermarks.plan import WatermarkPlan
from lit_data.synthesis.watermarks.spec import MODES
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
        min(size, math.ceil(c + half) + 1)
        for c, half, size in zip(centre, half_px, rows.shape, strict=True)
    )
    window = rows[top:bottom, left:right]
    matrix = _find_matrix(plan, number, bitmap, scale, (top, left))
    drawn = cv2.warpAffine(
        bitmap, matrix, (right - left, bottom - top), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    )
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
    rows[...] = cv2.warpAffine(
        cell, matrix, rows.shape[::-1], flags=flags, borderMode=cv2.BORDER_WRAP
    )


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


def _find_matrix(
    plan: WatermarkPlan, number: int, bitmap: Array, scale: float, origin_px: tuple[int, int]
) -> Array:
    """[2, 3]: from (x, y) px of a window of the sample to those of the bitmap."""
    angle, (y, x) = math.radians(float(plan.angle_deg[number])), plan.centre[number].tolist()
    sine, cosine = math.sin(angle) / scale, math.cos(angle) / scale
    turn = np.array([[cosine, -sine], [sine, cosine]])
    middle = np.array([(bitmap.shape[1] - 1) / 2, (bitmap.shape[0] - 1) / 2])
    return np.column_stack((turn, middle - turn @ np.array([x - origin_px[1], y - origin_px[0]])))


PROBES: Final = 32
"""Pixels that are looked at under each mark."""

_COVERED: Final = 63  # of 255: thin letters cover no pixel wholly
_LEAST_SHARE: Final = 0.7  # of them that must change
_NORMAL: Final = MODES.index("normal")
_OTHERS: Final = (0.0, 1.0, 0.5)  # black, white and, where both are under the mark, grey


def probe_under(images: Array, cover: Array) -> Array:
    """Colours of each image where its mark lies, spread evenly over the mark.

    Args:
        images: [M, 3, H, W] uint8.
        cover: [M, H, W] uint8.

    Returns:
        [M, PROBES, 3] uint8; 0 where there is no mark.
    """
    under = np.zeros((len(images), PROBES, 3), np.uint8)
    width = images.shape[-1]
    for row, mask in enumerate(cover):
        covered = np.flatnonzero(mask > _COVERED)
        if len(covered):
            rows, columns = np.divmod(covered[np.arange(PROBES) * len(covered) // PROBES], width)
            under[row] = images[row][:, rows, columns].T
    return under


def keep_visible(plan: WatermarkPlan, under: Array) -> WatermarkPlan:
    """Paint marks in black, white or grey that would leave too much of what lies under them as it
    is.

    What then is still too faint for the contrast of the ground gets more opacity, at most the
    largest of the specification.

    Args:
        plan: The watermarks.
        under: [B, PROBES, 3] uint8, colours under each.
    """
    ground = under.astype(np.float32) / np.float32(255)
    least = _share_changed(plan, ground, plan.colour, plan.mode)
    mode = np.full_like(plan.mode, _NORMAL)
    others = np.array(_OTHERS, np.float32)[:, None, None] * np.ones_like(plan.colour)
    shares = np.stack([_share_changed(plan, ground, other, mode) for other in others])
    hidden = least < np.minimum(_LEAST_SHARE, shares.max(0))
    best = others[shares.argmax(0), np.arange(len(mode))]
    painted = replace(
        plan,
        mode=np.where(hidden, mode, plan.mode),
        colour=np.where(hidden[:, None], best, plan.colour),
    )
    return replace(painted, opacity=_raise_opacity(painted, ground))


def _raise_opacity(plan: WatermarkPlan, ground: Floats) -> Floats:
    """[B], so that the mean change is a share of the standard deviation of the ground [B, PROBES, 3] under the mark."""
    change = np.abs(mix(ground, plan.colour[:, None], plan.mode[:, None]) - ground).max(2).mean(1)
    wanted = plan.spec.least_contrast * ground.std(1).max(1) / np.maximum(change, np.float32(1e-3))
    most = np.maximum(plan.opacity, np.float32(plan.spec.opacity[1]))
    raised = np.clip(wanted, plan.opacity, most).astype(np.float32)
    return np.where(plan.present, raised, np.float32(0))


def _share_changed(plan: WatermarkPlan, ground: Floats, colour: Floats, mode: Array) -> Floats:
    """[B] share of the pixels [B, PROBES, 3] that a mark changes enough in one channel at least."""
    change = (
        np.abs(mix(ground, colour[:, None], mode[:, None]) - ground).max(2) * plan.opacity[:, None]
    )
    shares: Floats = (change >= plan.spec.least_change).mean(1, dtype=np.float32)
    return shares


def mix(ground: Floats, colour: Floats, mode: Array) -> Floats:
    """What a mark of full opacity makes of a ground: [..., 3] in 0..1; see `find_lines`."""
    base, below, above = find_lines(colour, mode)
    mixed: Floats = (
        base + below * np.minimum(ground, 0.5) + above * np.maximum(ground - np.float32(0.5), 0)
    )
    return mixed


def find_lines(colour: Floats, mode: Array) -> tuple[Floats, Floats, Floats]:
    """The blend modes of W3C "Compositing and Blending Level 1", each as two lines over the ground
    g that meet at 1/2.

    A mark of full opacity makes ``base + below * min(g, 1/2) + above * max(g - 1/2, 0)`` of a
    ground: its colour c with `normal`, ``c g`` with `multiply`, ``c + g - c g`` with `screen`, and
    with `overlay` ``2 c g`` below 1/2 and ``1 - 2 (1 - c) (1 - g)`` above.

    Args:
        colour: [..., 3] in 0..1.
        mode: [...] number of each mode in `MODES`.

    Returns:
        base, below, above: [..., 3] each.
    """
    zero, rest = np.zeros_like(colour), 1 - colour
    lines = (
        (colour, zero, zero),
        (zero, colour, colour),
        (colour, rest, rest),
        (zero, 2 * colour, 2 * rest),
    )
    number = mode[..., None]
    base, below, above = (np.choose(number, [each[part] for each in lines]) for part in range(3))
    return base, below, above
