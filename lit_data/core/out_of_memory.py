"""Recognition of out-of-memory errors, and calls that are repeated after one."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from lit_data.core.errors import BatchMemoryError, causes_of, first_line

T = TypeVar("T")

_TEXTS = re.compile(
    "|".join(
        (
            r"out of memory",  # CUDA, MPS ("MPS backend out of memory"), HIP, XPU
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"can't allocate memory: you tried to allocate",
            r"CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED)",  # no workspace, or none that fits
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUBLAS_STATUS_NOT_INITIALIZED",  # its handle needs memory
            r"CUSOLVER_STATUS_ALLOC_FAILED",
            r"unable to find an engine to execute",  # cuDNN: no algorithm whose workspace fits
            r"Invalid buffer size",  # MPS
        )
    ),
    re.IGNORECASE,
)
"""Texts of RuntimeErrors; from PyTorch's sources, and reports such as ultralytics#12193 and mosaicml/composer#3397."""

_UNCLEAR = re.compile(r"CUDNN_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED)")
"""Texts of cuDNN for many faults, including a lack of memory for its handle."""
_SCARCE_BYTES = 2**28


def make_memory_error(text: str) -> BatchMemoryError:
    """Make an error that ``except torch.OutOfMemoryError`` and ``except RuntimeError`` catch too.

    Args:
        text: Text about what does not fit, and what to do.
    """
    return _find_kind()(text)


@lru_cache(maxsize=1)
def _find_kind() -> type[BatchMemoryError]:
    """Return a subclass of the errors of both packages, made here since errors do not import torch."""
    import torch

    def rebuild(error: BatchMemoryError) -> Any:  # noqa: ANN401 - as pickle wants it
        return make_memory_error, (str(error),), vars(error)

    parents = (BatchMemoryError, torch.OutOfMemoryError)
    content = {"__doc__": BatchMemoryError.__doc__, "__module__": BatchMemoryError.__module__}
    return type(BatchMemoryError.__name__, parents, content | {"__reduce__": rebuild})


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that it was raised from, says that memory ran out.

    It is recognized by its class if there is one, or else by the text of a RuntimeError. An illegal
    access, a failed assertion on the device and other errors do not count.
    """
    import torch

    for cause in causes_of(error):
        if isinstance(cause, BatchMemoryError):  # nothing is left to try
            continue
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(cause)
        if isinstance(cause, RuntimeError) and (_TEXTS.search(text) or _is_scarce(text)):
            return True
    return False


def read_failure(error: Exception) -> str:
    """Return the first line of an out-of-memory error, and raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return first_line(error)


def repeat(
    attempt: Callable[[], T],
    shrink: Callable[[str], object],
    read: Callable[[Exception], str] = read_failure,
) -> T:
    """Repeat a call with less work until it fits into memory.

    Args:
        attempt: The call.
        shrink: Called with the text of an error before the next attempt; reduces its work, or
            raises.
        read: Returns the text of an out-of-memory error, and raises any other error again.
    """
    while True:
        try:
            return attempt()
        except Exception as error:
            failure = read(error)
        # After the block, whose error keeps tensors of the attempt (pytorch/pytorch#18853).
        shrink(failure)


def _is_scarce(text: str) -> bool:
    """Return True if an ambiguous error occurred while the device had almost no memory left."""
    import torch

    if not _UNCLEAR.search(text) or not torch.cuda.is_available():
        return False
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes < _SCARCE_BYTES
    except RuntimeError:  # the device is broken, so memory was not the cause
        return False
