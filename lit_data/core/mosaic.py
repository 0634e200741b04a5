"""Plans of mosaics: the images of each, their positions, and their boxes, without pixels.

Four (or nine) images are arranged around a point of a canvas, and a window of it is scaled to the
output, as in Bochkovskiy et al., "YOLOv4" (2020), and ultralytics (``data/augment.py``, `Mosaic`
and `RandomPerspective`). Here the canvas is never drawn: a plan has the rectangle of each tile in
the output, and the positions of its pixels in the tile.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from lit_data.core.checks import check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Bools, Doubles, Ints, Size

FILL = 114
"""Gray of pixels without a tile, as in ultralytics (``data/augment.py``)."""

_SAMPLE_DRAWS = 6
_SIDES_4 = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
_SIDES_9 = np.array([[0, 0], [-1, 0], [-1, 1], [0, 1], [1, 1], [1, 0], [1, -1], [0, -1], [-1, -1]])
"""Direction (down, right) of each tile from the center; the first of nine is the center itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicSpec:
    """Composition of the training samples of a detector.

    The defaults are those of ultralytics (``cfg/default.yaml``), except for `close_epochs`, which
    depends on the run.

    Args:
        probability: Fraction of samples that are mosaics; the others are one image.
        tiles: Number of tiles, 4 or 9.
        scale: Smallest and largest factor from canvas to output.
        translate: Largest shift of the middle of the canvas, as a fraction of the output.
        min_box_px: Smallest height and width of a box that is kept, in the output.
        min_box_visible: Smallest visible fraction of the area of a box that is kept.
        max_box_aspect: Largest aspect ratio of a box that is kept.
        close_epochs: Number of last epochs of a run without mosaics, with images as in prediction.

    Raises:
        ConfigError: A value is out of range.
    """

    probability: float = 1.0
    tiles: Literal[4, 9] = 4
    scale: tuple[float, float] = (0.5, 1.5)
    translate: float = 0.1
    min_box_px: float = 2.0
    min_box_visible: float = 0.1
    max_box_aspect: float = 100.0
    close_epochs: int = 10

    def __post_init__(self) -> None:
        """Check every range."""
        object.__setattr__(self, "scale", tuple(self.scale))
        if self.tiles not in (4, 9):
            raise ConfigError(f"tiles={self.tiles!r} must be 4 or 9")
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ConfigError(
                f"scale={list(self.scale)} must be [smallest, largest] with 0 < smallest <= largest"
            )
        for name in ("probability", "translate", "min_box_visible"):
            check_fraction(name, getattr(self, name))
        if self.min_box_px < 0 or self.max_box_aspect < 1 or self.close_epochs < 0:
            raise ConfigError(
                "min_box_px and close_epochs must be at least 0, max_box_aspect at least 1"
            )


@dataclass(frozen=True, slots=True)
class MosaicPlan:
    """Plan of T tiles of M samples; each tile is a part of one image in a rectangle of its sample.

    A pixel (y, x) of the rectangle is that of the tile at ``((y + 0.5) / scale - top, (x + 0.5) /
    scale - left)``, where integers are the edges of pixels.

    Args:
        row: [T] sample of each tile.
        image: [T] number of its image.
        scale: [T] pixels of the output for each pixel of the tile.
        origin: [T, 2] (top, left): the beginning of the output in px of the tile, negated.
        window: [T, 4] (top, left, bottom, right) of the rectangle in the output, ends excluded;
            some are empty.
        bounds: [T, 4] the same before rounding to whole pixels; the boxes of the tile are cropped
            to it.
    """

    row: Ints
    image: Ints
    scale: Doubles
    origin: Doubles
    window: Ints
    bounds: Doubles

    def __len__(self) -> int:
        return len(self.row)


