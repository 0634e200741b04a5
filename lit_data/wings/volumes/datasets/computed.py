"""Arrays that are computed from each volume once, and mapped from then on."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from lit_data.core.progress import track
from lit_data.core.recent_cache import HasBytes, LruCache
from lit_data.core.temp import sweep
from lit_data.wings.volumes.files.sparse import VolumeBank
from lit_data.wings.volumes.files.sparse_file import MAX_OPEN

T = TypeVar("T", bound=HasBytes)


class ComputedVolumes(ABC, Generic[T]):
    """Arrays by the number of their volume, each written once beside the sparse store.

    A folder's name encodes everything its arrays depend on, so it is never out of date. It is
    renamed when it is complete, so several processes may work on the same volume.

    Args:
        bank: The volumes.
        folder: Folder of the arrays.
    """

    task: ClassVar[str]
    """Name of the work in a progress bar."""

    def __init__(self, bank: VolumeBank, folder: Path) -> None:
        self.bank, self.folder = bank, folder
        self._mapped: LruCache[int, T] = LruCache(max_items=MAX_OPEN)

    def __getitem__(self, number: int) -> T:
        """Map the arrays of a volume, read-only, after writing them if they do not exist."""
        return self._mapped.get_or_load(number, lambda: self.open(number))

    @abstractmethod
    def open(self, number: int) -> T:
        """Open the arrays of a volume, and write them first if they do not exist."""

    def prepare(self) -> None:
        """Write all arrays that do not exist.

        Raises:
            StoreError: The folder cannot be written.
        """
        sweep(self.folder)
        for number in track(range(len(self.bank)), self.task, len(self.bank)):
            self[number]
