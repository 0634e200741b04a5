"""Images as their files describe them, and the options for reading them, which a dataset shares."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array

Kind = Literal["png", "jpeg", "bmp", "tiff", "npy"]
Alpha = Literal["opaque", "drop", "error", "only"]

_CHOICES: dict[str, Sequence[object]] = {
    "alpha": get_args(Alpha),
    "exif": ("ignore", "apply"),
    "palette": ("error", "expand", "index"),
    "equal_channels": ("keep", "collapse", "brightest"),
    "invert": (False, True, "photometric"),
    "depth": ("scale", "keep"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Rules for turning a file into pixels.

    Attributes:
        page: Number of the page of a TIFF to read, from 0; None refuses files of several pages.
        alpha: ``opaque`` drops alpha channels that are opaque everywhere and refuses others,
            ``drop`` drops all of them, ``error`` refuses images that have one. ``only`` reads
            only the alpha channel, for masks that are cut-outs.
        exif: ``ignore`` keeps the rows as stored, ``apply`` rotates or mirrors the image by its
            EXIF or TIFF orientation.
        palette: ``expand`` returns the three colors of a palette image, ``index`` its numbers,
            ``error`` refuses it.
        nan_fill: Value that replaces NaN and infinite pixels; None makes them an error in strict
            reading.
        strict_extension: Refuse a file whose extension does not fit its content; otherwise add a
            note.
        max_pixels: Largest height x width; the default is the size above which Pillow refuses an
            image.
        max_image_bytes: Largest decoded image.
        cv2_order: Return the first three channels of a PNG, JPEG, BMP or TIFF as B, G, R like
            ``cv2.imread``, for datasets that count channels so. ``.npy`` files, which OpenCV
            does not read, keep their order.
        gray_to_rgb: Copy a single channel into three.
        equal_channels: ``collapse`` merges channels that are all equal into one and refuses
            channels that differ; ``brightest`` returns the largest of the channels at each pixel.
        invert: Subtract pixels from white, in every image (True), or in those whose TIFF tags say
            that white is stored as 0, as in fax pages (``photometric``). White is the largest
            number of the stored depth: 255 for 8 bits, 4095 for 12, 65535 for 16, True for bilevel
            images; for an expanded palette, it is that of the colors. Signed pixels, floats and
            palette numbers have no white and are refused.
        as_float: Cast integers to float32, unscaled; for depths that a store does not support
            (int32, uint32 and wider).
        depth: ``scale`` scales images of 1 to 7 and 9 to 15 bits to the full range of their dtype,
            as PNG of 1, 2 and 4 bits are; ``keep`` keeps their numbers.
    """

    key: ClassVar[str] = "data.read"
    """Key of these options in a configuration, for messages."""
    alpha_cure: ClassVar[str] = "set data.read.alpha=drop to read it without"
    colour_cure: ClassVar[str] = (
        "data.read.equal_channels=collapse is for channels that are copies of each other"
    )

    page: int | None = None
    alpha: Alpha = "opaque"
    exif: Literal["ignore", "apply"] = "ignore"
    palette: Literal["error", "expand", "index"] = "expand"
    nan_fill: float | None = None
    strict_extension: bool = False
    max_pixels: int = 178_956_970
    max_image_bytes: int = 4 * 2**30
    cv2_order: bool = False
    gray_to_rgb: bool = False
    equal_channels: Literal["keep", "collapse", "brightest"] = "keep"
    invert: bool | Literal["photometric"] = False
    as_float: bool = False
    depth: Literal["scale", "keep"] = "scale"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(f"{self.key}.{name}", getattr(self, name), allowed)
        for name in ("max_pixels", "max_image_bytes"):
            check_count(f"{self.key}.{name}", getattr(self, name), 1)
        if self.page is not None:
            check_count(f"{self.key}.page", self.page, 0)
        if self.nan_fill is not None and not math.isfinite(self.nan_fill):
            raise ConfigError(f"{self.key}.nan_fill={self.nan_fill!r} must be a finite number")
        if self.gray_to_rgb and self.equal_channels != "keep":
            raise ConfigError(
                f"{self.key}.gray_to_rgb=true and {self.key}.equal_channels={self.equal_channels} "
                "undo each other; choose one"
            )

    def fingerprint(self) -> str:
        """JSON of the options with sorted keys, the same in every process and release."""
        return json.dumps(asdict(self), sort_keys=True)


for _field in fields(ReadOptions):
    if _field.type is bool:
        _CHOICES[_field.name] = (False, True)

DEFAULT_READ = ReadOptions()
"""Default rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """Image as its file describes it.

    Attributes:
        kind: Format, by the first bytes of the file.
        height_px: Rows as stored, before any orientation is applied.
        width_px: Columns as stored.
        colors: Channels that are not alpha; 1 for a palette image.
        dtype: Dtype of the decoded pixels (of the indices for a palette image), in native byte
            order.
        bits_per_pixel: Bits of all channels, unpacked but not decoded.
        depth_bits: Bits of a sample that its values use; None means all bits of the dtype.
        white_is_zero: True if the file says that white is stored as 0.
        alpha: Positions of the alpha channels among all channels.
        palette: True if the pixels are indices into a table of colors.
        pages: Number of images in the file.
        page: Number of this page.
        orientation: EXIF or TIFF orientation, 1 to 8; 1 is upright.
        padded_pixels: Pixels that a decoder allocates if tiles are larger than the image.
        notes: Notes for the user.
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
    """Return True if the options ask for the image to be inverted.

    Raises:
        DataError: They do, and the image has no defined white, as with signed pixels, floats and
            palette numbers.
    """
    if options.invert is False or (options.invert == "photometric" and not stored.white_is_zero):
        return False
    if stored.palette and options.palette == "index":
        raise DataError(
            f"invert={options.invert!r}, but palette numbers have no white; set "
            f"{options.key}.palette=expand"
        )
    if stored.dtype.kind not in "bu":
        raise DataError(
            f"invert={options.invert!r}, but {stored.dtype} has no defined white; remove invert, "
            "or save it as whole numbers from 0 on"
        )
    return True


def invert(planes: Array, depth_bits: int | None) -> Array:
    """Subtract pixels from white.

    White is 2^bits - 1: 255 for uint8, 4095 for 12 bits in uint16, True for bilevel images.

    Args:
        planes: [C, H, W] bool or unsigned.
        depth_bits: Bits of a sample that are used; None means all bits of the dtype.

    Returns:
        Inverted pixels, of the same shape and dtype.
    """
    if planes.dtype == np.bool_:
        return ~planes
    # 12 bits in uint16 are white at 4095, not at 65535.
    white = 2 ** (depth_bits or 8 * planes.dtype.itemsize) - 1
    inverted: Array = planes.dtype.type(white) - planes
    return inverted


def note_inversion(stored: StoredImage, options: ReadOptions) -> tuple[str, ...]:
    """Return the note that an image is inverted, or that it is not."""
    if must_invert(stored, options):
        return ("white is stored as 0; inverted",) if stored.white_is_zero else ("inverted",)
    if stored.white_is_zero:
        note = "white is stored as 0; values are kept as stored (invert=False)"
        has_white = stored.dtype.kind in "bu"
        return (f"{note}; {options.key}.invert=photometric inverts them" if has_white else note,)
    return ()
