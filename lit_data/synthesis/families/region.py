"""Families that change a region of a surface: outlines, and what shows inside them."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.core.errors import DataError
from lit_data.core.grid import mirror
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Bools, Doubles, Floats, Ints, Size
from lit_data.images.discovery import find_images
from lit_data.images.readers import read_image
from lit_data.synthesis.families.base import (
    Drawn,
    Family,
    Parameters,
    Range,
    load_on,
    spread,
    square_window,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Pixels, Windows


TILE_PX = 64
LEAST_AREA_PX = 9
"""Smallest piece of a mask that is used as a shape."""
BORDER = 0.9
"""Fraction of a tile that the longer side of a shape takes."""

WOBBLE = 0.25
"""Deviation of a blob's edge, as a fraction of its radius."""

FIELD_PX = 512
CELL_PX = 32
"""Width of the largest bumps of the field, in its own pixels."""
_OCTAVES = 3

REACH_PX = 2

TEXTURE_PX = 256
_STRIDE = 4
"""Step between read pixels of the smooth field, whose bumps would exceed most defects otherwise."""


@lru_cache(maxsize=8)
def load_shapes(folder: str) -> Floats:
    """Load every connected piece of every mask below a folder, each scaled to a tile.

    Args:
        folder: Folder of PNG, TIFF, BMP or .npy masks of any depth; every value but 0 is defect.

    Returns:
        Coverage [S, TILE_PX, TILE_PX] float32 in 0..1, in the order of the paths.

    Raises:
        DataError: The folder is missing, or no mask in it has a piece of `LEAST_AREA_PX`.
    """
    if not Path(folder).is_dir():
        raise DataError(
            f"shapes_from={folder} is not a folder: give one that holds masks of defects"
        )
    shapes: list[Floats] = []
    for path in find_images(Path(folder)).paths:
        shapes += _cut_tiles(read_image(path)[0] != 0)
    if not shapes:
        raise DataError(
            f"shapes_from={folder}: no mask has a connected area of {LEAST_AREA_PX} px: are they "
            "all 0?"
        )
    return np.stack(shapes)


def _cut_tiles(mask: Bools) -> list[Floats]:
    import cv2

    _, labels, boxes, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    tiles = []
    for number, (left, top, width, height, area) in enumerate(boxes.tolist()):
        if number == 0 or area < LEAST_AREA_PX:  # 0 is the background
            continue
        piece = labels[top : top + height, left : left + width] == number
        tiles.append(_fit(piece.astype(np.float32)))
    return tiles


def _fit(piece: Floats) -> Floats:
    """Scale a piece to the center of a tile, so that its longer side takes `BORDER` of it."""
    import cv2

    scale = BORDER * TILE_PX / max(piece.shape)
    # An empty edge, into which the outline is interpolated.
    padded = np.pad(piece, 1)
    height, width = padded.shape
    # center to center; the position of a pixel is that of its center
    down = (TILE_PX - 1) / 2 - scale * (height - 1) / 2
    across = (TILE_PX - 1) / 2 - scale * (width - 1) / 2
    matrix = np.array([[scale, 0, across], [0, scale, down]], np.float64)
    tile = cv2.warpAffine(padded, matrix, (TILE_PX, TILE_PX), flags=cv2.INTER_LINEAR)
    return np.asarray(tile, np.float32)


def blob(windows: "Windows", p: Parameters, soft: float) -> "Tensor":
    """Return the coverage of an ellipse with a wavy edge.

    Args:
        windows: Windows of n defects.
        p: ``half_px`` and ``half_across_px`` (half axes), ``angle``, ``seed_y`` and ``seed_x``.
        soft: Width of the edge in fractions of the smaller half axis; 0 is an edge of one pixel.

    Returns:
        [n, h, w] in 0..1.
    """
    along, across = windows.turned(p["angle"])
    radius = ((along / p["half_px"]).square() + (across / p["half_across_px"]).square()).sqrt_()
    waves = look_up(windows, p["seed_y"], p["seed_x"], CELL_PX / p["half_px"])
    edge_px = (p["half_across_px"] * soft).clamp(min=1.0)
    depth = 1 + WOBBLE * waves.clamp_(-2, 2) - radius  # in half axes, from the wavy edge inward
    return (depth * p["half_across_px"] / edge_px + 0.5).clamp_(0, 1)


