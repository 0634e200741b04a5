"""Images to predict, which are opened when needed, cut into tiles, and stitched from their values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import pair_px
from lit_data.core.progress import ordered_map
from lit_data.core.types import Array, Size
from lit_data.images import ImageBank
from lit_inspect.tiles import Blend, Seams, TileAxis, cut, plan_axis, round_up

DTYPES = ("bool", "uint8", "uint16", "int16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rules by which images are cut.

    Args:
        tile_px: Tile size, one number or (height, width).
        overlap_px: Smallest number of pixels that neighboring tiles share.
        margin_px: Pixels next to the seam-side borders of a tile that count nothing; at most half
            the overlap. None takes half of the overlap for `constant`, which then takes each pixel
            from one tile, and a quarter for `gaussian`.
        blend: Average of the pixels that several tiles cover, see `lit_inspect.tiles.weigh_tiles`.
        multiple_px: Tiles begin at multiples of it, and long sides are filled up to a multiple of
            it: the total stride of a net that works at lower resolutions (16 for a UNet of four
            halvings).
        round_px: A side shorter than a tile is filled up to a multiple of it, so that images of
            about one size share batches. None takes an eighth of a tile.

    Raises:
        ConfigError: The sizes do not fit together.
    """

    tile_px: int | Size
    overlap_px: int
    margin_px: int | None = None
    blend: Blend = "constant"
    multiple_px: int = 1
    round_px: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_choice("blend", self.blend, get_args(Blend))
        if self.multiple_px < 1 or (self.round_px is not None and self.round_px < 1):
            raise ConfigError(
                f"multiple_px={self.multiple_px}, round_px={self.round_px}: need at least 1"
            )
        if any(side % self.multiple_px for side in self.sides_px):
            raise ConfigError(
                f"tile_px={self.tile_px} is not a multiple of multiple_px={self.multiple_px}"
            )
        most_px = min(self.sides_px) - self.multiple_px  # so that each tile begins behind the last
        if not 0 <= self.overlap_px <= most_px:
            raise ConfigError(
                f"overlap_px={self.overlap_px} must be from 0 to {most_px} for "
                f"tile_px={self.tile_px}, multiple_px={self.multiple_px}"
            )
        if self.margin_px is not None and not 0 <= self.margin_px <= self.overlap_px // 2:
            raise ConfigError(
                f"margin_px={self.margin_px} must be from 0 to {self.overlap_px // 2}, half of "
                f"overlap_px={self.overlap_px}: some pixels would come from no tile"
            )

    @property
    def sides_px(self) -> Size:
        """Tile (height, width)."""
        return pair_px("tile_px", self.tile_px)

    def plan(self, height_px: int, width_px: int) -> tuple[TileAxis, TileAxis]:
        """Return the tiles of an image along its height, and along its width."""
        tile_height_px, tile_width_px = self.sides_px
        rows = self._plan_axis(height_px, tile_height_px)
        return rows, self._plan_axis(width_px, tile_width_px)

    def _plan_axis(self, length_px: int, tile_px: int) -> TileAxis:
        step_px = self.round_px or round_up(max(tile_px // 8, 1), self.multiple_px)
        seams = Seams(self.overlap_px, self.margin_px, self.blend, self.multiple_px)
        return plan_axis(length_px, tile_px, step_px, seams)


@runtime_checkable
class ImagePixels(Protocol):
    """A [C, H, W] array that is read by slices: an ndarray, a memory map, a view of a store."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Three lengths."""

    @property
    def dtype(self) -> Any:  # noqa: ANN401 - NumPy's, or what it understands
        """Of the pixels."""

    def __getitem__(self, part: Any, /) -> Any: ...  # noqa: ANN401


Image = ImagePixels | Tensor | Callable[[], ImagePixels | Tensor]
Images = Iterable[Image] | ImageBank


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """One image, checked.

    Attributes:
        number: Its position in the input.
        pixels: [C, H, W].
        dtype: Dtype of the tiles that go to the device.
    """

    number: int
    pixels: ImagePixels
    dtype: np.dtype[Any]

    @property
    def size_px(self) -> tuple[int, int]:
        """(height, width)."""
        return self.pixels.shape[1], self.pixels.shape[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W]."""
        channels, height, width = self.pixels.shape
        return channels, height, width

    def read(self, top: int, bottom: int) -> Array:
        """Return rows [C, bottom - top, W]."""
        return np.asarray(self.pixels[:, top:bottom, :])


def open_source(number: int, image: Image) -> OpenedImage:
    """Load an image if it must be, and check it.

    Raises:
        DataError: It is none, or its pixels are of a kind that no net takes; or an error of its
            loading.
    """
    loaded = image() if callable(image) and not isinstance(image, Tensor) else image
    if isinstance(loaded, Tensor):
        pixels: ImagePixels = loaded.detach().cpu().numpy()
    else:
        pixels = cast(ImagePixels, loaded)
    shape = tuple(getattr(pixels, "shape", ()))
    if len(shape) != 3 or not all(shape):
        raise DataError(
            f"image {number} is {type(loaded).__name__} of shape {list(shape)}: "
            "give pixels [C, H, W]"
        )
    dtype = np.dtype(pixels.dtype)
    if dtype.name not in DTYPES:
        raise DataError(f"image {number} is {dtype.name}: convert it to one of {', '.join(DTYPES)}")
    # by name, which drops the byte order of a file
    tile_dtype = np.dtype("float32" if dtype.name == "float64" else dtype.name)
    return OpenedImage(number, pixels, tile_dtype)


def open_sources(
    images: Images, *, readers: int, on_bad: Callable[[int, DataError], None] | None
) -> Iterator[OpenedImage]:
    """Yield images in order, loaded by threads a few ahead.

    Args:
        images: Images or functions that load them.
        readers: Number of threads that load images.
        on_bad: Function called with the number of a bad image, which is then skipped, and the
            error; None raises the error.
    """

    def load(numbered: tuple[int, Image]) -> OpenedImage | tuple[int, DataError]:
        try:
            return open_source(*numbered)
        except DataError as error:
            if on_bad is None:
                raise
            return numbered[0], error

    for opened in ordered_map(load, enumerate(_each(images)), readers):
        if isinstance(opened, OpenedImage):
            yield opened
        elif on_bad is not None:
            on_bad(*opened)


def _each(images: Images) -> Iterator[Image]:
    if isinstance(images, Iterable):
        yield from images
        return
    for number in range(len(images)):
        yield lambda number=number: images[number]  # type: ignore[misc]


class Target(Protocol):
    """Receives finished rows of an image."""

    def write(self, top_px: int, values: Tensor) -> None:
        """Write rows [K, n, W] float32, starting at `top_px`."""


OpenTarget = Callable[[tuple[int, int, int]], Target]
"""Called with the shape [K, H, W] as soon as the number of channels is known."""


class MemoryTarget:
    """An image in memory.

    Args:
        shape: [K, H, W].

    Attributes:
        values: [K, H, W] float32.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.values = torch.empty(shape)

    def write(self, top_px: int, values: Tensor) -> None:
        """Take rows."""
        self.values[:, top_px : top_px + values.shape[1]] = values


class SlabStitcher:
    """Blends the tiles of one image and writes rows as soon as no further tile covers them.

    Memory holds one row of tiles.

    Args:
        rows: Tiles along the height.
        columns: Tiles along the width.
        open_target: Opens the target of the image.

    Attributes:
        target: Target of the image, once its first tile came.
    """

    def __init__(self, rows: TileAxis, columns: TileAxis, open_target: OpenTarget) -> None:
        self.target: Target | None = None
        self._rows = rows
        self._columns = columns
        self._open_target = open_target
        self._row = 0  # of the next tile
        self._column = 0
        self._slab = torch.empty(0)  # rows that further tiles cover, [K, h, W]

    @property
    def complete(self) -> bool:
        """True if all tiles have been added."""
        return self._row == len(self._rows.starts)

    def add(self, values: Tensor) -> None:
        """Add the next tile [K, h, w] float32, in row-major order."""
        if self.target is None:
            height = min(self._rows.tile_px, self._rows.length_px)
            self._slab = torch.zeros(len(values), height, self._columns.length_px)
            shape = (len(values), self._rows.length_px, self._columns.length_px)
            self.target = self._open_target(shape)  # only now the channels are known
        self._blend(values)
        self._column += 1
        if self._column == len(self._columns.starts):
            self._finish_row(self.target)

    def _blend(self, values: Tensor) -> None:
        down = self._rows.counted[self._row]
        across = self._columns.counted[self._column]
        vertical = self._rows.weights[self._row]
        horizontal = self._columns.weights[self._column]
        left = self._columns.starts[self._column]
        part = self._slab[:, down, left + across.start : left + across.stop]
        values = values[:, down, across]
        if vertical is not None:
            values = values * torch.from_numpy(vertical)[:, None]
        if horizontal is not None:
            part.addcmul_(values, torch.from_numpy(horizontal))
        elif vertical is not None:
            part.add_(values)
        else:
            part.copy_(values)  # all weights are 1: no other tile counts here

    def _finish_row(self, target: Target) -> None:
        top = self._rows.starts[self._row]
        self._row += 1
        self._column = 0
        if self.complete:
            target.write(top, self._slab[:, : self._rows.length_px - top])
            self._slab = torch.empty(0)
            return
        finished = self._rows.starts[self._row] - top
        # rows above the next row of tiles get no more values
        target.write(top, self._slab[:, :finished])
        shared = self._slab.shape[1] - finished
        self._slab[:, :shared] = self._slab[:, finished:].clone()  # both may overlap
        self._slab[:, shared:] = 0


class Kind(NamedTuple):
    """Shape [C, h, w] and dtype that the tiles of a batch share."""

    shape: tuple[int, int, int]
    dtype: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


class ImageJob:
    """One image in progress.

    Args:
        source: The image.
        tiling: Rules by which it is cut.
        open_target: Function that opens the target of its values.
    """

    def __init__(self, source: OpenedImage, tiling: Tiling, open_target: OpenTarget) -> None:
        rows, columns = tiling.plan(*source.size_px)
        self.number = source.number
        self.kind = Kind((source.pixels.shape[0], rows.tile_px, columns.tile_px), source.dtype.name)
        self.stitcher = SlabStitcher(rows, columns, open_target)
        self.tiles = cut(source, rows, columns)
