"""Coverage of pixels by watermarks, each text one warp of its bitmap, and colors that stay visible."""

import math
from dataclasses import replace

import numpy as np

from lit_data.core.types import Array, Floats
from lit_data.wings.watermarks.glyphs import GlyphBank, level_of, size_of
from lit_data.wings.watermarks.plan import MODES, WatermarkPlan

_LEAST_SOFT_PX = 0.2  # less is invisible

PROBES = 32
"""Number of pixels that are read under each mark."""

_COVERED = 63
"""Lowest coverage of a covered pixel, of 255, because thin letters cover no pixel fully."""
_LEAST_FRACTION = 0.7
"""Fraction of the pixels under a mark that must change."""
_NORMAL = MODES.index("normal")
_OTHERS = (0.0, 1.0, 0.5)  # black, white and, if both are under the mark, gray


def draw_cover(rows: Array, plan: WatermarkPlan, bank: GlyphBank) -> None:
    """Draw the coverage of each pixel by the watermark of its sample.

    Args:
        rows: [M, H, W] uint8; written: 0 is not covered, 255 is covered.
        plan: The watermarks.
        bank: Bitmaps of their texts.
    """
    import cv2

    rows[...] = 0
    for number, row in enumerate(plan.row.tolist()):
        if plan.tiled[row]:
            _tile(rows[row], plan, bank, number)
        else:
            _place(rows[row], plan, bank, number)
    is_soft = plan.present & (plan.soft_px > _LEAST_SOFT_PX)
    for row in np.flatnonzero(is_soft).tolist():
        sigma_px = float(plan.soft_px[row])
        rows[row] = cv2.GaussianBlur(rows[row], (0, 0), sigma_px)


def _place(rows: Array, plan: WatermarkPlan, bank: GlyphBank, number: int) -> None:
    """Draw one text, in the window that contains it."""
    import cv2

    bitmap, scale = _get_bitmap(plan, bank, number)
    half_height, half_width = _half_extents(bitmap, scale, float(plan.angle_deg[number]))
    # The window is clipped to the sample, because a text may leave it at any edge.
    y, x = plan.centre[number].tolist()
    height, width = rows.shape
    top, bottom = max(0, math.floor(y - half_height)), min(height, math.ceil(y + half_height) + 1)
    left, right = max(0, math.floor(x - half_width)), min(width, math.ceil(x + half_width) + 1)
    window = rows[top:bottom, left:right]
    matrix = _find_matrix(plan, number, bitmap, scale, (top, left))
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    text = cv2.warpAffine(bitmap, matrix, (right - left, bottom - top), flags=flags)
    np.maximum(window, text, out=window)  # texts of a sample may overlap


