"""Small pickles of large objects, whose content is copied into shared memory once.

A worker process that unpickles the object reads the arrays in place, without a copy.
"""

import mmap
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_data.core.errors import ConfigError, WorkerDiedError
from lit_data.core.types import Ints

INLINE_BYTES = 2**14
_ALIGN_BYTES = 64


class Handle(NamedTuple):
    """Address of memory for another process, valid while its creator lives and keeps it."""

    pid: int
    fd: int
    nbytes: int
    inode: int


class SharedMemory:
    """Zeroed shared memory of a fixed size, whose pages are allocated when they are written.

    Args:
        nbytes: Size in bytes.

    Attributes:
        map: The memory, writable.
        handle: What `attach` needs in another process.

    Raises:
        ConfigError: The system has no memfd (it is not Linux).
        OSError: No file descriptor is left.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = -1
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"worker processes need Linux, this is {sys.platform}: set worker_kind=thread"
            )
        self._fd = os.memfd_create("lit_data", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.map = mmap.mmap(self._fd, nbytes)
        self.handle = Handle(os.getpid(), self._fd, nbytes, os.fstat(self._fd).st_ino)

    def __del__(self) -> None:
        # A forked child holds a copy of the descriptor and may close its own.
        if self._fd >= 0:
            os.close(self._fd)


def attach(handle: Handle, *, writable: bool) -> mmap.mmap:
    """Map the memory that another process created.

    Args:
        handle: Handle of the memory.
        writable: Allow this process to write into it.

    Raises:
        WorkerDiedError: The process that created it has ended or released it, or is not visible
            from here.
    """
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR if writable else os.O_RDONLY)
        try:
            # Its number may by now belong to another file, or its process to another program.
            if os.fstat(fd).st_ino != handle.inode:
                raise ValueError("it was released")
            return mmap.mmap(fd, handle.nbytes, access=access)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WorkerDiedError(
            f"the shared memory of process {handle.pid} cannot be opened from process "
            f"{os.getpid()} ({error}): that process has ended or /proc is hidden here. If /proc "
            "is hidden, set worker_kind=thread"
        ) from error


class SharedState(dict[str, Any]):
    """Attributes of an object that never change, for its ``__getstate__``.

    Below ``INLINE_BYTES``, and on systems without memfd, they are stored in the pickle, which is
    then valid anywhere and forever. Above, they are copied into shared memory at the first
    pickling; such a pickle is valid while the process that made it lives and keeps the object. They
    unpickle as a plain dict, whose arrays are read-only views of that memory.
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
            self._memory = _write_parts(parts)
            self._parts = len(parts)


def share_state(owner: object, fixed: Sequence[str]) -> tuple[SharedState, dict[str, Any]]:
    """Make the result of an object's ``__getstate__``; it needs no ``__setstate__``.

    Args:
        owner: The object; it keeps the shared memory.
        fixed: Its attributes that never change and may be large; the others are pickled as they are
            now.
    """
    state = vars(owner)
    # The owner keeps what was made first, so that all its pickles share one memory.
    shared: SharedState = state.setdefault(
        "_shared_state", SharedState({name: state[name] for name in fixed})
    )
    others = {}
    for name, value in state.items():
        if name not in shared and name != "_shared_state":
            others[name] = value
    return shared, others


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
    parts_data = []
    for start, nbytes in zip(starts, lengths.tolist(), strict=False):  # the last start is the end
        parts_data.append(data[start : start + nbytes])
    body, *buffers = parts_data
    state: dict[str, Any] = pickle.loads(body, buffers=buffers)
    return state


def _find_starts(lengths: Ints) -> Ints:
    """Return the byte at which each part begins behind the table, and that behind the last."""
    sizes = np.array([lengths.nbytes, *lengths])
    aligned_sizes = -(-sizes // _ALIGN_BYTES) * _ALIGN_BYTES
    starts: Ints = np.cumsum(aligned_sizes)
    return starts
