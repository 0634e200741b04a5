"""Images as their files describe them, and the options of reading them, the same for a dataset."""

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
        page: Which page of a TIFF to read, from 0; None refuses files of several pages.
        alpha: ``opaque`` leaves alpha channels out that are opaque everywhere and refuses others,
            ``drop`` leaves all of them out, ``error`` refuses images that have one. ``only`` reads
            nothing but the alpha channel, for masks that are cut-outs.
        exif: ``ignore`` keeps the rows as stored, ``apply`` turns the image as its EXIF or TIFF
            orientation says.
        palette: ``expand`` gives the three colors of a palette image, ``index`` its numbers,
            ``error`` refuses it.
        nan_fill: Replaces NaN and infinite pixels; None makes them an error in strict reading.
        strict_extension: Refuse a file whose name does not fit its content; otherwise that is a
            note.
        max_pixels: Largest height x width; the default is the size above which Pillow refuses an
            image.
        max_image_bytes: Largest decoded image.
        cv2_order: Give the first three channels of a PNG, JPEG, BMP or TIFF as B, G, R like
            ``cv2.imread``, for sets whose owners counted channels so. ``.npy`` files, which OpenCV
            does not read, keep their order.
        gray_to_rgb: Copy a single channel into three.
        equal_channels: ``collapse`` turns channels that are all equal into one and refuses channels
            that differ; ``brightest`` gives the largest of the channels at each pixel.
        invert: Subtract pixels from white, in every image (True), or in those whose TIFF tags say
            that white is stored as 0, as fax pages do (``photometric``). White is the largest
            number of the stored depth: 255 of 8 bits, 4095 of 12, 65535 of 16, True of bilevel
            images; of the colors where a palette is expanded. Signed and floating pixels and the
            palette numbers have no white and are refused.
        as_float: Cast integers to float32, unscaled; for depths a store has no room for (int32,
            uint32 and wider).
        depth: ``scale`` brings images of 1 to 7 and 9 to 15 bits to all values of their dtype, as
            PNG of 1, 2 and 4 bits are; ``keep`` gives their numbers.
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
        """The options as JSON with sorted keys: equal options give equal text in every process and release."""
        return json.dumps(asdict(self), sort_keys=True)


for _field in fields(ReadOptions):
    if _field.type is bool:
        _CHOICES[_field.name] = (False, True)

DEFAULT_READ = ReadOptions()
"""The rules that hold when nothing is said."""


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
        palette: The pixels are indices into a table of colors.
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

    White is 2^bits - 1: 255 of uint8, 4095 of 12 bits in uint16, True of bilevel images.

    Args:
        planes: [C, H, W] bool or unsigned.
        depth_bits: Bits of a sample that are used; None: all of the dtype.

    Returns:
        The same shape and dtype.
    """
    if planes.dtype == np.bool_:
        return ~planes
    # 12 bits in uint16 are white at 4095, not at 65535.
    white = 2 ** (depth_bits or 8 * planes.dtype.itemsize) - 1
    inverted: Array = planes.dtype.type(white) - planes
    return inverted


def note_inversion(stored: StoredImage, options: ReadOptions) -> tuple[str, ...]:
    """Note for users that an image is inverted, or that it is not."""
    if must_invert(stored, options):
        return ("white is stored as 0; inverted",) if stored.white_is_zero else ("inverted",)
    if stored.white_is_zero:
        note = "white is stored as 0; values are kept as stored (invert=False)"
        has_white = stored.dtype.kind in "bu"
        return (f"{note}; {options.key}.invert=photometric inverts them" if has_white else note,)
    return ()
