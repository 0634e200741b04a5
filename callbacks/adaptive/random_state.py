"""The global random generators, of which NumPy's takes longest to read."""

import ctypes
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

_MT19937_BYTES: Final = 4 * (624 + 1)  # its words, and how many of them are used up


class NumpyRandom:
    """Reads NumPy's state only if it changed."""

    def __init__(self) -> None:
        self._bits = b""
        self._state: Any = None

    def save(self) -> Any:  # noqa: ANN401 - a state of any generator
        """The state as it is now."""
        generator = np.random.mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state(legacy=False)  # noqa: NPY002 - what users use
        bits = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # Normal values come in pairs: while the second is at hand, it can be taken without a change of the bits.
        if bits != self._bits or self._state["has_gauss"]:
            self._bits, self._state = bits, np.random.get_state(legacy=False)  # noqa: NPY002
        return self._state

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Put a state back."""
        np.random.set_state(state)  # noqa: NPY002
        self._bits = b""


_NUMPY: Final = NumpyRandom()


def save_random_state(device: torch.device) -> Callable[[], None]:
    """Keep the states of all global random generators; the result puts them back."""
    cpu, plain, numpy = torch.get_rng_state(), random.getstate(), _NUMPY.save()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(plain)
        _NUMPY.restore(numpy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore
