"""Textures and defects in them, drawn from random numbers alone, for `benchmarks.train_encoder`."""

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]
Rng = np.random.Generator


def draw_texture(rng: Rng, height: int, width: int) -> Image:
    """Draw a texture [height, width, 3] of about 0..1.

    It has one or two processes, colours, light, and blur and noise of a camera.
    """
    grey = _normalise(_PROCESSES[rng.integers(len(_PROCESSES))](rng, height, width))
    if rng.random() < 0.4:
        other = _normalise(_PROCESSES[rng.integers(len(_PROCESSES))](rng, height, width))
        fraction = rng.uniform(0.1, 0.5)
        if rng.random() < 0.3:
            mixed = grey * (1 + fraction * other)
        else:
            mixed = (1 - fraction) * grey + fraction * other
        grey = _normalise(mixed)
    if rng.random() < 0.3:
        grey = np.tanh(grey * rng.uniform(0.7, 2.5))
    if rng.random() < 0.4:
        grey = cv2.GaussianBlur(grey, (0, 0), rng.uniform(0.4, 1.8))
    image = _colour(rng, _normalise(grey))
    if rng.random() < 0.5:
        y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
        slope = rng.normal(0, 0.04, 2)
        image = image + (slope[0] * y + slope[1] * x)[..., None].astype(np.float32)
    noise = rng.exponential(0.012)
    channels = 1 if rng.random() < 0.6 else 3
    return (image + rng.normal(0, noise, (height, width, channels))).astype(np.float32)


def draw_defect(rng: Rng, crop: Image, canvas: Image) -> tuple[Image, Image]:
    """Draw one or two defects into a crop.

    Args:
        rng: Draws.
        crop: [h, w, 3] of the texture.
        canvas: The whole texture.

    Returns:
        The crop [h, w, 3] with its defects, and their mask [h, w] in {0, 1}.
    """
    image = crop.copy()
    mask = np.zeros(crop.shape[:2], np.float32)
    spread = max(float(canvas.std()), 0.02)
    for _ in range(rng.integers(1, 3)):
        image, alpha = _DEFECTS[rng.integers(len(_DEFECTS))](rng, image, spread)
        mask = np.maximum(mask, (alpha > 0.3).astype(np.float32))
    return image, mask


def _normalise(field: NDArray[np.floating[Any]]) -> Image:
    narrow = np.asarray(field, np.float32)
    return np.asarray((narrow - narrow.mean()) / max(float(narrow.std()), 1e-4), np.float32)


def _colour(rng: Rng, grey: Image) -> Image:
    base, contrast = rng.uniform(0.25, 0.75), rng.uniform(0.03, 0.2)
    if rng.random() < 0.5:
        return np.repeat((base + contrast * grey)[..., None], 3, axis=2).astype(np.float32)
    tint = rng.normal(0, 0.12, 3)
    axis = rng.normal(1, 0.4, 3)
    image = base + tint + contrast * grey[..., None] * axis
    if rng.random() < 0.3:
        other = _normalise(_draw_smooth(rng, grey.shape, 1, 12))
        strength = contrast * rng.uniform(0.2, 0.8)
        image = image + strength * other[..., None] * rng.normal(0, 1, 3)
    return np.asarray(image, np.float32)


def _draw_smooth(rng: Rng, shape: tuple[int, ...], low_px: float, high_px: float) -> Image:
    """Draw noise that is blurred by a sigma between two bounds."""
    noise = rng.normal(0, 1, shape).astype(np.float32)
    return np.asarray(cv2.GaussianBlur(noise, (0, 0), rng.uniform(low_px, high_px)), np.float32)


