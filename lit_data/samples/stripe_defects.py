"""The defects of the stripe samples' test split: thin scratches and missing pieces of a stripe.

The training synthesis makes Gaussian spots only: a model that finds these has learnt to compare,
not to know a shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_data.samples.stripe_texture import CameraView, Floats, StripePattern, pixel_grid

TARGET_ONLY: tuple[int, ...] = (0,)
DISTRACTOR_CHANNELS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2), (0, 1, 2), (1,), (2,))
LEAST_CHANGE = (
    0.05  # grey levels; a weaker change is hard to see, so it is neither drawn nor in the mask
)
LEAST_AREA_PX = 6  # in each channel that shows the defect, else it is drawn anew
MARGIN_PX = 6  # between two defects, more than twice the largest misregistration

Window = tuple[int, int, int, int]
"""(top, left, bottom, right) in px, ends excluded."""


@dataclass(frozen=True, slots=True)
class DrawnScratch:
    """A thin curve that brightens or darkens.

    Attributes:
        points_yx: [N, 2] points of the curve, a quarter px apart.
        strengths: [N] change of reflectance at each point.
        width_px: Width of the curve.
    """

    points_yx: Floats
    strengths: Floats
    width_px: float

    def change(self, pattern: StripePattern, y: Floats, x: Floats) -> Floats:
        """Return the change of reflectance at (y, x), which all stripes take alike."""
        offset_y, offset_x = (
            y[..., None] - self.points_yx[:, 0],
            x[..., None] - self.points_yx[:, 1],
        )
        squared_px = offset_y**2 + offset_x**2
        nearest = squared_px.argmin(axis=-1)
        distance_px = np.sqrt(squared_px.min(axis=-1))
        return np.asarray(
            self.strengths[nearest] * np.clip(self.width_px / 2 + 0.5 - distance_px, 0, 1)
        )


@dataclass(frozen=True, slots=True)
class MissingPiece:
    """A stretch of one stripe where the ground shows through.

    Attributes:
        stripe: Number of the stripe.
        start_px: Begin along the stripe.
        stop_px: End along the stripe.
        share: How much of the stripe is gone.
    """

    stripe: int
    start_px: float
    stop_px: float
    share: float

    def change(self, pattern: StripePattern, y: Floats, x: Floats) -> Floats:
        """Return the change of reflectance at (y, x)."""
        stripe, along_px = pattern.locate(y, x)
        inside = np.clip(np.minimum(along_px - self.start_px, self.stop_px - along_px) + 0.5, 0, 1)
        return np.asarray(
            -self.share
            * inside
            * (np.floor(stripe) == self.stripe)
            * pattern.stripe_part(stripe, along_px)
        )


@dataclass(frozen=True, slots=True)
class DrawnDefect:
    """One defect and where it shows.

    Attributes:
        kind: ``scratch`` or ``missing_piece``.
        channels: Channels that show it; (0,) alone is a true defect, everything else a distractor.
        window: Part of the image outside of which it changes nothing.
        form: What it does to the reflectance.
    """

    kind: str
    channels: tuple[int, ...]
    window: Window
    form: DrawnScratch | MissingPiece

    @property
    def is_true(self) -> bool:
        """Return True if it belongs in the mask."""
        return self.channels == TARGET_ONLY


def draw_defects(
    rng: np.random.Generator,
    pattern: StripePattern,
    views: Sequence[CameraView],
    shape: tuple[int, int],
) -> list[DrawnDefect]:
    """Draw 3 to 8 true defects and 3 to 8 distractors that keep clear of each other.

    A small image may have no room left for the last of them.
    """
    channels_of_defects = [TARGET_ONLY] * int(rng.integers(3, 9))
    channels_of_defects += [
        DISTRACTOR_CHANNELS[int(i)]
        for i in rng.integers(0, len(DISTRACTOR_CHANNELS), rng.integers(3, 9))
    ]
    defects: list[DrawnDefect] = []
    for channels in channels_of_defects:
        for _ in range(100):
            defect = _draw_defect(rng, pattern, shape, channels)
            if (
                _lies_inside(defect.window, shape)
                and not any(_touch(defect.window, other.window) for other in defects)
                and all(_is_visible(defect, pattern, views[channel], shape) for channel in channels)
            ):
                defects.append(defect)
                break
    return defects


def grey_change(
    defect: DrawnDefect, pattern: StripePattern, view: CameraView, shape: tuple[int, int]
) -> NDArray[np.float32]:
    """Render what a defect adds to the grey levels of one view, within the defect's window.

    Returns:
        change: [h, w] float32, zero or at least ``LEAST_CHANGE`` in size.
    """
    y, x = pixel_grid(*defect.window)
    y_seen, x_seen = view.displace(y, x, shape[0])
    change = defect.form.change(pattern, *np.broadcast_arrays(y_seen, x_seen)) * view.light(
        y, x, shape
    )
    return np.where(np.abs(change) >= LEAST_CHANGE, change, 0).astype(np.float32)


def _draw_defect(
    rng: np.random.Generator,
    pattern: StripePattern,
    shape: tuple[int, int],
    channels: tuple[int, ...],
) -> DrawnDefect:
    centre = (rng.uniform(0, shape[0]), rng.uniform(0, shape[1]))
    if rng.random() < 0.5:
        scratch = _draw_scratch(rng, centre, longest_px=min(80.0, 0.5 * min(shape)))
        return DrawnDefect("scratch", channels, _surround(scratch.points_yx, reach_px=4), scratch)
    # The wider the stripe the shorter the piece: all are near the training spots in area, none is
    # trivial by its size.
    length_px = rng.uniform(3, np.clip(45 / (pattern.duty * pattern.period_px), 4, 9))
    stripe, along_px = pattern.locate(np.array(centre[0]), np.array(centre[1]))
    piece = MissingPiece(
        stripe=int(np.floor(stripe)),
        start_px=float(along_px - length_px / 2),
        stop_px=float(along_px + length_px / 2),
        share=rng.uniform(0.5, 1.0),
    )
    along_reach, across_reach = length_px / 2 + 3, pattern.period_px + 5
    reach = (along_reach, across_reach) if pattern.runs_down else (across_reach, along_reach)
    corners = np.array([np.subtract(centre, reach), np.add(centre, reach)])
    return DrawnDefect("missing_piece", channels, _surround(corners, reach_px=0), piece)


def _draw_scratch(
    rng: np.random.Generator, centre: tuple[float, float], longest_px: float
) -> DrawnScratch:
    length_px = rng.uniform(10, longest_px)
    steps = np.linspace(-0.5, 0.5, int(4 * length_px))
    heading = rng.uniform(0, np.pi) + rng.uniform(-1.2, 1.2) * steps + rng.uniform(-2, 2) * steps**2
    way = (
        np.cumsum(np.stack([np.sin(heading), np.cos(heading)], axis=1), axis=0)
        * length_px
        / len(steps)
    )
    strength = rng.uniform(0.14, 0.29) * rng.choice([-1, 1])
    beat = np.sin(2 * np.pi * steps * length_px / rng.uniform(6, 10))
    body = np.clip(0.5 + 1.2 * beat, 0, 1) if rng.random() < 0.6 else 1 + 0.2 * beat
    ends = np.clip((0.5 - np.abs(steps)) * length_px / 4, 0.3, 1)
    return DrawnScratch(
        way - way.mean(axis=0) + centre, strength * body * ends, width_px=rng.uniform(1.2, 2.0)
    )


def _surround(points_yx: Floats, reach_px: float) -> Window:
    low, high = (
        np.floor(points_yx.min(axis=0) - reach_px),
        np.ceil(points_yx.max(axis=0) + reach_px),
    )
    return int(low[0]), int(low[1]), int(high[0]) + 1, int(high[1]) + 1


def _lies_inside(window: Window, shape: tuple[int, int]) -> bool:
    return window[0] >= 0 and window[1] >= 0 and window[2] <= shape[0] and window[3] <= shape[1]


def _is_visible(
    defect: DrawnDefect, pattern: StripePattern, view: CameraView, shape: tuple[int, int]
) -> bool:
    return int(np.count_nonzero(grey_change(defect, pattern, view, shape))) >= LEAST_AREA_PX


def _touch(one: Window, other: Window) -> bool:
    apart = (
        one[2] + MARGIN_PX <= other[0]
        or other[2] + MARGIN_PX <= one[0]
        or one[3] + MARGIN_PX <= other[1]
        or other[3] + MARGIN_PX <= one[1]
    )
    return not apart
