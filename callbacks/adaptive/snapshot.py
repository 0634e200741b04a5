"""What a step changes before its optimizer steps, so that a step that failed can begin again as if it never had."""

import ctypes
import random
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

_DEVICES: Final = ("cpu", "cuda")


class BufferCopy:
    """Keeps the values of tensors, and puts them back.

    Lines (1-dim) and numbers (0-dim) of a type, which is what norms have, are joined into one
    tensor: for 30 on a CPU this takes 0.6 of the time of ``torch._foreach_copy_``, which is used
    for all others.

    Args:
        tensors: What changes in a step.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds: dict[
            Any, list[Tensor]
        ] = {}  # a copy of mixed types is one call to the device for each tensor
        for tensor in tensors:
            kinds.setdefault(
                (tensor.dtype, tensor.device, min(tensor.ndim, 2), _is_plain(tensor)), []
            ).append(tensor)
        lines = [kind for (_, _, ndim, is_plain), kind in kinds.items() if ndim == 1 and is_plain]
        numbers = [kind for (_, _, ndim, is_plain), kind in kinds.items() if ndim == 0 and is_plain]
        joined = {id(tensor) for tensor in chain.from_iterable(lines + numbers)}
        others = [kind for kind in kinds.values() if id(kind[0]) not in joined]
        with torch.no_grad():
            self._lines = [(kind, torch.cat(kind)) for kind in lines]
            self._numbers = [(kind, torch.stack(kind)) for kind in numbers]
            self._others = [
                (kind, [torch.empty_like(tensor) for tensor in kind]) for kind in others
            ]

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
            torch._foreach_copy_(kind, torch.split(joined, [len(tensor) for tensor in kind]))
        for kind, joined in self._numbers:
            torch._foreach_copy_(kind, joined.unbind())
        for kind, copies in self._others:
            torch._foreach_copy_(kind, copies)


def _is_plain(tensor: Tensor) -> bool:
    """Whether torch can join it with others of its kind."""
    is_dense = (
        tensor.layout == torch.strided
        and tensor.device.type in _DEVICES
        and not tensor.is_quantized
    )
    return is_dense and type(tensor) in (Tensor, torch.nn.Parameter)


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
        # Normal values come in pairs: while the second is at hand, it can be taken without a change
        # of the bits.
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


Restore = Callable[[], None]
_NOTHING: Final = object()
_VALUES: Final = methodcaller("values")
_GRAD: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")


class _Attributes:
    """Plain attributes of a module, and the lengths of its lists."""

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.values = dict(vars(module))
        self.lengths = [
            (value, len(value)) for value in self.values.values() if type(value) is list
        ]

    def restore(self) -> None:
        """Put them back; what is new is deleted."""
        found = vars(self.module)
        for name in found.keys() - self.values.keys():
            del found[name]
        found.update(self.values)
        for values, length in self.lengths:
            del values[length:]


class TransferSnapshot:
    """Random generators and plain attributes of a module before a batch goes to the device,
    augmentation included.

    Args:
        module: Whose hooks are called.
        device: Where the batch goes.
    """

    def __init__(self, module: L.LightningModule, device: torch.device) -> None:
        self._restore_random = save_random_state(device)
        self._before: _Attributes | None = _Attributes(module)
        self._after: dict[str, Any] | None = None
        self._lengths: list[int] = []

    def finish(self) -> None:
        """The batch has arrived: what changes from now on is no part of the transfer."""
        if self._before is not None:
            self._after = dict(vars(self._before.module))
            self._lengths = [len(values) for values, _ in self._before.lengths]

    def restore(self) -> None:
        """Undo what the transfer did, and leave what hooks did since."""
        self._restore_random()
        if self._before is None:
            return
        if self._after is None:
            self.finish()
        before, after, found = self._before.values, self._after or {}, vars(self._before.module)
        for name in [
            name for name, value in after.items() if before.get(name, _NOTHING) is not value
        ]:
            if name in found and found[name] is after[name]:
                found.update({name: before[name]} if name in before else {})
                if name not in before:
                    del found[name]
        for (values, length), grown in zip(self._before.lengths, self._lengths, strict=True):
            del values[length:grown]
        self._before = None


class StepSnapshot:
    """Buffers, metrics, logged values and plain attributes of a module at the beginning of a step.

    Lists on the LightningModule itself are cut to their old length; what it does elsewhere (files,
    other objects) cannot be undone.

    Args:
        module: Whose step is run.
        results: Lightning's collection of logged values.
    """

    def __init__(self, module: L.LightningModule, results: dict[str, Any] | None) -> None:
        self.module, self.results = module, results
        self._owners = [part._buffers for part in module.modules() if part._buffers]
        self._found = [dict(owner) for owner in self._owners]
        self._all = [value for owner in self._owners for value in owner.values()]
        self._copy = BufferCopy([tensor for tensor in self._all if tensor is not None])
        self._parts = [part for part in module.modules() if isinstance(part, Metric)]
        self.take()

    def fits(self, module: L.LightningModule, results: object) -> bool:
        """Whether this snapshot's memory can be used again: the same module with the same buffers."""
        if self.module is not module or self.results is not results:
            return False
        found = chain.from_iterable(map(_VALUES, self._owners))
        return sum(map(len, self._owners)) == len(self._all) and all(map(is_, found, self._all))

    def take(self) -> None:
        """Take the state as it is now."""
        self._copy.take()
        self._metrics = [(part, _copy_metric(part)) for part in self._parts]
        self._attributes = _Attributes(self.module)
        self._logged = {key: dict(vars(value)) for key, value in (self.results or {}).items()}

    def restore(self) -> None:
        """Put everything back."""
        for owner, found in zip(self._owners, self._found, strict=True):
            owner.update(found)
        self._copy.restore()
        self._attributes.restore()
        for metric, state in self._metrics:
            vars(metric).update({name: _copy(value) for name, value in state.items()})
        if self.results is not None:
            for key in set(self.results) - set(self._logged):
                del self.results[key]
            for key, state in self._logged.items():
                vars(self.results[key]).update(state)


