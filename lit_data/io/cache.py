"""A byte-bounded cache of arrays; it knows nothing of images or files."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from lit_data.errors import ConfigError
from lit_data.types import Array

K = TypeVar("K", bound=Hashable)


class LruCache(Generic[K]):
    """Keeps the most recently used arrays within a number of bytes; safe to share between threads.

    It pickles as its bound alone: the copy in another process starts empty.

    Args:
        max_bytes: Bytes of arrays to keep. 0 keeps nothing.

    Attributes:
        hits: Calls answered from the cache, or by a load that another thread had already begun.
        misses: Calls that loaded.
        nbytes: Bytes of the arrays held now.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes={max_bytes} of a cache must be 0 or more")
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._arrays: OrderedDict[K, Array] = OrderedDict()
        self._loading: dict[K, Future[Array]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self) -> tuple[type["LruCache[K]"], tuple[int]]:
        return type(self), (self.max_bytes,)

    def get_or_load(self, key: K, load: Callable[[], Array]) -> Array:
        """Return the array of a key, loading it if it is not held.

        Threads that ask for one key at the same time share one load, and its error if it fails. An
        array larger than the whole bound is returned without being kept.

        Args:
            key: What the array is known by.
            load: Makes the array.

        Returns:
            A read-only array.
        """
        with self._lock:
            if key in self._arrays:
                self.hits += 1
                self._arrays.move_to_end(key)
                return self._arrays[key]
            future = self._loading.get(key)
            if future is not None:
                self.hits += 1
            else:
                self.misses += 1
                mine: Future[Array] = Future()
                self._loading[key] = mine
        return future.result() if future is not None else self._load(key, load, mine)

    def _load(self, key: K, load: Callable[[], Array], future: "Future[Array]") -> Array:
        try:
            array = load().view()
            array.flags.writeable = False
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            raise
        with self._lock:
            self._keep(key, array)
            del self._loading[key]
        future.set_result(array)
        return array

    def _keep(self, key: K, array: Array) -> None:
        if array.nbytes > self.max_bytes:
            return
        self._arrays[key] = array
        self.nbytes += array.nbytes
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._arrays.popitem(last=False)[1].nbytes
