"""The global random generators of torch, NumPy and `random`, from which users' datasets draw."""

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

States = tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]]
"""States of torch's generator of the CPU, of NumPy's global one, and of that of `random`."""


def take_states() -> States:
    """Their states now."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # type: ignore[return-value]  # noqa: NPY002


def put_states(states: States) -> None:
    """Set them back."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def are_equal(before: States, after: States) -> bool:
    """Whether nobody drew in between."""
    (_, key, *place), (_, key_after, *place_after) = before[1], after[1]
    numpy_is_equal = place == place_after and np.array_equal(key, key_after)
    return numpy_is_equal and before[2] == after[2] and torch.equal(before[0], after[0])


def seed_generators(words: NDArray[np.uint32]) -> None:
    """Seed all three.

    Args:
        words: Two random words.
    """
    low, high = int(words[0]), int(words[1])
    torch.default_generator.manual_seed(low | high << 32)
    np.random.seed(low)  # noqa: NPY002
    random.seed(high)
