"""Mosaics of images, planned: which images lie where, and what becomes of their boxes. No pixels.

Four (or nine) images are laid around a point of a canvas, and a window of it is scaled to the
output, as in Bochkovskiy et al., "YOLOv4" (2020), and ultralytics (``data/augment.py``, `Mosaic`
and `RandomPerspective`). Here the canvas exists on paper only: for each tile a rectangle of the
output is known, and the place in the tile that its pixels come from.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FILL: Final = 114
"""Grey of what no tile covers, as in ultralytics (``data/augment.py``)."""

_SAMPLE_DRAWS: Final = 6
_SIDES_4: Final = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
_SIDES_9: Final = np.array(
    [[0, 0], [-1, 0], [-1, 1], [0, 1], [1, 1], [1, 0], [1, -1], [0, -1], [-1, -1]]
)
"""Which way (down, right) each tile lies from the centre; the first of nine is the centre itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicSpec:
    """How training samples of a detector are put together.

    The defaults are those of ultralytics (``cfg/default.yaml``), but for `close_epochs`, which
    depends on the run.

    Args:
        probability: Share of samples that are mosaics; the others are one image.
        tiles: 4 or 9.
        scale: Smallest and largest factor from canvas to output.
        translate: Largest shift of the middle of the canvas, as a share of the output.
        min_box_px: Smallest height and width of a box that is kept, in the output.
        min_box_visible: Smallest share of a box's area that is left.
        max_box_aspect: Largest ratio of its sides.
        close_epochs: The last epochs of a run, which have no mosaics: images as they will be
            predicted.

    Raises:
        ConfigError: A value is out of its range.
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
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")
        if self.min_box_px < 0 or self.max_box_aspect < 1 or self.close_epochs < 0:
            raise ConfigError(
                "min_box_px and close_epochs must be at least 0, max_box_aspect at least 1"
            )


@dataclass(frozen=True, slots=True)
class MosaicPlan:
    """T tiles of M samples; each shows a part of one image in a rectangle of its sample.

    A pixel (y, x) of the rectangle shows the tile at ``((y + 0.5) / scale - top, (x + 0.5) / scale
    - left)``, where whole numbers are the edges of pixels.

    Args:
        row: [T] sample of each tile.
        image: [T] number of its image.
        scale: [T] pixels of the output for each pixel of the tile.
        origin: [T, 2] (top, left): where the output begins, in px of the tile, negated.
        window: [T, 4] (top, left, bottom, right) of the rectangle in the output, ends excluded;
            some are empty.
        bounds: [T, 4] the same before it was rounded to whole pixels: where the tile's boxes are
            cut.
    """

    row: Ints
    image: Ints
    scale: Floats
    origin: Floats
    window: Ints
    bounds: Floats

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
    output_px: tuple[int, int],
    choices: Ints,
) -> MosaicPlan:
    """Plan samples; each is a pure function of (seed, epoch, its index) and of the set.

    Args:
        spec: None lays each image into the middle of its output, as large as it fits.
        seed: 0 <= seed < 2**64.
        epoch: The epoch.
        index: [M] numbers of the samples' random streams.
        images: [M] their own images.
        sizes_px: [I, 2] (height, width) of all images.
        output_px: (height, width) of a sample.
        choices: [K] images that partners are drawn from.
    """
    own = np.atleast_1d(np.asarray(images, np.int64))
    if spec is None:
        return _place_alone(own, sizes_px, output_px)
    draws = uniform(seed, Stream.MOSAIC, index, epoch, _SAMPLE_DRAWS + spec.tiles - 1).astype(
        np.float64
    )
    is_mosaic = draws[:, 0] < spec.probability
    partners = choices[(draws[:, _SAMPLE_DRAWS:] * len(choices)).astype(np.int64)]
    shown = np.concatenate((own[:, None], partners), axis=1)
    output = np.array(output_px, np.float64)
    fit = (output / sizes_px[shown]).min(
        -1
    )  # [M, tiles], as large as the image fits into the output
    canvas = np.where(is_mosaic[:, None], 2.0, 1.0) * output
    rectangle, cell = _lay_out(sizes_px[shown] * fit[..., None], draws[:, 1:3], output, is_mosaic)
    scale = spec.scale[0] + draws[:, 3] * (spec.scale[1] - spec.scale[0])
    middle = (
        0.5 + spec.translate * (2 * draws[:, 4:6] - 1)
    ) * output  # of the canvas, in the output
    start = middle - scale[:, None] * canvas / 2
    edge = start + scale[:, None] * rectangle[:, 0, 2:]
    start += np.round(edge) - edge  # tiles meet between two pixels, so that drawing them cuts none
    row, tile = np.nonzero(is_mosaic[:, None] | (np.arange(spec.tiles) == 0))
    seen = _intersect(
        _intersect(rectangle, cell),
        np.concatenate((np.zeros_like(canvas), canvas), axis=1)[:, None],
    )
    return _project(
        row,
        shown[row, tile],
        fit[row, tile],
        scale[row],
        start[row],
        rectangle[row, tile, :2],
        seen[row, tile],
        output_px,
    )


def _place_alone(images: Ints, sizes_px: Ints, output_px: tuple[int, int]) -> MosaicPlan:
    """Each image in the middle of its output."""
    output = np.array(output_px, np.float64)
    fit = (output / sizes_px[images]).min(-1)
    fitted = sizes_px[images] * fit[:, None]
    top_left = np.round((output - fitted) / 2)
    seen, one = np.concatenate((top_left, top_left + fitted), axis=1), np.ones(len(images))
    return _project(
        np.arange(len(images)), images, fit, one, np.zeros_like(top_left), top_left, seen, output_px
    )


def _lay_out(
    sizes: Floats, draws: Floats, output: Floats, is_mosaic: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Where tiles lie on the canvas, and in which cell of it they may be seen: [M, tiles, 4] each.

    The point around which they lie is drawn from the middle half of the canvas. A sample that is no
    mosaic has its own image in the middle of a canvas of the size of the output.

    Args:
        sizes: [M, tiles, 2] (height, width) on the canvas.
        draws: [M, 2] in [0, 1).
        output: [2] half the size of the canvas of a mosaic.
        is_mosaic: [M].
    """
    sides = _SIDES_4 if sizes.shape[1] == len(_SIDES_4) else _SIDES_9
    point = ((0.5 + draws) * output)[:, None]
    half = (
        sizes[:, :1] / 2 * (len(sides) == len(_SIDES_9))
    )  # of the tile in the middle, if there is one
    first, last = point - half, point + half
    top_left = np.where(sides < 0, first - sizes, np.where(sides > 0, last, first))
    cell_low, cell_high = np.where(sides < 0, -np.inf, first), np.where(sides > 0, np.inf, last)
    cell_low, cell_high = np.where(sides > 0, last, cell_low), np.where(sides < 0, first, cell_high)
    alone = ~is_mosaic[:, None, None]
    top_left = np.where(alone, np.round((output - sizes) / 2), top_left)
    cell = np.concatenate(
        (np.where(alone, -np.inf, cell_low), np.where(alone, np.inf, cell_high)), axis=2
    )
    return np.concatenate((top_left, top_left + sizes), axis=2), cell


