"""What reads sparse volumes by number, and those that hold them in memory."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_data.io.shared_arrays import share_state
from lit_data.io.volumes.sparse import SparseVolume


class VolumeBank(Protocol):
    """Sparse volumes by number."""

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """[n] int64, occupied voxels of each volume; None until all are known."""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(path, what is wrong) of each volume that was left out."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SparseVolume: ...

    def name(self, index: int) -> str:
        """Path of the source of one volume."""

    def check_size(self) -> None:
        """Raise if a mapped file changed its length: reading past its end kills a process and cannot be caught."""


class CachedBank:
    """Keeps every volume that it gave, in this process; a pickled copy starts empty.

    Args:
        bank: Where volumes come from.
    """

    def __init__(self, bank: VolumeBank) -> None:
        self._bank = bank
        self._kept: dict[int, SparseVolume] = {}

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """See ``VolumeBank``; known as well once all volumes were given."""
        if self._bank.counts is None and len(self._kept) == len(self):
            return np.array([len(self._kept[index]) for index in range(len(self))], np.int64)
        return self._bank.counts

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """See ``VolumeBank``."""
        return self._bank.skipped

    def __len__(self) -> int:
        return len(self._bank)

    def __getitem__(self, index: int) -> SparseVolume:
        """One volume, from memory if it was given before."""
        volume = self._kept.get(index)
        if volume is None:
            volume = self._kept[index] = self._bank[index]
        return volume

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._bank,)

    def name(self, index: int) -> str:
        """Path of the source of one volume."""
        return self._bank.name(index)

    def check_size(self) -> None:
        """See ``VolumeBank``."""
        self._bank.check_size()


class MemoryBank:
    """Volumes in memory that worker processes share.

    Args:
        volumes: All of them.
        names: Paths of their sources.
        skipped: (path, what is wrong) of volumes that were left out.
    """

    def __init__(
        self, volumes: Sequence[SparseVolume], names: Sequence[str], skipped: tuple[tuple[str, str], ...]
    ) -> None:
        self._volumes, self._names, self.skipped = list(volumes), list(names), skipped
        self.counts: NDArray[np.int64] = np.array(list(map(len, self._volumes)), np.int64)

    def __len__(self) -> int:
        return len(self._volumes)

    def __getitem__(self, index: int) -> SparseVolume:
        """One volume."""
        return self._volumes[index]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, ("_volumes", "_names", "skipped", "counts"))

    def name(self, index: int) -> str:
        """Path of the source of one volume."""
        return self._names[index]

    def check_size(self) -> None:
        """No file is mapped."""
