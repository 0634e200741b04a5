"""Masks: pixels whose values are class numbers, never colours."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError, DataError
from lit_data.io.images.options import DEFAULT_READ, ReadOptions
from lit_data.io.images.readers import read_image
from lit_data.io.source import naming, open_source
from lit_data.types import IGNORED, Array

log = logging.getLogger(__name__)

_SHOWN = 10
_LOOKED_AT: Final = 64  # masks of a set
_MOST_LABEL_BYTES: Final = 100_000
_MOST_COLOURS: Final = 32  # of classes; pictures have far more
_END: Final = 32  # grey levels next to black and to white
_NEARLY_WHITE: Final = slice(
    240, 255
)  # that class numbers beside 255 for ignored pixels do not use
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
        scale: Values of a mask of two classes: ``0_1``, ``0_255``, or ``auto`` for either of them
            in each file. With more classes the values are the class numbers.
        threshold: With two classes: values from it on are the defect, all below are background,
            whatever they are; for masks with grey edges, as smooth scaling and JPEG leave them.
            None refuses such masks.
        palette: ``index`` takes the numbers of a palette image, ``expand`` its colours, which must
            be greys: for black and white masks whose numbers mean nothing.
        colours: ``[red, green, blue]`` of each class, that of the background first, where masks are
            colours, as exports of LabelMe and CVAT are; with two classes all but the first mark the
            defect. None: values are numbers.
        ignore: Value of pixels that neither train nor are scored, such as 255; they get the number
            255. None: there is none.
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
    colours: Sequence[Sequence[int]] | None = None
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
            raise ConfigError(
                f'scale={self.scale!r} is for 2 classes; leave it at "auto" with classes={self.classes}'
            )
        if self.threshold is not None and (
            self.classes > 2
            or not isinstance(self.threshold, int)
            or not 0 < self.threshold < 65536
        ):
            raise ConfigError(
                f"threshold={self.threshold!r} must be a whole number from 1 to 65535, and is for 2 classes"
            )
        if self.ignore is not None and (not isinstance(self.ignore, int) or self.classes > IGNORED):
            raise ConfigError(
                f"ignore={self.ignore!r} must be a whole number, beside at most {IGNORED} classes"
            )
        if self.colours is not None:
            self._check_colours()
        _ = self.read  # its own checks

    def _check_colours(self) -> None:
        colours = tuple(tuple(colour) for colour in self.colours or ())
        are_bytes = all(
            type(part) is int and 0 <= part <= 255 for colour in colours for part in colour
        )
        if (
            len(set(colours)) < max(2, len(colours))
            or {len(colour) for colour in colours} != {3}
            or not are_bytes
        ):
            raise ConfigError(
                f"colours={self.colours!r} must be two or more different [red, green, blue] of 0 to 255, that of the "
                "background first"
            )
        if self.classes not in (2, len(colours)):
            raise ConfigError(
                f"{len(colours)} colours, that of the background among them, and {self.classes} classes"
            )
        if self.threshold is not None or self.ignore is not None or self.scale != "auto":
            raise ConfigError("colours say all: leave out scale, threshold and ignore")
        object.__setattr__(self, "colours", colours)

    @property
    def read(self) -> ReadOptions:
        """How the file of a mask is read."""
        has_colours = self.colours is not None
        return ReadOptions(
            page=self.page,
            alpha=self.alpha,
            exif=self.exif,
            palette="expand" if has_colours else self.palette,
            strict_extension=self.strict_extension,
            max_pixels=self.max_pixels,
            max_image_bytes=self.max_image_bytes,
            gray_to_rgb=has_colours,
            equal_channels="keep" if has_colours else "collapse",
        )


DEFAULT_MASK = MaskOptions()
"""Two classes, stored as 0 and 1 or as 0 and 255."""


def read_mask(
    path: str | os.PathLike[str], options: MaskOptions = DEFAULT_MASK
) -> NDArray[np.uint8]:
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
        mask: [1, H, W] as read under ``options.read``; [3, H, W] where the options name colours.
        options: The rules.

    Returns:
        [1, H, W] uint8; 255 where pixels are ignored.

    Raises:
        DataError: a value or a colour that is no class, or values that are not whole numbers.
    """
    if options.colours is not None:
        return _number_colours(mask, options.colours, options.classes)
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
            raise DataError(
                _explain(values, f"0 to {options.classes - 1} (classes={options.classes})", options)
            )
        return mask.astype(np.uint8)
    if options.threshold is not None:
        return (mask >= options.threshold).astype(np.uint8)
    if not any(found <= scale for scale in _SCALES[options.scale]):
        allowed = " or ".join(f"{min(scale)} and {max(scale)}" for scale in _SCALES[options.scale])
        raise DataError(_explain(values, allowed, options))
    foreground: NDArray[np.bool_] = mask != 0
    return foreground.astype(np.uint8)