def _intersect(one: Floats, other: Floats) -> Floats:
    """Intersections of rectangles [..., 4] (top, left, bottom, right)."""
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    return np.concatenate((low, np.maximum(high, low)), axis=-1)


def _project(
    row: Ints,
    image: Ints,
    fit: Floats,
    scale: Floats,
    start: Floats,
    top_left: Floats,
    seen: Floats,
    output_px: tuple[int, int],
) -> MosaicPlan:
    """From the canvas to the output: [T] or [T, 2 or 4] each, see `MosaicPlan`."""
    bounds = np.clip(
        np.tile(start, 2) + scale[:, None] * seen, 0, np.tile(np.array(output_px, np.float64), 2)
    )
    return MosaicPlan(
        row=row,
        image=image,
        scale=scale * fit,
        origin=(start / scale[:, None] + top_left) / fit[:, None],
        window=np.ceil(bounds - 0.5).astype(np.int64),
        bounds=bounds,
    )


def move_boxes(
    boxes: Floats, tile: Ints, plan: MosaicPlan, sizes_px: Ints, spec: MosaicSpec
) -> tuple[Floats, Ints]:
    """Boxes of tiles in their samples, cut to what is seen of the tile; those below the limits are
    left out.

    Args:
        boxes: [N, 4] (cx, cy, w, h) in shares of the tile's image.
        tile: [N] which tile of the plan each lies in.
        plan: The plan.
        sizes_px: [I, 2] (height, width) of all images.
        spec: The limits.

    Returns:
        [K, 4] (top, left, bottom, right) px of the sample, and which of the N boxes they are [K].
    """
    height_width = sizes_px[plan.image[tile]][:, ::-1]  # (width, height), as boxes have x first
    centre, size = boxes[:, :2] * height_width, boxes[:, 2:] * height_width
    edges = np.concatenate((centre - size / 2, centre + size / 2), axis=1)[:, [1, 0, 3, 2]]
    whole = (edges + np.tile(plan.origin[tile], 2)) * plan.scale[tile, None]
    bounds = plan.bounds[tile]
    cut = np.concatenate(
        (np.maximum(whole[:, :2], bounds[:, :2]), np.minimum(whole[:, 2:], bounds[:, 2:])), axis=1
    )
    sides, sides_before = cut[:, 2:] - cut[:, :2], whole[:, 2:] - whole[:, :2]
    kept = (sides > 0).all(1) & (sides >= spec.min_box_px).all(1)
    kept &= sides.prod(1) >= spec.min_box_visible * sides_before.prod(1)
    longest, shortest = sides.max(1), np.maximum(sides.min(1), 1e-9)
    kept &= longest <= spec.max_box_aspect * shortest
    return cut[kept], np.flatnonzero(kept)
