"""Small pickles of large objects: what an object is made of goes into shared memory once, and its pickle says where.

A worker process that unpickles the object reads the arrays where they are; it makes no copy of them.
"""

import os
import pickle
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.io.shared import Handle, SharedMemory, attach

INLINE_BYTES: Final = 2**14
_ALIGN_BYTES: Final = 64


class SharedState(dict[str, Any]):
    """Attributes of an object that never change, for its ``__getstate__``; they unpickle as a plain dict.

    Below ``INLINE_BYTES``, and on systems without memfd, they travel inside the pickle, which then is good anywhere
    and for ever. Above, they are copied into shared memory at the first pickling; such a pickle is good as long as
    the process that made it lives and keeps the object. Arrays come out as read-only views of that memory.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__(attributes)
        self._lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._parts = 0

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            if self._memory is None and hasattr(os, "memfd_create"):
                self._share()
            if self._memory is None:
                return dict, (dict(self),)
            return _unpack, (self._memory.handle, self._parts)

    def _share(self) -> None:
        buffers: list[pickle.PickleBuffer] = []
        # Protocol 5 hands over the arrays' own memory instead of copying it into the pickle.
        body = pickle.dumps(dict(self), protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        if sum(part.nbytes for part in parts) > INLINE_BYTES:
            self._memory, self._parts = _write_parts(parts), len(parts)


def share_state(owner: object, fixed: Sequence[str]) -> tuple[SharedState, dict[str, Any]]:
    """Make the result of an object's ``__getstate__``; it needs no ``__setstate__``.

    Args:
        owner: The object; it keeps the shared memory.
        fixed: Its attributes that never change and may be large; the others are pickled as they are now.
    """
    state = vars(owner)
    shared: SharedState = state.setdefault("_shared_state", SharedState({name: state[name] for name in fixed}))
    return shared, {name: value for name, value in state.items() if name not in shared and name != "_shared_state"}


def _write_parts(parts: Sequence[memoryview]) -> SharedMemory:
    lengths = np.array([part.nbytes for part in parts], dtype=np.int64)
    starts = _find_starts(lengths)
    memory = SharedMemory(int(starts[-1]))
    memory.map[: lengths.nbytes] = lengths.tobytes()
    for part, start in zip(parts, starts.tolist(), strict=False):
        memory.map[start : start + part.nbytes] = part
    return memory


def _unpack(handle: Handle, parts: int) -> dict[str, Any]:
    data = memoryview(attach(handle, writable=False))
    lengths = np.frombuffer(data, np.int64, parts)
    starts = _find_starts(lengths).tolist()
    body, *buffers = (data[start : start + n] for start, n in zip(starts, lengths.tolist(), strict=False))
    state: dict[str, Any] = pickle.loads(body, buffers=buffers)
    return state


def _find_starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each part begins after the table of lengths, and where the last one ends."""
    rooms = -(-np.array([lengths.nbytes, *lengths]) // _ALIGN_BYTES) * _ALIGN_BYTES
    starts: NDArray[np.int64] = np.cumsum(rooms)
    return starts
