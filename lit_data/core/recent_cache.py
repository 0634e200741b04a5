"""Bounded cache of recently used objects: decoded arrays, mapped volumes, opened shards."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from lit_data.core.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)


class HasBytes(Protocol):
    """Object with a known size."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""


Value = TypeVar("Value", bound=HasBytes)


class LruCache(Generic[Key, Value]):
    """Cache that keeps the most recently used values within a limit; safe to share between threads.

    Only its limits are pickled, so the copy in another process starts empty.

    Args:
        max_bytes: Bytes of values to keep, 0 for nothing; None for no limit.
        max_items: Number of values to keep; None for no limit.

    Attributes:
        hits: Calls answered from the cache, or by a load that another thread had already begun.
        misses: Calls that loaded.
        nbytes: Bytes of the values in the cache.

    Raises:
        ConfigError: A limit is below 0.
    """

    def __init__(self, max_bytes: int | None = None, max_items: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"max_bytes={max_bytes} of a cache must be 0 or more")
        if max_items is not None and max_items < 0:
            raise ConfigError(f"max_items={max_items} of a cache must be 0 or more")
        self.max_bytes = max_bytes
        self.max_items = max_items
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._loading: dict[Key, Future[Value]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[Self], tuple[int | None, int | None]]:
        return type(self), (self.max_bytes, self.max_items)

    def get_or_load(self, key: Key, load: Callable[[], Value]) -> Value:
        """Return the value of a key, and load it if it is not in the cache.

        Threads that ask for one key at the same time share one load, and its error if it fails. A
        value larger than the limit is returned without being kept.

        Args:
            key: Key of the value.
            load: Makes the value.

        Returns:
            The value; an array is read-only, because its users share it.
        """
        with self._lock:
            if key in self._values:
                self.hits += 1
                self._values.move_to_end(key)
                return self._values[key]
            others_load = self._loading.get(key)
            if others_load is None:
                self.misses += 1
                own_load: Future[Value] = Future()
                self._loading[key] = own_load
            else:
                self.hits += 1
        # Outside of the lock, so that other keys can be had meanwhile.
        if others_load is not None:
            return others_load.result()
        return self._load(key, load, own_load)

    def _load(self, key: Key, load: Callable[[], Value], future: "Future[Value]") -> Value:
        try:
            value: Value = _make_read_only(load())
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            raise
        with self._lock:
            self._keep(key, value)
            del self._loading[key]
        future.set_result(value)
        return value

    def _keep(self, key: Key, value: Value) -> None:
        # One that is too large by itself would push out all others for nothing.
        if self._is_over(value.nbytes, 1):
            return
        self._values[key] = value
        self.nbytes += value.nbytes
        while self._is_over(self.nbytes, len(self._values)):
            _, oldest = self._values.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def _is_over(self, nbytes: int, items: int) -> bool:
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return True
        return self.max_items is not None and items > self.max_items


def _make_read_only(value: Any) -> Any:  # noqa: ANN401 - of the type that came
    """Return a read-only view of an array, and other values unchanged."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
