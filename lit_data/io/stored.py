"""What a file says about its image, before any option is applied."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

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
