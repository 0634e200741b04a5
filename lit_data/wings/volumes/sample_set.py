"""Default data of the ct experiment: a small synthetic dataset, made once if there is no ``data.root``."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.core.types import Bools, Bytes, Doubles, Floats, Triple
from lit_data.datasets.synthetic.sample_set import SampleSpec, open_streams

TUMOUR = 1
"""Label of every tumor; all other voxels are 0."""

_AIR_HU = -1000.0
_FAT_HU = -100.0
_MUSCLE_HU = 45.0
_LUNG_HU = -860.0
_VESSEL_HU = 40.0
_BONE_HU = 550.0
_NOISE_HU = 18.0  # standard deviation; a scanner's at a usual dose
_LOWEST_HU, _HIGHEST_HU = -1024, 3071  # range of a 12-bit scanner
_VESSELS = 9  # of each lung
_STEPS = 40  # of a vessel
_LUNG_RADII = (0.72, 0.33, 0.22)

Mask = Bools
_Axes = tuple[Floats, Floats, Floats]

SMALLEST_SIDE = 16  # voxels

README = """CT samples, made by lit_data (lit_data.wings.volumes.sample_set). Synthetic, CC0: free to use.

train, val, test
  ct_NNNN.npy           int16 Hounsfield units [z, y, x]: a trunk of fat and muscle with lungs, vessels, spine, ribs
                        and, in two lungs of three, a tumor
  ct_NNNN_labels.npy    uint8 [z, y, x]: 1 where a tumor is
                        A .npy file has no spacing: voxels count as 1 mm.
samples.json            what the dataset was made from, and the size of each file. If it is missing, the dataset is
                        made again.
