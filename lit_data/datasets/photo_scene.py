"""Drawn photographs: sky, hills and things, with the soft large shapes and the fine texture that pictures have."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def draw_photo(rng: np.random.Generator, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw one photograph.

    Args:
        rng: Where it comes from.
        size_px: (height, width).

    Returns:
        [3, H, W] uint8, R, G, B.
    """
    high, low = rng.uniform(0.2, 1, (3, 1, 1)), rng.uniform(0.1, 0.9, (3, 1, 1))
    share = np.linspace(0, 1, size_px[0])[:, None] + 0.3 * (_cloud(rng, size_px, 3, 1.0) - 0.5)
    image = (high + (low - high) * share.clip(0, 1)).astype(np.float32)
    for number in range(int(rng.integers(1, 4))):
        _draw_hill(image, rng, 0.25 + 0.2 * number)
    for _ in range(int(rng.integers(2, 9))):
        _draw_thing(image, rng)
    image += rng.normal(0, rng.uniform(0.004, 0.02), image.shape).astype(np.float32)
    return np.asarray(np.rint(image.clip(0, 1) * 255), np.uint8)


def draw_texture(rng: np.random.Generator, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw a grey surface: grains of many sizes, now and then with joints like those of brick or cloth.

    Returns:
        [H, W] uint8.
    """
    grey = rng.uniform(0.2, 0.5) + rng.uniform(0.2, 0.5) * _cloud(rng, size_px, 6, rng.uniform(0.4, 1.2))
    if rng.random() < 0.5:
        pitch, width = rng.integers(12, 60, 2), int(rng.integers(1, 4))
        rows, columns = np.arange(size_px[0])[:, None], np.arange(size_px[1])[None]
        shifted = columns + pitch[1] // 2 * (rows // pitch[0] % 2)
        joints = (rows % pitch[0] < width) | (shifted % pitch[1] < width)
        grey = np.where(joints, rng.uniform(0.2, 0.9), grey)
    return np.asarray(np.rint(grey.clip(0, 1) * 255), np.uint8)


def _draw_hill(image: Floats, rng: np.random.Generator, horizon: float) -> None:
    """Everything below a line that wanders."""
    height, width = image.shape[1:]
    line = height * (horizon + 0.5 * (_cloud(rng, (1, width), 4, 1.0)[0] - 0.5) + 0.2)
    inside = np.arange(height)[:, None] > line
    ground = rng.uniform(0.1, 0.7, (3, 1, 1)) * (0.6 + 0.8 * _cloud(rng, (height, width), 6, rng.uniform(0.3, 1)))
    np.copyto(image, ground.astype(np.float32), where=inside)


def _draw_thing(image: Floats, rng: np.random.Generator) -> None:
    """A lit ball, or a block with a pattern."""
    height, width = image.shape[1:]
    radius = rng.uniform(0.03, 0.2) * min(height, width)
    y, x = rng.uniform(0, height), rng.uniform(0, width)
    rows, columns = (np.arange(height)[:, None] - y) / radius, (np.arange(width)[None] - x) / radius
    colour = rng.uniform(0, 1, (3, 1, 1))
    if rng.random() < 0.5:
        inside, shade = rows**2 + columns**2 < 1, 1.1 - 0.5 * np.hypot(rows + 0.4, columns + 0.4)
    else:
        inside = np.maximum(abs(rows), abs(columns)) < 1
        shade = 0.7 + 0.3 * np.sign(np.sin(rng.uniform(3, 20) * columns) * np.sin(rng.uniform(3, 20) * rows))
    np.copyto(image, (colour * shade).astype(np.float32), where=inside)


def _cloud(rng: np.random.Generator, size_px: tuple[int, int], octaves: int, decay: float) -> Floats:
    """[H, W] about 0..1: noise of ever finer grain, each octave weaker than the last by 2 ** decay."""
    import cv2

    cloud, total = np.zeros(size_px, np.float32), 0.0
    for octave in range(octaves):
        cells = tuple(min(size, 2 ** (octave + 1) + 1) for size in size_px)
        noise = rng.random(cells, dtype=np.float32)
        weight = 2.0 ** (-decay * octave)
        cloud += weight * cv2.resize(noise, size_px[::-1], interpolation=cv2.INTER_CUBIC)
        total += weight
    return np.asarray(cloud / np.float32(total))
