"""The default data of the detection experiment: a small set of images, made once where no ``data.root`` is given."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from lit_data.datasets.split_names import SPLITS
from lit_data.io.images.writing import write_png
from lit_data.samples.sample_set import SampleSpec, open_streams
from lit_data.types import Bools, Bytes, Doubles, Ints, Size

CLASSES = ("disc", "square", "triangle")

_DISTRACTOR = len(CLASSES)  # a ring: drawn like an object, and of no class
_LEAST_VISIBLE = 0.5  # share of an object that later ones leave uncovered
_SMALLEST_PX = 5.0  # radius
_HOLE = 0.6  # radius of a ring's hole, as a share of its own
_CORNERS = np.pi / 2 + np.arange(3) * 2 * np.pi / 3  # of a triangle

Mask = Bools

SMALLEST_SIDE_PX = 64  # room for a few objects

README = """Detection samples, made by lit_data (lit_data.samples.detection). Synthetic, CC0: free to use.

images/train, val, test   PNG, R, G, B: discs, squares and triangles of any size, angle and colour on textured ground.
                          Rings are of no class. One image in ten is tall, one is wide, one in twelve has no object.
labels/train, val, test   YOLO text with the stems of the images: class cx cy w h, in shares of the image. A box holds
                          the whole object as far as it lies in the image, also what another object covers: at most
                          half of it.
