"""Masks, whose pixels are class numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.opening import naming
from lit_data.core.types import IGNORED, Array, Bools, Bytes, Ints, PathText
from lit_data.images.read_options import DEFAULT_READ, Alpha, ReadOptions
from lit_data.images.readers import read_image

_MOST_SHOWN = 10
_SMALL = 16  # class numbers that may have gaps
_FEW = 64  # class numbers; grey edges have far more values
_CHANNELS: dict[str, Literal["collapse", "brightest"]] = {
    "equal": "collapse",
    "brightest": "brightest",
}
_SCALES = {"auto": ({0, 1}, {0, 255}), "0_1": ({0, 1},), "0_255": ({0, 255},)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaskReadOptions(ReadOptions):
    key: ClassVar[str] = "data.mask_read"
    alpha_cure: ClassVar[str] = (
        "set data.mask_read.alpha=drop to read it without, or =only if it is the mask"
    )
    colour_cure: ClassVar[str] = (
        "set data.mask_read.channels=brightest if every pixel that is not black is a defect"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOptions:
    """Rules for turning a file into class numbers.

    Attributes:
        classes: Number of classes, including the background; 2 to 256.
        scale: Values of a mask of two classes: ``0_1``, ``0_255``, or ``auto``, which accepts
            either, and 0 and 65535 of 16 bits, in each file. With more classes, the values are the
            class numbers.
        threshold: With two classes, values from the threshold up are the defect, and all values
            below are background. For masks with gray edges, from smooth scaling or JPEG. None
            refuses such masks.
        palette: ``index`` takes the numbers of a palette image, ``expand`` its colors, which must
            be grays: for black and white masks whose numbers have no meaning.
        colors: ``[red, green, blue]`` of each class, the background first, if masks are colors,
            as in exports of LabelMe and CVAT. With two classes, all colors but the first mark the
            defect. None means that values are numbers.
        ignore: Value of pixels that are excluded from training and scores, such as 255; they get
            the number 255. None means that there is no such value.
        invert: False takes the numbers as stored, ``photometric`` as shown if the TIFF tags say
            that white is stored as 0; class numbers stay. ``auto`` is decided by the masks of a
            dataset, see `choose_inversion`, and takes the numbers of a single file as stored. True
            swaps background and defect in every mask.
        page: As in ``ReadOptions``.
        alpha: As in ``ReadOptions``; ``only`` for masks that are transparent outside the defect.
        channels: ``equal`` refuses channels that differ; ``brightest`` takes the largest of them.
            With two classes, anything that is not black is then the defect.
        exif: As in ``ReadOptions``; choose the same for images and masks.
        strict_extension: As in ``ReadOptions``.
        max_pixels: As in ``ReadOptions``.
        max_image_bytes: As in ``ReadOptions``.
    """

    classes: int = 2
    scale: Literal["auto", "0_1", "0_255"] = "auto"
    threshold: int | None = None
    palette: Literal["index", "expand"] = "index"
    colors: Sequence[Sequence[int]] | None = None
    ignore: int | None = None
    invert: bool | Literal["auto", "photometric"] = "auto"
    page: int | None = None
    alpha: Alpha = "opaque"
    channels: Literal["equal", "brightest"] = "equal"
    exif: Literal["ignore", "apply"] = "ignore"
    strict_extension: bool = False
    max_pixels: int = DEFAULT_READ.max_pixels
    max_image_bytes: int = DEFAULT_READ.max_image_bytes

    def __post_init__(self) -> None:
        check_count("classes", self.classes, 2, 256)
        check_choice("scale", self.scale, [*_SCALES])
        check_choice("palette", self.palette, ("index", "expand"))
        check_choice("invert", self.invert, (False, True, "auto", "photometric"))
        if self.invert is True and self.classes > 2:
            raise ConfigError(
                "invert=true swaps defect and background, which needs 2 classes, and "
                f"classes={self.classes}: remove it"
            )
        if self.classes > 2 and self.scale != "auto":
            raise ConfigError(
                f"scale={self.scale!r} is for 2 classes; "
                f'leave it at "auto" with classes={self.classes}'
            )
        if self.threshold is not None and (
            self.classes > 2
            or not isinstance(self.threshold, int)
            or not 0 < self.threshold < 65536
        ):
            raise ConfigError(
                f"threshold={self.threshold!r} must be a whole number from 1 to 65535, and is for "
                "2 classes"
            )
        if self.ignore is not None and (not isinstance(self.ignore, int) or self.classes > IGNORED):
            raise ConfigError(
                f"ignore={self.ignore!r} must be a whole number, with at most {IGNORED} classes"
            )
        check_choice("channels", self.channels, [*_CHANNELS])
        if self.classes > 2 and (self.channels != "equal" or self.alpha == "only"):
            raise ConfigError(
                "channels=brightest and alpha=only separate a defect from the background, which "
                f"needs 2 classes, and classes={self.classes}: name the colors of the classes"
            )
        if self.colors is not None:
            self._check_colours()
        _ = self.read  # its own checks

    def _check_colours(self) -> None:
        colors = tuple(tuple(colour) for colour in self.colors or ())
        are_bytes = all(
            type(part) is int and 0 <= part <= 255 for colour in colors for part in colour
        )
        if (
            len(set(colors)) < max(2, len(colors))
            or {len(colour) for colour in colors} != {3}
            or not are_bytes
        ):
            raise ConfigError(
                f"colors={self.colors!r} must be two or more different [red, green, blue] of 0 "
                "to 255, the background first"
            )
        if self.classes not in (2, len(colors)):
            raise ConfigError(
                f"{len(colors)} colors, including the background, and {self.classes} classes"
            )
        if self.threshold is not None or self.ignore is not None or self.scale != "auto":
            raise ConfigError("colors replaces scale, threshold and ignore: remove them")
        if self.channels != "equal" or self.alpha == "only":
            raise ConfigError("colors replaces channels=brightest and alpha=only: remove them")
        object.__setattr__(self, "colors", colors)

    @property
    def read(self) -> ReadOptions:
        """Rules for reading the file of a mask."""
        has_colours = self.colors is not None
        # Class numbers mean themselves, whatever a viewer would show.
        is_seen = self.invert == "photometric" and (has_colours or self.classes == 2)
        return _MaskReadOptions(
            page=self.page,
            alpha=self.alpha,
            exif=self.exif,
            palette="expand" if has_colours else self.palette,
            strict_extension=self.strict_extension,
            max_pixels=self.max_pixels,
            max_image_bytes=self.max_image_bytes,
            gray_to_rgb=has_colours,
            equal_channels="keep" if has_colours else _CHANNELS[self.channels],
            depth="keep",
            invert="photometric" if is_seen else False,
        )


DEFAULT_MASK = MaskOptions()
"""Two classes, stored as 0 and 1 or as 0 and 255."""


def read_mask(path: PathText, options: MaskOptions = DEFAULT_MASK) -> Bytes:
    """Read the mask of an image.

    Args:
        path: A file as for ``read_image``.
        options: Rules for reading it.

    Returns:
        [1, H, W] uint8 class numbers.

    Raises:
        DataError: As ``read_image``, or a value is not a class.
    """
    mask = read_image(path, options.read)
    with naming(path):
        return number_classes(mask, options)


def number_classes(mask: Array, options: MaskOptions) -> Bytes:
    """Turn the values of a mask into class numbers.

    Args:
        mask: [1, H, W] as read under ``options.read``; [3, H, W] if the options name colors.
        options: Rules for the values.

    Returns:
        [1, H, W] uint8; 255 for ignored pixels.

    Raises:
        DataError: A value or a color is not a class, or values are not integers.
    """
    ignored = None if options.ignore is None else mask == options.ignore
    if options.colors is not None:
        numbers = _number_colours(mask, options.colors, options.classes)
    elif ignored is None:
        numbers = _number(mask, options)
    else:
        # They count as background during the check, since their value is not a class.
        numbers = _number(np.where(ignored, mask.dtype.type(0), mask), options)
    if options.invert is True:
        numbers = np.uint8(1) - numbers
    if ignored is not None:
        numbers[ignored] = IGNORED
    return numbers


def to_whole_numbers(mask: Array) -> Array:
    """Return the values of a mask as integers; floats stay if they are not whole numbers."""
    if mask.dtype == np.bool_:
        return mask.view(np.uint8)
    if mask.dtype.kind != "f" or not (np.abs(mask) < 2**31).all():  # NaN is not less either
        return mask
    numbers = mask.astype(np.int64)
    return numbers if (numbers == mask).all() else mask


def _number(mask: Array, options: MaskOptions) -> Bytes:
    if mask.dtype == np.bool_:
        return mask.astype(np.uint8)
    mask = to_whole_numbers(mask)
    values = _list_values(mask)
    if mask.dtype.kind not in "iu":
        raise DataError(
            f"mask of {mask.dtype} with the values {show_values(values)}; masks are whole numbers, "
            "save them as 8-bit PNG"
        )
    if options.classes > 2:
        if values[0] < 0 or values[-1] >= options.classes:
            allowed = f"0 to {options.classes - 1} (classes={options.classes})"
            raise DataError(_explain(values, allowed, options))
        return mask.astype(np.uint8)
    if options.threshold is not None:
        return (mask >= options.threshold).astype(np.uint8)
    scales = _SCALES[options.scale]
    numbers = set(values.tolist())
    if mask.dtype == np.uint16 and numbers <= {0, 65535}:  # black and white
        numbers = {0, 255}
    if not any(numbers <= scale for scale in scales):
        allowed = " or ".join(f"{min(scale)} and {max(scale)}" for scale in scales)
        raise DataError(_explain(values, allowed, options))
    foreground: Bools = mask != 0
    return foreground.astype(np.uint8)


def _number_colours(mask: Array, colors: Sequence[Sequence[int]], classes: int) -> Bytes:
    mask = widen_bits(mask)
    if mask.dtype != np.uint8:
        raise DataError(f"mask of {mask.dtype}; color masks have 8 bits; save it as 8-bit PNG")
    packed = pack_colours(mask)
    numbers = np.full(mask.shape[1:], -1)  # stands for unnamed colors
    for number, colour in enumerate(colors):
        # Of two classes, all colors but the first are the defect.
        class_number = number if classes > 2 else min(number, 1)
        numbers[packed == pack_colours(np.array(colour))] = class_number
    unknown = np.unique(packed[numbers < 0])
    if len(unknown):
        first_colours = ", ".join(map(str, unpack_colours(unknown[:_MOST_SHOWN])))
        raise DataError(
            f"mask with the colors {first_colours}; add them to data.mask_read.colors, which "
            "does not name them"
        )
    return numbers[None].astype(np.uint8)


def widen_bits(mask: Array) -> Array:
    """Convert a mask of single bits to 8-bit black and white; return other masks unchanged."""
    return mask.view(np.uint8) * np.uint8(255) if mask.dtype == np.bool_ else mask


def pack_colours(colors: Array) -> Ints:
    """Pack each color of [3, ...] into a number."""
    red, green, blue = colors.astype(np.int64)
    return np.asarray(red << 16 | green << 8 | blue)


def unpack_colours(packed: Ints) -> list[list[int]]:
    """Return red, green and blue of each packed color."""
    return [[value >> 16, value >> 8 & 255, value & 255] for value in packed.tolist()]


def _list_values(mask: Array) -> Array:
    if mask.dtype == np.uint8:  # without the sorting of `unique`
        return np.flatnonzero(np.bincount(mask.ravel(), minlength=256))
    return np.unique(mask)


def _explain(values: Array, allowed: str, options: MaskOptions) -> str:
    numbers = set(values.tolist())
    largest = int(values.max())
    if options.classes > 2:
        cure = _cure_classes(values)
    elif numbers <= {0, 255} or numbers <= {0, 1}:
        cure = f"set data.mask_read.scale=0_{largest}"
    elif values[0] < 0:
        cure = "save it as 8-bit PNG, in which 0 is the background"
    elif largest < 255:
        cure = _cure_small_values(values, options)
    elif largest == 255 or (largest == 65535 and len(values) > _FEW):
        cure = _cure_edges(values)
    else:
        cure = (
            "set data.mask_read.threshold=1 if every value but 0 is a defect, or save the "
            "numbers of the classes from 0 on as 8-bit PNG (KITTI: number // 256)"
        )
    return f"mask with the values {show_values(values)}; allowed are {allowed}; {cure}"


def _are_class_numbers(values: Array) -> bool:
    """Return True if sorted values may be class numbers, of which some do not occur."""
    largest = int(values[-1])
    return largest < _SMALL or (largest < _FEW and 2 * len(values) > largest)


def _cure_classes(values: Array) -> str:
    if set(values.tolist()) <= {0, 255}:
        return "set data.mask_read.classes=2"
    if _are_class_numbers(values):
        return f"set data.mask_read.classes={values[-1] + 1} if these are class numbers"
    return "number the classes from 0 without gaps"


def _cure_small_values(values: Array, options: MaskOptions) -> str:
    largest = int(values[-1])
    are_two = len(values) == 2
    middle = max(1, (largest + 1) // 2)
    edges = f"set data.mask_read.threshold={middle} if the values in between are gray edges"
    numbers = f"set data.mask_read.classes={largest + 1} if these are class numbers"
    every = "data.mask_read.threshold=1 if every value but 0 is a defect"
    cure = numbers if _are_class_numbers(values) else f"{edges}, or {every}"
    if are_two and largest >= _FEW:
        cure = f"set {every}"
    if are_two and options.palette == "index":
        palette = "if they are black and white in a palette"
        return f"{cure}, or data.mask_read.palette=expand {palette}"
    if _are_class_numbers(values) and len(values) <= largest:  # no run of class numbers
        return f"{edges}, as smooth scaling leaves them; {cure}"
    return cure


def _cure_edges(values: Array) -> str:
    middle = (int(values[-1]) + 1) // 2
    cure = (
        "values in between come from JPEG or from smooth scaling: set "
        f"data.mask_read.threshold={middle}, which counts values from {middle} on as defect"
    )
    below_white = values[:-1]
    if values[-1] != 255 or len(below_white) == 0 or below_white[-1] == 0:
        return cure
    # Small numbers and 255: classes and ignored pixels.
    classes = int(below_white[-1]) + 1
    if classes > _SMALL and (classes >= _FEW or 2 * len(values) <= classes):
        return cure
    options = f"data.mask_read.classes={classes} and data.mask_read.ignore=255"
    return f"set {options} if these are class numbers; {cure}"


def show_values(values: Array) -> str:
    """Return the first values as text, with the number of further ones."""
    first = ", ".join(map(str, values[:_MOST_SHOWN]))
    if len(values) <= _MOST_SHOWN:
        return first
    return f"{first}, ... {len(values) - _MOST_SHOWN} more up to {values[-1]}"
