"""Sparse volumes that are mapped, a bounded number of them."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

from lit_data.io.volumes.sparse import SparseVolume
from lit_data.io.volumes.sparse_file import StoredVolume

MAX_OPEN: Final = 64
"""Volumes that stay mapped; each holds up to seven descriptors, of which a process has about a thousand."""


class MappedFiles:
    """Keeps the volumes that were mapped last; threads may share it, and a pickled copy starts empty."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, SparseVolume] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["MappedFiles"], tuple[()]]:
        return type(self), ()

    def open(self, path: Path) -> SparseVolume:
        """Map a volume, or give the map that there is.

        Raises:
            StoreError: it cannot be opened.
            StoreCorruptError: it is damaged.
        """
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            volume = self._open[path] = StoredVolume(path).map()
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return volume
