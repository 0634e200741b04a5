"""What a device cannot do that others can, and what is put there once."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def widest_float(device: "torch.device | None" = None) -> "torch.dtype":
    """float64, or float32 on an Apple GPU, which has none; without a device: what any tensor here may be moved with."""
    import torch

    is_mps = torch.backends.mps.is_available() if device is None else device.type == "mps"
    return torch.float32 if is_mps else torch.float64


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: "torch.device", dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """Numbers on a device, brought there once: each copy of a tensor from the host makes it wait. Not to be changed.

    Args:
        values: The numbers.
        device: Where to.
        dtype: float32 by default.
    """
    import torch

    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype or torch.float32, device=device)