def real_shape(windows: "Windows", p: Parameters, folder: str) -> "Tensor":
    """Return the coverage of a real defect, turned and scaled.

    Args:
        windows: Windows of n defects.
        p: ``half_px`` (of the longer side), ``angle``, and ``seed_y``, which chooses the shape.
        folder: Folder of masks, see `lit_data.synthesis.families.region.load_shapes`.

    Returns:
        [n, h, w] in 0..1.
    """
    shapes = load_on(windows.device, load_shapes, folder)
    along, across = windows.turned(p["angle"])
    # A tile is as large as the shape plus a border.
    column = (along * BORDER / p["half_px"] + 1) * (TILE_PX / 2)
    row = (across * BORDER / p["half_px"] + 1) * (TILE_PX / 2)
    inside = (column >= 0) & (column < TILE_PX) & (row >= 0) & (row < TILE_PX)
    shape = (p["seed_y"] * len(shapes)).long()
    last = TILE_PX - 1
    return shapes[shape, row.long().clamp_(0, last), column.long().clamp_(0, last)] * inside


@lru_cache(maxsize=1)
def smooth_field() -> Floats:
    """Return gradient noise with three octaves that is periodic at its edges.

    The method is that of Perlin, "An image synthesizer", SIGGRAPH 1985.

    Returns:
        [FIELD_PX, FIELD_PX] float32 with mean 0 and variance 1.
    """
    octaves = []
    for octave in range(_OCTAVES):
        # Each octave has bumps of half the width and half the height of the one before.
        octaves.append(_perlin(FIELD_PX, CELL_PX >> octave, octave) / 2**octave)
    field = np.sum(octaves, axis=0)
    standard: Floats = ((field - field.mean()) / field.std()).astype(np.float32)
    return standard


def look_up(windows: "Windows", top: "Tensor", left: "Tensor", scale: "Tensor") -> "Tensor":
    """Return the field in windows, each with its own position and scale.

    Args:
        windows: Windows of n defects.
        top: [n, 1, 1] in [0, 1), a position in the field.
        left: [n, 1, 1] in [0, 1).
        scale: [n, 1, 1] pixels of the field for each pixel of the image.

    Returns:
        [n, h, w] float32 with mean 0 and variance 1 over the whole field.
    """
    # plus FIELD_PX, because pixels left of the center would be negative
    rows = (top * FIELD_PX + (windows.y + FIELD_PX) * scale).long() % FIELD_PX
    columns = (left * FIELD_PX + (windows.x + FIELD_PX) * scale).long() % FIELD_PX
    pixels = rows * FIELD_PX + columns
    field = load_on(windows.device, smooth_field).view(-1)
    return field.index_select(0, pixels.view(-1)).view(pixels.shape)


