"""A clock that waits for the device, and measurements by it."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from lit_data.core.progress import track

Call = Callable[[], object]


def read_clock(device: torch.device) -> float:
    """Return the seconds of `time.perf_counter` after a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_in_turn(works: Mapping[str, Call], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each function, called in turn with the others after a warm-up.

    Args:
        works: The functions by name.
        repeats: Number of measurements of each function.
        device: Device whose work is part of the measured time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    rounds = [*works.items()] * (repeats + 1)  # the first one warms up
    for name, work in track(rounds, "measuring", len(rounds)):
        began_s = read_clock(device)
        work()
        seconds[name].append(read_clock(device) - began_s)
    return {name: median(times[1:]) for name, times in seconds.items()}
