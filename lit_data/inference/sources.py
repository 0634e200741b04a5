"""Images to predict: in memory, loaded when their turn comes, or read part by part."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lit_data.errors import DataError
from lit_data.inference.tiling import TileAxis
from lit_data.io import ImageBank
from lit_data.io.progress import ordered_map
from lit_data.types import Array

DTYPES: Final = ("bool", "uint8", "uint16", "int16", "float16", "float32", "float64")


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

    def cut(self, rows: TileAxis, columns: TileAxis) -> Iterator[NDArray[Any]]:
        """Yield tiles row by row, [C, h, w] each; each row of tiles is read once.

        Tiles that reach past the end of the image repeat its edge.
        """
        for top in rows.starts:
            bottom = min(top + rows.tile_px, rows.length_px)
            slab = np.asarray(self.pixels[:, top:bottom, :])
            for left in columns.starts:
                tile = slab[:, :, left : left + columns.tile_px]
                yield _fill(tile, rows.tile_px, columns.tile_px)


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
        readers: Threads that load.
        on_bad: Called with the number of an image that is bad, which is then left out; None raises.
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


def _fill(part: Array, height: int, width: int) -> Array:
    # only tiles at the lower and the right edge of an image are smaller
    missing_rows = height - part.shape[1]
    missing_columns = width - part.shape[2]
    if missing_rows == missing_columns == 0:
        return part
    return np.pad(part, ((0, 0), (0, missing_rows), (0, missing_columns)), mode="edge")
