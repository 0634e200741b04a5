"""Marks that nobody could see get another colour: decided on the host, from a few pixels under each mark."""

from dataclasses import replace
from typing import Final

import numpy as np

from lit_data.synthesis.families.base import Floats
from lit_data.synthesis.watermarks.plan import WatermarkPlan
from lit_data.synthesis.watermarks.spec import MODES
from lit_data.types import Array

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
    """Paint marks in black, white or grey that would leave too much of what lies under them as it is.

    What then is still too faint for the contrast of the ground gets more opacity, at most the largest of the
    specification.

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
    painted = replace(plan, mode=np.where(hidden, mode, plan.mode), colour=np.where(hidden[:, None], best, plan.colour))
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
    change = np.abs(mix(ground, colour[:, None], mode[:, None]) - ground).max(2) * plan.opacity[:, None]
    shares: Floats = (change >= plan.spec.least_change).mean(1, dtype=np.float32)
    return shares


def mix(ground: Floats, colour: Floats, mode: Array) -> Floats:
    """What a mark of full opacity makes of a ground: [..., 3] in 0..1; see `find_lines`."""
    base, below, above = find_lines(colour, mode)
    mixed: Floats = base + below * np.minimum(ground, 0.5) + above * np.maximum(ground - np.float32(0.5), 0)
    return mixed


def find_lines(colour: Floats, mode: Array) -> tuple[Floats, Floats, Floats]:
    """The blend modes of W3C "Compositing and Blending Level 1", each as two lines over the ground g that meet at 1/2.

    A mark of full opacity makes ``base + below * min(g, 1/2) + above * max(g - 1/2, 0)`` of a ground: its colour c with
    `normal`, ``c g`` with `multiply`, ``c + g - c g`` with `screen`, and with `overlay` ``2 c g`` below 1/2 and
    ``1 - 2 (1 - c) (1 - g)`` above.

    Args:
        colour: [..., 3] in 0..1.
        mode: [...] number of each mode in `MODES`.

    Returns:
        base, below, above: [..., 3] each.
    """
    zero, rest = np.zeros_like(colour), 1 - colour
    lines = (colour, zero, zero), (zero, colour, colour), (colour, rest, rest), (zero, 2 * colour, 2 * rest)
    number = mode[..., None]
    base, below, above = (np.choose(number, [each[part] for each in lines]) for part in range(3))
    return base, below, above
