"""Default data of the gan experiment: a small synthetic dataset of objects with several views, made once."""

import colorsys
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_count
from lit_data.core.types import Bytes, Floats, Ints, Size
from lit_data.datasets.split_names import SPLITS
from lit_data.datasets.synthetic.sample_set import SampleSpec, open_streams
from lit_data.images.writing import write_png
from lit_data.wings.gan.dataset import LAYOUT_FILE, ViewLayout

Sizes = tuple[float, float, float]

KINDS = ("ellipsoid", "box", "cylinder", "cone", "torus")
CAMERA_DISTANCE = 4.0
FIELD_OF_VIEW_DEG = 30.0
"""Angle from the lower to the upper edge of a view."""
BACKGROUND = 0.92

_LIGHT = np.array((0.45, -0.35, 0.82), np.float32)
_REACH = math.tan(math.radians(FIELD_OF_VIEW_DEG / 2))
_AMBIENT = 0.35
_STEPS = 48
_HIT = 2e-3
_TILT_RAD = 0.6  # from upright, at most
_BLUR = 0.02  # half width of the line between the colors
_EDGE = 0.03  # how far the edges of a box are rounded
# Smallest and largest of three lengths of each kind.
_SIZES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "ellipsoid": ((0.6, 0.95), (0.45, 0.8), (0.45, 0.95)),  # radii
    "box": ((0.4, 0.56), (0.35, 0.56), (0.35, 0.56)),  # halves of the sides
    "cylinder": ((0.4, 0.65), (0.45, 0.72), (0.0, 0.0)),  # radius, half of the height
    "cone": ((0.55, 0.75), (0.5, 0.65), (0.0, 0.2)),  # lower radius, half of the height, upper
    "torus": ((0.55, 0.66), (0.18, 0.3), (0.0, 0.0)),  # radius of the ring, and of its section
}

SMALLEST_SIDE_PX = 8
MOST_TILES = 16

README = """Objects seen from several sides, made by lit_data (lit_data.wings.gan.sample_set). Synthetic, CC0.

train, val, test / ellipsoid, box, cylinder, cone, torus
                        PNG, R, G, B: one sheet of k x k views for each object. The azimuth grows from left to right,
                        the elevation from top to bottom.
views.json              k (tiles), the azimuth of the first view and where the circle ends, the lowest and the highest
                        elevation, in degrees. The camera looks at the middle of the object; lit_data.wings.gan
                        has its distance and its field of view.
samples.json            what the dataset was made from, and the size of each file. If it is missing, the dataset is
                        made again.
"""


@dataclass(frozen=True, slots=True)
class Solid:
    """An object of the dataset.

    Attributes:
        kind: One of `KINDS`.
        sizes: Three lengths, see `_SIZES`.
        turn: [3, 3] float32 rotation from its own axes to those of the world.
        colours: [2, 3] float32, R, G, B in 0..1 of its two halves.
        parting: [3] float32 unit normal of the plane between the halves, in its own axes.
    """

    kind: str
    sizes: Sizes
    turn: Floats
    colours: Floats
    parting: Floats

    def distance(self, points: Floats) -> Floats:
        """Return the distance of points [3, N] in its own axes to its surface, negative inside.

        For ellipsoids it is a bound.
        """
        return _DISTANCES[self.kind](points, self.sizes)


def draw_solid(seed: int, number: int) -> Solid:
    """Draw the object of a number: kinds alternate, everything else depends only on (seed, number)."""
    (rng,) = open_streams(seed, number, 1)
    kind = KINDS[number % len(KINDS)]
    first, second, third = (float(rng.uniform(low, high)) for low, high in _SIZES[kind])
    # The second color is well away from the first on the color circle.
    hue, step = rng.uniform(), rng.uniform(0.2, 0.8)
    colours = [
        colorsys.hsv_to_rgb(part % 1, rng.uniform(0.5, 0.9), rng.uniform(0.6, 0.95))
        for part in (hue, hue + step)
    ]
    parting = rng.normal(size=3)
    turn = _turn(
        rng.uniform(0, 2 * math.pi), rng.uniform(0, _TILT_RAD), rng.uniform(0, 2 * math.pi)
    )
    # A normal vector has no preferred direction, so its unit vector is uniform on the sphere.
    unit = (parting / np.linalg.norm(parting)).astype(np.float32)
    return Solid(kind, (first, second, third), turn, np.array(colours, np.float32), unit)


@dataclass(frozen=True, slots=True)
class Cameras:
    """Rays of several views that cross the ball of radius 1 around the origin.

    Attributes:
        shape: (V, h, w).
        pixels: [N] int64, flat pixel of each ray.
        origins: [3, N] float32.
        directions: [3, N] float32 of length 1.
        near: [N] float32, distance along the ray at which the ball begins.
        far: [N] float32, distance at which it ends.
    """

    shape: tuple[int, int, int]
    pixels: Ints
    origins: Floats
    directions: Floats
    near: Floats
    far: Floats

    @classmethod
    def at(cls, poses: Floats, size_px: Size) -> "Cameras":
        """Make cameras at [V, 2] (azimuth, elevation) in rad, whose views have (h, w) px."""
        origins, directions = cast_rays(poses, size_px)
        # Where |origin + t * direction| = 1: a quadratic in t with its vertex at `middle`.
        middle = -(origins * directions).sum(0)
        squared = 1 - (origins**2).sum(0) + middle**2
        pixels = np.flatnonzero(squared > 0)
        half = np.sqrt(squared[pixels])
        near, far = middle[pixels] - half, middle[pixels] + half
        return cls(
            (len(poses), *size_px), pixels, origins[:, pixels], directions[:, pixels], near, far
        )


