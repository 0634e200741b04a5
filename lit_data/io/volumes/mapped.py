"""Files that stay mapped, a bounded number of them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Opened = TypeVar("Opened")

MAX_OPEN: Final = 64
"""Volumes that stay mapped; each holds up to seven descriptors, of which a process has about a thousand."""


class LastOpened(Generic[Key, Opened]):
    """Keeps what was opened last; threads may share it, and a pickled copy starts empty."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Opened] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["LastOpened[Key, Opened]"], tuple[()]]:
        return type(self), ()

    def get(self, key: Key, open_: Callable[[], Opened]) -> Opened:
        """What is kept under a key, opened first if need be; threads that ask at the same time may open it twice."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = open_()
        with self._lock:
            self._kept[key] = found
            if len(self._kept) > MAX_OPEN:
                self._kept.popitem(last=False)
        return found
