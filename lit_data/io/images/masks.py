"""Masks: pixels whose values are class numbers, never colours."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError, DataError
from lit_data.io.images.options import DEFAULT_READ, ReadOptions
from lit_data.io.images.readers import read_image
from lit_data.io.source import naming
from lit_data.types import IGNORED, Array

log = logging.getLogger(__name__)

_SHOWN = 10
_LOOKED_AT: Final = 64  # masks of a set
_END: Final = 32  # grey levels next to black and to white
_NEARLY_WHITE: Final = slice(240, 255)  # that class numbers beside 255 for ignored pixels do not use
_MOST_BETWEEN: Final = 0.1  # of the pixels of masks whose edges alone are grey
_THRESHOLD: Final = 128
_SMALL = 16  # class numbers that may have gaps
_FEW = 64  # class numbers, which grey edges go far beyond
_SCALES = {"auto": ({0, 1}, {0, 255}), "0_1": ({0, 1},), "0_255": ({0, 255},)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOptions:
    """Rules for turning a file into class numbers.

    Channels that are all equal count as one.

    Attributes:
        classes: Number of classes, background included; 2 to 256.
        scale: Values of a mask of two classes: ``0_1``, ``0_255``, or ``auto`` for either of them in each file. With
            more classes the values are the class numbers.
        threshold: With two classes: values from it on are the defect, all below are background, whatever they are; for
            masks with grey edges, as smooth scaling and JPEG leave them. None refuses such masks.
        palette: ``index`` takes the numbers of a palette image, ``expand`` its colours, which must be greys: for black
            and white masks whose numbers mean nothing.
        ignore: Value of pixels that neither train nor are scored, such as 255; they get the number 255. None: there is
            none.
        page: As in ``ReadOptions``.
        alpha: As in ``ReadOptions``.
        exif: As in ``ReadOptions``; choose the same for images and masks.
        strict_extension: As in ``ReadOptions``.
        max_pixels: As in ``ReadOptions``.
        max_image_bytes: As in ``ReadOptions``.
    """

    classes: int = 2
    scale: Literal["auto", "0_1", "0_255"] = "auto"
    threshold: int | None = None
    palette: Literal["index", "expand"] = "index"
    ignore: int | None = None
    page: int | None = None
    alpha: Literal["opaque", "drop", "error"] = "opaque"
    exif: Literal["ignore", "apply"] = "ignore"
    strict_extension: bool = False
    max_pixels: int = DEFAULT_READ.max_pixels
    max_image_bytes: int = DEFAULT_READ.max_image_bytes

    def __post_init__(self) -> None:
        if not isinstance(self.classes, int) or not 2 <= self.classes <= 256:
            raise ConfigError(f"classes={self.classes!r} must be a whole number from 2 to 256")
        if self.scale not in _SCALES:
            raise ConfigError(f"scale={self.scale!r} is not one of {', '.join(map(repr, _SCALES))}")
        if self.palette not in ("index", "expand"):
            raise ConfigError(f"palette={self.palette!r} is not one of 'index', 'expand'")
        if self.classes > 2 and self.scale != "auto":
            raise ConfigError(f'scale={self.scale!r} is for 2 classes; leave it at "auto" with classes={self.classes}')
        if self.threshold is not None and (
            self.classes > 2 or not isinstance(self.threshold, int) or not 0 < self.threshold < 65536
        ):
            raise ConfigError(
                f"threshold={self.threshold!r} must be a whole number from 1 to 65535, and is for 2 classes"
            )
        if self.ignore is not None and (not isinstance(self.ignore, int) or self.classes > IGNORED):
            raise ConfigError(f"ignore={self.ignore!r} must be a whole number, beside at most {IGNORED} classes")
        _ = self.read  # its own checks

    @property
    def read(self) -> ReadOptions:
        """How the file of a mask is read."""
        return ReadOptions(
            page=self.page,
            alpha=self.alpha,
            exif=self.exif,
            palette=self.palette,
            strict_extension=self.strict_extension,
            max_pixels=self.max_pixels,
            max_image_bytes=self.max_image_bytes,
            equal_channels="collapse",
        )


DEFAULT_MASK = MaskOptions()
"""Two classes, stored as 0 and 1 or as 0 and 255."""


def read_mask(path: str | os.PathLike[str], options: MaskOptions = DEFAULT_MASK) -> NDArray[np.uint8]:
    """Read the mask of an image.

    Args:
        path: A file as for ``read_image``.
        options: The rules.

    Returns:
        [1, H, W] uint8 class numbers.

    Raises:
        DataError: as ``read_image``, or a value that is no class.
    """
    mask = read_image(path, options.read)
    with naming(path):
        return number_classes(mask, options)


def number_classes(mask: Array, options: MaskOptions) -> NDArray[np.uint8]:
    """Turn the values of a mask into class numbers.

    Args:
        mask: [1, H, W] as read under ``options.read``.
        options: The rules.

    Returns:
        [1, H, W] uint8; 255 where pixels are ignored.

    Raises:
        DataError: a value that is no class, or values that are not whole numbers.
    """
    if options.ignore is None:
        return _number(mask, options)
    ignored = mask == options.ignore
    numbers = _number(np.where(ignored, mask.dtype.type(0), mask), options)
    numbers[ignored] = IGNORED
    return numbers


def _number(mask: Array, options: MaskOptions) -> NDArray[np.uint8]:
    if mask.dtype == np.bool_:
        return mask.astype(np.uint8)
    values = _list_values(mask)
    if mask.dtype.kind not in "iu":
        raise DataError(
            f"mask of {mask.dtype} with the values {_show(values)}; masks are whole numbers, save them as 8-bit PNG"
        )
    found = set(values.tolist())
    if options.classes > 2:
        if min(found) < 0 or max(found) >= options.classes:
            raise DataError(_explain(values, f"0 to {options.classes - 1} (classes={options.classes})", options))
        return mask.astype(np.uint8)
    if options.threshold is not None:
        return (mask >= options.threshold).astype(np.uint8)
    if not any(found <= scale for scale in _SCALES[options.scale]):
        allowed = " or ".join(f"{min(scale)} and {max(scale)}" for scale in _SCALES[options.scale])
        raise DataError(_explain(values, allowed, options))
    foreground: NDArray[np.bool_] = mask != 0
    return foreground.astype(np.uint8)


def _list_values(mask: Array) -> Array:
    if mask.dtype == np.uint8:
        return np.flatnonzero(np.bincount(mask.ravel(), minlength=256))
    return np.unique(mask)


def _explain(values: Array, allowed: str, options: MaskOptions) -> str:
    found, largest = set(values.tolist()), int(values.max())
    are_plausible = largest < _SMALL or (largest < _FEW and 2 * len(values) > largest)
    if options.classes > 2:
        hint = (
            "set data.mask_read.classes=2"
            if found <= {0, 255}
            else f"set data.mask_read.classes={largest + 1} if these are class numbers"
            if are_plausible
            else "number the classes from 0 without gaps"
        )
    elif found <= {0, 255} or found <= {0, 1}:
        hint = f"set data.mask_read.scale={0}_{largest}"
    elif largest < 255:
        edges = f"set data.mask_read.threshold={max(1, (largest + 1) // 2)} if the values in between are grey edges"
        hint = f"set data.mask_read.classes={largest + 1} if these are class numbers" if are_plausible else edges
        if len(values) == 2 and largest >= _FEW:
            hint = "set data.mask_read.threshold=1 if all but 0 is the defect"
        if len(values) == 2 and options.palette == "index":
            hint += ", or data.mask_read.palette=expand if they stand for black and white in a palette"
        elif are_plausible and len(values) <= largest:  # no run of class numbers
            hint = f"{edges}, as smooth scaling leaves them; {hint}"
    else:
        hint = (
            "values in between come from JPEG or from smooth scaling: set data.mask_read.threshold=128, which counts "
            "values from 128 on as defect"
        )
        classes = int(values[-2]) + 1 if len(values) > 1 else 1
        if largest == 255 and 1 < classes < _FEW and (classes <= _SMALL or 2 * len(values) > classes):
            numbers = f"set data.mask_read.classes={classes} and data.mask_read.ignore=255 if these are class numbers"
            hint = f"{numbers}; {hint}"
    return f"mask with the values {_show(values)}; allowed are {allowed}; {hint}"


def _show(values: Array) -> str:
    more = f", ... {len(values) - _SHOWN} more up to {values[-1]}" if len(values) > _SHOWN else ""
    return ", ".join(str(value) for value in values[:_SHOWN]) + more


def choose_mask_options(masks: Sequence[Path], options: MaskOptions) -> MaskOptions:
    """Return options with a threshold where the masks of a set need one, and say so.

    Masks that were scaled smoothly or saved as JPEG have grey edges: nearly all of their pixels are nearly black or
    nearly white, and the rest lies in between. In masks of two values, such as 0 and 38, all but 0 is the defect.

    Args:
        masks: All masks of the set; up to 64 of them are looked at.
        options: With more than two classes, a scale or a threshold they are returned as they are.
    """
    is_open = options.classes == 2 and options.scale == "auto" and options.threshold is None and options.ignore is None
    if not masks or not is_open:
        return options
    chosen = np.unique(np.linspace(0, len(masks) - 1, min(_LOOKED_AT, len(masks))).astype(np.int64))
    counts = sum(_count_readable((masks[number] for number in chosen), options), np.zeros(256, np.int64))
    values = np.flatnonzero(counts)
    if set(values.tolist()) <= {0, 1} or set(values.tolist()) <= {0, 255}:
        return options
    if has_grey_edges(counts):
        between = counts[_END : 256 - _END].sum() / counts.sum()
        reason = f"masks have grey edges ({between:.2%} of the pixels of {len(chosen)} masks): values from"
    elif len(values) == 2 and values[0] == 0:
        return _tell(options, 1, f"masks hold 0 and {values[1]}: values from")
    else:
        return options
    return _tell(options, _THRESHOLD, reason)


def has_grey_edges(counts: NDArray[np.int64]) -> bool:
    """Whether masks are black and white but for their edges, by how often they have each of 256 values."""
    between, nearly_white = counts[_END : 256 - _END], counts[_NEARLY_WHITE]
    spreads = np.count_nonzero(between) >= _END // 4 or np.count_nonzero(nearly_white) > 1
    return bool(counts[-_END:].any() and spreads and between.sum() <= _MOST_BETWEEN * counts.sum())


def count_values(path: Path, options: MaskOptions) -> NDArray[np.int64] | None:
    """Count how often a mask has each of 256 values; None where it has others.

    Raises:
        DataError: It cannot be read as a mask.
    """
    mask = read_image(path, options.read)
    if mask.dtype == np.bool_:
        mask = mask.astype(np.uint8)
    return np.bincount(mask.ravel(), minlength=256) if mask.dtype == np.uint8 else None


def _count_readable(masks: Iterable[Path], options: MaskOptions) -> Iterator[NDArray[np.int64]]:
    for path in masks:
        try:
            counts = count_values(path, options)
        except DataError:  # is told where all masks are read
            continue
        if counts is not None:
            yield counts


def _tell(options: MaskOptions, threshold: int, reason: str) -> MaskOptions:
    log.info("%s %d on are the defect (data.mask_read.threshold=%d)", reason, threshold, threshold)
    return replace(options, threshold=threshold)
