"""Drawing of stripe samples: a print or weave under a line camera, and the defects of the test split."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_data.core.types import Doubles, Floats, Size

TARGET_ONLY: tuple[int, ...] = (0,)
DISTRACTOR_CHANNELS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2), (0, 1, 2), (1,), (2,))
LEAST_CHANGE = 0.05
"""Least change in gray levels; a weaker one is hard to see, so it is neither drawn nor in the mask."""
LEAST_AREA_PX = 6
"""Least visible pixels in each channel that shows the defect, or else it is drawn again."""
MARGIN_PX = 6
"""Distance between two defects, more than twice the largest misregistration."""

Window = tuple[int, int, int, int]
"""(top, left, bottom, right) px, with ends excluded."""


@dataclass(frozen=True, slots=True)
class StripePattern:
    """Pattern that the three repeats share.

    Attributes:
        runs_down: True if stripes follow the transport of the scan, False if they cross it.
        tilt_rad: Angle to that direction.
        period_px: Distance between two stripes.
        phase: Position of the first stripe, in periods.
        duty: Fraction of the period that a stripe covers.
        edge_px: Width of the blurred stripe edge.
        ground: Reflectance between the stripes.
        contrast: Reflectance that a stripe adds to the ground; negative for dark stripes.
        stripe_levels: Strength of each stripe, about 1, repeated after the last.
        weave_period_px: Length of one thread crossing along a stripe.
        weave_depth: Fraction of the contrast of a stripe that a crossing removes; 0 for a print.
        wander_px: Amplitude of the swing of a stripe to each side.
        wander_length_px: Length of one swing along the stripe.
    """

    runs_down: bool
    tilt_rad: float
    period_px: float
    phase: float
    duty: float
    edge_px: float
    ground: float
    contrast: float
    stripe_levels: Doubles
    weave_period_px: float
    weave_depth: float
    wander_px: float
    wander_length_px: float

    def locate(self, y: Doubles, x: Doubles) -> tuple[Doubles, Doubles]:
        """Return the pattern coordinates of points.

        Returns:
            The stripe coordinate (its floor is the number of the stripe, .5 the center line) and
            the position along the stripe in px.
        """
        # Stripes that run down change across the columns.
        across, along = (x, y) if self.runs_down else (y, x)
        cos, sin = np.cos(self.tilt_rad), np.sin(self.tilt_rad)
        distance_px = across * sin + along * cos
        swing_px = self.wander_px * np.sin(2 * np.pi * distance_px / self.wander_length_px)
        return (across * cos - along * sin + swing_px) / self.period_px + self.phase, distance_px

    def stripe_part(self, stripe: Doubles, along_px: Doubles) -> Doubles:
        """Return the reflectance that stripes add to the ground, at coordinates from ``locate``."""
        inside_px = (self.duty / 2 - np.abs(stripe % 1 - 0.5)) * self.period_px
        cover = np.clip(0.5 + inside_px / self.edge_px, 0, 1)
        number = np.floor(stripe)
        # Threads of neighbouring stripes cross half a period apart, as in plain weave.
        crossing = 0.5 + 0.5 * np.cos(2 * np.pi * (along_px / self.weave_period_px + number / 2))
        level = self.stripe_levels[number.astype(np.int64) % len(self.stripe_levels)]
        return np.asarray(
            self.contrast * level * cover**2 * (3 - 2 * cover) * (1 - self.weave_depth * crossing)
        )


@dataclass(frozen=True, slots=True)
class CameraView:
    """View of one repeat by the camera.

    Attributes:
        shift_px: (y, x) misregistration to the target at the middle row.
        drift_px: Increase of the misregistration from the middle row to the last.
        gain: Factor on all gray levels.
        offset: Black level.
        gradient: (y, x) change of the light from the middle to the image border.
        vignette: Light lost at the left and right border.
        noise: Standard deviation of the sensor noise at full light.
        mottle: Standard deviation of the blotchy substrate.
        column_spread: Standard deviation of the gains of the sensor columns.
    """

    shift_px: tuple[float, float]
    drift_px: tuple[float, float]
    gain: float
    offset: float
    gradient: tuple[float, float]
    vignette: float
    noise: float
    mottle: float
    column_spread: float

    def displace(self, y: Doubles, x: Doubles, height_px: int) -> tuple[Doubles, Doubles]:
        """Return the coordinates of the pattern under the pixels (y, x)."""
        swing = 2 * y / height_px - 1
        seen_y = y + self.shift_px[0] + self.drift_px[0] * swing
        seen_x = x + self.shift_px[1] + self.drift_px[1] * swing
        return seen_y, seen_x

    def light(self, y: Doubles, x: Doubles, shape: Size) -> Doubles:
        """Return the factor from reflectance to gray level at the pixels (y, x)."""
        rows, columns = 2 * y / shape[0] - 1, 2 * x / shape[1] - 1
        shading = (
            1 + self.gradient[0] * rows + self.gradient[1] * columns - self.vignette * columns**2
        )
        return np.asarray(self.gain * shading)


def draw_pattern(rng: np.random.Generator) -> StripePattern:
    """Draw a random pattern: three in four run down the image, half are woven, half are darker than the ground."""
    dark_level = rng.uniform(0.22, 0.32)
    bright_level = dark_level + rng.uniform(0.24, 0.42)
    dark_stripes = rng.random() < 0.5
    # Evenly on a logarithmic scale from 6 to 24 px.
    period_px = 6 * 4 ** rng.random()
    return StripePattern(
        runs_down=bool(rng.random() < 0.75),
        tilt_rad=rng.uniform(-0.1, 0.1),
        period_px=period_px,
        phase=rng.random(),
        duty=rng.uniform(0.35, 0.65),
        edge_px=rng.uniform(2, min(4.5, period_px / 2.5)),
        ground=bright_level if dark_stripes else dark_level,
        contrast=(dark_level - bright_level) * (1 if dark_stripes else -1),
        stripe_levels=rng.uniform(0.88, 1.0, 61),
        weave_period_px=rng.uniform(5, 14),
        weave_depth=rng.uniform(0.15, 0.45) if rng.random() < 0.5 else 0.0,
        wander_px=rng.uniform(0, 1.5),
        wander_length_px=rng.uniform(150, 600),
    )


def draw_views(rng: np.random.Generator) -> list[CameraView]:
    """Draw the views of target, ref1 and ref2.

    The references are out of register by up to 1 px in y and in x, to the same side, so that their
    mean is off as well, and the gains differ. The plain difference of target and mean reference
    therefore also responds without a defect.
    """
    # Both references shift to one side, so that their mean is out of register too.
    side = rng.choice([-1, 1], 2)
    gradient, vignette = rng.uniform(-0.07, 0.07, 2), rng.uniform(0.03, 0.14)
    noise = rng.uniform(0.007, 0.013)
    mottle, column_spread = rng.uniform(0.002, 0.005), rng.uniform(0.002, 0.005)
    views = []
    for moved in (0, 1, 1):
        shift = moved * side * rng.uniform(0.35, 0.75, 2)
        drift = moved * rng.uniform(-0.25, 0.25, 2)
        view_gradient = gradient + rng.uniform(-0.045, 0.045, 2)
        views.append(
            CameraView(
                shift_px=(float(shift[0]), float(shift[1])),
                drift_px=(float(drift[0]), float(drift[1])),
                gain=rng.uniform(0.68, 1.05),
                offset=rng.uniform(0.0, 0.03),
                gradient=(float(view_gradient[0]), float(view_gradient[1])),
                vignette=vignette,
                noise=noise,
                mottle=mottle,
                column_spread=column_spread,
            )
        )
    return views


def expose(
    pattern: StripePattern, view: CameraView, shape: Size, rng: np.random.Generator
) -> Floats:
    """Render one repeat without defects.

    Returns:
        grey: [H, W] float32, within 0..1 except for rare noise.
    """
    import cv2

    y, x = pixel_grid(0, 0, *shape)
    reflectance = pattern.ground + pattern.stripe_part(
        *pattern.locate(*view.displace(y, x, shape[0]))
    )
    blotches = cv2.GaussianBlur(rng.standard_normal(shape, dtype=np.float32), (0, 0), 2.0)
    # A Gaussian of sigma 2 keeps 1 / (2 sigma sqrt(pi)) of the deviation of white noise.
    reflectance += view.mottle * 4 * np.sqrt(np.pi) * blotches
    columns = 1 + view.column_spread * rng.standard_normal(shape[1])
    grey = view.light(y, x, shape) * columns * reflectance + view.offset
    # Photon noise grows with the square root of the light.
    shot_noise = (
        view.noise * np.sqrt(np.maximum(grey, 0.05)) * rng.standard_normal(shape, dtype=np.float32)
    )
    return np.asarray(grey + shot_noise, dtype=np.float32)


def pixel_grid(top: int, left: int, bottom: int, right: int) -> tuple[Doubles, Doubles]:
    """Return the row and column coordinates of a window, [h, 1] and [1, w], ends excluded."""
    rows, columns = (
        np.arange(top, bottom, dtype=np.float64),
        np.arange(left, right, dtype=np.float64),
    )
    return rows[:, None], columns[None]


@dataclass(frozen=True, slots=True)
class DrawnScratch:
    """Scratch: a thin curve that brightens or darkens.

    Attributes:
        points_yx: [N, 2] points of the curve, a quarter px apart.
        strengths: [N] change of reflectance at each point.
        width_px: Width of the curve.
    """

    points_yx: Doubles
    strengths: Doubles
    width_px: float

    def change(self, pattern: StripePattern, y: Doubles, x: Doubles) -> Doubles:
        """Return the change of reflectance at (y, x), which does not depend on stripes."""
        offset_y = y[..., None] - self.points_yx[:, 0]
        offset_x = x[..., None] - self.points_yx[:, 1]
        squared_px = offset_y**2 + offset_x**2
        nearest = squared_px.argmin(axis=-1)
        distance_px = np.sqrt(squared_px.min(axis=-1))
        return np.asarray(
            self.strengths[nearest] * np.clip(self.width_px / 2 + 0.5 - distance_px, 0, 1)
        )


@dataclass(frozen=True, slots=True)
class MissingPiece:
    """Missing piece of one stripe, where the ground shows through.

    Attributes:
        stripe: Number of the stripe.
        start_px: Start position along the stripe.
        stop_px: End position along the stripe.
        share: Fraction of the stripe that is missing.
    """

    stripe: int
    start_px: float
    stop_px: float
    share: float

    def change(self, pattern: StripePattern, y: Doubles, x: Doubles) -> Doubles:
        """Return the change of reflectance at (y, x)."""
        stripe, along_px = pattern.locate(y, x)
        inside = np.clip(np.minimum(along_px - self.start_px, self.stop_px - along_px) + 0.5, 0, 1)
        is_stripe = np.floor(stripe) == self.stripe
        return np.asarray(-self.share * inside * is_stripe * pattern.stripe_part(stripe, along_px))


@dataclass(frozen=True, slots=True)
class DrawnDefect:
    """One defect and its position.

    Attributes:
        kind: ``scratch`` or ``missing_piece``.
        channels: Channels that show it; (0,) is a true defect, anything else a distractor.
        window: Part of the image that it changes.
        form: Shape that changes the reflectance.
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
    shape: Size,
) -> list[DrawnDefect]:
    """Draw 3 to 8 true defects and 3 to 8 distractors that keep clear of each other.

    A small image may not have enough space for the last of them.
    """
    # True defects come first, so that distractors are missing if there is not enough space.
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
    defect: DrawnDefect, pattern: StripePattern, view: CameraView, shape: Size
) -> Floats:
    """Render the gray levels that a defect adds to one view, within the window of the defect.

    Returns:
        change: [h, w] float32, zero or at least ``LEAST_CHANGE`` in magnitude.
    """
    y, x = pixel_grid(*defect.window)
    y_seen, x_seen = view.displace(y, x, shape[0])
    reflectance = defect.form.change(pattern, *np.broadcast_arrays(y_seen, x_seen))
    change = reflectance * view.light(y, x, shape)
    return np.where(np.abs(change) >= LEAST_CHANGE, change, 0).astype(np.float32)


