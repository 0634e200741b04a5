"""Running code that draws from global generators as if it drew from a seed of its own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python inside, and put them back afterwards.

    Args:
        seed: Any whole number; its lowest 64 bits count.
        device: Where the code works; the generator of a CUDA device is seeded as well.
    """
    seed %= 2**64
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - a user's module may draw from it
    devices = [device] if device.type == "cuda" else []
    # torch.manual_seed would also seed devices that are not in use and are not put back.
    generators = [torch.default_generator, *(torch.cuda.default_generators[d.index or 0] for d in devices)]
    with torch.random.fork_rng(devices=devices):
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