def renew(
    snapshot: StepSnapshot | None, module: L.LightningModule, results: dict[str, Any] | None
) -> StepSnapshot:
    """A snapshot of now, in the memory of an old one if that fits."""
    if snapshot is None or not snapshot.fits(module, results):
        return StepSnapshot(module, results)
    snapshot.take()
    return snapshot


class GradientSnapshot:
    """Gradients at the beginning of a step.

    Args:
        parameters: Whose.
        keep: Copy their values, because the step adds to them; otherwise they count as zero.
    """

    def __init__(self, parameters: Sequence[Tensor], *, keep: bool) -> None:
        self._parameters = parameters
        grads = map(_GRAD, parameters)
        if not keep:
            self._saved: list[Tensor | bool] = [grad is not None for grad in grads]
        else:
            self._saved = [False if grad is None else grad.detach().clone() for grad in grads]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for parameter, saved in zip(self._parameters, self._saved, strict=True):
            if saved is False:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter) if saved is True else saved.clone()
            elif saved is True:
                parameter.grad.zero_()
            else:
                parameter.grad.copy_(saved)


class OptimizerSnapshot:
    """What an optimizer's step changes: all of it before its first step, and afterwards only
    whether it began.

    A first step makes the optimizer's state, and that is where memory runs out. Parameters are
    copied to the host.

    Args:
        optimizer: Whose steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._tensors: list[Tensor] = []
        self._version = 0
        self._saved: list[Tensor] = []

    def take(self, *, first: bool) -> None:
        """Before a step, the first of this run or another."""
        first = first and not self.optimizer.state
        self._saved = [_save(p) for p in self._parameters] if first else []
        if len(self._tensors) <= len(self._parameters):  # the first step makes the state
            states = (value for state in self.optimizer.state.values() for value in state.values())
            self._tensors = [
                *self._parameters,
                *(value for value in states if isinstance(value, Tensor)),
            ]
        self._version = sum(map(_VERSION, self._tensors))

    def has_written(self) -> bool:
        """Whether a parameter or a state changed since `take`."""
        return bool(self._version != sum(map(_VERSION, self._tensors)))

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo a step that failed; false if it was under way and cannot be undone.

        Torch counts how often a tensor was written in place, except by a fused step.
        """
        if not self._saved:
            fused = any(group.get("fused") for group in self.optimizer.param_groups)
            return not fused and not self.has_written()
        for parameter, saved in zip(self._parameters, self._saved, strict=True):
            parameter.copy_(saved)
        self.optimizer.state.clear()
        return True


def _save(parameter: Tensor) -> Tensor:
    """A copy on the host, for which nobody waits: what puts it back comes behind it in the same stream."""
    return parameter.detach().to("cpu", copy=True, non_blocking=parameter.is_cuda)


def _copy_metric(metric: Metric) -> dict[str, Any]:
    """The states of a metric and its bookkeeping; not its children, which are metrics themselves."""
    return {name: _copy(value) for name, value in vars(metric).items()}


def _copy(value: Any) -> Any:  # noqa: ANN401 - a metric's state
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
