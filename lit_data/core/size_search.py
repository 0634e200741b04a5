"""Search for the number of samples that fit through a model at once, in training and prediction."""

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from lit_data.core.checks import check_count, check_saved_counts
from lit_data.core.errors import ConfigError

_MORE_MEMORY = 1.05
"""Factor by which memory must grow since a failure to forget it."""
_GAIN = 1.05
"""Half way to a size that failed must be so many times the size in use to be worth another failure."""
_OPTIONAL = ("max_size", "fails")


@dataclass
class SizeSearch:
    """Sizes for one stage and one kind of sample.

    Attributes:
        size: Samples that may go through the model at once.
        min_size: Smallest size.
        max_size: Largest size, if there is one.
        fits: Largest size that succeeded.
        fails: Smallest size that failed, if any.
        fails_limit_bytes: Available memory when it failed.
        clean: Steps since the size changed or failed, with batches at least that large.
    """

    size: int
    min_size: int = 1
    max_size: int | None = None
    fits: int = 0
    fails: int | None = None
    fails_limit_bytes: int = 0
    clean: int = 0

    def fail(self, size: int, limit_bytes: int) -> None:
        """Halve a size that ran out of memory, or return to the size that fitted if that is larger.

        Args:
            size: Size that failed.
            limit_bytes: Available memory.
        """
        if self.fails is None or size < self.fails:
            self.fails = size
        self.fails_limit_bytes = limit_bytes
        if self.fits >= size:  # it fitted once, and there is less memory now
            self.fits = 0
        half = -(-size // 2)
        self.change(max(self.min_size, self.fits, half))

    def succeed(self, size: int, samples: int) -> None:
        """Count a successful step.

        Args:
            size: Most samples that went through the model at once.
            samples: Number of samples of the batch; a batch smaller than the current size tells
                nothing about that size.
        """
        self.fits = max(self.fits, size)
        if samples >= self.size:
            self.clean += 1

    def change(self, size: int) -> None:
        """Use another size, and restart the count of clean steps."""
        self.size = size
        self.clean = 0

    def limit(self, max_size: int) -> None:
        """Use no more than `max_size` samples from now on."""
        self.max_size = max_size
        if self.size > max_size:
            self.change(max_size)

    def forget_failure(self, limit_bytes: int) -> None:
        """Forget that a size failed, once there is more memory than at that time."""
        if limit_bytes > self.fails_limit_bytes * _MORE_MEMORY:
            self.fails = None

    def grow(self) -> None:
        """Double the size, or go halfway to the size that failed, without reaching it."""
        larger = 2 * self.size
        if self.max_size is not None:
            larger = min(larger, self.max_size)
        if self.fails is not None:
            halfway = (self.size + self.fails) // 2
            larger = min(larger, halfway)
            if larger == halfway < _GAIN * self.size:
                larger = self.size
        self.change(max(larger, self.size))

    def to_plain(self) -> dict[str, Any]:
        """Return the search as plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "SizeSearch":
        """Return a search that continues a saved one.

        Raises:
            ValueError: The values are not those of a search.
        """
        names = {item.name for item in fields(cls)}
        if values.keys() != names:
            expected = ", ".join(sorted(names))
            got = ", ".join(map(str, values))
            raise ValueError(f"a search of batch sizes has {expected}, not {got}")
        unset = {name for name in _OPTIONAL if values[name] is None}
        check_saved_counts("a search of batch sizes", values, names - unset)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Bounds of a search, and when it grows.

    Attributes:
        initial: First size; None starts with whole batches.
        smallest: Smallest size of a micro-batch.
        largest: Largest size of a micro-batch.
        grow_after: Clean steps before a larger size is tried; None never grows.

    Raises:
        ConfigError: A value is out of range.
    """

    initial: int | None = None
    smallest: int = 1
    largest: int | None = None
    grow_after: int | None = 100

    def __post_init__(self) -> None:
        options = ("initial_size", "min_size", "max_size", "grow_after")
        for option, item in zip(options, fields(self), strict=True):
            value = getattr(self, item.name)
            if value is not None:
                check_count(option, value, 1)
        if self.largest is not None and self.largest < self.smallest:
            raise ConfigError(f"max_size={self.largest} is below min_size={self.smallest}")

    def begin_search(self) -> SizeSearch:
        """Return a search within these bounds."""
        first = self.initial or sys.maxsize
        if self.largest is not None:
            first = min(first, self.largest)
        return SizeSearch(max(self.smallest, first), self.smallest, self.largest)

    def go_on(self, search: SizeSearch) -> SizeSearch:
        """Return a search of an earlier run within these bounds."""
        begun = self.begin_search()
        search.min_size, search.max_size = begun.min_size, begun.max_size
        size = search.size if self.largest is None else min(search.size, self.largest)
        search.size = max(size, self.smallest)
        return search
