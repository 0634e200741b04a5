"""What a device cannot do that others can."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def widest_float(device: "torch.device | None" = None) -> "torch.dtype":
    """float64, or float32 on an Apple GPU, which has none; without a device: what any tensor here may be moved with."""
    import torch

    is_mps = torch.backends.mps.is_available() if device is None else device.type == "mps"
    return torch.float32 if is_mps else torch.float64
