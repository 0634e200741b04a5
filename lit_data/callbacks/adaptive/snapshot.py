"""Copies of the state that a step changes, to repeat a failed step from the same state."""

import ctypes
import random
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import starmap
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lit_data.callbacks.adaptive.attributes import AttributeCopy

Restore = Callable[[], None]
"""Function that restores what was kept; may be called more than once."""

_MT19937_BYTES = 4 * (624 + 1)  # its words, and the number of used words


class BufferCopy:
    """Keeps the values of tensors and restores them.

    Args:
        tensors: Tensors that may change in a step.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Copying mixed types takes a device call per tensor, so each type is copied separately.
        tensors_by_type: dict[Hashable, list[Tensor]] = {}
        for tensor in tensors:
            tensors_by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        for group in tensors_by_type.values():
            copies = [torch.empty_like(tensor, requires_grad=False) for tensor in group]
            self._groups.append((group, copies))

    @torch.no_grad()
    def take(self) -> None:
        """Keep the current values."""
        for tensors, copies in self._groups:
            torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values."""
        for tensors, copies in self._groups:
            torch._foreach_copy_(tensors, copies)


class MetricCopy:
    """Keeps the states and counts of a metric, without its children, which are metrics themselves.

    A training step leaves the metrics of validation alone, so only states that changed are copied.

    Args:
        metric: Metric whose states are tensors or lists of tensors.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._attributes: dict[str, Any] = {}
        self._copies: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._versions: list[int] | None = None
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def take(self) -> None:
        """Keep the current states."""
        attributes = vars(self._metric)
        if self._is_unchanged(attributes):
            return
        self._attributes = dict(attributes)
        states = {k: v for k, v in attributes.items() if isinstance(v, Tensor | list)}
        self._copies = {name: _copy_state(state) for name, state in states.items()}
        self._tensors = [state for state in states.values() if isinstance(state, Tensor)]
        self._versions = _read_versions(self._tensors)
        self._lists = [
            (state, self._copies[name]) for name, state in states.items() if isinstance(state, list)
        ]

    def restore(self) -> None:
        """Restore the states."""
        # Copied again, because the next attempt writes into what it gets.
        copies = {name: _copy_state(state) for name, state in self._copies.items()}
        vars(self._metric).update(self._attributes | copies)

    def _is_unchanged(self, attributes: dict[str, Any]) -> bool:
        """Return True if the copies are still those of the current states."""
        if not _are_same(attributes.values(), self._attributes.values()):
            return False
        if not all(starmap(_are_same, self._lists)):
            return False
        versions = _read_versions(self._tensors)
        return versions is not None and versions == self._versions


def _are_same(objects: Collection[Any], old_objects: Collection[Any]) -> bool:
    return len(objects) == len(old_objects) and all(map(is_, objects, old_objects))


def _read_versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the versions of tensors, which grow with each write; None for inference tensors."""
    if any(map(Tensor.is_inference, tensors)):
        return None
    return [tensor._version for tensor in tensors]


class NumpyRandom:
    """Reads NumPy's state only if it changed."""

    def __init__(self) -> None:
        self._bits = b""
        self._state: Any = None

    def save(self) -> Any:  # noqa: ANN401 - a state of any generator
        """Return the current state."""
        generator = np.random.mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state(legacy=False)  # noqa: NPY002 - what users use
        bits = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # Normal values come in pairs: taking the second one of a pair does not change the bits.
        if bits != self._bits or self._state["has_gauss"]:
            self._bits = bits
            self._state = np.random.get_state(legacy=False)  # noqa: NPY002
        return self._state

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Restore a state."""
        np.random.set_state(state)  # noqa: NPY002
        self._bits = b""


_NUMPY = NumpyRandom()


def save_random_state(device: torch.device) -> Restore:
    """Keep the states of all global random generators, and return a function that restores them."""
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
    """Copy the gradients of parameters, and return a function that restores them."""
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


class StepSnapshot:
    """Buffers, metrics, logged values and attributes of a module at the beginning of a step.

    Attributes are those of all its parts, with their content (`AttributeCopy`). What a step changes
    elsewhere (files, other objects) cannot be undone.

    Args:
        module: Module whose step runs.
        results: Lightning's collection of logged values.
    """

    def __init__(self, module: LightningModule, results: dict[str, Any] | None) -> None:
        self.module = module
        self.results = results
        # A step may also replace a buffer by another tensor, so owners are kept as well.
        self._owners = [part._buffers for part in module.modules() if part._buffers]
        self._buffers_by_owner = [dict(owner) for owner in self._owners]
        self._buffers = self._list_buffers()
        self._copy = BufferCopy([buffer for buffer in self._buffers if buffer is not None])
        self._metrics = [MetricCopy(part) for part in module.modules() if isinstance(part, Metric)]
        self._attributes = AttributeCopy(module.modules())
        self.take()

    @property
    def left_out(self) -> dict[str, str]:
        """Names of attributes that hold more than can be restored, with the reason."""
        return self._attributes.left_out

    def fits(self, module: LightningModule, results: object) -> bool:
        """Return True if this memory can be reused, for the same module with the same buffers."""
        if self.module is not module or self.results is not results:
            return False
        buffers = self._list_buffers()
        return len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers))

    def take(self) -> None:
        """Keep the current state."""
        self._copy.take()
        for metric in self._metrics:
            metric.take()
        self._attributes.take()
        self._logged = {key: dict(vars(value)) for key, value in (self.results or {}).items()}

    def restore(self) -> None:
        """Restore everything, and delete what is new."""
        for owner, buffers in zip(self._owners, self._buffers_by_owner, strict=True):
            owner.update(buffers)
        self._copy.restore()
        self._attributes.restore()
        for metric in self._metrics:
            metric.restore()
        if self.results is not None:
            _delete_new(self.results, self._logged)
            for key, state in self._logged.items():
                vars(self.results[key]).update(state)

    def _list_buffers(self) -> list[Tensor | None]:
        return [buffer for owner in self._owners for buffer in owner.values()]


def renew(
    snapshot: StepSnapshot | None, module: LightningModule, results: dict[str, Any] | None
) -> StepSnapshot:
    """Return a snapshot of the current state, reusing the memory of an old one if that fits."""
    if snapshot is None or not snapshot.fits(module, results):
        return StepSnapshot(module, results)
    snapshot.take()
    return snapshot


def _delete_new(values: dict[str, Any], old_values: dict[str, Any]) -> None:
    for name in values.keys() - old_values.keys():
        del values[name]


def _copy_state(state: Any) -> Any:  # noqa: ANN401 - a tensor, or a list of them
    return state.detach().clone() if isinstance(state, Tensor) else list(state)
