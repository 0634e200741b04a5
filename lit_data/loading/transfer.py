"""Copies to a CUDA device on a stream of their own, one batch ahead of the step that uses it."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_data.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor of a batch and its copy."""

    host: Tensor
    device: Tensor


class StagedBatch(dict[str, Any]):
    """A batch on the host whose copy to the device is under way; hooks before the transfer see the
    host tensors.

    Args:
        batch: The batch.
        copies: What is being copied, by key.
        event: Recorded behind the copies.
    """

    def __init__(
        self,
        batch: Mapping[str, Any] | Iterable[Any] = (),
        copies: Mapping[str, Copy] | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__(batch)
        self.copies, self.event = dict(copies or {}), event

    def extended(self, batch: Mapping[str, Any]) -> "StagedBatch":
        """The same copies beside what a hook made of the batch."""
        return StagedBatch(batch, self.copies, self.event)


class SideStream:
    """Copies batches to one CUDA device beside its computations.

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
        """The same batches, each copied while the one before it is in use; what is no dict of tensors is left alone."""
        waiting: Any = None
        for batch in batches:
            staged = self._try(batch) if is_flat(batch) else batch
            if waiting is not None:
                yield waiting
            waiting = staged
        if waiting is not None:
            yield waiting

    def _try(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to copy, if there is room: if not, it is copied in its step, where running out of memory is handled."""
        try:
            return self.start(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.info("no room to copy a batch ahead of its step: %s", str(error).partition("\n")[0])
            return batch


def finish_transfer(batch: StagedBatch, device: torch.device) -> dict[str, Any]:
    """The batch on its device, for use on the current stream: copies that were begun, and what
    hooks added since.

    Of what was added, tensors and all that has a method ``to`` move, also inside dicts, lists and
    tuples.

    Args:
        batch: A staged batch, perhaps extended.
        device: Where it was copied to.
    """
    if batch.event is not None:
        current: Any = torch.cuda.current_stream(device)
        current.wait_event(batch.event)
        for copy in batch.copies.values():
            copy.device.record_stream(current)
    return {name: _moved(batch.copies.get(name), value, device) for name, value in batch.items()}


def is_flat(batch: object) -> bool:
    """Whether a batch is a dict of tensors."""
    return isinstance(batch, dict) and all(isinstance(value, Tensor) for value in batch.values())


def _moved(copy: Copy | None, value: Any, device: torch.device) -> Any:  # noqa: ANN401 - a hook may add anything
    if copy is not None and copy.host is value:
        return copy.device
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(
        partial(_move, device), value, is_leaf=_has_to
    )  # a packed sequence is a tuple, but has `to`


def _has_to(value: object) -> bool:
    return callable(getattr(value, "to", None))


def _move(device: torch.device, value: Any) -> Any:  # noqa: ANN401
    """Whatever has a method ``to``, as Lightning's own mover, with no wait for the device where that can be said."""
    if not _has_to(value):
        return value
    overlaps = isinstance(value, Tensor) or _can_overlap(value.to)
    moved = value.to(device, non_blocking=True) if overlaps else value.to(device)
    return value if moved is None else moved  # it may have moved itself


def _can_overlap(to: Callable[..., Any]) -> bool:
    """Whether a method ``to`` takes ``non_blocking``, which Lightning does not ask for."""
    try:
        parameters = inspect.signature(to).parameters.values()
    except ValueError:  # compiled code has no signature
        return False
    return any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)
