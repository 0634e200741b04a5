"""Memory of the process: what glibc keeps of freed blocks, and which objects are never garbage."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

_TRIM_THRESHOLD = -1  # options of mallopt, from malloc.h of glibc
_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**30
_USUAL_BYTES = 2**25  # glibc raises its thresholds up to here by itself, and to twice as much
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_keeps = False


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed memory for new blocks, since a net on a CPU frees and allocates many.

    By default, glibc maps blocks above 32 MiB each time, and the system then writes zeros to each
    page. Activations are such blocks: with the default, training of a U-Net on EfficientNet-Lite0
    takes 1.2 (128 px) to 1.5 times (256 px, batches of 16) as long. Environment variables that set
    these thresholds take precedence.
    """
    global _keeps
    if not any(name in os.environ for name in _VARIABLES):
        _set_thresholds(_KEPT_BYTES, _KEPT_BYTES)
        _keeps = True


def return_freed_memory() -> None:
    """Return freed memory to the system again, as a process does that was forked from one that keeps it."""
    global _keeps
    if _keeps:
        _set_thresholds(_USUAL_BYTES, 2 * _USUAL_BYTES)
        _keeps = False


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory within the block, such as that of one image for the next to be decoded.

    To map it anew, page by page, takes 0.8 of the time to decode a JPEG of 640 x 480 px.
    """
    if _keeps:
        yield
        return
    keep_freed_memory()
    try:
        yield
    finally:
        return_freed_memory()
        trim_heap()


def trim_heap() -> None:
    """Return the memory that is free now to the system."""
    library = _open_library()
    if library is not None:
        library.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    library = _open_library()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, mmap_bytes)
        library.mallopt(_TRIM_THRESHOLD, trim_bytes)


def _open_library() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # on Windows there is no such handle
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def load_module(name: str) -> ModuleType:
    """Import the module of a command, and exempt all that it imports from garbage collection.

    Torch and Lightning make half a million objects that live as long as the process. To examine
    them again and again takes 1 s of an import, 1.4 s of the end of the process and 0.2 s of each
    full collection, which also copies their pages in a forked worker.

    Args:
        name: Its dotted name; a module that was imported before is returned as it is.
    """
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()