data.yaml                 names of the classes, folders of the splits.
samples.json              what the set was made from, and the size of each file. Without it the set is made again.
"""


@dataclass(frozen=True, slots=True)
class DetectionScene:
    """A rendered image.

    Attributes:
        image: [3, H, W] uint8, R, G, B.
        boxes: [N, 5] int64 = (class, top, left, bottom, right), ends excluded: the pixels of the
            whole object inside the image, those under a later object included.
    """

    image: Bytes
    boxes: Ints


class _Thing(NamedTuple):
    kind: int
    y: float
    x: float
    radius_px: float
    angle_rad: float
    colour: Doubles  # [3] in 0..1


def render_scene(seed: int, number: int, size_px: Size, *, empty: bool = False) -> DetectionScene:
    """Render one image, a pure function of the arguments.

    Ground and objects have random streams of their own.

    Args:
        seed: Seed of the set.
        number: Image number in the set.
        size_px: (height, width).
        empty: Draw no object, only rings, which are of no class.
    """
    # Streams of their own: another number of objects leaves the ground as it is.
    ground, things = open_streams(seed, number, 2)
    image = _draw_ground(ground, size_px)
    owner, masks = np.full(size_px, -1), dict[int, Mask]()
    drawn = _draw_things(things, size_px, empty=empty)
    for order, thing in enumerate(drawn):
        # An object that would hide half of an earlier one, or lies outside, is not painted.
        mask = _find_inside(thing, size_px)
        covered = [other for other in np.unique(owner[mask]).tolist() if other >= 0]
        left = [(owner == other) & ~mask for other in covered]
        if not mask.any() or any(
            part.sum() < _LEAST_VISIBLE * masks[other].sum()
            for part, other in zip(left, covered, strict=True)
        ):
            continue
        owner[mask], masks[order] = order, mask
        paint(image, thing, mask, things)
    boxes = [(drawn[order].kind, *_find_extents(mask)) for order, mask in masks.items()]
    # Last of all, so that objects have the noise of the ground.
    noise = ground.normal(0, 0.012, image.shape)
    return DetectionScene(
        np.rint((image + noise).clip(0, 1) * 255).astype(np.uint8),
        np.array([box for box in boxes if box[0] != _DISTRACTOR], np.int64).reshape(-1, 5),
    )


def _draw_ground(rng: np.random.Generator, size_px: Size) -> Doubles:
    """[3, H, W] in 0..1: a colour that changes slowly, and a finer texture."""
    base = rng.uniform(0.25, 0.75, (3, 1, 1))
    slow = _interpolate(rng.normal(0, 0.08, (3, 5, 5)), size_px)
    cells = size_px[0] // 8 + 2, size_px[1] // 8 + 2
    texture = _interpolate(rng.normal(0, 0.05, (1, *cells)), size_px)
    return base + slow + texture


def _interpolate(coarse: Doubles, size_px: Size) -> Doubles:
    """[K, h, w] stretched bilinearly to [K, H, W]."""
    for axis, size in ((1, size_px[0]), (2, size_px[1])):
        position = np.linspace(0, coarse.shape[axis] - 1, size)
        low = np.minimum(position.astype(np.int64), coarse.shape[axis] - 2)
        share = (position - low).reshape([-1 if other == axis else 1 for other in range(3)])
        coarse = coarse.take(low, axis) * (1 - share) + coarse.take(low + 1, axis) * share
    return coarse


def _draw_things(rng: np.random.Generator, size_px: Size, *, empty: bool) -> list[_Thing]:
    count, largest_px = int(rng.integers(2, 10)), max(_SMALLEST_PX, 0.24 * min(size_px))
    things = []
    for _ in range(count):
        kind = _DISTRACTOR if empty else int(rng.choice(_DISTRACTOR + 1, p=(0.3, 0.3, 0.3, 0.1)))
        # Evenly on a logarithmic scale: small objects are as common as large ones.
        radius_px = float(np.exp(rng.uniform(np.log(_SMALLEST_PX), np.log(largest_px))))
        y, x = (float(rng.uniform(0.4 * radius_px, size - 0.4 * radius_px)) for size in size_px)
        things.append(
            _Thing(kind, y, x, radius_px, float(rng.uniform(0, 2 * np.pi)), rng.uniform(0, 1, 3))
        )
    return things


def _find_inside(thing: _Thing, size_px: Size) -> Mask:
    """[H, W]: the pixels whose centre lies in the object."""
    y = (np.arange(size_px[0]) + 0.5 - thing.y)[:, None] / thing.radius_px
    x = (np.arange(size_px[1]) + 0.5 - thing.x)[None] / thing.radius_px
    sine, cosine = np.sin(thing.angle_rad), np.cos(thing.angle_rad)
    # Coordinates of the object, turned, in units of its radius.
    along, across = cosine * x + sine * y, cosine * y - sine * x
    squared = along**2 + across**2
    if thing.kind == CLASSES.index("square"):
        return np.asarray(np.maximum(abs(along), abs(across)) <= np.sqrt(0.5))
    if thing.kind == CLASSES.index("triangle"):
        return np.asarray(
            np.all(
                [np.cos(a) * along + np.sin(a) * across <= 0.5 for a in _CORNERS + np.pi], axis=0
            )
        )
    return np.asarray((squared <= 1) & ((thing.kind != _DISTRACTOR) | (squared >= _HOLE**2)))


def paint(image: Doubles, thing: _Thing, mask: Mask, rng: np.random.Generator) -> None:
    """Fill an object with its colour, brighter towards one side, and away from the ground around it."""
    rows, columns = np.nonzero(mask)
    # Brighter than a dark ground and darker than a bright one, or it could not be seen.
    away = np.where(image[:, mask].mean(1) < 0.5, 1.0, -1.0)
    colour = 0.5 + away * (0.15 + 0.35 * thing.colour)
    light = rng.normal(0, 0.08, 2)
    slope = (light[0] * (rows - thing.y) + light[1] * (columns - thing.x)) / thing.radius_px
    image[:, mask] = colour[:, None] + slope


def _find_extents(mask: Mask) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


@dataclass(frozen=True, kw_only=True)
class DetectionSampleSpec(SampleSpec):
    """Recipe of images with boxes; equal specs give equal pixels.

    The dataset's folder holds ``images``, ``labels``, ``data.yaml`` and ``README.txt``.

    Args:
        size_px: (height, width) of most images.
    """

    kind = "detection"
    sides = (SMALLEST_SIDE_PX, 2**13)
    folders = tuple(f"{part}/{split}" for part in ("images", "labels") for split in SPLITS)
    readme = README

    count: int = 160
    size_px: Size = (240, 320)

    def size_of(self, number: int) -> tuple[int, int]:
        """(height, width) of an image: of ten one is twice as high as wide, and one is twice as wide as high."""
        side = min(self.size_px)
        return {3: (side, side // 2), 7: (side // 2, side)}.get(number % 10, self.size_px)

    def is_empty(self, number: int) -> bool:
        """Return True if an image has no object: one in twelve has none."""
        return number % 12 == 5

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            size_px, split, stem = (
                self.size_of(number),
                self.split_of(number),
                f"detection_{number:04d}",
            )
            scene = render_scene(self.seed, number, size_px, empty=self.is_empty(number))
            write_png(root / "images" / split / f"{stem}.png", np.moveaxis(scene.image, 0, -1))
            lines = "".join(_format_box(box, size_px) for box in scene.boxes)
            (root / "labels" / split / f"{stem}.txt").write_text(lines, encoding="utf-8")
        names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
        folders = "".join(f"{split}: images/{split}\n" for split in SPLITS)
        (root / "data.yaml").write_text(f"path: .\n{folders}names:\n{names}", encoding="utf-8")


def _format_box(box: Ints, size_px: Size) -> str:
    kind, top, left, bottom, right = box.tolist()
    height, width = size_px
    centre = f"{(left + right) / 2 / width:.6f} {(top + bottom) / 2 / height:.6f}"
    return f"{kind} {centre} {(right - left) / width:.6f} {(bottom - top) / height:.6f}\n"
