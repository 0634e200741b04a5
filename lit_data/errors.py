"""Every error that lit_data raises on purpose, and the exit code each one gives the command line.

Each class takes one string that holds all a user needs: what is wrong, with which file or option, what was found, what
is allowed, what to do. One string only, and defined at module level, because torch rebuilds the exception of a worker
as ``type(text)``; a class that cannot be rebuilt so hangs the loader (pytorch/pytorch#142884).
"""

from typing import ClassVar


class LitDataError(Exception):
    """Base of all errors a user can act on."""

    exit_code: ClassVar[int] = 1


class ConfigError(LitDataError, ValueError):
    """A wrong option, an unknown key or a refused ``_target_``."""

    exit_code = 2


class DataError(LitDataError):
    """An image, mask, label or path of the user is bad."""

    exit_code = 3


class StoreError(LitDataError):
    """Base of everything that is wrong with a decoded store or another file written by lit_data."""

    exit_code = 4


class StoreCorruptError(StoreError):
    """The store's bytes are not what its header says."""


class StoreStaleError(StoreError):
    """The sources or the decode options changed since the store was built, and rebuilding is off."""


class StoreBusyError(StoreError):
    """Another process held the store's lock for longer than the stated wait."""


class StoreSpaceError(StoreError):
    """The disk has no room for the store."""


class BatchMemoryError(LitDataError):
    """A batch does not fit into memory even with one sample."""

    exit_code = 5


class WorkerDiedError(LitDataError):
    """A worker died, hung past its timeout or could not report its own error."""

    exit_code = 6


class RankMismatchError(LitDataError):
    """The ranks disagree about the work to do."""

    exit_code = 6