def _number_colours(
    mask: Array, colours: Sequence[Sequence[int]], classes: int
) -> NDArray[np.uint8]:
    if mask.dtype != np.uint8:
        raise DataError(f"mask of {mask.dtype}; masks of colours have 8 bits, save it as 8-bit PNG")
    packed, numbers = _pack_colours(mask), np.full(mask.shape[1:], -1)
    for number, colour in enumerate(colours):
        numbers[packed == _pack_colours(np.array(colour))] = (
            number if classes > 2 else min(number, 1)
        )
    unknown = np.unique(packed[numbers < 0])
    if len(unknown):
        shown = ", ".join(map(str, _unpack_colours(unknown[:_SHOWN])))
        raise DataError(
            f"mask with the colours {shown}; add them to data.mask_read.colours, which does not name them"
        )
    return numbers[None].astype(np.uint8)


def _pack_colours(colours: Array) -> NDArray[np.int64]:
    """One number for each colour [3, ...]."""
    red, green, blue = colours.astype(np.int64)
    return np.asarray(red << 16 | green << 8 | blue)


def _unpack_colours(packed: NDArray[np.int64]) -> list[list[int]]:
    return [[value >> 16, value >> 8 & 255, value & 255] for value in packed.tolist()]


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
        hint = (
            f"set data.mask_read.classes={largest + 1} if these are class numbers"
            if are_plausible
            else edges
        )
        if len(values) == 2 and largest >= _FEW:
            hint = "set data.mask_read.threshold=1 if all but 0 is the defect"
        if len(values) == 2 and options.palette == "index":
            hint += (
                ", or data.mask_read.palette=expand if they stand for black and white in a palette"
            )
        elif are_plausible and len(values) <= largest:  # no run of class numbers
            hint = f"{edges}, as smooth scaling leaves them; {hint}"
    else:
        hint = (
            "values in between come from JPEG or from smooth scaling: set data.mask_read.threshold=128, which counts "
            "values from 128 on as defect"
        )
        classes = int(values[-2]) + 1 if len(values) > 1 else 1
        if (
            largest == 255
            and 1 < classes < _FEW
            and (classes <= _SMALL or 2 * len(values) > classes)
        ):
            numbers = f"set data.mask_read.classes={classes} and data.mask_read.ignore=255 if these are class numbers"
            hint = f"{numbers}; {hint}"
    return f"mask with the values {_show(values)}; allowed are {allowed}; {hint}"


def _show(values: Array) -> str:
    more = f", ... {len(values) - _SHOWN} more up to {values[-1]}" if len(values) > _SHOWN else ""
    return ", ".join(str(value) for value in values[:_SHOWN]) + more


