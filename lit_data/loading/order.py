"""Which sample comes when: a pure function of (seed, epoch), shared out over ranks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.rng import shuffled


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of one rank's samples in any epoch, computed piece by piece.

    Rank r takes positions r, r + world_size, ... of the epoch's order. In a shuffled (training) order the last
    ``length % world_size`` positions are left out, so that all ranks take equally many steps; which samples those are
    changes with the epoch. In evaluation each sample occurs exactly once over all ranks.

    Args:
        length: Samples in the set.
        shuffle: Random order, new in each epoch; otherwise ascending.
        seed: 0 <= seed < 2**64.
        rank: This process, 0 <= rank < world_size.
        world_size: Number of processes.

    Raises:
        ConfigError: There are fewer samples than ranks, or the rank is out of range.
    """

    length: int
    shuffle: bool
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Check that every rank has work."""
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is out of range for world_size={self.world_size}")
        if self.length < self.world_size:
            raise ConfigError(
                f"{self.length} samples cannot be shared by {self.world_size} ranks: use fewer devices or more data"
            )

    def __len__(self) -> int:
        if self.shuffle:
            return self.length // self.world_size
        return len(range(self.rank, self.length, self.world_size))

    def indices(self, start: int, stop: int, epoch: int) -> NDArray[np.int64]:
        """Sample indices of this rank from its position `start` up to `stop`."""
        positions = np.arange(start, stop, dtype=np.int64) * self.world_size + self.rank
        return shuffled(positions, self.length, self.seed, epoch) if self.shuffle else positions