def _perlin(size_px: int, cell_px: int, octave: int) -> Doubles:
    """Return one octave, with a random slope at each corner of a cell and blending in between."""
    cells = size_px // cell_px
    angle = 2 * np.pi * uniform(octave, Stream.NOISE, np.arange(cells), 1, cells).astype(np.float64)
    # Unit vectors, so that all bumps are about equally steep.
    gradients = np.stack((np.sin(angle), np.cos(angle)))
    cell, inside = np.divmod((np.arange(size_px) + 0.5) / cell_px, 1)
    first, second = cell.astype(np.int64), (cell.astype(np.int64) + 1) % cells
    # Smooth up to the second derivative, so that cells have no visible borders.
    blend = inside**3 * (inside * (inside * 6 - 15) + 10)

    def slope(rows: Ints, columns: Ints, dy: float, dx: float) -> Doubles:
        down, across = gradients[:, rows[:, None], columns[None, :]]
        return np.asarray(down * (inside[:, None] - dy) + across * (inside[None, :] - dx))

    above_left, above_right = slope(first, first, 0, 0), slope(first, second, 0, 1)
    below_left, below_right = slope(second, first, 1, 0), slope(second, second, 1, 1)
    above = above_left + blend[None, :] * (above_right - above_left)
    below = below_left + blend[None, :] * (below_right - below_left)
    return np.asarray(above + blend[:, None] * (below - above))


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Family):
    """A region with a wavy outline, or that of a real defect.

    Args:
        weight: See `Family`.
        amplitude: See `Family`.
        contrast: See `Family`.
        size_px: Length of the longer side.
        elongation: Ratio of the longer side to the shorter one, for wavy outlines.
        shapes_from: Folder of masks of real defects, whose pieces are the outlines; None draws wavy
            ones.
    """

    size_px: Range = (6.0, 28.0)
    elongation: Range = (1.0, 2.5)
    shapes_from: str | None = None

    outline: ClassVar[tuple[str, ...]] = ("half_px", "half_across_px", "angle", "seed_y", "seed_x")
    soft: ClassVar[float] = 0.0
    """Width of the edge in fractions of the shorter half axis."""

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        half = spread(draws[:, 0], self.size_px) / 2
        return {
            "half_px": half,
            "half_across_px": half / spread(draws[:, 1], self.elongation),
            "angle": draws[:, 2] * np.float32(2 * np.pi),
            "seed_y": draws[:, 3],
            "seed_x": draws[:, 4],
        }

    @override
    def window_px(self, parameters: Drawn, shape_px: Size) -> Ints:
        if self.shapes_from is not None:
            return square_window(parameters["half_px"] * np.float32(np.sqrt(2)))
        half_px = parameters["half_px"]
        # An edge one pixel wide is stretched along with the ellipse.
        edge_px = np.maximum(half_px * self.soft, half_px / parameters["half_across_px"])
        return square_window(half_px * np.float32(1 + 2 * WOBBLE) + edge_px / 2)

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        if self.shapes_from is None:
            return blob(windows, parameters, self.soft)
        return real_shape(windows, parameters, self.shapes_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blur(Region):
    """A region that is blurred by a Gaussian, which is truncated at `REACH_PX`.

    Args:
        weight: See `Family`.
        amplitude: Not used: the strength is `sigma_px`.
        contrast: Not used.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        sigma_px: Standard deviation of the Gaussian.
    """

    sigma_px: Range = (0.7, 1.5)

    name: ClassVar[str] = "blur"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "sigma_px")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        sigma = {"sigma_px": spread(draws[:, 5], self.sigma_px)}
        return super(Blur, self).sample(draws, variant) | sigma

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        import torch

        windows = pixels.windows
        offset = torch.arange(2 * REACH_PX + 1, device=windows.device) - REACH_PX
        weights = (-(offset.square() / (2 * parameters["sigma_px"].square()))).exp_()
        weights = weights / weights.sum(2, keepdim=True)
        # Whole windows, because neighbors share nearly all the pixels read for them.
        blurred = windows.canvas.read_channels(windows.row, *windows.find_pixels(REACH_PX))
        for axis, length in enumerate(windows.size_px, start=1):
            total = blurred.new_zeros(())
            for n in range(len(offset)):
                total = total + blurred.narrow(axis, n, length) * weights[:, :, n, None, None]
            blurred = total
        return pixels.turn_into(blurred[pixels.at])


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPaste(Region):
    """A region that was cut from another place of the image (Li et al., "CutPaste", CVPR 2021).

    Args:
        weight: See `Family`.
        amplitude: Not used: the other place determines the strength.
        contrast: Not used.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        distance_px: Distance of that place, along any direction.
    """

    distance_px: Range = (10.0, 48.0)

    name: ClassVar[str] = "cut_paste"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "shift_y", "shift_x")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        direction = draws[:, 5] * np.float32(2 * np.pi)
        distance = spread(draws[:, 6], self.distance_px)
        # Whole pixels, so that nothing is interpolated and the noise does not change.
        shift = {
            "shift_y": np.rint(distance * np.sin(direction)),
            "shift_x": np.rint(distance * np.cos(direction)),
        }
        return super(CutPaste, self).sample(draws, variant) | shift

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        shift_y = pixels.of_each(parameters["shift_y"]).long()
        shift_x = pixels.of_each(parameters["shift_x"]).long()
        return pixels.turn_into(pixels.look(pixels.y + shift_y, pixels.x + shift_x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift(CutPaste):
    """A region printed a few pixels out of place; the arguments are those of `CutPaste`."""

    size_px: Range = (12.0, 40.0)
    distance_px: Range = (1.5, 4.0)

    name: ClassVar[str] = "shift"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stain(Region):
    """A region with a soft edge, brighter or darker; the arguments are those of `Region`."""

    name: ClassVar[str] = "stain"
    parameters: ClassVar[tuple[str, ...]] = Region.outline
    turns_inwards: ClassVar[bool] = True
    soft: ClassVar[float] = 0.8


@lru_cache(maxsize=8)
def load_textures(folder: str | None) -> Floats:
    """Load the center of the first channel of every image below a folder, reflected if too small.

    Args:
        folder: Folder of images of any depth; None gives smooth noise.

    Returns:
        Textures [T, TEXTURE_PX, TEXTURE_PX] float32 with mean 0 and variance 1 each, in the order
        of the paths.

    Raises:
        DataError: The folder is missing or holds no image.
    """
    if folder is None:
        rows = np.arange(TEXTURE_PX) * _STRIDE % FIELD_PX
        return smooth_field()[rows[:, None], rows[None, :]][None]
    if not Path(folder).is_dir():
        raise DataError(f"textures_from={folder} is not a folder: give one that holds images")
    paths = find_images(Path(folder)).paths
    return np.stack([_standardise(read_image(path)[0]) for path in paths])


def _standardise(image: NDArray[np.generic]) -> Floats:
    """Crop the center of an image, and scale it to mean 0 and variance 1."""
    pixels = image.astype(np.float32)
    for axis, length in enumerate(pixels.shape):
        start = max(0, length - TEXTURE_PX) // 2
        pixels = pixels.take(mirror(start, TEXTURE_PX, length), axis=axis)
    return np.asarray((pixels - pixels.mean()) / max(float(pixels.std()), 1e-6), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texture(Region):
    """A region with another texture of the same mean brightness, behind a mask of Perlin noise.

    It follows Zavrtanik et al., "DRAEM", ICCV 2021, where the texture is an image of another data
    set and the mask is thresholded Perlin noise.

    Args:
        weight: See `Family`.
        amplitude: Standard deviation of the texture, see `Family`.
        contrast: See `Family`.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        textures_from: Folder of images, of which random parts are used; None uses smooth noise.
    """

    textures_from: str | None = None

    name: ClassVar[str] = "texture"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "texture_y", "texture_x", "texture")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: Ints) -> Drawn:
        texture = {"texture_y": draws[:, 5], "texture_x": draws[:, 6], "texture": draws[:, 7]}
        return super(Texture, self).sample(draws, variant) | texture

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        cover = super(Texture, self).cover(windows, parameters)
        return cover if self.shapes_from else cover * _perlin_mask(windows, parameters)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        textures = load_on(pixels.cover.device, load_textures, self.textures_from)
        top = (pixels.of_each(parameters["texture_y"]) * TEXTURE_PX).long()
        left = (pixels.of_each(parameters["texture_x"]) * TEXTURE_PX).long()
        number = (pixels.of_each(parameters["texture"]) * len(textures)).long()
        row = (top + pixels.y) % TEXTURE_PX
        column = (left + pixels.x) % TEXTURE_PX
        # The texture has variance 1, so the strength is its standard deviation.
        grain = pixels.strength.abs() * textures[number, row, column]
        return pixels.turn_into(pixels.windows.brightness[pixels.defect] + grain[:, None])


def _perlin_mask(windows: "Windows", p: Parameters) -> "Tensor":
    """Return islands that cover three quarters of a surface, with edges of a pixel, [n, h, w] in 0..1."""
    waves = look_up(windows, p["seed_x"], p["seed_y"], 2 * CELL_PX / p["half_px"])
    return (waves.add(0.67) * p["half_px"] / 2 + 0.5).clamp_(0, 1)