def _coordinates(rng: Rng, height: int, width: int, warp: float = 0.5) -> tuple[Image, Image]:
    """Return rows and columns, turned and often warped."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    angle = rng.choice([0, np.pi / 2, rng.uniform(0, np.pi)])
    y, x = y * np.cos(angle) - x * np.sin(angle), y * np.sin(angle) + x * np.cos(angle)
    if rng.random() < warp:
        strength, sigma = rng.uniform(0.3, 4), rng.uniform(5, 30)
        y_noise, x_noise = rng.normal(0, 1, (2, height, width)).astype(np.float32)
        y = y + strength * _normalise(cv2.GaussianBlur(y_noise, (0, 0), sigma))
        x = x + strength * _normalise(cv2.GaussianBlur(x_noise, (0, 0), sigma))
    return y.astype(np.float32), x.astype(np.float32)


def _spectral(rng: Rng, height: int, width: int) -> Image:
    """Draw noise of a random spectrum: a power law, stretched along an axis, often with a band."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    angle, stretch = rng.uniform(0, np.pi), np.exp(rng.normal(0, 0.8))
    u, v = fx * np.cos(angle) + fy * np.sin(angle), -fx * np.sin(angle) + fy * np.cos(angle)
    radius = np.sqrt((u * stretch) ** 2 + (v / stretch) ** 2) + 1e-3
    amplitude = radius ** -rng.uniform(0, 2.2) * (radius > 1 / 60)
    if rng.random() < 0.5:
        centre, octaves = np.exp(rng.uniform(np.log(0.03), np.log(0.3))), rng.uniform(0.2, 1)
        amplitude = amplitude * np.exp(-(np.log2(radius / centre) ** 2) / (2 * octaves**2))
    white = np.fft.rfft2(rng.normal(0, 1, (height, width)))
    field = _normalise(np.fft.irfft2(white * amplitude, (height, width)))
    kind = rng.integers(4)
    if kind == 0:
        field = np.abs(field)
    elif kind == 1:
        field = np.sign(field - np.float32(rng.uniform(-1, 1)))
    return field


def _waves(rng: Rng, height: int, width: int) -> Image:
    """Stripes of one period, from sines to narrow lines."""
    _, x = _coordinates(rng, height, width)
    period = np.exp(rng.uniform(np.log(3), np.log(40)))
    phase = 2 * np.pi * x / period
    steepness = rng.uniform(0.3, 6)
    wave = steepness * (np.sin(phase) - rng.uniform(-0.8, 0.8))
    return np.asarray(np.tanh(wave), np.float32)


def _weave(rng: Rng, height: int, width: int) -> Image:
    """Threads over and under each other."""
    y, x = _coordinates(rng, height, width)
    period = np.exp(rng.uniform(np.log(6), np.log(28)))
    u, v = x / period, y / period * rng.uniform(0.7, 1.4)
    step = rng.integers(1, 4)
    over = (np.floor(u) + step * np.floor(v)) % (step + 1) < 1
    across, along = np.abs(np.sin(np.pi * u)), np.abs(np.sin(np.pi * v))
    field = np.where(over, across, along * rng.uniform(0.6, 1))
    shades = rng.normal(0, rng.uniform(0, 0.2), 4096)
    number = np.floor(u).astype(int) * 61 + np.floor(v).astype(int) * 17
    return np.asarray(field + shades[number % 4096], np.float32)


def _lattice(rng: Rng, height: int, width: int) -> Image:
    """Bricks, tiles or holes on a lattice, each with a shade of its own."""
    y, x = _coordinates(rng, height, width)
    tall, wide = np.exp(rng.uniform(np.log(8), np.log(48), 2))
    row = np.floor(y / tall)
    x = x + (row % 2) * wide * rng.choice([0, 0.5])
    column = np.floor(x / wide)
    u, v = x / wide - column - 0.5, y / tall - row - 0.5
    shades = rng.normal(0, rng.uniform(0, 0.6), 4096)
    shade = shades[(row.astype(int) * 61 + column.astype(int) * 17) % 4096]
    if rng.random() < 0.5:
        radius = rng.uniform(0.15, 0.42)
        inside = 1 / (1 + np.exp((np.hypot(u, v) - radius) * 30))
    else:
        gap = rng.uniform(0.03, 0.15)
        inside = np.tanh((0.5 - np.maximum(np.abs(u), np.abs(v))) / gap)
    field = inside * (1 + shade)
    if rng.random() < 0.6:
        field = field + rng.uniform(0.05, 0.4) * _spectral(rng, height, width)
    return np.asarray(field, np.float32)


