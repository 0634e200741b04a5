"""The tensors of this process: whose they are and how much memory they hold, without keeping any alive."""

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_MOST_NODES: Final = 100_000
_Storage = tuple[torch.device, int]
_Named = tuple[Any, str, str]
"""A tensor, or nothing; the kind and the name of its owner."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Memory that a tensor holds; it has no reference to the tensor.

    Attributes:
        nbytes: Of its storage, which views share.
        shape: Of the owner's tensor, else of the largest view.
        dtype: Its data type.
        device: Where it is.
        kind: ``parameters``, ``gradients``, ``optimizer state``, ``buffers`` or ``activations and other``.
        owner: The kind with the name of the parameter or buffer, or what keeps an activation.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    owner: str


def find_tensors(module: torch.nn.Module, optimizers: Sequence[Any]) -> list[HeldTensor]:
    """All tensors of this process, largest first: those that Python sees, and those that autograd saved for backward.

    Args:
        module: Whose parameters and buffers have names.
        optimizers: Whose state belongs to its parameters.

    Returns:
        One for each storage.
    """
    visible = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]  # isinstance could run a proxy
    held: dict[_Storage, HeldTensor] = {}
    for named in (_name_owned(module, optimizers), _name_saved(visible), _name_others(visible)):
        found = [pair for pair in itertools.starmap(_hold, named) if pair]
        for storage, tensor in sorted(found, key=lambda pair: -torch.Size(pair[1].shape).numel()):  # whole before views
            held.setdefault(storage, tensor)
    return sorted(held.values(), key=lambda tensor: -tensor.nbytes)


def _name_owned(module: torch.nn.Module, optimizers: Sequence[Any]) -> Iterator[_Named]:
    names = dict[int, str]()
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        yield parameter, "parameters", f"parameter {name}"
        yield parameter.grad, "gradients", f"gradient of {name}"
    for name, buffer in module.named_buffers():
        yield buffer, "buffers", f"buffer {name}"
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            owner = names.get(id(parameter), "a parameter")
            for key, value in state.items():
                yield value, "optimizer state", f"optimizer state {key} of {owner}"


def _name_others(tensors: Sequence[Tensor]) -> Iterator[_Named]:
    return ((tensor, "activations and other", "activation or other") for tensor in tensors)


def _name_saved(roots: Sequence[Tensor]) -> Iterator[_Named]:
    """What the graphs of some tensors keep for backward, as it is: hooks that would compute it again do not run."""
    nodes: list[Any] = []
    for tensor in roots:
        with suppress(Exception):
            nodes.append(tensor.grad_fn)
    seen: set[Any] = set()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            with suppress(Exception):  # freed by backward
                saved = getattr(node, name)
                for packed in saved if isinstance(saved, list | tuple) else (saved,):
                    yield packed.data, "activations and other", f"activation saved by {node.name()}"


def _hold(tensor: Any, kind: str, owner: str) -> tuple[_Storage, HeldTensor] | None:  # noqa: ANN401
    """Where a tensor lies, and what is kept of it; sparse, fake and wrapped tensors have no storage of their own."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return None
    with suppress(Exception):
        storage = tensor.untyped_storage()
        found = HeldTensor(storage.nbytes(), tuple(tensor.shape), tensor.dtype, tensor.device, kind, owner)
        return ((tensor.device, storage.data_ptr()), found) if storage.nbytes() else None
    return None
