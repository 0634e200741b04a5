"""Surfaces of a part, and defects on them, as `lit_data.synthesis` draws them."""

from dataclasses import replace

import numpy as np

from lit_data.core.types import Bytes, Floats, Size
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan

GREY_LEVELS = ValueRange(0, 255, whole=True)


def draw_texture(rng: np.random.Generator, size_px: Size) -> Bytes:
    """Draw a gray surface with grain of many sizes.

    Some surfaces have joints like those of brick or cloth.

    Returns:
        [H, W] uint8.
    """
    darkest, span, decay = rng.uniform((0.2, 0.2, 0.4), (0.5, 0.5, 1.2)).tolist()
    grey = darkest + span * draw_cloud(rng, size_px, 6, decay)
    if rng.random() < 0.5:
        pitch, width = rng.integers(12, 60, 2), int(rng.integers(1, 4))
        rows, columns = np.arange(size_px[0])[:, None], np.arange(size_px[1])[None]
        # Every second row of bricks is shifted by half a brick.
        shifted = columns + pitch[1] // 2 * (rows // pitch[0] % 2)
        joints = (rows % pitch[0] < width) | (shifted % pitch[1] < width)
        grey = np.where(joints, rng.uniform(0.2, 0.9), grey)
    return np.asarray(np.rint(grey.clip(0, 1) * 255), np.uint8)


def draw_cloud(rng: np.random.Generator, size_px: Size, octaves: int, decay: float) -> Floats:
    """Draw noise of increasingly fine grain, each octave weaker than the last by 2 ** decay.

    Returns:
        [H, W] values of about 0..1.
    """
    import cv2

    cloud, total = np.zeros(size_px, np.float32), 0.0
    for octave in range(octaves):
        cells = tuple(min(size, 2 ** (octave + 1) + 1) for size in size_px)
        noise = rng.random(cells, dtype=np.float32)
        # Finer octaves are weaker, so that a larger decay makes the grain smoother.
        weight = 2.0 ** (-decay * octave)
        cloud += weight * cv2.resize(noise, size_px[::-1], interpolation=cv2.INTER_CUBIC)
        total += weight
    return np.asarray(cloud / np.float32(total))


def plan_defects(
    spec: DefectSpec, seed: int, number: int, shape: tuple[int, int, int]
) -> DefectPlan:
    """Plan the defects of one sample, which all of its channels show.

    Args:
        spec: Distribution of the defects.
        seed: Seed of the dataset.
        number: Number of the sample in the dataset.
        shape: (C, H, W) of the sample.
    """
    channels, height_px, width_px = shape
    plan = sample_plan(spec, seed, 0, [number], (1, height_px, width_px))
    return replace(plan, channels=np.ones((len(plan), channels), np.bool_))