def cast_rays(poses: Floats, size_px: Size) -> tuple[Floats, Floats]:
    """Return rays through the centers of the pixels.

    Args:
        poses: [V, 2] float32, (azimuth, elevation) of each camera, rad.
        size_px: (h, w) of a view.

    Returns:
        origins: [3, V * h * w] float32.
        directions: [3, V * h * w] float32 of length 1.
    """
    height, width = size_px
    (sin_a, sin_e), (cos_a, cos_e) = np.sin(poses).T, np.cos(poses).T
    outward = np.stack((cos_e * cos_a, cos_e * sin_a, sin_e))
    right = np.stack((-sin_a, cos_a, np.zeros_like(sin_a)))
    up = np.cross(outward, right, axis=0)
    # Pixels of the plane at distance 1, which the field of view spans from top to bottom.
    step = 2 * _REACH / height
    across = (np.arange(width) + 0.5 - width / 2) * step
    down = (np.arange(height) + 0.5 - height / 2)[:, None] * step
    ways = (
        across * right[:, :, None, None] - down * up[:, :, None, None] - outward[:, :, None, None]
    )
    ways /= np.linalg.norm(ways, axis=0)
    origins = np.repeat(CAMERA_DISTANCE * outward, height * width, axis=1)
    return origins.astype(np.float32), ways.reshape(3, -1).astype(np.float32)


def render_views(solid: Solid, cameras: Cameras) -> Bytes:
    """Render the views of an object: [V, h, w, 3] uint8, R, G, B."""
    start, way = (solid.turn.T @ part for part in (cameras.origins, cameras.directions))
    pixel = np.float32(CAMERA_DISTANCE * 2 * _REACH / cameras.shape[1])
    # A pixel at the edge is partly covered, depending on how far from the solid its ray passes:
    # half a pixel inside, half outside.
    along, away = _trace(solid, start, way, cameras, pixel / 2)
    seen = np.flatnonzero(away < pixel)
    cover = (1 - away[seen] / pixel)[:, None]
    colours = _shade(solid, start[:, seen] + along[seen] * way[:, seen])
    image = np.full((math.prod(cameras.shape), 3), BACKGROUND, np.float32)
    image[cameras.pixels[seen]] += cover * (colours - np.float32(BACKGROUND))
    return np.round(image * 255).astype(np.uint8).reshape(*cameras.shape, 3)


def _trace(
    solid: Solid, start: Floats, way: Floats, cameras: Cameras, less: np.float32
) -> tuple[Floats, Floats]:
    """Follow rays to a surface that is `less` inside that of the solid.

    Returns:
        along: [N] float32, distance along each ray to its point nearest to the surface.
        away: [N] float32, distance of that point from the surface; 0 if the ray hits it.
    """
    along, away = cameras.near.copy(), np.full_like(cameras.near, np.inf)
    active, at, far = np.arange(len(along)), cameras.near, cameras.far
    # Sphere tracing: a step of the distance to the surface never passes through it.
    for _ in range(_STEPS):
        distance = solid.distance(start + at * way) + less
        nearer = np.flatnonzero(distance < away[active])
        along[active[nearer]], away[active[nearer]] = at[nearer], distance[nearer]
        at = at + distance
        active_rays = np.flatnonzero((distance > _HIT) & (at < far))
        if not active_rays.size:
            break
        active, at, far = active[active_rays], at[active_rays], far[active_rays]
        start, way = start[:, active_rays], way[:, active_rays]
    return along, np.where(away < _HIT, np.float32(0), away)


def _shade(solid: Solid, points: Floats) -> Floats:
    """Return colors of points [3, N] on the surface, by Lambert's law: [N, 3] float32 in 0..1."""
    light = solid.turn.T @ (_LIGHT / np.linalg.norm(_LIGHT))
    lit = _AMBIENT + (1 - _AMBIENT) * np.maximum(light @ _normals(solid, points), 0)
    # From 0 to 1 across the line between the colors, which is blurred against jagged edges.
    share = np.clip(solid.parting @ points / np.float32(2 * _BLUR) + np.float32(0.5), 0, 1)[:, None]
    return np.asarray(
        lit[:, None] * (solid.colours[0] * share + solid.colours[1] * (1 - share)), np.float32
    )


def _normals(solid: Solid, points: Floats) -> Floats:
    """Return the directions in which the distance grows, from four values around each point: [3, N] float32."""
    # Four corners of a tetrahedron give the gradient with fewer values than three pairs.
    corners = np.array(((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)), np.float32)[..., None]
    slope = sum(solid.distance(points + np.float32(1e-3) * corner) * corner for corner in corners)
    normals: Floats = slope / np.maximum(_length(*slope), np.float32(1e-12))
    return normals


