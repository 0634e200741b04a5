"""Texture of stripe samples: a print or weave, seen by a line camera in three repeats.

Everything is evaluated at given (y, x) coordinates in px, so a repeat can be shifted by less than
one pixel, and a window costs no more than its own pixels. Reflectance and grey levels are in 0..1;
shape is (height, width) in px.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StripePattern:
    """Pattern that the three repeats share.

    Attributes:
        runs_down: Stripes follow the rows of the scan (the transport), else they lie across it.
        tilt_rad: Angle to that direction.
        period_px: Distance between two stripes.
        phase: Position of the first stripe, in periods.
        duty: Share of the period that a stripe covers.
        edge_px: Width of the blurred stripe edge.
        ground: Reflectance between the stripes.
        contrast: What a stripe adds to the ground; negative for dark stripes.
        stripe_levels: Strength of each stripe, repeated after the last, about 1.
        weave_period_px: Length of one thread crossing along a stripe.
        weave_depth: How much of a stripe's contrast a crossing takes away; 0 for a plain print.
        wander_px: How far a stripe swings to each side.
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
    stripe_levels: Floats
    weave_period_px: float
    weave_depth: float
    wander_px: float
    wander_length_px: float

    def locate(self, y: Floats, x: Floats) -> tuple[Floats, Floats]:
        """Say where a point lies in the pattern.

        Returns:
            The stripe coordinate (its floor is the stripe's number, .5 the centre line) and the px
            along the stripe.
        """
        across, along = (x, y) if self.runs_down else (y, x)
        cos, sin = np.cos(self.tilt_rad), np.sin(self.tilt_rad)
        distance_px = across * sin + along * cos
        swing_px = self.wander_px * np.sin(2 * np.pi * distance_px / self.wander_length_px)
        return (across * cos - along * sin + swing_px) / self.period_px + self.phase, distance_px

    def stripe_part(self, stripe: Floats, along_px: Floats) -> Floats:
        """Return what the stripes add to the ground, for coordinates as ``locate`` gives them."""
        inside_px = (self.duty / 2 - np.abs(stripe % 1 - 0.5)) * self.period_px
        cover = np.clip(0.5 + inside_px / self.edge_px, 0, 1)
        number = np.floor(stripe)
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
        drift_px: What the misregistration gains from the middle row to the last.
        gain: Factor on all grey levels.
        offset: Black level.
        gradient: (y, x) change of the light from the middle to the image border.
        vignette: Light lost at the left and right border.
        noise: Standard deviation of the sensor noise at full light.
        mottle: Standard deviation of the blotchy substrate.
        column_spread: Standard deviation of the gains of the sensor's columns.
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

    def displace(self, y: Floats, x: Floats, height_px: int) -> tuple[Floats, Floats]:
        """Return the pattern's coordinates under the pixels (y, x)."""
        swing = 2 * y / height_px - 1
        return y + self.shift_px[0] + self.drift_px[0] * swing, x + self.shift_px[
            1
        ] + self.drift_px[1] * swing

    def light(self, y: Floats, x: Floats, shape: tuple[int, int]) -> Floats:
        """Return the factor from reflectance to grey level at the pixels (y, x)."""
        rows, columns = 2 * y / shape[0] - 1, 2 * x / shape[1] - 1
        shading = (
            1 + self.gradient[0] * rows + self.gradient[1] * columns - self.vignette * columns**2
        )
        return np.asarray(self.gain * shading)


def draw_pattern(rng: np.random.Generator) -> StripePattern:
    """Draw a stripe pattern: three in four run down the image, half are woven, half are darker than the ground."""
    dark_level = rng.uniform(0.22, 0.32)
    bright_level = dark_level + rng.uniform(0.24, 0.42)
    dark_stripes = rng.random() < 0.5
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

    The references are out of register by up to 1 px in y and in x, to the same side, so their mean
    is off as well, and the gains differ: the plain difference of target and mean reference responds
    where there is no defect.
    """
    side = rng.choice([-1, 1], 2)
    gradient, vignette = rng.uniform(-0.07, 0.07, 2), rng.uniform(0.03, 0.14)
    noise, mottle, column_spread = (
        rng.uniform(0.007, 0.013),
        rng.uniform(0.002, 0.005),
        rng.uniform(0.002, 0.005),
    )
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
    pattern: StripePattern, view: CameraView, shape: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Render one repeat without defects.

    Returns:
        grey: [H, W] float32, within 0..1 but for rare noise.
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
    shot_noise = (
        view.noise * np.sqrt(np.maximum(grey, 0.05)) * rng.standard_normal(shape, dtype=np.float32)
    )
    return np.asarray(grey + shot_noise, dtype=np.float32)


def pixel_grid(top: int, left: int, bottom: int, right: int) -> tuple[Floats, Floats]:
    """Return the row and column coordinates of a window, [h, 1] and [1, w], ends excluded."""
    return np.arange(top, bottom, dtype=np.float64)[:, None], np.arange(
        left, right, dtype=np.float64
    )[None, :]