def sample_mosaics(
    spec: MosaicSpec | None,
    seed: int,
    epoch: int,
    index: ArrayLike,
    *,
    images: ArrayLike,
    sizes_px: Ints,
    output_px: Size,
    choices: Ints,
) -> MosaicPlan:
    """Plan samples; each is a pure function of (seed, epoch, its index) and of the dataset.

    Args:
        spec: Composition; None puts each image into the center of its output, as large as fits.
        seed: 0 <= seed < 2**64.
        epoch: The epoch.
        index: [M] numbers of the random streams of the samples.
        images: [M] main images of the samples, to which partners are added.
        sizes_px: [I, 2] (height, width) of all images.
        output_px: (height, width) of a sample.
        choices: [K] images that partners are drawn from.
    """
    main_image = np.atleast_1d(np.asarray(images, np.int64))
    if spec is None:
        return _place_alone(main_image, sizes_px, output_px)
    count = _SAMPLE_DRAWS + spec.tiles - 1
    draws = uniform(seed, Stream.MOSAIC, index, epoch, count).astype(np.float64)
    is_mosaic = draws[:, 0] < spec.probability
    partners = choices[(draws[:, _SAMPLE_DRAWS:] * len(choices)).astype(np.int64)]
    image = np.concatenate((main_image[:, None], partners), axis=1)  # [M, tiles]
    output = np.array(output_px, np.float64)
    fit = (output / sizes_px[image]).min(-1)  # as large as the image fits into the output
    canvas = np.where(is_mosaic[:, None], 2.0, 1.0) * output
    rectangle, cell = _lay_out(sizes_px[image] * fit[..., None], draws[:, 1:3], output, is_mosaic)
    scale = spec.scale[0] + draws[:, 3] * (spec.scale[1] - spec.scale[0])
    # Middle of the canvas, in the output.
    middle = (0.5 + spec.translate * (2 * draws[:, 4:6] - 1)) * output
    start = middle - scale[:, None] * canvas / 2
    edge = start + scale[:, None] * rectangle[:, 0, 2:]
    start += np.round(edge) - edge  # tiles meet between two pixels, so that drawing them cuts none
    canvas_bounds = np.concatenate((np.zeros_like(canvas), canvas), axis=1)[:, None]
    seen = _intersect(_intersect(rectangle, cell), canvas_bounds)
    # A sample that is no mosaic has its first tile alone.
    row, tile = np.nonzero(is_mosaic[:, None] | (np.arange(spec.tiles) == 0))
    return _project(
        row,
        image[row, tile],
        fit[row, tile],
        scale[row],
        start[row],
        rectangle[row, tile, :2],
        seen[row, tile],
        output_px,
    )


def _place_alone(images: Ints, sizes_px: Ints, output_px: Size) -> MosaicPlan:
    """Plan each image in the middle of its output."""
    output = np.array(output_px, np.float64)
    fit = (output / sizes_px[images]).min(-1)
    fitted = sizes_px[images] * fit[:, None]
    top_left = np.round((output - fitted) / 2)
    seen = np.concatenate((top_left, top_left + fitted), axis=1)
    row = np.arange(len(images))
    scale, start = np.ones(len(images)), np.zeros_like(top_left)  # the output is the canvas
    return _project(row, images, fit, scale, start, top_left, seen, output_px)


