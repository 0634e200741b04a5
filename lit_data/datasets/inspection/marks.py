"""What marks pixels of a mask: outlines, and runs of pixels in the forms of COCO and of CSV files."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import DataError

_SLACK_PX: Final = 1.0  # points of outlines may lie so far outside their image

Mask = NDArray[np.uint8]
Draw = Callable[[Mask], None]
"""Sets pixels of a mask [H, W] to 1; raises `DataError` for what does not fit."""


def outline(points: Any, *, scaled: bool = False) -> Draw:  # noqa: ANN401 - numbers as a file gives them
    """What fills an outline.

    Args:
        points: x, y, x, y, ... in px, or shares of the image.
        scaled: They are shares.
    """

    def draw(mask: Mask) -> None:
        try:
            corners = np.asarray(points, np.float64).reshape(-1, 2)
        except (ValueError, TypeError) as error:
            raise DataError("an outline that is no list of points") from error
        size = np.array([mask.shape[1], mask.shape[0]])
        corners = corners * size if scaled else corners
        if len(corners) < 3 or not np.isfinite(corners).all():
            raise DataError(f"an outline of {len(corners)} points; three at least are needed")
        if (corners < -_SLACK_PX).any() or (corners > size + _SLACK_PX).any():
            raise DataError(f"an outline that leaves the image of {mask.shape[0]} x {mask.shape[1]} px")
        _fill(mask, corners)

    return draw


def _fill(mask: Mask, corners: NDArray[np.float64]) -> None:
    """Mark the pixels whose middle lies inside an outline; of one that holds no middle those of its corners."""
    (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, axis=0).T
    middles = np.arange(mask.shape[0]) + 0.5
    edge, row = np.nonzero((y[:, None] <= middles) != (next_y[:, None] <= middles))
    crossings = x[edge] + (middles[row] - y[edge]) * (next_x - x)[edge] / (next_y - y)[edge]
    columns = np.clip(np.ceil(crossings - 0.5), 0, mask.shape[1]).astype(np.int64)
    turns = np.zeros((mask.shape[0], mask.shape[1] + 1), np.int64)
    np.add.at(turns, (row, columns), 1)
    inside = (np.cumsum(turns, axis=1)[:, :-1] % 2).astype(np.uint8)
    if not inside.any():
        places = np.clip(np.floor(corners), 0, np.array(mask.shape)[::-1] - 1).astype(np.int64)
        inside[places[:, 1], places[:, 0]] = 1
    mask |= inside


def runs(text: str) -> Draw:
    """What marks runs of pixels: start and length in turn, column by column, counted from 1."""

    def draw(mask: Mask) -> None:
        try:
            numbers = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"runs that are no whole numbers: {text[:40]!r}") from error
        if len(numbers) % 2 or (len(numbers) and numbers.min() < 1):
            raise DataError(f"runs of {len(numbers)} numbers: starts from 1 and lengths in turn are expected")
        begins, lengths = numbers[::2] - 1, numbers[1::2]
        _mark_runs(mask, begins, lengths)

    return draw


def counts(said: Any) -> Draw:  # noqa: ANN401 - as a file gives it
    """What marks the runs of COCO: ``counts``, a list or a text, and ``size``; by columns, unmarked ones first."""

    def draw(mask: Mask) -> None:
        size, given = said.get("size"), said.get("counts")
        if list(size or ()) != list(mask.shape):
            raise DataError(f"runs of an image of {size}, found {list(mask.shape)}")
        try:
            lengths = np.array(_unpack(given) if isinstance(given, str) else given, np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError("runs that cannot be read") from error
        if lengths.ndim != 1 or (len(lengths) and lengths.min() < 0):
            raise DataError("runs that cannot be read")
        ends = np.cumsum(lengths)
        _mark_runs(mask, (ends - lengths)[1::2], lengths[1::2])

    return draw


def _mark_runs(mask: Mask, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    if len(begins) and int((begins + lengths).max()) > mask.size:
        raise DataError(f"runs up to pixel {int((begins + lengths).max())} of an image of {mask.size}")
    steps = np.zeros(mask.size + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + lengths, -1)
    marked = np.cumsum(steps[:-1]) > 0
    mask |= marked.reshape(mask.shape[::-1]).T.astype(np.uint8)


def _unpack(text: str) -> list[int]:
    """Numbers of COCO's text: groups of six bits from 48 on, of which one says that more follow, as differences."""
    found: list[int] = []
    place = 0
    while place < len(text):
        value, shift, more = 0, 0, True
        while more:
            if place >= len(text):
                raise ValueError("cut")
            bits = ord(text[place]) - 48
            value |= (bits & 31) << shift
            more, place, shift = bool(bits & 32), place + 1, shift + 5
            if not more and bits & 16:
                value -= 1 << shift
        found.append(value + (found[-2] if len(found) > 2 else 0))
    return found