def choose_mask_options(masks: Sequence[Path], options: MaskOptions) -> MaskOptions:
    """Return options with a threshold or with colours where the masks of a set need them, and say
    so.

    Masks that were scaled smoothly or saved as JPEG have grey edges: nearly all of their pixels are
    nearly black or nearly white, and the rest lies in between. In masks of two values, such as 0
    and 38, or of a few small numbers, all but 0 is the defect. Few colours are those of classes.

    Args:
        masks: All masks of the set; up to 64 of them are looked at.
        options: With a scale or a threshold they are returned as they are; with more than two
            classes only colours are looked for.
    """
    is_open = options.scale == "auto" and options.threshold is None and options.ignore is None
    if not masks or not is_open or options.colours is not None:
        return options
    numbers = np.unique(
        np.linspace(0, len(masks) - 1, min(_LOOKED_AT, len(masks))).astype(np.int64)
    )
    chosen = [masks[number] for number in numbers]
    all_counts = list(_count_readable(chosen, options))
    if len(all_counts) < len(chosen):
        options = _choose_colours(chosen, options)
    counts = sum(all_counts, np.zeros(256, np.int64))
    values = np.flatnonzero(counts)
    is_done = options.classes > 2 or options.colours is not None
    if is_done or set(values.tolist()) <= {0, 1} or set(values.tolist()) <= {0, 255}:
        return options
    if has_grey_edges(counts):
        between = counts[_END : 256 - _END].sum() / counts.sum()
        reason = f"masks have grey edges ({between:.2%} of the pixels of {len(chosen)} masks): values from"
        return _tell(options, _THRESHOLD, reason)
    if values[0] == 0 and (len(values) == 2 or values[-1] < _SMALL):
        return _tell(options, 1, f"masks hold {_join(values)}: values from")
    return options


def _choose_colours(masks: Sequence[Path], options: MaskOptions) -> MaskOptions:
    """Return options with the colours that masks hold, if these are few: black first, or the most
    frequent one.

    Raises:
        DataError: The options are for another number of classes.
    """
    read = replace(options, classes=2, colours=((0, 0, 0), (255, 255, 255))).read
    pixels: Counter[int] = Counter()
    for path in masks:
        try:
            found, counts = np.unique(_pack_colours(read_image(path, read)), return_counts=True)
        except (DataError, ValueError):  # is told where all masks are read
            continue
        pixels.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if len(pixels) > _MOST_COLOURS:
            return options
    are_grey = all(len(set(colour)) == 1 for colour in _unpack_colours(np.array(list(pixels))))
    if len(pixels) < 2 or are_grey:
        return options
    names = _read_label_map(masks[0].parent)
    background = 0 if 0 in pixels else pixels.most_common(1)[0][0]
    marks = [colour for colour in names if colour != background] + sorted(
        pixels.keys() - {background} - names.keys()
    )
    colours = _unpack_colours(np.array([background, *marks]))
    typed = str(colours).replace(" ", "")
    if options.classes not in (2, len(colours)):
        raise DataError(
            f"masks hold {len(colours)} colours, that of the background among them, and data.classes names "
            f"{options.classes - 1}: name one for each other colour of {typed}"
        )
    named = ",".join(names.get(colour, f"name{number}") for number, colour in enumerate(marks, 1))
    hint = (
        f"; data.classes=[{named}] tells them apart"
        if options.classes == 2 and len(marks) > 1
        else ""
    )
    log.info(
        "masks hold %d colours, the background first: data.mask_read.colours=%s%s",
        len(colours),
        typed,
        hint,
    )
    return replace(options, colours=colours)


def _read_label_map(folder: Path) -> dict[int, str]:
    """Read the names of colours from the ``labelmap.txt`` of CVAT, beside masks or up to two folders above."""
    for place in (folder, *folder.parents[:2]):
        if (place / "labelmap.txt").is_file():
            with open_source(place / "labelmap.txt") as stream:
                lines = stream.read(_MOST_LABEL_BYTES).decode(errors="replace").splitlines()
            return dict(filter(None, map(_read_label, lines)))
    return {}


def _read_label(line: str) -> tuple[int, str] | None:
    """Read ``name:128,0,0::``."""
    name, _, rest = line.partition(":")
    parts = rest.partition(":")[0].split(",")
    if (
        name.startswith("#")
        or len(parts) != 3
        or not all(re.fullmatch("[0-9]{1,3}", part) for part in parts)
    ):
        return None
    return int(_pack_colours(np.array(parts, np.int64))), name


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


def _join(values: Array) -> str:
    return " and ".join(map(str, values)) if len(values) == 2 else _show(values)


def _tell(options: MaskOptions, threshold: int, reason: str) -> MaskOptions:
    log.info("%s %d on are the defect (data.mask_read.threshold=%d)", reason, threshold, threshold)
    return replace(options, threshold=threshold)