def _turn(yaw: float, tilt: float, spin: float) -> Floats:
    """Return a rotation: about z, then a tilt, then about z again: [3, 3] float32."""
    over = np.array(
        ((1, 0, 0), (0, math.cos(tilt), -math.sin(tilt)), (0, math.sin(tilt), math.cos(tilt)))
    )
    turns = [
        np.array(((math.cos(a), -math.sin(a), 0), (math.sin(a), math.cos(a), 0), (0, 0, 1)))
        for a in (yaw, spin)
    ]
    turn: Floats = np.asarray(turns[1] @ over @ turns[0], np.float32)
    return turn


def _length(*parts: Floats) -> Floats:
    """Return the lengths of vectors from their parts [N]; several times as fast as `np.linalg.norm`."""
    return np.asarray(np.sqrt(sum(part * part for part in parts)), np.float32)


# Formulas: https://iquilezles.org/articles/distfunctions/


def _to_ellipsoid(points: Floats, sizes: Sizes) -> Floats:
    radii = np.array(sizes, np.float32)[:, None]
    outer, slope = _length(*(points / radii)), _length(*(points / radii**2))
    return np.asarray(outer * (outer - 1) / np.maximum(slope, np.float32(1e-6)), np.float32)


def _to_box(points: Floats, sizes: Sizes) -> Floats:
    x, y, z = np.abs(points) - (np.array(sizes, np.float32) - np.float32(_EDGE))[:, None]
    inside = np.minimum(np.maximum(np.maximum(x, y), z), 0)
    distance: Floats = (
        _length(np.maximum(x, 0), np.maximum(y, 0), np.maximum(z, 0)) + inside - np.float32(_EDGE)
    )
    return distance


def _to_cylinder(points: Floats, sizes: Sizes) -> Floats:
    radial = _length(points[0], points[1]) - np.float32(sizes[0])
    upward = np.abs(points[2]) - np.float32(sizes[1])
    inside = np.minimum(np.maximum(radial, upward), 0)
    distance: Floats = _length(np.maximum(radial, 0), np.maximum(upward, 0)) + inside
    return distance


def _to_cone(points: Floats, sizes: Sizes) -> Floats:
    lower, half, upper = (np.float32(size) for size in sizes)
    radius, z = _length(points[0], points[1]), points[2]
    cap_r = radius - np.minimum(radius, np.where(z < 0, lower, upper))
    cap_z = np.abs(z) - half
    slant_r, slant_z = upper - lower, 2 * half
    share = np.clip(
        ((radius - upper) * -slant_r + (half - z) * slant_z) / (slant_r**2 + slant_z**2), 0, 1
    )
    side_r, side_z = radius - upper + slant_r * share, z - half + slant_z * share
    outside = np.where((side_r < 0) & (cap_z < 0), np.float32(-1), np.float32(1))
    distance: Floats = outside * np.minimum(_length(cap_r, cap_z), _length(side_r, side_z))
    return distance


def _to_torus(points: Floats, sizes: Sizes) -> Floats:
    from_ring = _length(points[0], points[1]) - np.float32(sizes[0])
    return _length(from_ring, points[2]) - np.float32(sizes[1])


_DISTANCES: Mapping[str, Callable[[Floats, Sizes], Floats]] = {
    "ellipsoid": _to_ellipsoid,
    "box": _to_box,
    "cylinder": _to_cylinder,
    "cone": _to_cone,
    "torus": _to_torus,
}


@dataclass(frozen=True, kw_only=True)
class GANSampleSpec(SampleSpec):
    """Recipe of objects; equal specs give equal pixels.

    Args:
        size_px: (height, width) of a view.
        tiles: k, for k * k views of each object: k azimuths and k elevations.
    """

    kind = "gan"
    sides = (SMALLEST_SIDE_PX, 1024)
    folders = tuple(f"{split}/{kind}" for split in SPLITS for kind in KINDS)
    readme = README

    count: int = 300
    size_px: Size = (64, 64)
    tiles: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("tiles", self.tiles, 1, MOST_TILES)

    @property
    def folder_name(self) -> str:
        """Name of the folder; datasets of different specs are side by side."""
        height, width = self.size_px
        return f"{self.kind}-{self.count}x{self.tiles**2}x{height}x{width}-seed{self.seed}"

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        layout = ViewLayout(views="sheet", tiles=self.tiles)
        cameras = Cameras.at(layout.poses(self.tiles), self.size_px)
        for number in numbers:
            solid = draw_solid(self.seed, number)
            # Rows of the sheet are elevations, columns azimuths.
            rows = [
                np.concatenate(list(row), axis=1)
                for row in np.split(render_views(solid, cameras), self.tiles)
            ]
            name = f"{solid.kind}_{number:04d}.png"
            write_png(root / self.split_of(number) / solid.kind / name, np.concatenate(rows))
        (root / LAYOUT_FILE).write_text(json.dumps(asdict(layout), indent=1), encoding="utf-8")
