"""State that a step changes, kept so that a step that failed can begin again as if it never had."""

import ctypes
import random
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

Restore = Callable[[], None]
"""Puts back what was kept; may be called more than once."""

_JOINABLE_DEVICES: Final = ("cpu", "cuda")


class BufferCopy:
    """Keeps the values of tensors, and puts them back.

    Lines (1-dim) and numbers (0-dim) of a type, which is what norms have, are joined into one
    tensor: for 30 on a CPU this takes 0.6 of the time of ``torch._foreach_copy_``, which is used
    for all others.

    Args:
        tensors: What changes in a step.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # A copy of mixed types is one call to the device for each tensor, so each type has its own.
        kinds: dict[Hashable, list[Tensor]] = {}
        for tensor in tensors:
            ndim = min(tensor.ndim, 2) if _can_be_joined(tensor) else None
            kinds.setdefault((ndim, tensor.dtype, tensor.device), []).append(tensor)
        self._lines: list[tuple[list[Tensor], Tensor]] = []
        self._numbers: list[tuple[list[Tensor], Tensor]] = []
        self._others: list[tuple[list[Tensor], list[Tensor]]] = []
        with torch.no_grad():
            for (ndim, *_), kind in kinds.items():  # type: ignore[misc]
                if ndim == 1:
                    self._lines.append((kind, torch.cat(kind)))
                elif ndim == 0:
                    self._numbers.append((kind, torch.stack(kind)))
                else:
                    self._others.append((kind, [torch.empty_like(tensor) for tensor in kind]))

    @torch.no_grad()
    def take(self) -> None:
        """Take the values as they are now."""
        for kind, joined in self._lines:
            torch.cat(kind, out=joined)
        for kind, joined in self._numbers:
            torch.stack(kind, out=joined)
        for kind, copies in self._others:
            torch._foreach_copy_(copies, kind)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for kind, joined in self._lines:
            lengths = [len(tensor) for tensor in kind]
            torch._foreach_copy_(kind, torch.split(joined, lengths))
        for kind, joined in self._numbers:
            torch._foreach_copy_(kind, joined.unbind())
        for kind, copies in self._others:
            torch._foreach_copy_(kind, copies)


def _can_be_joined(tensor: Tensor) -> bool:
    """Return True if torch can join a tensor with others of its type."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_dense and is_plain and tensor.device.type in _JOINABLE_DEVICES


_MT19937_BYTES: Final = 4 * (624 + 1)  # its words, and how many of them are used up


class NumpyRandom:
    """Reads NumPy's state only if it changed."""

    def __init__(self) -> None:
        self._bits = b""
        self._state: Any = None

    def save(self) -> Any:  # noqa: ANN401 - a state of any generator
        """Return the state as it is now."""
        generator = np.random.mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state(legacy=False)  # noqa: NPY002 - what users use
        bits = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # Normal values come in pairs: while the second is at hand, it can be taken without a change
        # of the bits.
        if bits != self._bits or self._state["has_gauss"]:
            self._bits = bits
            self._state = np.random.get_state(legacy=False)  # noqa: NPY002
        return self._state

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Put a state back."""
        np.random.set_state(state)  # noqa: NPY002
        self._bits = b""


_NUMPY: Final = NumpyRandom()


def save_random_state(device: torch.device) -> Restore:
    """Keep the states of all global random generators; the result puts them back."""
    cpu_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = _NUMPY.save()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        _NUMPY.restore(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)

    return restore


def save_gradients(parameters: Sequence[Tensor]) -> Restore:
    """Copy the gradients of parameters, to which a step adds; the result puts them back."""
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    @torch.no_grad()
    def restore() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)

    return restore


class _Attributes:
    """Plain attributes of a module, and the lengths of its lists."""

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.values = dict(vars(module))
        self.lists = [value for value in self.values.values() if type(value) is list]
        self.lengths = [len(values) for values in self.lists]

    def restore(self) -> None:
        """Put them back; what is new is deleted."""
        attributes = vars(self.module)
        for name in attributes.keys() - self.values.keys():
            del attributes[name]
        attributes.update(self.values)
        for values, length in zip(self.lists, self.lengths, strict=True):
            del values[length:]


class StepSnapshot:
    """Buffers, metrics, logged values and plain attributes of a module at the beginning of a step.

    Lists on the LightningModule itself are cut to their old length; what it does elsewhere (files,
    other objects) cannot be undone.

    Args:
        module: Whose step is run.
        results: Lightning's collection of logged values.
    """

    def __init__(self, module: L.LightningModule, results: dict[str, Any] | None) -> None:
        self.module = module
        self.results = results
        # A step may also put another tensor in the place of a buffer, so owners are noted as well.
        self._owners = [part._buffers for part in module.modules() if part._buffers]
        self._buffers_by_owner = [dict(owner) for owner in self._owners]
        self._buffers = [buffer for owner in self._owners for buffer in owner.values()]
        self._copy = BufferCopy([buffer for buffer in self._buffers if buffer is not None])
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self.take()

    def fits(self, module: L.LightningModule, results: object) -> bool:
        """Return True if this memory can be used again: the same module with the same buffers."""
        if self.module is not module or self.results is not results:
            return False
        if sum(map(len, self._owners)) != len(self._buffers):
            return False
        buffers = chain.from_iterable(owner.values() for owner in self._owners)
        return all(map(is_, buffers, self._buffers))

    def take(self) -> None:
        """Take the state as it is now."""
        self._copy.take()
        self._metric_states = [_copy_metric(metric) for metric in self._metrics]
        self._attributes = _Attributes(self.module)
        self._logged = {key: dict(vars(value)) for key, value in (self.results or {}).items()}

    def restore(self) -> None:
        """Put everything back."""
        for owner, buffers in zip(self._owners, self._buffers_by_owner, strict=True):
            owner.update(buffers)
        self._copy.restore()
        self._attributes.restore()
        for metric, state in zip(self._metrics, self._metric_states, strict=True):
            # Copied again, because the next attempt writes into what it gets.
            vars(metric).update({name: _copy(value) for name, value in state.items()})
        if self.results is not None:
            for key in self.results.keys() - self._logged.keys():
                del self.results[key]
            for key, state in self._logged.items():
                vars(self.results[key]).update(state)


def renew(
    snapshot: StepSnapshot | None, module: L.LightningModule, results: dict[str, Any] | None
) -> StepSnapshot:
    """Return a snapshot of now, in the memory of an old one if that fits."""
    if snapshot is None or not snapshot.fits(module, results):
        return StepSnapshot(module, results)
    snapshot.take()
    return snapshot


def _copy_metric(metric: Metric) -> dict[str, Any]:
    """Copy the states of a metric and its counts; its children are metrics themselves."""
    return {name: _copy(value) for name, value in vars(metric).items()}


def _copy(value: Any) -> Any:  # noqa: ANN401 - a metric's state
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return list(value)
    return value
