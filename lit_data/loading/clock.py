"""A clock that waits for the device."""

import time

import torch


def read_clock(device: torch.device) -> float:
    """Seconds, as `time.perf_counter`, once a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
