"""How many tiles go through the net at once: what fitted, what failed, and what to try next."""

from dataclasses import dataclass
from typing import Final

from lit_data.errors import ConfigError

GROW_AFTER: Final = 8
"""Full batches that must go well before a larger one is tried."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What the batch size may be.

    Args:
        start: Tiles of the first batch.
        smallest: If so many tiles do not fit, prediction ends.
        largest: After batches that went well the size grows up to this; None stays at `start`.

    Raises:
        ConfigError: They are not in order.
    """

    start: int
    smallest: int = 1
    largest: int | None = None

    def __post_init__(self) -> None:
        """Check the order."""
        if not 1 <= self.smallest <= self.start <= self.top:
            raise ConfigError(
                f"min_batch_size={self.smallest}, batch_size={self.start}, max_batch_size={self.largest}: "
                "need 1 <= min <= batch <= max"
            )

    @property
    def top(self) -> int:
        """Largest size."""
        return self.start if self.largest is None else self.largest


class BatchSize:
    """The size for tiles of one kind.

    After a failure it is halved, or goes back to what fitted before; it grows half way towards what failed and never
    reaches it.

    Args:
        limits: What it may be.
        most: What memory is known to hold; None if that is not known.
        alone: See below.

    Attributes:
        size: Tiles of the next batch.
        fails: Smallest size that failed, if one did.
        alone: Whether memory holds a batch only if nothing else is under way.
    """

    def __init__(self, limits: BatchRange, most: int | None = None, *, alone: bool = False) -> None:
        self._smallest = limits.smallest
        self._top = limits.top if most is None else min(limits.top, most)
        self.size = min(limits.start, self._top)
        self.fails: int | None = None
        self.alone = alone
        self._fits = self._clean = 0

    def succeed(self, tiles: int) -> None:
        """A batch of so many tiles went well."""
        self._fits = max(self._fits, tiles)
        self._clean += tiles >= self.size
        top = self._top if self.fails is None else min(self._top, self.fails - 1)
        if self._clean < GROW_AFTER or top <= self.size:
            return
        self.size = min(2 * self.size, top) if self.fails is None else (self.size + top + 1) // 2
        self._clean = 0

    def fail(self, tiles: int) -> bool:
        """A batch of so many tiles did not fit; whether there is a smaller size to try."""
        if tiles <= self._smallest:
            return False
        self.fails = tiles if self.fails is None else min(self.fails, tiles)
        if self._fits >= tiles:  # somebody else took memory since then
            self._fits = 0
        self.size, self._clean = max(self._fits or tiles // 2, self._smallest), 0
        return True