def _cells(rng: Rng, height: int, width: int) -> Image:
    """Cells around random points: distance to the nearest, shade of each, or their borders."""
    size = np.exp(rng.uniform(np.log(6), np.log(40)))
    count = max(4, int(height * width / size**2))
    seeds = np.full((height, width), 255, np.uint8)
    seeds[rng.integers(0, height, count), rng.integers(0, width, count)] = 0
    distance, labels = cv2.distanceTransformWithLabels(
        seeds, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL
    )
    shade = rng.normal(0, 1, int(labels.max()) + 1).astype(np.float32)[labels]
    edges = (cv2.Laplacian(labels.astype(np.float32), cv2.CV_32F) != 0).astype(np.float32)
    edges = cv2.GaussianBlur(edges, (0, 0), rng.uniform(0.6, 2.0))
    weights = rng.dirichlet((0.6, 0.6, 0.6))
    field = weights[0] * _normalise(distance) + weights[1] * shade - weights[2] * _normalise(edges)
    return np.asarray(field, np.float32)


def _leaves(rng: Rng, height: int, width: int) -> Image:
    """Discs, ellipses or polygons that cover each other (dead leaves)."""
    field = np.zeros((height, width), np.float32)
    size = np.exp(rng.uniform(np.log(2.5), np.log(22)))
    kind, is_shaded = rng.integers(3), rng.random() < 0.5
    count = int(min(2500, 2.5 * height * width / size**2))
    centres = np.stack((rng.integers(0, width, count), rng.integers(0, height, count)), 1)
    sizes = np.maximum(1, size * np.exp(rng.normal(0, 0.4, count)))
    shades, angles = rng.normal(0, 1, count), rng.uniform(0, 180, count)
    ratio = rng.uniform(0.3, 1)
    for (x, y), radius, shade, angle in zip(centres.tolist(), sizes, shades, angles, strict=True):
        if kind == 0:
            cv2.circle(field, (x, y), int(radius), float(shade), -1)
        elif kind == 1:
            axes = int(radius), max(1, int(radius * ratio))
            cv2.ellipse(field, (x, y), axes, float(angle), 0, 360, float(shade), -1)
        else:
            corners = rng.integers(4, 8)
            turn = np.sort(rng.uniform(0, 2 * np.pi, corners))
            points = np.stack((x + radius * np.cos(turn), y + radius * np.sin(turn)), 1)
            cv2.fillPoly(field, [points.astype(np.int32)], float(shade))
    if is_shaded:
        soft = cv2.GaussianBlur(field, (0, 0), size / 2 + 0.5)
        field = field + rng.uniform(0.2, 0.8) * (soft - field)
    return field


def _fibres(rng: Rng, height: int, width: int) -> Image:
    """Short lines of a preferred direction: grass, hair, brushed metal."""
    field = np.zeros((height, width), np.float32)
    length_px = np.exp(rng.uniform(np.log(6), np.log(60)))
    spread, main_angle = rng.uniform(0.02, 1.5), rng.uniform(0, np.pi)
    thickness = int(rng.integers(1, 4))
    count = int(min(3000, 2.0 * height * width / (length_px * thickness)))
    x, y = rng.uniform(-20, width + 20, count), rng.uniform(-20, height + 20, count)
    starts = np.stack((x, y), 1)
    angles = main_angle + rng.normal(0, spread, count)
    directions = np.stack((np.cos(angles), np.sin(angles)), 1)
    ends = starts + length_px * directions * rng.uniform(0.5, 1.5, (count, 1))
    shades = rng.normal(0, 1, count)
    start_px, end_px = starts.astype(int).tolist(), ends.astype(int).tolist()
    for start, end, shade in zip(start_px, end_px, shades, strict=True):
        cv2.line(field, start, end, float(shade), thickness)
    return field


