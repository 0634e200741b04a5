"""Calls that must fit into memory."""

import gc
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from lit_data.errors import BatchMemoryError
from lit_data.out_of_memory import is_out_of_memory

T = TypeVar("T")

ADVICE: Final = "use a smaller tile_px or model, precision=bf16, or free the device of other programs"


def try_twice(call: Callable[[], T], what: str, device: torch.device) -> T:
    """The result of a call for which a single tile must fit.

    Raises:
        BatchMemoryError: Memory ran out, and again after all that could be was released.
    """
    failure = ""
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0]
        release_memory(device)
    raise BatchMemoryError(f"{what} does not fit into memory ({failure}): {ADVICE}")


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