def _tile(rows: Array, plan: WatermarkPlan, bank: GlyphBank, number: int) -> None:
    """Draw one text all over the sample, each line shifted by half a text.

    The warp reads a cell of two lines, which repeats endlessly.
    """
    import cv2

    bitmap, scale = _get_bitmap(plan, bank, number)
    height, width = bitmap.shape
    gap_y, gap_x = (round(float(gap) * height) for gap in plan.gap[plan.row[number]])
    cell = np.zeros((2 * (height + gap_y), width + gap_x), np.uint8)
    cell[:height, :width] = bitmap
    # The second line of the cell is the first one, shifted by half a text.
    cell[height + gap_y :] = np.roll(cell[: height + gap_y], cell.shape[1] // 2, axis=1)
    matrix = _find_matrix(plan, number, bitmap, scale, (0, 0))
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    rows[...] = cv2.warpAffine(
        cell, matrix, rows.shape[::-1], flags=flags, borderMode=cv2.BORDER_WRAP
    )


def _get_bitmap(plan: WatermarkPlan, bank: GlyphBank, number: int) -> tuple[Array, float]:
    """Return the bitmap of a text, and the factor from its pixels to those of the sample."""
    size_px = float(plan.size_px[number])
    outline = float(plan.outline[plan.row[number]])
    level = level_of(size_px)
    outline_px = max(1, round(outline * size_of(level))) if outline else 0
    font = int(plan.font[number] * np.float32(len(bank.fonts)))
    return bank.get(int(plan.text[number]), font, level, outline_px), size_px / size_of(level)


def _half_extents(bitmap: Array, scale: float, angle_deg: float) -> tuple[float, float]:
    """Return the (vertical, horizontal) px from the center of a rotated text to its edges."""
    height, width = scale * bitmap.shape[0] / 2, scale * bitmap.shape[1] / 2
    angle = math.radians(angle_deg)
    sine, cosine = abs(math.sin(angle)), abs(math.cos(angle))
    return width * sine + height * cosine, width * cosine + height * sine


def _find_matrix(
    plan: WatermarkPlan, number: int, bitmap: Array, scale: float, origin_px: tuple[int, int]
) -> Array:
    """Return the matrix from (x, y) px of a window of the sample to those of the bitmap: [2, 3]."""
    angle = math.radians(float(plan.angle_deg[number]))
    sine, cosine = math.sin(angle) / scale, math.cos(angle) / scale
    turn = np.array([[cosine, -sine], [sine, cosine]])
    y, x = plan.centre[number].tolist()
    centre = np.array([x - origin_px[1], y - origin_px[0]])
    middle = np.array([(bitmap.shape[1] - 1) / 2, (bitmap.shape[0] - 1) / 2])
    return np.column_stack((turn, middle - turn @ centre))


def probe_under(images: Array, cover: Array) -> Array:
    """Return colors of each image under its mark, spread evenly over the mark.

    Args:
        images: [M, 3, H, W] uint8.
        cover: [M, H, W] uint8.

    Returns:
        [M, PROBES, 3] uint8; 0 without a mark.
    """
    under = np.zeros((len(images), PROBES, 3), np.uint8)
    width = images.shape[-1]
    for row, mask in enumerate(cover):
        covered = np.flatnonzero(mask > _COVERED)
        if not len(covered):
            continue
        # Evenly over the covered pixels, row by row.
        probes = covered[np.arange(PROBES) * len(covered) // PROBES]
        rows, columns = np.divmod(probes, width)
        under[row] = images[row][:, rows, columns].T
    return under


def keep_visible(plan: WatermarkPlan, under: Array) -> WatermarkPlan:
    """Paint marks in black, white or gray if they would change too little of the ground under them.

    Marks that are then still too faint for the contrast of the ground get more opacity, up to the
    largest of the specification.

    Args:
        plan: The watermarks.
        under: [B, PROBES, 3] uint8, colors under each mark.
    """
    ground = under.astype(np.float32) / np.float32(255)
    changed = _find_changed(plan, ground, plan.colour, plan.mode)
    mode = np.full_like(plan.mode, _NORMAL)
    # One candidate of each other color for each sample: [3, B, 3].
    others = np.array(_OTHERS, np.float32)[:, None, None] * np.ones_like(plan.colour)
    others_changed = np.stack([_find_changed(plan, ground, other, mode) for other in others])
    # If no color changes as much as it should, the best one is good enough.
    is_hidden = changed < np.minimum(_LEAST_FRACTION, others_changed.max(0))
    best = others[others_changed.argmax(0), np.arange(len(mode))]
    painted = replace(
        plan,
        mode=np.where(is_hidden, mode, plan.mode),
        colour=np.where(is_hidden[:, None], best, plan.colour),
    )
    return replace(painted, opacity=_raise_opacity(painted, ground))


def _raise_opacity(plan: WatermarkPlan, ground: Floats) -> Floats:
    """Return opacities [B] for a mean change in proportion to the contrast of the ground.

    Args:
        plan: The watermarks.
        ground: [B, PROBES, 3] in 0..1, under the marks.
    """
    marked = mix(ground, plan.colour[:, None], plan.mode[:, None])
    # The channel that changes or varies most counts.
    change = np.abs(marked - ground).max(2).mean(1)
    contrast = ground.std(1).max(1)
    opacity = plan.spec.least_contrast * contrast / np.maximum(change, np.float32(1e-3))
    most = np.maximum(plan.opacity, np.float32(plan.spec.opacity[1]))
    raised = np.clip(opacity, plan.opacity, most).astype(np.float32)
    return np.where(plan.present, raised, np.float32(0))


def _find_changed(plan: WatermarkPlan, ground: Floats, colour: Floats, mode: Array) -> Floats:
    """Return the fraction of the pixels that a mark changes enough in at least one channel: [B]."""
    marked = mix(ground, colour[:, None], mode[:, None])
    change = np.abs(marked - ground).max(2) * plan.opacity[:, None]
    fractions: Floats = (change >= plan.spec.least_change).mean(1, dtype=np.float32)
    return fractions


def mix(ground: Floats, colour: Floats, mode: Array) -> Floats:
    """Return the ground with a mark of full opacity: [..., 3] in 0..1; see `find_lines`."""
    base, below, above = find_lines(colour, mode)
    dark = below * np.minimum(ground, 0.5)
    bright = above * np.maximum(ground - np.float32(0.5), 0)
    mixed: Floats = base + dark + bright
    return mixed


def find_lines(colour: Floats, mode: Array) -> tuple[Floats, Floats, Floats]:
    """Return a blend mode as two lines over the ground g that meet at 1/2.

    The modes are those of W3C "Compositing and Blending Level 1". A mark of full opacity changes
    the ground to ``base + below * min(g, 1/2) + above * max(g - 1/2, 0)``: its color c with
    `normal`, ``c g`` with `multiply`, ``c + g - c g`` with `screen`, and with `overlay` ``2 c g``
    below 1/2 and ``1 - 2 (1 - c) (1 - g)`` above.

    Args:
        colour: [..., 3] in 0..1.
        mode: [...] number of each mode in `MODES`.

    Returns:
        base, below, above: [..., 3] each.
    """
    zero = np.zeros_like(colour)
    rest = 1 - colour
    number = mode[..., None]
    # One entry for each of `MODES`: normal, multiply, screen, overlay.
    base = np.choose(number, [colour, zero, colour, zero])
    below = np.choose(number, [zero, colour, rest, 2 * colour])
    above = np.choose(number, [zero, colour, rest, 2 * rest])
    return base, below, above