def _spots(rng: Rng, height: int, width: int) -> Image:
    """Bright or dark spots on something calm."""
    field = np.zeros((height, width), np.float32)
    size = np.exp(rng.uniform(np.log(1), np.log(6)))
    count = int(height * width / (size * rng.uniform(4, 12)) ** 2)
    columns, rows = rng.integers(0, width, count), rng.integers(0, height, count)
    radii = size * np.exp(rng.normal(0, 0.3, count))
    for x, y, radius in zip(columns, rows, radii, strict=True):
        cv2.circle(field, (int(x), int(y)), max(1, int(radius)), float(rng.normal(1, 0.3)), -1)
    field = cv2.GaussianBlur(field, (0, 0), rng.uniform(0.5, 2))
    return np.asarray(field + rng.uniform(0.02, 0.3) * _spectral(rng, height, width), np.float32)


def _calm(rng: Rng, height: int, width: int) -> Image:
    """Nearly nothing: slow changes and fine noise, as on polished or painted parts."""
    slow = _normalise(_draw_smooth(rng, (height, width), 10, 40))
    fine = _normalise(_draw_smooth(rng, (height, width), 0.3, 1.5))
    return np.asarray(slow * rng.uniform(0, 0.5) + fine * rng.uniform(0.2, 1), np.float32)


_PROCESSES: tuple[Callable[[Rng, int, int], Image], ...] = (
    *(_spectral, _spectral, _waves, _weave, _lattice, _cells, _cells),
    *(_leaves, _leaves, _fibres, _fibres, _spots, _calm),
)


def _blob(rng: Rng, shape: tuple[int, ...], size: float, soft: float) -> Image:
    """Draw a round thing with an uneven edge, somewhere: [height, width] in 0..1."""
    height, width = shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float32)
    cy, cx = rng.uniform(0.08, 0.92) * height, rng.uniform(0.08, 0.92) * width
    angle, ratio = rng.uniform(0, np.pi), rng.uniform(0.4, 1)
    u = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
    v = -(x - cx) * np.sin(angle) + (y - cy) * np.cos(angle)
    around = np.arctan2(v, u)
    waves = [rng.normal(0, 0.15) * np.cos(k * around + rng.uniform(0, 6.3)) for k in (2, 3, 5)]
    uneven = 1 + sum(waves)
    radius = np.hypot(u * np.sqrt(ratio), v / np.sqrt(ratio)) / (size / 2 * np.maximum(uneven, 0.3))
    return np.asarray(np.clip((1 - radius) * size / 2 / soft + 0.5, 0, 1), np.float32)


def _strength(rng: Rng, spread: float) -> NDArray[np.float64]:
    """Draw the change of each channel: more than the texture varies, sometimes coloured."""
    strength = rng.choice([-1, 1]) * rng.uniform(1.0, 4.0) * max(spread, 0.03)
    is_grey = rng.random() < 0.6
    return np.asarray(strength * (np.ones(3) if is_grey else rng.normal(0.6, 0.5, 3)))