def _draw_defect(
    rng: np.random.Generator,
    pattern: StripePattern,
    shape: Size,
    channels: tuple[int, ...],
) -> DrawnDefect:
    centre = (rng.uniform(0, shape[0]), rng.uniform(0, shape[1]))
    if rng.random() < 0.5:
        scratch = _draw_scratch(rng, centre, longest_px=min(80.0, 0.5 * min(shape)))
        return DrawnDefect("scratch", channels, _surround(scratch.points_yx, reach_px=4), scratch)
    # The wider the stripe, the shorter the piece: all areas are near those of the training spots,
    # and none is easy to find by its size.
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
    # The direction changes linearly and quadratically along the way, for a smooth curve.
    heading = rng.uniform(0, np.pi) + rng.uniform(-1.2, 1.2) * steps + rng.uniform(-2, 2) * steps**2
    way = (
        np.cumsum(np.stack([np.sin(heading), np.cos(heading)], axis=1), axis=0)
        * length_px
        / len(steps)
    )
    strength = rng.uniform(0.14, 0.29) * rng.choice([-1, 1])
    beat = np.sin(2 * np.pi * steps * length_px / rng.uniform(6, 10))
    # Six of ten scratches are intermittent.
    body = np.clip(0.5 + 1.2 * beat, 0, 1) if rng.random() < 0.6 else 1 + 0.2 * beat
    ends = np.clip((0.5 - np.abs(steps)) * length_px / 4, 0.3, 1)
    return DrawnScratch(
        way - way.mean(axis=0) + centre, strength * body * ends, width_px=rng.uniform(1.2, 2.0)
    )


def _surround(points_yx: Doubles, reach_px: float) -> Window:
    low = np.floor(points_yx.min(axis=0) - reach_px)
    high = np.ceil(points_yx.max(axis=0) + reach_px)
    return int(low[0]), int(low[1]), int(high[0]) + 1, int(high[1]) + 1


def _lies_inside(window: Window, shape: Size) -> bool:
    return window[0] >= 0 and window[1] >= 0 and window[2] <= shape[0] and window[3] <= shape[1]


def _is_visible(defect: DrawnDefect, pattern: StripePattern, view: CameraView, shape: Size) -> bool:
    return int(np.count_nonzero(grey_change(defect, pattern, view, shape))) >= LEAST_AREA_PX


def _touch(one: Window, other: Window) -> bool:
    apart = (
        one[2] + MARGIN_PX <= other[0]
        or other[2] + MARGIN_PX <= one[0]
        or one[3] + MARGIN_PX <= other[1]
        or other[3] + MARGIN_PX <= one[1]
    )
    return not apart