def _lay_out(
    sizes: Doubles, draws: Doubles, output: Doubles, is_mosaic: Bools
) -> tuple[Doubles, Doubles]:
    """Return the positions of tiles on the canvas, and their cells in it: [M, tiles, 4] each.

    A tile is visible within its cell. The point around which tiles are arranged is drawn from the
    middle half of the canvas. A sample without a mosaic has its image in the center of a canvas of
    the size of the output.

    Args:
        sizes: [M, tiles, 2] (height, width) on the canvas.
        draws: [M, 2] in [0, 1).
        output: [2] half the size of the canvas of a mosaic.
        is_mosaic: [M].
    """
    sides = _SIDES_4 if sizes.shape[1] == len(_SIDES_4) else _SIDES_9
    point = ((0.5 + draws) * output)[:, None]
    # Half of the tile in the middle, if there is one: first and last are its edges.
    half = sizes[:, :1] / 2 * (len(sides) == len(_SIDES_9))
    first, last = point - half, point + half
    is_before, is_behind = sides < 0, sides > 0
    top_left = np.where(is_before, first - sizes, np.where(is_behind, last, first))
    cell_low = np.where(is_before, -np.inf, np.where(is_behind, last, first))
    cell_high = np.where(is_behind, np.inf, np.where(is_before, first, last))
    is_alone = ~is_mosaic[:, None, None]
    top_left = np.where(is_alone, np.round((output - sizes) / 2), top_left)
    cell_low = np.where(is_alone, -np.inf, cell_low)
    cell_high = np.where(is_alone, np.inf, cell_high)
    cell = np.concatenate((cell_low, cell_high), axis=2)
    return np.concatenate((top_left, top_left + sizes), axis=2), cell


def _intersect(one: Doubles, other: Doubles) -> Doubles:
    """Return the intersections of rectangles [..., 4] (top, left, bottom, right)."""
    low = np.maximum(one[..., :2], other[..., :2])
    high = np.minimum(one[..., 2:], other[..., 2:])
    return np.concatenate((low, np.maximum(high, low)), axis=-1)


def _project(
    row: Ints,
    image: Ints,
    fit: Doubles,
    scale: Doubles,
    start: Doubles,
    top_left: Doubles,
    seen: Doubles,
    output_px: Size,
) -> MosaicPlan:
    """Project tiles from the canvas to the output: [T] or [T, 2 or 4] each, see `MosaicPlan`."""
    output = np.array(output_px, np.float64)
    bounds = np.clip(np.tile(start, 2) + scale[:, None] * seen, 0, np.tile(output, 2))
    return MosaicPlan(
        row=row,
        image=image,
        scale=scale * fit,
        origin=(start / scale[:, None] + top_left) / fit[:, None],
        window=np.ceil(bounds - 0.5).astype(np.int64),
        bounds=bounds,
    )


def move_boxes(
    boxes: Doubles, tile: Ints, plan: MosaicPlan, sizes_px: Ints, spec: MosaicSpec
) -> tuple[Doubles, Ints]:
    """Move boxes of tiles into their samples, cropped to the visible part of the tile.

    Boxes outside the limits are dropped.

    Args:
        boxes: [N, 4] (cx, cy, w, h) in fractions of the tile's image.
        tile: [N] tile of each box in the plan.
        plan: The plan.
        sizes_px: [I, 2] (height, width) of all images.
        spec: The limits.

    Returns:
        [K, 4] (top, left, bottom, right) px of the sample, and [K] numbers of these boxes.
    """
    width_height = sizes_px[plan.image[tile]][:, ::-1]  # boxes have x first
    centre, size = boxes[:, :2] * width_height, boxes[:, 2:] * width_height
    edges = np.concatenate((centre - size / 2, centre + size / 2), axis=1)[:, [1, 0, 3, 2]]
    moved = (edges + np.tile(plan.origin[tile], 2)) * plan.scale[tile, None]
    bounds = plan.bounds[tile]
    low = np.maximum(moved[:, :2], bounds[:, :2])
    high = np.minimum(moved[:, 2:], bounds[:, 2:])
    sides = high - low
    moved_sides = moved[:, 2:] - moved[:, :2]
    is_large = (sides > 0).all(1) & (sides >= spec.min_box_px).all(1)
    is_visible = sides.prod(1) >= spec.min_box_visible * moved_sides.prod(1)
    longest, shortest = sides.max(1), np.maximum(sides.min(1), 1e-9)
    is_compact = longest <= spec.max_box_aspect * shortest
    numbers = np.flatnonzero(is_large & is_visible & is_compact)
    return np.concatenate((low, high), axis=1)[numbers], numbers