def _stain(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    size = np.exp(rng.uniform(np.log(6), np.log(44)))
    alpha = _blob(rng, image.shape, size, rng.uniform(1, size / 3 + 1))
    change = _strength(rng, spread) * rng.uniform(0.4, 1)
    return (image + alpha[..., None] * change).astype(np.float32), alpha


def _fill(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    """Something flat over it: a hole, paint, missing material."""
    size = np.exp(rng.uniform(np.log(3), np.log(36)))
    alpha = _blob(rng, image.shape, size, rng.uniform(0.7, 2))
    level = image.mean((0, 1)) + _strength(rng, spread) * rng.uniform(0.2, 1)
    noise = rng.normal(0, 0.2 * spread, (*image.shape[:2], 1))
    return (image + alpha[..., None] * (level + noise - image)).astype(np.float32), alpha


def _scratch(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    height, width = image.shape[:2]
    point = rng.uniform(0.1, 0.9, 2) * (width, height)
    angle = rng.uniform(0, 2 * np.pi)
    points = []
    for _ in range(rng.integers(5, 30)):
        points.append(point)
        angle += rng.normal(0, 0.25)
        point = point + 3 * np.array([np.cos(angle), np.sin(angle)])
    drawn = np.zeros((height, width), np.float32)
    line = np.round(np.array(points) * 8).astype(np.int32)
    cv2.polylines(
        drawn, [line], isClosed=False, color=1.0, thickness=int(rng.integers(1, 4)), shift=3
    )
    alpha = np.minimum(cv2.GaussianBlur(drawn, (0, 0), rng.uniform(0.4, 0.9)) * 1.3, 1)
    return (image + alpha[..., None] * _strength(rng, spread)).astype(np.float32), alpha


def _pit(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    """A dent: dark on one side and bright on the other."""
    size = np.exp(rng.uniform(np.log(4), np.log(24)))
    alpha = _blob(rng, image.shape, size, max(1.0, size / 3))
    gy, gx = np.gradient(alpha)
    angle = rng.uniform(0, 2 * np.pi)
    relief = gx * np.cos(angle) + gy * np.sin(angle)
    relief = relief / max(float(np.abs(relief).max()), 1e-3)
    strength = rng.uniform(1.0, 4.0) * max(spread, 0.03)
    dented = (image + (relief * strength)[..., None]).astype(np.float32)
    return dented, (np.abs(relief) > 0.25).astype(np.float32)


def _foreign(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    """Another texture in place of this one, as bright as it or not."""
    height, width = image.shape[:2]
    other = draw_texture(rng, height, width)
    if rng.random() < 0.6:
        scaled = (other - other.mean((0, 1))) / max(float(other.std()), 0.01)
        other = scaled * image.std() + image.mean((0, 1))
    size = np.exp(rng.uniform(np.log(8), np.log(44)))
    alpha = _blob(rng, image.shape, size, rng.uniform(0.7, 3))
    return (image + alpha[..., None] * (other - image)).astype(np.float32), alpha


def _blur(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    size = np.exp(rng.uniform(np.log(12), np.log(44)))
    alpha = _blob(rng, image.shape, size, 2)
    soft = cv2.GaussianBlur(image, (0, 0), rng.uniform(1.5, 5))
    return (image + alpha[..., None] * (soft - image)).astype(np.float32), alpha


def _warp(rng: Rng, image: Image, spread: float) -> tuple[Image, Image]:
    """Turned or pushed aside."""
    height, width = image.shape[:2]
    size = np.exp(rng.uniform(np.log(16), np.log(48)))
    alpha = _blob(rng, image.shape, size, max(2.0, size / 5))
    y, x = np.mgrid[:height, :width].astype(np.float32)
    if rng.random() < 0.5:
        middle, degrees = (width / 2, height / 2), rng.uniform(30, 150)
        matrix = cv2.getRotationMatrix2D(middle, degrees, rng.uniform(0.7, 1.4))
        turned = cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT)
        return (image + (alpha > 0.5)[..., None] * (turned - image)).astype(np.float32), alpha
    dy, dx = rng.normal(0, 1, 2) * rng.uniform(3, 8)
    x, y = x + np.float32(dx) * alpha, y + np.float32(dy) * alpha
    moved = cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)
    return moved.astype(np.float32), alpha


_DEFECTS: tuple[Callable[[Rng, Image, float], tuple[Image, Image]], ...] = (
    *(_stain, _fill, _fill, _scratch, _scratch, _pit, _foreign, _blur, _warp),
)
