"""Memory that several processes map: without a name, so that nothing is left behind however they end.

A memfd, not a file in /dev/shm: the small /dev/shm of a container does not bound it, and it goes with its last user.
Another process of the same user opens it through /proc of the process that made it, whichever way it was started.
"""

import mmap
import os
import sys
from typing import NamedTuple

from lit_data.errors import ConfigError, WorkerDiedError


class Handle(NamedTuple):
    """Where another process finds the memory while its maker lives and keeps it."""

    pid: int
    fd: int
    nbytes: int
    inode: int


class SharedMemory:
    """Zeroed memory of a fixed size; pages take room once they are written.

    Args:
        nbytes: Size.

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
            raise ConfigError(f"worker processes need Linux, this is {sys.platform}: set worker_kind=thread")
        self._fd = os.memfd_create("lit_data", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.map = mmap.mmap(self._fd, nbytes)
        self.handle = Handle(os.getpid(), self._fd, nbytes, os.fstat(self._fd).st_ino)

    def __del__(self) -> None:
        # A forked child holds a copy of the descriptor and may close its own.
        if self._fd >= 0:
            os.close(self._fd)


def attach(handle: Handle, *, writable: bool) -> mmap.mmap:
    """Map the memory that another process made.

    Args:
        handle: Its handle.
        writable: Whether this process may write into it.

    Raises:
        WorkerDiedError: The process that made it has ended or has given it back, or is not visible from here.
    """
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR if writable else os.O_RDONLY)
        try:
            # Its number may by now belong to another file, or its process to another program.
            if os.fstat(fd).st_ino != handle.inode:
                raise ValueError("it was given back")
            return mmap.mmap(fd, handle.nbytes, access=access)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WorkerDiedError(
            f"the shared memory of process {handle.pid} cannot be opened from process {os.getpid()} ({error}): "
            "that process has ended or /proc is hidden here. In the second case set worker_kind=thread"
        ) from error