"""


@dataclass(frozen=True, slots=True)
class CTScene:
    """A synthetic volume.

    Attributes:
        volume: [Z, Y, X] int16 Hounsfield units; z runs from the feet up, y from the front to the
            back.
        labels: [Z, Y, X] uint8, `TUMOUR` in tumors.
    """

    volume: NDArray[np.int16]
    labels: Bytes


def render_volume(seed: int, number: int, shape: Triple) -> CTScene:
    """Render one volume, a pure function of the arguments.

    Args:
        seed: Seed of the dataset.
        number: Number of the volume in the dataset.
        shape: (z, y, x) voxels.
    """
    rng, noise = open_streams(seed, number, 2)
    axes = _make_axes(shape)
    girth = rng.uniform(0.9, 1.1, 2)
    depth = _measure_trunk(axes, girth)
    volume = np.full(shape, _AIR_HU, np.float32)
    volume[depth < 1] = _FAT_HU
    volume[depth < 0.86] = _MUSCLE_HU + rng.uniform(-10, 10)
    lungs = _draw_lungs(volume, axes, rng)
    _draw_bones(volume, axes, depth, rng)
    labels = np.zeros(shape, np.uint8)
    for centre in lungs:
        for radius, centre_of_ball in _walk_vessels(centre, rng):
            box, ball = _find_ball(axes, centre_of_ball, radius)
            volume[box][ball] = _VESSEL_HU
        _draw_tumour(volume, labels, axes, centre, rng)
    noisy = _blur(volume) + noise.normal(0, _NOISE_HU, shape)
    return CTScene(np.rint(noisy).clip(_LOWEST_HU, _HIGHEST_HU).astype(np.int16), labels)


def _make_axes(shape: Triple) -> _Axes:
    """Return the coordinates of the voxel centers, from -1 to 1 along each axis, shaped to broadcast."""
    z, y, x = (((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32) for size in shape)
    return z[:, None, None], y[None, :, None], x[None, None, :]


def _measure_trunk(axes: _Axes, girth: Doubles) -> Floats:
    """Return 0 in the center of the trunk to 1 on the skin, wider at the shoulders: [Z, Y, X]."""
    z, y, x = axes
    wide = np.float32(0.72 * girth[0]) + np.float32(0.1) * z
    deep = np.float32(0.5 * girth[1])
    return np.asarray(np.sqrt((x / wide) ** 2 + (y / deep) ** 2))


def _draw_lungs(volume: Floats, axes: _Axes, rng: np.random.Generator) -> list[Doubles]:
    """Draw both lungs and return their centers."""
    centres = []
    for side in (-1, 1):
        centre = np.array([0.08, 0.0, side * 0.33]) + rng.uniform(-0.03, 0.03, 3)
        box, lung = _find_ball(axes, centre, rng.uniform(0.95, 1.05), _LUNG_RADII)
        volume[box][lung] = _LUNG_HU
        centres.append(centre)
    return centres


def _draw_bones(volume: Floats, axes: _Axes, depth: Floats, rng: np.random.Generator) -> None:
    """Draw a spine of vertebrae, and ribs: bands around the trunk that slope down to the front."""
    z, y, x = axes
    beat = np.float32(rng.uniform(18, 22))
    thick = np.where(np.cos(beat * z) > -0.6, 0.11, 0.07).astype(np.float32)
    spine = (x**2 + (y - np.float32(0.36)) ** 2) < thick**2
    slope = z - np.float32(0.5) * y + np.float32(rng.uniform(-0.1, 0.1))
    ribs = (
        (abs(depth - np.float32(0.8)) < 0.045)
        & (np.cos(np.float32(0.8) * beat * slope) > 0.55)
        & (abs(x) > 0.06)
    )
    volume[ribs & (abs(z) < 0.85)] = _BONE_HU + rng.uniform(-120, 120)
    volume[spine] = _BONE_HU + rng.uniform(-120, 120)


def _walk_vessels(centre: Doubles, rng: np.random.Generator) -> Iterator[tuple[float, Doubles]]:
    """Yield radius and center of balls along vessels, which start at the root of a lung and get thinner."""
    for _ in range(_VESSELS):
        position = centre * np.array([1.0, 1.0, 0.55])
        course = rng.normal(0, 1, 3) * _LUNG_RADII
        for step in range(_STEPS):
            course = course / np.linalg.norm(course) + rng.normal(0, 0.12, 3)
            position = position + course * 0.018
            if (((position - centre) / _LUNG_RADII) ** 2).sum() > 0.9:
                break
            yield 0.04 - 0.025 * step / _STEPS, position


def _draw_tumour(
    volume: Floats,
    labels: Bytes,
    axes: _Axes,
    centre: Doubles,
    rng: np.random.Generator,
) -> None:
    """Draw a ball into two lungs of three; calcium makes it brighter than vessels."""
    position = centre + rng.uniform(-0.5, 0.5, 3) * _LUNG_RADII
    radius, density_hu, has_one = (
        rng.uniform(0.07, 0.12),
        rng.uniform(250, 450),
        rng.uniform() < 2 / 3,
    )
    if has_one:
        box, ball = _find_ball(axes, position, radius)
        volume[box][ball] = density_hu
        labels[box][ball] = TUMOUR


def _find_ball(
    axes: _Axes,
    centre: Doubles,
    radius: float,
    radii: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> tuple[tuple[slice, slice, slice], Mask]:
    """Return a box around a ball, or an ellipsoid with `radii` along each axis, and its voxels in the box."""
    box, squared = [], np.zeros((1, 1, 1), np.float32)
    for number, (axis, middle, width) in enumerate(zip(axes, centre, radii, strict=True)):
        away = ((axis - np.float32(middle)) / np.float32(radius * width)).ravel() ** 2
        inside = np.flatnonzero(away < 1)
        box.append(slice(int(inside[0]), int(inside[-1]) + 1) if inside.size else slice(0, 0))
        squared = squared + np.expand_dims(
            away[box[-1]], [other for other in range(3) if other != number]
        )
    return (box[0], box[1], box[2]), squared < 1


def _blur(volume: Floats) -> Floats:
    """Mix neighbors by 1 : 2 : 1 along each axis, because voxels at an edge contain some of both sides."""
    for axis in range(3):
        moved = np.moveaxis(volume, axis, 0)
        padded = np.concatenate((moved[:1], moved, moved[-1:]))
        mixed = (padded[:-2] + np.float32(2) * padded[1:-1] + padded[2:]) / np.float32(4)
        volume = np.moveaxis(mixed, 0, axis)
    return volume


@dataclass(frozen=True, kw_only=True)
class CTSampleSpec(SampleSpec):
    """Recipe of volumes; equal specs give equal voxels.

    Args:
        shape: (z, y, x) voxels of each volume.
    """

    kind = "ct"
    size_name = "shape"
    axes = ("z", "y", "x")
    sides = (SMALLEST_SIDE, 1024)
    readme = README

    count: int = 32
    shape: Triple = (64, 64, 64)

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            scene = render_volume(self.seed, number, self.shape)
            folder = root / self.split_of(number)
            np.save(folder / f"ct_{number:04d}.npy", scene.volume)
            np.save(folder / f"ct_{number:04d}_labels.npy", scene.labels)
