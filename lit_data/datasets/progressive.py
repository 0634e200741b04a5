"""`ProgressiveSize`: small patches first, larger ones in later epochs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lit_data.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProgressiveSize:
    """The side of training patches as a pure function of the epoch.

    So nothing is started anew when it changes, and a run that is resumed goes on with the size it would have had.

    Args:
        sizes: (first epoch, side in px) of each stage; the first begins with epoch 0.

    Raises:
        ConfigError: There is no stage, the epochs do not ascend from 0, or a size is not positive.
    """

    sizes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Accept plain lists, as a configuration file gives them, and check them."""
        rows = [tuple(row) if isinstance(row, Sequence) else () for row in self.sizes]
        object.__setattr__(self, "sizes", tuple(rows))
        whole = all(
            len(row) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in row) and row[1] > 0
            for row in rows
        )
        if not rows or not whole:
            raise ConfigError(f"sizes={self.sizes!r} must be a list of [first epoch, side in px]")
        epochs = [row[0] for row in rows]
        if epochs[0] != 0 or any(late <= early for early, late in pairwise(epochs)):
            raise ConfigError(f"sizes={self.sizes!r}: the epochs must ascend, and the first must be 0")

    @property
    def largest_px(self) -> int:
        """The largest side of all, for which there must be room."""
        return max(size for _, size in self.sizes)

    def size_at(self, epoch: int) -> int:
        """The side of the patches of an epoch in px."""
        return self.sizes[bisect_right(self.sizes, epoch, key=lambda row: row[0]) - 1][1]
