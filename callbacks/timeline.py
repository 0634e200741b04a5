"""`Timeline`: the numbers and the events of a run that its pictures show, in bounded memory."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Timeline:
    """Rows of numbers over steps or seconds, and events of several kinds, however long a run is.

    Where there are too many rows, each two neighbours become one, and from then on so many rows
    make one. Of each kind of event every second is dropped where there are too many.

    Args:
        merge: Makes one row of two neighbours.
        most_rows: Rows that stay at most.
        most_marks: Events of each kind that stay at most.

    Attributes:
        marks: Events by kind.
    """

    def __init__(
        self, merge: Callable[[Any, Any], Any], *, most_rows: int = 2000, most_marks: int = 200
    ) -> None:
        self.marks: defaultdict[str, Marks] = defaultdict(partial(Marks, most_marks))
        self._merge = merge
        self._most_rows = most_rows
        self._positions: list[float] = []
        self._rows: list[Any] = []
        self._rows_per_point = 1
        self._rows_in_last = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, position: float, row: Sequence[Any] | NDArray[np.float64]) -> None:
        """Add the numbers of a step or moment; merged rows stand at their first position."""
        if self._rows and self._rows_in_last < self._rows_per_point:
            self._rows[-1] = self._merge(self._rows[-1], row)
            self._rows_in_last += 1
            return
        if len(self) == self._most_rows:
            self._halve()
            self.add(position, row)  # the last point may have room now
            return
        self._positions.append(position)
        self._rows.append(row)
        self._rows_in_last = 1

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return positions [N] and rows [N, ...]."""
        return np.array(self._positions, np.float64), np.array(self._rows, np.float64)

    def _halve(self) -> None:
        merged = []
        for first in range(0, len(self) - 1, 2):
            merged.append(self._merge(self._rows[first], self._rows[first + 1]))
        if len(self) % 2:
            merged.append(self._rows[-1])  # has no neighbour, and keeps its number of rows
        else:
            self._rows_in_last += self._rows_per_point
        self._rows = merged
        self._positions = self._positions[::2]
        self._rows_per_point *= 2


@dataclass
class Marks:
    """Events of one kind.

    Attributes:
        most: Events that stay at most.
        count: All events there were.
        spans: Begin and end of those that stay, in the unit of the positions; equal for a moment.
    """

    most: int
    count: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    _events_per_span: int = field(default=1, init=False)

    def add(self, began: float, ended: float | None = None) -> None:
        """Add an event; one without an end is a moment."""
        if self.count % self._events_per_span == 0:
            self.spans.append((began, began if ended is None else ended))
        self.count += 1
        if len(self.spans) > self.most:
            self.spans = self.spans[::2]
            self._events_per_span *= 2


def add_rows(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Add up two rows of sums, such as seconds or samples."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


def widen_rows(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the extremes of two rows [2, K] of lowest and highest values, which may be NaN."""
    return np.stack([np.fmin(first[0], second[0]), np.fmax(first[1], second[1])])
