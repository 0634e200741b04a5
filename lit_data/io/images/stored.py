"""Images as their files describe them, before any option is applied."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lit_data.errors import DataError
from lit_data.io.images.options import ReadOptions
from lit_data.types import Array

Kind = Literal["png", "jpeg", "bmp", "tiff", "npy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image as its file describes it.

    Attributes:
        kind: Format, by the first bytes of the file.
        height_px: Rows as stored, before any orientation is applied.
        width_px: Columns as stored.
        colors: Channels that are not alpha; 1 for a palette image.
        dtype: Of the decoded pixels (of the indices for a palette image), in native byte order.
        bits_per_pixel: Of all channels, unpacked but not decoded.
        depth_bits: Bits of a sample that its values use; None: all of the dtype.
        white_is_zero: The file says that white is stored as 0.
        alpha: Places of the alpha channels among all channels.
        palette: The pixels are indices into a table of colours.
        pages: Images in the file.
        page: Which of them this is.
        orientation: The EXIF or TIFF orientation, 1 to 8; 1 is upright.
        padded_pixels: Pixels a decoder makes on its way, where tiles are larger than the image.
        notes: What a user should know.
    """

    kind: Kind
    height_px: int
    width_px: int
    colors: int
    dtype: "np.dtype[Any]"
    bits_per_pixel: int
    depth_bits: int | None = None
    white_is_zero: bool = False
    alpha: tuple[int, ...] = ()
    palette: bool = False
    pages: int = 1
    page: int = 0
    orientation: int = 1
    padded_pixels: int = 0
    notes: tuple[str, ...] = ()


def must_invert(stored: StoredImage, options: ReadOptions) -> bool:
    """Return True if the options ask for black and white to change places.

    Raises:
        DataError: They do, and the image has no defined white: signed and floating pixels, numbers
            of a palette.
    """
    if options.invert is False or (options.invert == "photometric" and not stored.white_is_zero):
        return False
    if stored.palette and options.palette == "index":
        raise DataError(
            f"invert={options.invert!r}, but numbers of a palette have no white; set "
            f"{options.key}.palette=expand"
        )
    if stored.dtype.kind not in "bu":
        raise DataError(
            f"invert={options.invert!r}, but {stored.dtype} has no defined white; leave invert "
            "out, or save it as whole numbers from 0 on"
        )
    return True


def invert(planes: Array, depth_bits: int | None) -> Array:
    """Subtract pixels from white.

    White is 2^bits - 1: 255 of uint8, 4095 of 12 bits in uint16, True of bilevel images.

    Args:
        planes: [C, H, W] bool or unsigned.
        depth_bits: Bits of a sample that are used; None: all of the dtype.

    Returns:
        The same shape and dtype.
    """
    if planes.dtype == np.bool_:
        return ~planes
    white = 2 ** (depth_bits or 8 * planes.dtype.itemsize) - 1
    inverted: Array = planes.dtype.type(white) - planes
    return inverted


def note_inversion(stored: StoredImage, options: ReadOptions) -> tuple[str, ...]:
    """Note for users that an image is inverted, or that it is not."""
    if must_invert(stored, options):
        return ("white is stored as 0; inverted",) if stored.white_is_zero else ("inverted",)
    return (
        ("white is stored as 0; values are kept as stored (invert=False)",)
        if stored.white_is_zero
        else ()
    )
