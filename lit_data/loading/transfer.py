"""Copies to a CUDA device on a separate stream, one batch ahead of the step that uses it."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_data.core.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of a batch and its copy on the device."""

    host: Tensor
    device: Tensor


class StagedBatch(dict[str, Any]):
    """A batch on the host that is being copied to the device.

    Hooks before the transfer see the host tensors.

    Args:
        batch: The batch.
        copies: The copies in progress, by key.
        event: CUDA event that is recorded after the copies.
    """

    def __init__(
        self,
        batch: Mapping[str, Any] | Iterable[Any] = (),
        copies: Mapping[str, Copy] | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__(batch)
        self.copies = dict(copies or {})
        self.event = event

    def extended(self, batch: Mapping[str, Any]) -> "StagedBatch":
        """Return a hook's batch with the copies of this one."""
        return StagedBatch(batch, self.copies, self.event)


class SideStream:
    """Stream that copies batches to a CUDA device while it computes.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Mapping[str, Tensor]) -> StagedBatch:
        """Begin to copy a batch whose tensors are page-locked."""
        with torch.cuda.stream(self.stream):
            copies = {
                name: Copy(host, host.to(self.device, non_blocking=True))
                for name, host in batch.items()
            }
            return StagedBatch(batch, copies, self.stream.record_event())

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each copied while the one before it is in use.

        A batch that is not a dict of tensors is returned unchanged.
        """
        waiting: Any = None
        for batch in batches:
            staged = self._try(batch) if is_flat(batch) else batch
            if waiting is not None:
                yield waiting
            waiting = staged
        if waiting is not None:
            yield waiting

    def _try(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to copy a batch if there is room.

        If not, the batch is copied in its step, where running out of memory is handled.
        """
        try:
            return self.start(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.info(
                "no memory to copy a batch ahead of its step: %s", str(error).partition("\n")[0]
            )
            return batch


def finish_transfer(batch: StagedBatch, device: torch.device) -> dict[str, Any]:
    """Return the batch on its device for use on the current stream.

    It has the copies that are in progress, and all values that hooks have added since. Added tensors
    and objects with a method ``to`` are moved, also inside dicts, lists and tuples.

    Args:
        batch: A staged batch, with or without changes by hooks.
        device: Device of the copies.
    """
    if batch.event is not None:
        current: Any = torch.cuda.current_stream(device)
        current.wait_event(batch.event)
        for copy in batch.copies.values():
            copy.device.record_stream(current)
    return {name: _moved(batch.copies.get(name), value, device) for name, value in batch.items()}


def pin_tensors(batch: Any) -> Any:  # noqa: ANN401 - any result of a `collate_fn`
    """Return a batch with all its tensors page-locked."""
    return tree_map(_pin_tensor, batch)


def _pin_tensor(part: object) -> object:
    return part.pin_memory() if isinstance(part, Tensor) else part


def is_flat(batch: object) -> bool:
    """Return True if a batch is a dict of tensors."""
    return isinstance(batch, dict) and all(isinstance(value, Tensor) for value in batch.values())


def _moved(copy: Copy | None, value: Any, device: torch.device) -> Any:  # noqa: ANN401 - a hook may add anything
    if copy is not None and copy.host is value:
        return copy.device
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    # A packed sequence is a tuple, but has `to`.
    return tree_map(partial(_move, device), value, is_leaf=_has_to)


def _has_to(value: object) -> bool:
    return callable(getattr(value, "to", None))


def _move(device: torch.device, value: Any) -> Any:  # noqa: ANN401
    """Move a value that has a method ``to``, as Lightning does, but without blocking if possible."""
    if not _has_to(value):
        return value
    if isinstance(value, Tensor) or _can_overlap(value.to):
        moved = value.to(device, non_blocking=True)
    else:
        moved = value.to(device)
    return value if moved is None else moved  # `to` may work in place


def _can_overlap(to: Callable[..., Any]) -> bool:
    """Return True if a method ``to`` takes ``non_blocking``, which Lightning does not require."""
    try:
        parameters = inspect.signature(to).parameters.values()
    except ValueError:  # compiled code has no signature
        return False
    names = {parameter.name for parameter in parameters}
    kinds = {parameter.kind for parameter in parameters}
    return "non_blocking" in names or inspect.Parameter.VAR_KEYWORD in kinds
