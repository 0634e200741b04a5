"""Images whose white is stored as 0: which are turned round, and how."""

import numpy as np

from lit_data.errors import DataError
from lit_data.io.options import ReadOptions
from lit_data.io.stored import StoredImage
from lit_data.types import Array


def must_invert(stored: StoredImage, options: ReadOptions) -> bool:
    """Whether the options ask for black and white to change places.

    Raises:
        DataError: They do, and the image has no defined white: signed and floating pixels, numbers of a palette.
    """
    if options.invert is False or (options.invert == "photometric" and not stored.white_is_zero):
        return False
    if stored.palette and options.palette == "index":
        raise DataError(f'invert={options.invert!r}, but numbers of a palette have no white; set palette="expand"')
    if stored.dtype.kind not in "bu":
        raise DataError(
            f"invert={options.invert!r}, but {stored.dtype} has no defined white; leave invert out, or save it as "
            "whole numbers from 0 on"
        )
    return True


def invert(planes: Array, depth_bits: int | None) -> Array:
    """Subtract from white, which is 2^bits - 1: 255 of uint8, 4095 of 12 bits in uint16, True of bilevel images.

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
    """What a user should know of it."""
    if must_invert(stored, options):
        return ("white is stored as 0; inverted",) if stored.white_is_zero else ("inverted",)
    return ("white is stored as 0; values are kept as stored (invert=False)",) if stored.white_is_zero else ()
