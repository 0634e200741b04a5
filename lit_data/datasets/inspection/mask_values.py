"""Which values of black and white masks are the defect, where they are not 0 and 1 or 0 and 255."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError
from lit_data.io.images.masks import MaskOptions
from lit_data.io.images.readers import read_image

log = logging.getLogger(__name__)

_LOOKED_AT: Final = 64  # masks of a set
_END: Final = 32  # grey levels next to black and to white
_NEARLY_WHITE: Final = slice(240, 255)  # that class numbers beside 255 for ignored pixels do not use
_MOST_BETWEEN: Final = 0.1  # of the pixels of masks whose edges alone are grey
_THRESHOLD: Final = 128


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
        reason = f"masks have grey edges ({between:.1%} of the pixels of {len(chosen)} masks): values from"
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
