"""One stripe sample from its numbers: pattern, three views, defects and mask."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.stripe_defects import Defect, draw_defects, grey_change
from lit_data.datasets.stripe_texture import draw_pattern, draw_views, expose


@dataclass(frozen=True, slots=True)
class StripeSample:
    """One rendered sample.

    Attributes:
        clean: [3, H, W] float32 in 0..1, the image without its defects, noise included.
        image: [3, H, W] float32 in 0..1.
        mask: [H, W] bool, true defects of the target.
        defects: One row per defect as in ``defects.json``, without the image's name.
    """

    clean: NDArray[np.float32]
    image: NDArray[np.float32]
    mask: NDArray[np.bool_]
    defects: list[dict[str, Any]]


def render_sample(seed: int, number: int, shape: tuple[int, int], *, with_defects: bool) -> StripeSample:
    """Render one sample; pattern, noise and defects have random streams of their own.

    Args:
        seed: Seed of the set.
        number: Image number in the set.
        shape: (height, width) in px.
        with_defects: Draw defects into it.
    """
    looks, noise, flaws = (
        np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, 0, stream])) for stream in range(3)
    )
    pattern, views = draw_pattern(looks), draw_views(looks)
    clean = np.stack([expose(pattern, view, shape, noise) for view in views]).clip(0, 1)
    image, mask, rows = clean.copy(), np.zeros(shape, dtype=np.bool_), []
    for defect in draw_defects(flaws, pattern, views, shape) if with_defects else []:
        part = np.s_[defect.window[0] : defect.window[2], defect.window[1] : defect.window[3]]
        shown = np.zeros(image[0][part].shape, dtype=np.bool_)
        for channel in defect.channels:
            change = grey_change(defect, pattern, views[channel], shape)
            image[channel][part] += change
            shown |= change != 0
        if defect.is_true:
            mask[part] |= shown
        rows.append(_describe(defect, shown))
    return StripeSample(clean, image.clip(0, 1), mask, rows)


def _describe(defect: Defect, shown: NDArray[np.bool_]) -> dict[str, Any]:
    rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
    top, left = defect.window[:2]
    return {
        "kind": defect.kind,
        "role": "true" if defect.is_true else "distractor",
        "channels": [("target", "ref1", "ref2")[channel] for channel in defect.channels],
        "box_px": [int(top + rows[0]), int(left + columns[0]), int(top + rows[-1] + 1), int(left + columns[-1] + 1)],
    }
